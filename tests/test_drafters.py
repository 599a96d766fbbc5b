"""Drafters without training: lossless, and what they guess is what their methods say, by slow searches of the same thing."""

import copy
import dataclasses
import inspect
import itertools
import math
import os
import pickle
import random
import shutil
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from conftest import FAMILIES, VOCAB, counted, make_model, make_target, make_tokenizer, tiny_run
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from scipy.stats import chi2

from headwright.configs import UserError
from headwright.data.harvest import store_path
from headwright.data.sampling import Policy
from headwright.data.store import FeatureReader
from headwright.data.target import EarlyExit, Target
from headwright.eval import baselines, retrieval
from headwright.eval.baselines import datastore, others, rows_of, training_texts
from headwright.eval.decode import PLAIN, Decoder, Generation, Settings, decode_plain, generate, generate_one
from headwright.eval.drafters import HostDrafter, PromptLookup, Rows, best_first, chain_of, forest
from headwright.eval.fallback import Fallback
from headwright.eval.lookahead import Branches, Lookahead
from headwright.eval.lookahead import Memory as LookaheadMemory
from headwright.eval.model_drafter import (
    Exit,
    ModelDrafter,
    best_exit,
    early_exits,
    measure_exit,
    own_choices,
    pooled,
    small_model,
)
from headwright.eval.retrieval import COMPARED, Datastore, Retrieval, suffix_order
from headwright.eval.suffix import BREAK, COUNTED, ROOT, Automaton, SuffixDrafter, read_corpus
from headwright.heads.base import Context
from headwright.heads.draft_tree import Tree, TreeShape

CHAIN, TREE, EAGLE = TreeShape.chain(4), TreeShape.dynamic(3, 3, 8), TreeShape.parse("eagle-1")
SHAPES = (CHAIN, TREE, EAGLE)
NEW = 14
RAGGED = 7


def named(value) -> str:
    """Test ids."""
    return value.name if isinstance(value, TreeShape) else str(value)


# Targets, prompts and drafters


@pytest.fixture(scope="module")
def small() -> Target:
    """A quick target of two layers."""
    return make_target(taps=(0, 1, 2), num_hidden_layers=2)


def noisy(model, share: float, seed: int = 5, name: str = "noisy") -> Target:
    """A model whose weights are a little off, as a target of its own: it agrees with the original now and then."""
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * share)
    return Target(model, make_tokenizer(), name, (0,))


@pytest.fixture(scope="module")
def prompts(small) -> list[list[int]]:
    """Pieces of source text, from 1 to 61 tokens long; some stand twice over, so that there is something to look up."""
    ids = small.tokenizer.encode(inspect.getsource(textwrap), add_special_tokens=False)
    pieces = [ids[i * 53 : i * 53 + 1 + (i * 37) % 61] for i in range(30)]
    assert len(set(map(len, pieces))) == 30
    return [piece * 2 if number % 4 == 3 else piece for number, piece in enumerate(pieces)]


@pytest.fixture(scope="module")
def plain(small, prompts) -> list[Generation]:
    """What the target says to every prompt, one by one."""
    return [decode_plain(small, prompt, NEW) for prompt in prompts]


@pytest.fixture(scope="module")
def corpus(prompts, plain) -> list[list[int]]:
    """What the target said to half of the prompts."""
    return [prompt + out.tokens for prompt, out in list(zip(prompts, plain))[::2]]


MAKERS = ("lookup", "suffix", "suffix of a corpus", "retrieval", "lookahead", "small model", "early exit")
HOSTED = MAKERS[:5]


@pytest.fixture(scope="module")
def drafters(small, corpus) -> dict[str, object]:
    """One of each kind."""
    made = (
        PromptLookup(),
        SuffixDrafter(),
        SuffixDrafter(read_corpus(corpus)),
        Retrieval(Datastore.of(corpus)),
        Lookahead(),
        small_model(noisy(small.model, 0.12), small),
        ModelDrafter(EarlyExit(small, 1), small.spec.vocab_size),
    )
    return dict(zip(MAKERS, made, strict=True))


# Lookahead lays out trees of its own
CASES = [(name, shape) for name in MAKERS if name != "lookahead" for shape in SHAPES] + [
    ("lookahead", Lookahead().shape)
]


def texts_of(generations: list[Generation]) -> list[list[int]]:
    return [out.tokens for out in generations]


def counters(generations: list[Generation]) -> list[tuple]:
    """All that a batch must not change."""
    return [(out.tokens, out.accepted, out.emitted, out.drafted, out.finish) for out in generations]


def height(parents: list[int]) -> int:
    """Depth of the deepest guess of a tree without padding."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)


def check_guesses(guesses, shape: TreeShape) -> None:
    """Parents before children, no equal siblings, within the bounds of the shape."""
    assert len(guesses) <= shape.nodes
    assert all(0 <= parent <= place for place, (_, parent) in enumerate(guesses))
    assert len({(parent, token) for token, parent in guesses}) == len(guesses)
    assert height([parent for _, parent in guesses]) <= shape.depth


# Lossless


@pytest.mark.parametrize(("name", "shape"), CASES, ids=named)
def test_greedy_text_and_counters_alone_and_in_a_ragged_batch(small, prompts, plain, drafters, name, shape):
    """Token identity with plain decoding; all prompts seven at a time with refill, every third alone."""
    drafter = drafters[name]
    outs = generate(small, drafter, prompts, Settings(shape, NEW, batch=RAGGED)).generations
    assert texts_of(outs) == texts_of(plain)
    part = slice(CASES.index((name, shape)) % 3, None, 3)
    alone = generate(small, drafter, prompts[part], Settings(shape, NEW)).generations
    assert counters(alone) == counters(outs[part])
    assert all(drafted <= shape.nodes for out in outs for drafted in out.drafted)
    lengths = Counter(accepted for out in outs for accepted in out.accepted)
    assert lengths[0] > 5
    assert sum(lengths[n] for n in lengths if n) > 5, "accepted and rejected guesses both took part"
    if name in ("small model", "early exit"):
        assert {drafted for out in outs for drafted in out.drafted} == {shape.nodes}


@pytest.mark.parametrize("name", MAKERS)
def test_greedy_text_under_a_penalty_is_that_of_plain_decoding(small, prompts, drafters, name):
    """What the target says at a guess depends on the guesses above it."""
    policy, drafter = Policy(repetition_penalty=1.3, presence_penalty=0.4), drafters[name]
    shape = drafter.shape if name == "lookahead" else TREE
    wanted = [decode_plain(small, prompt, 10, policy).tokens for prompt in prompts[:9]]
    outs = generate(small, drafter, prompts[:9], Settings(shape, 10, policy, batch=4)).generations
    assert texts_of(outs) == wanted


@pytest.mark.parametrize("verification", ["walk", "sampled"])
@pytest.mark.parametrize("name", MAKERS)
def test_draws_of_the_only_token_give_the_greedy_text(small, prompts, plain, drafters, name, verification):
    """At top-k 1 every draw, accepted, left over or bonus, must be the greedy token, at any temperature."""
    drafter = drafters[name]
    shape = drafter.shape if name == "lookahead" else EAGLE
    options = Settings(shape, NEW, Policy(3.0, top_k=1), verification=verification, batch=RAGGED)
    outs = generate(small, drafter, prompts[:15], options).generations
    assert texts_of(outs) == texts_of(plain[:15])
    assert sum(sum(out.accepted) for out in outs) > 3


SAMPLED = [(name, "walk", Policy(0.7)) for name in MAKERS] + [
    (name, "sampled", Policy(0.9, top_p=0.95)) for name in ("small model", "early exit")
]


@pytest.mark.parametrize(("name", "verification", "policy"), SAMPLED, ids=named)
def test_sampled_text_does_not_depend_on_its_company(small, prompts, drafters, name, verification, policy):
    """The same prompt and seed: the same text and counters alone, in a ragged batch, and in another order."""
    drafter, some, seeds = drafters[name], prompts[:10], [5 * number + 2 for number in range(10)]
    shape = drafter.shape if name == "lookahead" else EAGLE if verification == "sampled" else TREE
    options = Settings(shape, NEW, policy, verification=verification)
    alone = counters(generate(small, drafter, some, options, seeds).generations)
    assert counters(generate(small, drafter, some, replace(options, batch=RAGGED), seeds).generations) == alone
    back = generate(small, drafter, some[::-1], replace(options, batch=3), seeds[::-1]).generations
    assert counters(back) == alone[::-1]
    assert len({tuple(tokens) for tokens, *_ in alone}) == len(some)


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "lookahead"])
def test_drafting_that_rests_loses_nothing(small, prompts, plain, drafters, name):
    """Rows that came while nobody drafted are taken in later, all at once."""
    options = Settings(TREE, NEW, fallback=Fallback(break_even=50.0, window=2, rest=2), batch=4)
    outs = generate(small, drafters[name], prompts[:16], options).generations
    assert texts_of(outs) == texts_of(plain[:16])
    drafted = [bool(count) for out in outs for count in out.drafted]
    assert any(drafted)
    assert not all(drafted)


def test_lookahead_that_rests_loses_nothing(small, prompts, plain):
    """The target's choices belong to the tree that was drafted, not to the plain passes after it."""
    drafter = Lookahead()
    options = Settings(drafter.shape, NEW, fallback=Fallback(break_even=50.0, window=2, rest=2), batch=4)
    assert texts_of(generate(small, drafter, prompts[:16], options).generations) == texts_of(plain[:16])


@pytest.mark.parametrize("name", MAKERS)
def test_the_context_ends_the_text(small, drafters, name):
    """Up to the target's last position, with guesses that reach beyond it."""
    drafter, prompt = drafters[name], [7, 9, 30] * 167
    shape = drafter.shape if name == "lookahead" else EAGLE
    out = generate_one(small, drafter, prompt, Settings(shape, 40, ignore_eos=True))
    assert out.finish == "context"
    assert out.tokens == generate_one(small, None, prompt, Settings(PLAIN, 11, ignore_eos=True)).tokens


# The distribution of sampled text

WORDS = 12
TOY = Policy(1.1, top_k=3)


@pytest.fixture(scope="module")
def toy() -> Target:
    """A target over twelve tokens that sees two of them: its texts are Markov chains of order two, whose every step can be
    tested. Its end tokens lie outside, so that no text ends early.
    """
    shape = {"num_hidden_layers": 1, "sliding_window": 2, "initializer_range": 0.35}
    model = make_model("mistral", seed=3, vocab=WORDS, eos_token_id=None, pad_token_id=None, **shape)
    return Target(model, make_tokenizer(), "toy", (0, 1))


@pytest.fixture(scope="module")
def steps(toy) -> torch.Tensor:
    """Logits [V, V, V] after each pair of tokens."""
    pairs = torch.cartesian_prod(torch.arange(WORDS), torch.arange(WORDS))
    return toy.logits(toy.features(pairs).last_BND[:, -1]).view(WORDS, WORDS, WORDS)


def p_value(generations: list[Generation], probs_VVV: torch.Tensor) -> float:
    """χ² of every step given the two tokens before it; a token that the target cannot say gives 0."""
    seen = counted(generations, (1, 5), WORDS)
    assert seen.sum() >= 20000
    wanted = seen.sum(-1, keepdim=True) * probs_VVV.double()
    if (seen[wanted == 0] > 0).any():
        return 0.0
    total, freedom = 0.0, 0
    for have, want in zip(seen.flatten(0, 1), wanted.flatten(0, 1)):
        many = want >= 5
        if many.sum() < 2 or want[~many].sum() > 0:  # only rows whose every cell can be tested
            continue
        total += float(((have - want) ** 2 / want)[many].sum())
        freedom += int(many.sum()) - 1
    assert freedom > 20
    return float(chi2.sf(total, freedom))


def sample(toy, drafter, shape, policy=TOY, **options) -> list[Generation]:
    """21600 draws."""
    rules = Settings(shape, 90, policy, batch=240, **options)
    return generate(toy, drafter, [[1, 5]] * 240, rules).generations


SMALL_TREE = TreeShape.static([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]], "small")
DRAWN = [
    ("small model", TreeShape.chain(3), {}),
    ("small model", SMALL_TREE, {}),
    ("small model", TREE, {}),
    ("small model", TREE, {"verification": "walk"}),
    ("suffix", TREE, {}),
    ("lookahead", Lookahead(3, 3, 3).shape, {}),
]


@pytest.mark.parametrize(("name", "shape", "options"), DRAWN, ids=named)
def test_sampled_text_has_the_targets_distribution(toy, steps, name, shape, options):
    """Drawn and deterministic guesses: every step of the text is the target's own."""
    makers = {
        "small model": lambda: small_model(noisy(toy.model, 0.25), toy),
        "suffix": SuffixDrafter,
        "lookahead": lambda: Lookahead(3, 3, 3),
    }
    outs = sample(toy, makers[name](), shape, **options)
    lengths = Counter(accepted for out in outs for accepted in out.accepted[:-1])
    assert len(lengths) >= 3
    assert min(lengths[0], lengths[1], lengths[2]) > 50
    assert p_value(outs, TOY.probs(steps)) > 1e-3


def test_the_test_sees_another_distribution(toy, steps):
    """Negative controls: another temperature, and a drafter that draws from other distributions than the verifier is told."""
    assert p_value(sample(toy, None, PLAIN, Policy(0.95, top_k=3)), TOY.probs(steps)) < 1e-6
    outs = sample(toy, Boaster(noisy(toy.model, 0.25), WORDS), SMALL_TREE)
    assert p_value(outs, TOY.probs(steps)) < 1e-6


class Boaster(ModelDrafter):
    """Claims to have drawn from flatter distributions than it did."""

    def propose(self, state, context, shape):
        tree = super().propose(state, context, shape)
        q = tree.proposal.q_BFW.sqrt()
        return replace(tree, proposal=replace(tree.proposal, q_BFW=q / q.sum(-1, keepdim=True)))


# Guesses and trees


def test_chain_of_is_a_chain():
    assert chain_of([7, 8, 9]) == [(7, 0), (8, 1), (9, 2)]
    assert chain_of([]) == []


def naive_lookup(text: list[int], longest: int, count: int) -> list[int]:
    """Every earlier place of every suffix: the longest match, of these the latest."""
    found = [
        (length, start)
        for length in range(1, longest + 1)
        for start in range(len(text) - length)
        if text[start : start + length] == text[len(text) - length :]
    ]
    if not found:
        return []
    length, start = max(found)
    return text[start + length :][:count]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.integers(1, 4), st.integers(1, 5))
def test_prompt_lookup_is_a_search(text, longest, count):
    drafter = PromptLookup(longest)
    memory = drafter.remember()
    for token in text:
        drafter.learn(memory, [token], None)
    assert drafter.guess(memory, TreeShape.chain(count)) == chain_of(naive_lookup(text, longest, count))


def context_of(texts: list[list[int]]) -> Context:
    """A context whose tokens alone matter."""
    rows = [torch.tensor(text) for text in texts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    none = torch.zeros(*tokens.shape, 0)
    counts = [len(text) for text in texts]
    return Context(None, tokens, none[:, :, None], none, Policy(), None, counts, texts=texts)


@st.composite
def some_guesses(draw):
    """A random tree without equal siblings."""
    found = []
    for place in range(draw(st.integers(0, 9))):
        found.append((draw(st.integers(0, 5)), draw(st.integers(0, place))))
    return [guess for place, guess in enumerate(found) if guess not in found[:place]]


def depth_of(parents: list[int], node: int) -> int:
    """Steps up to the root."""
    return 0 if node == 0 else 1 + depth_of(parents, parents[node])


def sound(guesses) -> bool:
    """Removing repeated guesses may have moved parents behind their children."""
    return all(parent <= place for place, (_, parent) in enumerate(guesses))


@given(st.lists(some_guesses().filter(sound), min_size=1, max_size=4))
def test_forest_pads_with_nodes_that_belong_to_nobody(guesses):
    """Tokens, parents and depths as given; padding has no parent, sees itself alone, and nobody sees it."""
    texts = [[3] * number + [10 + number] for number in range(len(guesses))]
    tree = forest(context_of(texts), guesses)
    nodes = 1 + max(map(len, guesses))
    assert tree.tokens_BN.shape == tree.parents_BN.shape == tree.depth_BN.shape == (len(texts), nodes)
    assert tree.proposal is None
    assert tree.levels == int(tree.depth_BN.max())
    sees = tree.ancestors()
    for row, below in enumerate(guesses):
        count = 1 + len(below)
        parents = [-1, *(parent for _, parent in below)]
        assert tree.tokens_BN[row, :count].tolist() == [10 + row, *(token for token, _ in below)]
        assert tree.parents_BN[row].tolist() == parents + [-1] * (nodes - count)
        assert tree.depth_BN[row, :count].tolist() == [depth_of(parents, node) for node in range(count)]
        assert (tree.depth_BN[row, count:] == 0).all()
        assert torch.equal(sees[row, count:], torch.eye(nodes, dtype=torch.bool)[count:])
        assert not sees[row, :count, count:].any()


class Echo(HostDrafter):
    """Guesses what it is told, and remembers all."""

    wants_choices = True

    def remember(self):
        return []

    def learn(self, memory, text, choices):
        memory.append((list(text), choices))

    def guess(self, memory, shape):
        return chain_of(memory[-1][0])


def test_a_host_drafter_asks_about_each_text_alone():
    """New tokens and choices go to their own text, before it is asked to guess."""
    drafter, texts = Echo(), [[4, 5], [6], [7, 8, 9]]
    state = drafter.start(3, 100)
    drafter.absorb(state, context_of(texts))
    tree = drafter.propose(state, replace(context_of(texts), choices=[[1], [2, 3], []]), CHAIN)
    assert state == [
        [([4, 5], None), ([4, 5], [1])],
        [([6], None), ([6], [2, 3])],
        [([7, 8, 9], None), ([7, 8, 9], [])],
    ]
    assert tree.tokens_BN.tolist() == [[5, 4, 5, 0], [6, 6, 0, 0], [9, 7, 8, 9]]
    assert tree.parents_BN.tolist() == [[-1, 0, 1, -1], [-1, 0, -1, -1], [-1, 0, 1, 2]]


def test_rows_come_and_go():
    rows = Rows(["a", "b", "c"])
    rows.put(1, Rows(["x"]))
    assert rows == ["a", "x", "c"]
    rows.select([2, 0])
    assert rows == ["c", "a"]
    assert isinstance(rows, Rows)


@st.composite
def odds(draw):
    """What may come after each place of a small tree: shares that differ among siblings, and sum to at most 1."""
    table = {}
    for place in [(), *((a,) for a in range(3)), *itertools.product(range(3), repeat=2)]:
        shares = draw(st.lists(st.integers(1, 20), max_size=3, unique=True))
        total = sum(shares) + draw(st.integers(0, 5))
        table[place] = [(token, share / total, (*place, token)) for token, share in enumerate(shares)]
    return table


def all_trees(options: dict, most: int) -> set[frozenset]:
    """Every set of at most `most` places that holds the place above each of its own."""
    trees, layer = {frozenset()}, {frozenset()}
    for _ in range(most):
        layer = {
            tree | {place}
            for tree in layer
            for place in options
            if place not in tree and (len(place) == 1 or place[:-1] in tree)
        }
        trees |= layer
    return trees


@settings(max_examples=60, deadline=None)
@given(odds(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_best_first_finds_the_likeliest_tree(table, depth, top_k, nodes):
    """Against all trees within the bounds: none has more probability. Nodes come in falling order."""
    shape = TreeShape("free", depth, top_k, nodes)
    guesses = best_first((), lambda place: iter(table.get(place, [])), shape)
    check_guesses(guesses, shape)
    value, reachable = {(): 1.0}, [()]
    for place in reachable:
        if len(place) < depth:
            for _, share, below in sorted(table.get(place, []), key=lambda option: -option[1])[:top_k]:
                value[below] = value[place] * share
                reachable.append(below)
    del value[()]
    paths = [()]
    for token, parent in guesses:
        paths.append((*paths[parent], token))
    assert set(paths[1:]) <= value.keys()
    assert len(guesses) == min(nodes, len(value))
    mine = [value[path] for path in paths[1:]]
    best = max(sum(value[place] for place in tree) for tree in all_trees(value, nodes))
    assert sum(mine) == pytest.approx(best)
    assert mine == sorted(mine, reverse=True)


def test_best_first_takes_the_first_found_of_equals():
    """And never a child before its parent, even at the same value."""
    table = {"": [(5, 0.5, "a"), (6, 0.5, "b")], "a": [(7, 1.0, "c")], "b": [(8, 1.0, "d")]}
    shape = TreeShape("free", 2, 2, 4)
    assert best_first("", lambda place: table.get(place, []), shape) == [(5, 0), (6, 0), (7, 1), (8, 2)]
    assert best_first("", lambda place: [], shape) == []


# The suffix automaton


def occurrences(text, part) -> list[int]:
    """Ends of all places where `part` stands, overlapping ones too."""
    text, part = list(text), list(part)
    return [start + len(part) for start in range(len(text) - len(part) + 1) if text[start : start + len(part)] == part]


def substrings(text) -> set[tuple[int, ...]]:
    """All that are not empty."""
    return {tuple(text[a:b]) for a in range(len(text)) for b in range(a + 1, len(text) + 1)}


def reach(automaton: Automaton, part) -> int | None:
    """The state of a string, from the root."""
    place = ROOT
    for token in part:
        if token not in automaton.next[place]:
            return None
        place = automaton.next[place][token]
    return place


def automaton_of(text) -> Automaton:
    automaton = Automaton()
    for token in text:
        automaton.push(token)
    return automaton


def accepted_strings(automaton: Automaton) -> list[tuple[int, ...]]:
    """Every path from the root."""
    found = [((), ROOT)]
    for string, place in found:
        found += [((*string, token), below) for token, below in automaton.next[place].items()]
    return [string for string, _ in found[1:]]


TEXT = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=26))


@settings(max_examples=150, deadline=None)
@given(TEXT)
def test_the_automaton_holds_every_substring_and_its_count(text):
    """Substrings, numbers of occurrences, and the classes of strings that end at the same places, against a search."""
    automaton, parts = automaton_of(text), substrings(text)
    strings = accepted_strings(automaton)
    assert len(strings) == len(set(strings))
    assert set(strings) == parts
    ends = {part: tuple(occurrences(text, part)) for part in parts}
    alike = defaultdict(list)
    for part, places in ends.items():
        alike[places].append(part)
        assert automaton.count[reach(automaton, part)] == len(places)
    for places, members in alike.items():
        states = {reach(automaton, part) for part in members}
        assert len(states) == 1, "strings that end at the same places share a state"
        [state] = states
        longest = max(members, key=len)
        assert automaton.length[state] == len(longest)
        others = [longest[n:] for n in range(1, len(longest)) if ends[longest[n:]] != places]
        assert automaton.link[state] == (reach(automaton, others[0]) if others else ROOT)
    assert len(automaton.next) == 1 + len(alike)
    assert len(automaton.next) <= max(2 * len(text), 1)


@settings(max_examples=100, deadline=None)
@given(TEXT.filter(bool))
def test_the_last_link_is_the_longest_suffix_that_occurred_before(text):
    automaton = Automaton()
    for count, token in enumerate(text, 1):
        automaton.push(token)
        here = text[:count]
        wanted = max((n for n in range(count) if occurrences(here[:-1], here[count - n :])), default=0)
        place = automaton.link[automaton.last]
        assert automaton.length[place] == wanted
        assert place == reach(automaton, here[count - wanted :])
        assert automaton.length[automaton.last] == count


@pytest.mark.parametrize("period", [1, 2, 7])
def test_a_long_loop_is_held_whole_and_counted_up_to_a_bound(period):
    """Strings stay right, and no count is more than the truth. Of a string among the longest it is exact."""
    text = [n % period for n in range(4 * COUNTED)]
    automaton = automaton_of(text)
    assert len(automaton.next) <= 2 * len(text)
    for length in (1, 2, COUNTED, len(text) - COUNTED // 2, len(text)):
        part = text[:length]
        state, wanted = reach(automaton, part), len(occurrences(text, part))
        assert min(wanted, COUNTED // period) <= automaton.count[state] <= wanted
    assert reach(automaton, [*text, text[0]]) is None


DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4)


@settings(max_examples=120, deadline=None)
@given(DOCUMENTS, st.lists(st.integers(0, 3), max_size=20))
def test_advance_keeps_the_longest_suffix_that_occurs_in_the_corpus(documents, text):
    """Never across two documents: the naive search looks into each alone."""
    corpus = read_corpus(documents)
    place, length = ROOT, 0
    for count, token in enumerate(text, 1):
        place, length = corpus.advance(place, length, token)
        ends = [text[count - n : count] for n in range(count, 0, -1)]
        wanted = next((part for part in ends if any(occurrences(document, part) for document in documents)), [])
        assert length == len(wanted)
        assert place == reach(corpus, wanted)


def followers(documents, part) -> Counter:
    """What came after a string, within documents."""
    return Counter(
        document[end] for document in documents for end in occurrences(document, part) if end < len(document)
    )


@settings(max_examples=120, deadline=None)
@given(DOCUMENTS)
def test_follow_gives_conditional_frequencies(documents):
    corpus = read_corpus(documents)
    for part in set().union([()], *map(substrings, documents)):
        counts = followers(documents, part)
        options = list(corpus.follow(reach(corpus, part)))
        assert {token: share for token, share, _ in options} == {
            token: pytest.approx(count / counts.total()) for token, count in counts.items()
        }
        assert BREAK not in counts
        for token, _, state in options:
            assert state == reach(corpus, [*part, token])


def values_of(guesses, share) -> list[float]:
    """Probabilities of guesses, by `share` of each path."""
    paths = [()]
    for token, parent in guesses:
        paths.append((*paths[parent], token))
    return sorted((share(path) for path in paths[1:]), reverse=True)


def likeliest(follow, depth: int, nodes: int) -> list[float]:
    """Probabilities of the best nodes, from all paths; follow(path): counts of what comes next."""
    layer, values = [((), 1.0)], []
    for _ in range(depth):
        grown = []
        for path, value in layer:
            counts = follow(path)
            grown += [((*path, token), value * count / counts.total()) for token, count in counts.items()]
        layer = grown
        values += [value for _, value in layer]
    return sorted(values, reverse=True)[:nodes]


WIDE = TreeShape("free", 3, 4, 7)


@settings(max_examples=120, deadline=None)
@given(DOCUMENTS, st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(1, 3), st.booleans())
def test_suffix_drafter_continues_the_longest_match(documents, text, shortest, has_corpus):
    """In the text or the corpus, the text's own where both are as long; by naive searches of both."""
    drafter = SuffixDrafter(read_corpus(documents) if has_corpus else None, shortest)
    memory = drafter.remember()
    for token in text:
        drafter.learn(memory, [token], None)
    guesses = drafter.guess(memory, WIDE)
    check_guesses(guesses, WIDE)
    tails = [text[len(text) - n :] for n in range(len(text), -1, -1)]
    own = next(tail for tail in tails if len(tail) < len(text) and (not tail or occurrences(text[:-1], tail)))
    known = documents if has_corpus else []
    theirs = next(tail for tail in tails if not tail or any(occurrences(document, tail) for document in known))
    match, source = (theirs, documents) if len(theirs) > len(own) else (own, [text])
    if len(match) < shortest:
        assert guesses == []
        return

    def follow(path) -> Counter:
        return followers(source, [*match, *path])

    def share(path) -> float:
        value = 1.0
        for n, token in enumerate(path):
            counts = follow(path[:n])
            value *= counts[token] / counts.total()
        return value

    assert values_of(guesses, share) == pytest.approx(likeliest(follow, WIDE.depth, WIDE.nodes))


def test_a_corpus_is_not_shared_between_texts():
    """Each text has its own place in it, and its own memory; the corpus itself learns nothing."""
    corpus = read_corpus([[1, 2, 3], [1, 4, 5]])
    before = copy.deepcopy((corpus.next, corpus.count))
    drafter = SuffixDrafter(corpus)
    state = drafter.start(2, 10)
    tree = drafter.propose(state, context_of([[1, 2], [1, 4]]), TreeShape.chain(1))
    assert tree.tokens_BN.tolist() == [[2, 3], [4, 5]]
    assert (corpus.next, corpus.count) == before


# The datastore

LONG = st.lists(st.lists(st.integers(0, 1), max_size=45), min_size=1, max_size=3).filter(any)
SHORT = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=5).filter(any)
STORES = st.one_of(LONG, SHORT)


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.lists(st.integers(-1, 1), min_size=1, max_size=70), st.lists(st.just(2), min_size=1, max_size=70)))
def test_suffix_order_is_sorting_by_the_first_sixteen_tokens(tokens):
    order = suffix_order(np.asarray(tokens, dtype=np.int32))
    assert order.dtype == np.int32
    assert order.tolist() == sorted(range(len(tokens)), key=lambda n: (tokens[n : n + COMPARED], n))


def places_of(documents, ngram) -> list[int]:
    """Where an n-gram starts in all documents behind each other."""
    found, begin = [], 0
    for document in filter(None, documents):
        found += [begin + end - len(ngram) for end in occurrences(document, ngram)]
        begin += len(document) + 1
    return found


@st.composite
def store_and_query(draw):
    """Documents, and tokens that often occur in them."""
    documents = draw(STORES)
    document = draw(st.sampled_from([document for document in documents if document]))
    start = draw(st.integers(0, len(document) - 1))
    piece = document[start : start + draw(st.integers(1, 24))]
    ahead = draw(st.lists(st.integers(0, 4), max_size=4))
    return documents, ahead + piece + draw(st.lists(st.integers(0, 4), max_size=1))


@settings(max_examples=200, deadline=None)
@given(store_and_query())
def test_matches_and_longest_are_those_of_a_search(both):
    documents, query = both
    store = Datastore.of(documents)
    for count in range(1, min(COMPARED, len(query)) + 1):
        ngram = query[-count:]
        first, stop = store.matches(ngram)
        assert sorted(store.order_T[first:stop].tolist()) == places_of(documents, ngram)
    for most in (1, 5, COMPARED):
        length, found = store.longest(query, most)
        ends = [n for n in range(1, min(most, len(query)) + 1) if places_of(documents, query[-n:])]
        assert length == max(ends, default=0)
        if length:
            assert sorted(store.order_T[slice(*found)].tolist()) == places_of(documents, query[-length:])
        else:
            assert found == (0, 0)


def test_longest_of_nothing_is_nothing():
    assert Datastore.of([[1, 2]]).longest([], 8) == (0, (0, 0))


@settings(max_examples=150, deadline=None)
@given(store_and_query(), st.integers(1, 6), st.integers(1, 9))
def test_after_gives_what_follows_within_the_documents(both, depth, most):
    """Of all matches if they are few enough, else of every n-th."""
    documents, query = both
    store = Datastore.of(documents)
    length, found = store.longest(query, COMPARED)
    assume(length)
    begin, at = 0, {}
    for document in filter(None, documents):
        for end in occurrences(document, query[-length:]):
            at[begin + end - length] = tuple(document[end : end + depth])
        begin += len(document) + 1
    ordered = [at[start] for start in store.order_T[slice(*found)].tolist()]
    continuations = list(store.after(found, length, depth, most))
    assert len(continuations) <= most
    step = math.ceil(len(ordered) / most)
    assert continuations == ordered[::step]
    assert sorted(store.after(found, length, depth, 10_000)) == sorted(at.values())


@given(STORES)
def test_a_saved_datastore_is_the_same(tmp_path_factory, documents):
    path = tmp_path_factory.mktemp("store") / "kept.safetensors"
    store = Datastore.of(documents)
    store.save(path)
    again = Datastore.open(path)
    assert again.tokens_T.tolist() == store.tokens_T.tolist()
    assert again.order_T.tolist() == store.order_T.tolist()
    assert [again.tokens_T.dtype, again.order_T.dtype] == [np.int32, np.int32]
    wanted = [token for document in documents if document for token in (*document, -1)]
    assert store.tokens_T.tolist() == wanted
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("documents", [[], [[]], [[], []]], ids=str)
def test_a_datastore_of_nothing_is_refused(documents):
    with pytest.raises(UserError, match="at least one document"):
        Datastore.of(documents)


@pytest.fixture
def kept(tmp_path):
    """A datastore on disk."""
    path = tmp_path / "kept.safetensors"
    Datastore.of([[1, 2, 3, 1, 2], [2, 3, 1]]).save(path)
    return path


def rewrite(path, **changes) -> None:
    """The same file with other tensors; None removes one."""
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def places(*numbers):
    return np.asarray(numbers, dtype=np.int32)


BREAKS = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(random.Random(0).randbytes(400)),
    "text": lambda path: path.write_text("[1, 2, 3]"),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"tokens": [1], "order": [0]})),
    "torch": lambda path: torch.save({"tokens": torch.zeros(3), "order": torch.zeros(3)}, path),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "half": lambda path: path.write_bytes(path.read_bytes()[:60]),
    "no order": lambda path: rewrite(path, order=None),
    "no tokens": lambda path: rewrite(path, tokens=None),
    "short order": lambda path: rewrite(path, order=places(0, 1, 2)),
    "order with a place twice": lambda path: rewrite(path, order=places(0, 0, 2, 3, 4, 5, 6, 7, 8, 9)),
    "order beyond the end": lambda path: rewrite(path, order=places(0, 1, 2, 3, 4, 5, 6, 7, 8, 10)),
    "order below zero": lambda path: rewrite(path, order=places(-1, 1, 2, 3, 4, 5, 6, 7, 8, 9)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_datastore_is_refused_by_name(kept, how):
    assert len(Datastore.open(kept).order_T) == 10
    BREAKS[how](kept)
    with pytest.raises(UserError, match=rf"{kept.name}: not a datastore"):
        Datastore.open(kept)


def test_an_order_that_does_not_sort_is_refused(kept):
    """By such an order a search finds too little, and nobody is told."""
    rewrite(kept, order=places(*reversed(range(10))))
    with pytest.raises(UserError, match="not a datastore"):
        Datastore.open(kept)


@pytest.mark.parametrize("before", [False, True])
def test_nothing_is_left_half_written(kept, monkeypatch, before):
    """A save that fails leaves what was there before, or nothing."""
    old = kept.read_bytes()
    if not before:
        kept.unlink()

    def fail(tensors, file):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(retrieval, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        Datastore.of([[5, 6]]).save(kept)
    assert [file.name for file in kept.parent.iterdir()] == [kept.name] * before
    assert not before or kept.read_bytes() == old


@settings(max_examples=120, deadline=None)
@given(store_and_query(), st.integers(1, 20))
def test_retrieval_guesses_the_likeliest_continuations(both, longest):
    """Each guess is as likely as the share of matches whose continuation begins with its path."""
    documents, query = both
    drafter = Retrieval(Datastore.of(documents), longest)
    memory = drafter.remember()
    for token in query:
        drafter.learn(memory, [token], None)
    guesses = drafter.guess(memory, WIDE)
    check_guesses(guesses, WIDE)
    tails = [query[-n:] for n in range(min(longest, COMPARED, len(query)), 0, -1)]
    match = next((tail for tail in tails if places_of(documents, tail)), None)
    if match is None:
        assert guesses == []
        return
    texts = [tuple(document[end:]) for document in documents for end in occurrences(document, match)]

    def share(path) -> float:
        return sum(text[: len(path)] == path for text in texts) / len(texts)

    nodes = {text[:depth] for text in texts for depth in range(1, min(WIDE.depth, len(text)) + 1)}
    wanted = sorted(map(share, nodes), reverse=True)[: WIDE.nodes]
    assert values_of(guesses, share) == pytest.approx(wanted)


def test_retrieval_looks_at_an_even_selection_of_many_matches():
    """Two matches of a hundred stand for all: the first and the one half way."""
    documents = [[1, 2, n] for n in range(10, 110)]
    drafter = Retrieval(Datastore.of(documents), most=2)
    memory = [1, 2]
    assert drafter.guess(memory, WIDE) == [(10, 0), (60, 0)]


# Lookahead


@dataclass
class SlowWindow:
    """Jacobi iteration as the paper describes it (arXiv 2402.02057, section 3.1), one forward for each place.

    levels: the guesses of past iterations, oldest first, one for each column. The next guess of a column reads the text, the
    oldest guesses up to that column, then the column's own guess of each later iteration.
    """

    columns: int
    ngram: int
    most: int
    levels: list[list[int]] = field(default_factory=list)
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))

    def iterate(self, target: Target, text: list[int]) -> None:
        """One pass: all columns grow by a token, n-grams go to the pool, the oldest iteration is forgotten."""
        newest = []
        for column in range(self.columns):
            line = text + [self.levels[0][place] for place in range(column + 1)]
            for age in range(1, self.ngram - 1):
                line.append(self.levels[age][column])
            newest.append(int(target.logits(target.features(torch.tensor([line])).last_BND[0, -1]).argmax()))
        for column in range(self.columns):
            self.collect([level[column] for level in self.levels] + [newest[column]])
        self.levels = [*self.levels[1:], newest]

    def collect(self, ngram: list[int]) -> None:
        """The latest `most` different n-grams of each first token."""
        kept = [tail for tail in self.pool[ngram[0]] if tail != tuple(ngram[1:])]
        self.pool[ngram[0]] = [*kept, tuple(ngram[1:])][-self.most :]


def paths_of(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """All paths of a tree, from below the root."""
    paths = [()]
    for token, parent in zip(tokens[1:], parents[1:]):
        if parent >= 0:
            paths.append((*paths[parent], token))
    return set(paths)


@pytest.mark.parametrize(("window", "ngram", "most"), [(5, 3, 5), (3, 4, 2), (4, 2, 1), (1, 3, 3)], ids=str)
def test_lookahead_is_jacobi_iteration(small, prompts, window, ngram, most):
    """Columns, levels and pool after every cycle of a ragged batch, and what is checked of the pool, against the slow way."""
    drafter = Lookahead(window, ngram, most)
    decoder = Decoder(small, drafter, prompts[:5], Settings(drafter.shape, 10, ignore_eos=True, batch=2))
    slow, said, propose, compared = {}, {}, drafter.propose, 0

    def watched(state, context, shape):
        nonlocal compared
        tree = propose(state, context, shape)
        for place, row in enumerate(decoder.rows):
            memory, text = state[place], row.prompt + row.out.tokens
            if row.number not in slow:
                slow[row.number] = SlowWindow(window, ngram, most, [list(level) for level in memory.window])
            else:
                slow[row.number].iterate(small, said[row.number])
                compared += 1
            said[row.number], reference = text, slow[row.number]
            assert memory.window == reference.levels
            assert {first: list(tails) for first, tails in memory.pool.items()} == reference.pool
            paths = paths_of(tree.tokens_BN[place].tolist(), tree.parents_BN[place].tolist())
            assert paths >= set(reference.pool.get(text[-1], []))
            for column in range(window):
                line = [*reference.levels[0][: column + 1], *(level[column] for level in reference.levels[1:])]
                assert tuple(line) in paths
        return tree

    drafter.propose = watched
    for _ in decoder.cycles():
        pass
    assert len(slow) == 5
    assert compared > 20


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(2, 5), st.integers(1, 4))
def test_lookahead_stays_within_its_shape(data, window, ngram, most):
    """Whatever the target says: no equal siblings, no more nodes or levels than promised, a bounded pool."""
    drafter, tokens = Lookahead(window, ngram, most), st.integers(0, data.draw(st.integers(0, 3)))
    shape, memory = drafter.shape, drafter.remember()
    drafter.learn(memory, data.draw(st.lists(tokens, min_size=1, max_size=3)), None)
    for _ in range(6):
        guesses = drafter.guess(memory, shape)
        check_guesses(guesses, shape)
        assert len(memory.window) == ngram - 1
        assert all(len(level) == window for level in memory.window)
        checked = memory.pool.get(memory.text[-1], {})
        assert guesses[: ngram - 1] == chain_of(next(reversed(checked))) if checked else True
        count = len(guesses) + 1
        choices = data.draw(st.lists(tokens, min_size=count, max_size=count))
        drafter.learn(memory, data.draw(st.lists(tokens, min_size=1, max_size=3)), choices)
        assert all(len(tails) <= most for tails in memory.pool.values())
        assert all(len(tail) == ngram - 1 for tails in memory.pool.values() for tail in tails)
        assert len(memory.text) <= window * ngram


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), max_size=20), st.integers(1, 3))
def test_the_pool_forgets_what_was_seen_longest_ago(ngrams, most):
    """Seen again counts as new; each first token has its own share."""
    drafter = Lookahead(2, 2, most)
    memory, reference = drafter.remember(), SlowWindow(2, 2, most)
    for ngram in ngrams:
        drafter.keep(memory, list(ngram))
        reference.collect(list(ngram))
    assert {first: list(tails) for first, tails in memory.pool.items()} == reference.pool


def test_the_largest_tree_fills_its_shape():
    """No room is promised that nothing can use."""
    drafter = Lookahead(3, 3, 2)
    memory = LookaheadMemory(text=[1], window=[[20, 21, 22], [30, 31, 32]])
    for tail in ([10, 11], [12, 13]):
        drafter.keep(memory, [1, *tail])
    guesses = drafter.guess(memory, drafter.shape)
    assert len(guesses) == drafter.shape.nodes == 10
    assert height([parent for _, parent in guesses]) == drafter.shape.depth == 4
    assert guesses[:2] == [(12, 0), (13, 1)], "the latest first"


def test_branches_share_what_is_common():
    tree = Branches()
    assert [tree.add([1, 2]), tree.add([1, 3]), tree.add([1, 2]), tree.add([])] == [2, 3, 2, 0]
    assert tree.guesses == [(1, 0), (2, 1), (3, 1)]


def test_lookahead_is_right_about_a_text_that_repeats_itself():
    """A target that says two tokens in turn: after a while all n-grams are known, and most passes emit several tokens."""
    target = alternating()
    drafter = Lookahead(4, 3, 3)
    out = generate_one(target, drafter, [5, 6, 7], Settings(drafter.shape, 40, ignore_eos=True))
    assert out.tokens == decode_plain(target, [5, 6, 7], 40).tokens
    assert len(set(out.tokens[4:])) <= 3
    assert out.acceptance_length > 1.8
    assert max(out.accepted) >= 2


def alternating() -> Target:
    """A target without context: attention adds nothing, so that each token alone decides the next, and texts must loop."""
    model = make_model(num_hidden_layers=1, initializer_range=0.5)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        table = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(0)) * 10
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(table)
        model.model.norm.weight.fill_(1.0)
        head = torch.zeros(VOCAB, 32)
        for token in range(VOCAB):
            head[follower(token)] += table[token]
        model.lm_head.weight.copy_(head)
    return Target(model, make_tokenizer(), "alternating", (0, 1))


def follower(token: int) -> int:
    """Three tokens in a circle; all others lead into it."""
    return 10 + (token + 1) % 3


@pytest.mark.parametrize("numbers", [(0, 3, 5), (-1, 3, 5), (5, 1, 5), (5, 0, 5), (5, 3, 0), (5, 3, -2)], ids=str)
def test_lookahead_refuses_bad_numbers(numbers):
    window, ngram, guesses = numbers
    with pytest.raises(UserError, match=rf"window {window}, ngram {ngram}, guesses {guesses}: at least 1, 2 and 1"):
        Lookahead(*numbers)


def test_lookahead_takes_the_smallest_numbers(small, prompts, plain):
    drafter = Lookahead(1, 2, 1)
    assert drafter.shape == TreeShape("free", 1, 1, 2, label="lookahead-1-2-1")
    outs = generate(small, drafter, prompts[:6], Settings(drafter.shape, NEW, batch=4)).generations
    assert texts_of(outs) == texts_of(plain[:6])


# Early exits


@torch.inference_mode()
def reference_logits(target: Target, ids: list[int], layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States and logits after some layers, from Hugging Face's own forward."""
    with target.attention(target.own_attention):
        out = target.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    target.captured.clear()  # this forward filled it
    states = out.hidden_states[layers]
    last = states if layers == target.spec.num_layers else target.body.norm(states)  # transformers' last is normed
    logits = target.model.get_output_embeddings()(last)
    cap = getattr(target.model.config, "final_logit_softcapping", None)
    logits = torch.tanh(logits / cap) * cap if cap else logits
    if layers == target.spec.num_layers:
        assert torch.allclose(logits, out.logits, atol=1e-5)
    return last[0], logits[0]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exit_is_the_norm_and_head_on_that_layers_state(family):
    """Whole, and in pieces through its cache; beyond a sliding window; the whole target before and after."""
    target = make_target(family)
    ids = torch.randint(VOCAB, (26,), generator=torch.Generator().manual_seed(2)).tolist()
    ids_1T = torch.tensor([ids])
    before = target.features(ids_1T)
    for layers in (1, 2, 5, 8):
        last, logits = reference_logits(target, ids, layers)
        early = EarlyExit(target, layers)
        whole = early.features(ids_1T).last_BND
        assert close(whole[0], last)
        assert close(early.logits(whole)[0], logits)
        cache, pieces = early.new_cache(1, len(ids)), []
        for start, stop in ((0, 7), (7, 8), (8, 26)):
            pieces.append(early.extend(ids_1T[:, start:stop], cache).last_BND)
            cache.advance(stop - start)
        assert close(torch.cat(pieces, 1)[0], last)
        assert len(cache.keys) == layers
        assert len(target.body.layers) == 8
    after = target.features(ids_1T)
    assert torch.equal(before.last_BND, after.last_BND)
    assert torch.equal(before.taps_BNKD, after.taps_BNKD)


def test_an_exit_after_all_layers_is_the_target(tiny):
    early, ids = EarlyExit(tiny, tiny.spec.num_layers), torch.tensor([[5, 9, 200, 31]])
    assert early.spec is tiny.spec
    assert early.device == tiny.device
    ours, theirs = early.features(ids), tiny.features(ids)
    assert torch.equal(ours.last_BND, theirs.last_BND)
    assert torch.equal(ours.taps_BNKD, theirs.taps_BNKD)
    assert torch.equal(early.logits(ours.last_BND), tiny.logits(theirs.last_BND))


@pytest.mark.parametrize("layers", [-1, 0, 9, 100])
def test_an_exit_out_of_range_is_refused(tiny, layers):
    with pytest.raises(UserError, match=rf"early exit after {layers} layers: the target has 8"):
        EarlyExit(tiny, layers)


def test_the_target_survives_an_exception_in_an_early_exit(tiny, monkeypatch):
    """Too small a cache, and a layer that fails: all layers are back, and the target's states are what they were."""
    early, ids = EarlyExit(tiny, 2), torch.tensor([[5, 9, 200, 31]])
    before, layers = tiny.features(ids), list(tiny.body.layers)
    with pytest.raises(ValueError, match="too small"):
        early.extend(ids, early.new_cache(1, 2))
    assert list(tiny.body.layers) == layers

    def fail(*_, **__):
        raise RuntimeError("layer failed")

    with monkeypatch.context() as patch:
        patch.setattr(layers[1], "forward", fail)
        with pytest.raises(RuntimeError, match="layer failed"):
            early.features(ids)
    assert list(tiny.body.layers) == layers
    after = tiny.features(ids)
    assert torch.equal(before.last_BND, after.last_BND)
    assert torch.equal(before.taps_BNKD, after.taps_BNKD)
    assert torch.equal(tiny.logits(before.last_BND), tiny.logits(after.last_BND))


def test_an_early_exit_after_generating_by_transformers():
    """As in an evaluation all of whose prompts are timed: exits are measured right after transformers' own generation."""
    target = make_target()
    early, ids = EarlyExit(target, 2), torch.tensor([[7, 8]])
    wanted = early.features(ids)
    target.generate_hf(torch.tensor([[5, 9, 200, 31]]), 3)
    found = early.features(ids)
    assert torch.equal(found.last_BND, wanted.last_BND)
    assert torch.equal(found.taps_BNKD, wanted.taps_BNKD)


def test_an_early_exit_survives_an_exception_in_the_target(monkeypatch):
    """States that a failed pass has left behind must not be taken for those of the next."""
    target = make_target()
    early, wanted = EarlyExit(target, 2), EarlyExit(target, 2).features(torch.tensor([[7, 8]])).taps_BNKD

    def fail(*_, **__):
        raise RuntimeError("layer failed")

    with monkeypatch.context() as patch:
        patch.setattr(target.body.layers[7], "forward", fail)
        with pytest.raises(RuntimeError, match="layer failed"):
            target.features(torch.tensor([[5, 9, 200, 31]]))
    assert torch.equal(early.features(torch.tensor([[7, 8]])).taps_BNKD, wanted)


def naive_exit(target: Target, layers: int, documents) -> tuple[float, list[float], list[float]]:
    """Agreement, and how sure right and wrong guesses were, token by token."""
    right, wrong = [], []
    for ids, rows in documents:
        _, early = reference_logits(target, ids, layers)
        _, whole = reference_logits(target, ids, target.spec.num_layers)
        for row in rows:
            probs = early[row].double().exp() / early[row].double().exp().sum()
            guess = max(range(VOCAB), key=lambda token: float(probs[token]))
            (right if guess == int(whole[row].argmax()) else wrong).append(float(probs[guess]))
    return len(right) / (len(right) + len(wrong)), right, wrong


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def test_the_exit_report_is_that_of_a_count(small, tiny, corpus):
    """Over several documents with some of their rows, in one number each."""
    for target in (small, tiny):
        documents = [(text, list(range(3 + number, len(text) - 1, 2))) for number, text in enumerate(corpus[:5])]
        documents = [(text, rows) for text, rows in documents if rows]
        candidates = [1, target.spec.num_layers - 1, target.spec.num_layers]
        for found, layers in zip(early_exits(target, documents, candidates), candidates, strict=True):
            agreement, right, wrong = naive_exit(target, layers, documents)
            assert found.layers == layers
            assert found.agreement == pytest.approx(agreement)
            assert found.confidence_right == pytest.approx(mean(right), rel=1e-4, nan_ok=True)
            assert found.confidence_wrong == pytest.approx(mean(wrong), rel=1e-4, nan_ok=True)
        assert found.agreement == 1.0
        assert math.isnan(found.confidence_wrong)


def exit_at(target: Target, ids: list[int], rows: list[int]) -> Exit:
    """The exit after one layer, at some rows of a text."""
    ids_1T, rows_R = torch.tensor([ids]), torch.tensor(rows)
    return measure_exit(target, 1, ids_1T, rows_R, own_choices(target, ids_1T, rows_R))


def test_measure_exit_reads_only_its_rows(small, corpus):
    """Other tokens behind the last row change nothing."""
    ids, rows = corpus[3], [2, 5, 6]
    whole = exit_at(small, ids, rows)
    cut = exit_at(small, [*ids[:7], 9, 9], rows)
    assert dataclasses.astuple(cut) == pytest.approx(dataclasses.astuple(whole), nan_ok=True)
    one, two = (exit_at(small, ids, part) for part in (rows[:1], rows[1:]))
    both = pooled([(one, 1), (two, 2)])
    assert [both.layers, both.agreement] == [1, pytest.approx(whole.agreement)]
    assert both.confidence_right == pytest.approx(whole.confidence_right, nan_ok=True)
    assert both.confidence_wrong == pytest.approx(whole.confidence_wrong, nan_ok=True)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(any), min_size=1, max_size=5), st.data())
def test_pooled_is_the_mean_over_all_rows(counts, data):
    """Texts of right and wrong guesses, each with its own confidence."""
    parts, right, wrong = [], [], []
    for good, bad in counts:
        sure = [data.draw(st.floats(0.01, 1)) for _ in range(good + bad)]
        right += sure[:good]
        wrong += sure[good:]
        parts.append((Exit(3, good / (good + bad), mean(sure[:good]), mean(sure[good:])), good + bad))
    found = pooled(parts)
    assert found.layers == 3
    assert found.agreement == pytest.approx(len(right) / (len(right) + len(wrong)))
    assert found.confidence_right == pytest.approx(mean(right), nan_ok=True)
    assert found.confidence_wrong == pytest.approx(mean(wrong), nan_ok=True)


def test_a_document_without_rows_counts_for_nothing(small, corpus):
    """A text may hold no learned token behind its first one."""
    documents = [(corpus[3], [2, 5, 6]), (corpus[4], [])]
    [found] = early_exits(small, documents, [1])
    [alone] = early_exits(small, documents[:1], [1])
    assert found.agreement == alone.agreement


@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0, 1)), min_size=1, max_size=6),
    st.integers(1, 8),
    st.floats(0.5, 3),
)
def test_best_exit_is_the_maximum_of_the_formula(exits, depth, verify):
    """τ / (depth · exit / layers + v), with τ = 1 + a + a² + … + a^depth, over all exits and depths."""
    found = [Exit(layers, share, 0.5, 0.5) for layers, share in exits]
    values = {}
    for one in found:
        for length in range(1, depth + 1):
            tau = 1.0
            for k in range(1, length + 1):
                tau += math.prod([one.agreement] * k)
            values[id(one), length] = tau / (length * one.layers / 30 + verify)
    best, length, predicted = best_exit(found, 30, range(1, depth + 1), verify)
    assert predicted == pytest.approx(max(values.values()))
    assert predicted == pytest.approx(values[id(best), length])


def test_an_exit_after_all_layers_is_always_right(small, prompts):
    """Chains of K: τ = K + 1, alone and in batches."""
    drafter = ModelDrafter(EarlyExit(small, 2), small.spec.vocab_size)
    check_whole_acceptance(small, drafter, prompts, Policy())


def check_whole_acceptance(target, drafter, prompts, policy) -> None:
    """Every cycle emits the whole chain and the bonus."""
    limit = 1 + 4 * (CHAIN.depth + 1)
    for some, batch in ((prompts[:5], 1), (prompts[:13], 5)):
        options = Settings(CHAIN, limit, policy, ignore_eos=True, batch=batch)
        for out in generate(target, drafter, some, options).generations:
            assert out.accepted == [CHAIN.depth] * 4
            assert out.acceptance_length == CHAIN.depth + 1


# A small model


@pytest.mark.parametrize("policy", [Policy(), Policy(1.0), Policy(0.6)], ids=lambda policy: f"T={policy.temperature}")
def test_the_target_drafting_for_itself_is_always_right(small, prompts, policy):
    """Greedy, and sampled, where p = q and no draw is refused."""
    check_whole_acceptance(small, small_model(small, small), prompts, policy)


def with_model(small, changes: dict | None = None, tokenizer=None, **model) -> Target:
    """A draft model of one layer."""
    name = "draft"
    target = Target(make_model(num_hidden_layers=1, **model), tokenizer or make_tokenizer(), name, (0,))
    target.spec = replace(target.spec, **(changes or {}))
    return target


def test_another_tokenizer_is_refused_by_its_tokens(small):
    """Two tokens that have changed places, and one that is missing or more."""
    swapped = make_tokenizer()
    vocabulary = swapped.get_vocab()
    other = copy.copy(swapped)
    other.get_vocab = lambda: vocabulary | {"a": vocabulary["b"], "b": vocabulary["a"]}
    with pytest.raises(UserError, match=r"tokenizer is not that of tiny-llama \(259 and 259 tokens, 2 differ.*'[ab]'"):
        small_model(with_model(small, tokenizer=other), small)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    more = make_tokenizer(special=[*specials, "<|tool|>"])
    with pytest.raises(UserError, match=r"260 and 259 tokens, 0 differ\)"):
        small_model(with_model(small, tokenizer=more), small)
    fewer = make_tokenizer(special=specials[1:])
    with pytest.raises(UserError, match=r"258 and 259 tokens, \d differ, such as '<"):
        small_model(with_model(small, tokenizer=fewer), small)


@pytest.mark.parametrize(("context", "fits"), [(511, False), (64, False), (512, True), (4096, True)])
def test_a_shorter_context_is_refused(small, context, fits):
    model = with_model(small, max_position_embeddings=context)
    if fits:
        assert small_model(model, small).model is model
        return
    with pytest.raises(UserError, match=rf"its context of {context} is shorter than the target's \(512\)"):
        small_model(model, small)


@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_rows_beyond_the_targets_vocabulary_are_never_guessed(small, prompts, plain, shape):
    """A draft model with more rows than the target, which it would love to say: greedy and sampled."""
    model = make_model(num_hidden_layers=2, vocab=VOCAB + 40)
    with torch.no_grad():
        model.model.embed_tokens.weight[:VOCAB] = small.model.model.embed_tokens.weight
        model.model.layers.load_state_dict(small.model.model.layers.state_dict())
        model.model.norm.load_state_dict(small.model.model.norm.state_dict())
        model.lm_head.weight[:VOCAB] = small.lm_head.weight
        model.lm_head.weight[VOCAB:] *= 100
    drafter = small_model(Target(model, make_tokenizer(), "padded", (0,)), small)
    assert drafter.ids_W.tolist() == list(range(VOCAB))
    seen, propose = [], drafter.propose

    def watched(state, context, shape):
        seen.append(propose(state, context, shape))
        return seen[-1]

    drafter.propose = watched
    outs = generate(small, drafter, prompts[:10], Settings(shape, NEW, batch=4)).generations
    assert texts_of(outs) == texts_of(plain[:10])
    itself = generate(small, small_model(small, small), prompts[:10], Settings(shape, NEW, batch=4)).generations
    assert sum(sum(out.accepted) for out in outs) == sum(sum(out.accepted) for out in itself) > 20
    generate(small, drafter, prompts[:4], Settings(shape, NEW, Policy(1.0), batch=4))
    assert all((tree.tokens_BN < VOCAB).all() for tree in seen)
    assert any(tree.proposal is not None for tree in seen)


@pytest.mark.parametrize("vocabulary", [259, 264])
def test_fewer_rows_than_the_target_has_do_no_harm(small, prompts, plain, vocabulary):
    """The target may say a token that the draft model has no row for; such tokens are never guessed, but read."""
    model = with_model(small, vocab=vocabulary)
    drafter = small_model(model, small)
    assert len(drafter.ids_W) == vocabulary
    outs = generate(small, drafter, prompts, Settings(TREE, NEW, batch=RAGGED)).generations
    assert texts_of(outs) == texts_of(plain)
    assert any(token >= vocabulary for out in plain for token in out.tokens), "the case took place"


def check_draft_cache(decoder: Decoder, place: int) -> int:
    """A row's slots hold what reading the text so far afresh gives, and the rest of the text is waiting."""
    row, count = decoder.rows[place], decoder.state.lengths[place]
    text = row.prompt + row.out.tokens
    assert decoder.pending.rows_of(place).texts[0] == text[count:]
    model = decoder.drafter.model
    fresh = model.new_cache(1, count)
    model.extend(torch.tensor([text[:count]]), fresh)
    assert decoder.state.positions[place, :count].tolist() == list(range(count))
    for ours, theirs in zip((*decoder.state.keys, *decoder.state.values), (*fresh.keys, *fresh.values), strict=True):
        assert torch.allclose(ours[place, :, :count], theirs[0], rtol=1e-3, atol=2e-5)
    return count


@pytest.mark.parametrize("policy", [Policy(), Policy(0.9, top_p=0.95)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES, ids=named)
@pytest.mark.parametrize("name", ["small model", "early exit"])
def test_nothing_speculative_stays_in_the_draft_cache(small, prompts, drafters, name, shape, policy):
    """After every cycle, row by row, through acceptance, rejection and the coming and going of texts."""
    decoder = Decoder(small, drafters[name], prompts[:7], Settings(shape, 10, policy, batch=3))
    accepted = Counter()
    for _ in decoder.cycles():
        for place, row in enumerate(decoder.rows):
            if not row.out.finish and row.out.emitted:
                check_draft_cache(decoder, place)
                accepted[row.out.accepted[-1]] += 1
    assert accepted[0] > 0
    assert sum(accepted[n] for n in accepted if n) > 3


@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_absorbing_in_pieces_is_absorbing_at_once(small, drafters, shape):
    """The same tree, whether the text came token by token, in a padded batch or whole."""
    drafter, texts = drafters["small model"], [[5, 9, 7, 30, 31, 2], [8], [7, 7, 7, 9]]
    batch = drafter.start(3, 40)
    together = drafter.propose(batch, context_of(texts), shape)
    assert batch.lengths == [len(text) for text in texts]
    for row, text in enumerate(texts):
        state = drafter.start(1, 40)
        for token in text[:-1]:
            drafter.absorb(state, context_of([[token]]))
        alone = drafter.propose(state, context_of([text[-1:]]), shape)
        assert state.lengths == [len(text)]
        for ours, theirs in ((together.tokens_BN, alone.tokens_BN), (together.parents_BN, alone.parents_BN)):
            assert ours[row].tolist() == theirs[0].tolist()
        assert torch.allclose(together.logprobs_BN[row], alone.logprobs_BN[0], atol=1e-3)
        check_chain_of_best(drafter, text, alone)


def check_chain_of_best(drafter: ModelDrafter, text: list[int], tree: Tree) -> None:
    """Each node's log-probability is that of its path in the model, without any cache."""
    parents, tokens = tree.parents_BN[0].tolist(), tree.tokens_BN[0].tolist()
    paths, scores = [[]], [0.0]
    for node in range(1, len(tokens)):
        line = torch.tensor([text + paths[parents[node]]])
        logp = drafter.logits(drafter.model.features(line).last_BND[0, -1]).log_softmax(-1)
        paths.append([*paths[parents[node]], tokens[node]])
        scores.append(scores[parents[node]] + float(logp[tokens[node]]))
    assert tree.logprobs_BN[0].tolist() == pytest.approx(scores, abs=1e-3)
    logp = drafter.logits(drafter.model.features(torch.tensor([text])).last_BND[0, -1]).log_softmax(-1)
    assert tokens[1] == int(logp.argmax())


# The baselines of a run


@pytest.fixture
def bench(done, tmp_path):
    """A copy of a harvested run, which a test may change, and its target."""
    run = copy.deepcopy(done)
    run.runs = str(tmp_path)
    shutil.copytree(done.directory, run.directory)
    return run


@pytest.fixture(scope="module")
def whole(done) -> Target:
    """The run's target."""
    return Target.load(done.target, list(FeatureReader(store_path(done, "train")).manifest.taps))


NAMES = ["prompt-lookup", "suffix", "retrieval", "lookahead", "early-exit"]
KINDS = {
    "prompt-lookup": PromptLookup,
    "suffix": SuffixDrafter,
    "retrieval": Retrieval,
    "lookahead": Lookahead,
    "early-exit": ModelDrafter,
    "draft-model": ModelDrafter,
}
MEASURED = [TREE, TreeShape.chain(3), TreeShape.chain(2)]


def test_every_baseline_is_made_and_lossless(bench, whole, model_dir):
    """All of them, in order, each in its shape, and the text is the target's on held-out prompts."""
    bench.eval.baselines, bench.eval.draft_model = list(NAMES), str(model_dir)
    entries = list(others(bench, whole, MEASURED))
    reader = FeatureReader(store_path(bench, "held-out"))
    starts = [reader[number].ids_T.tolist()[: 9 + 3 * number] for number in range(4)]
    wanted = [decode_plain(whole, start, 12).tokens for start in starts]
    names = []
    for name, drafter, [shape] in entries:
        kind = "early-exit" if name.startswith("early-exit-") else name
        names.append(kind)
        assert type(drafter) is KINDS[kind]
        if kind == "lookahead":
            assert shape == drafter.shape
        elif kind == "early-exit":
            assert name == f"early-exit-{drafter.model.exit}"
            assert shape == TreeShape.chain(shape.depth)
            assert 1 <= shape.depth <= 3
        else:
            assert shape == TreeShape.chain(3), "the first chain of the run"
        outs = generate(whole, drafter, starts, Settings(shape, 12, batch=3)).generations
        assert texts_of(outs) == wanted
        if kind == "draft-model":
            assert all(out.accepted[0] == 3 for out in outs if len(out.tokens) > 4), "here it is the target itself"
    assert names == [*NAMES, "draft-model"]


def test_only_what_is_asked_for_is_made(bench, whole):
    """In the run's order; without a chain among the shapes, one of the first shape's depth. No store is read for nothing."""
    bench.eval.baselines = ["lookahead", "prompt-lookup"]
    shutil.rmtree(store_path(bench, "train"))
    entries = list(others(bench, whole, [TREE, EAGLE]))
    assert [name for name, *_ in entries] == ["lookahead", "prompt-lookup"]
    assert entries[1][2] == [TreeShape.chain(TREE.depth)]
    bench.eval.baselines = []
    assert list(others(bench, whole, MEASURED)) == []
    assert not (bench.directory / "datastore.safetensors").exists()


def test_corpora_are_the_training_texts(bench, whole):
    """In order and whole, the held-out ones not among them."""
    bench.eval.baselines = ["suffix", "retrieval"]
    reader = FeatureReader(store_path(bench, "train"))
    texts = [reader[number].ids_T.tolist() for number in range(len(reader))]
    assert len(texts) > 5
    (_, suffix, _), (_, lookup, _) = others(bench, whole, MEASURED)
    tokens = [token for text in texts for token in (*text, -1)]
    assert lookup.store.tokens_T.tolist() == tokens
    assert suffix.corpus.length[suffix.corpus.last] == len(tokens)
    assert all(reach(suffix.corpus, text) is not None for text in texts)


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_training_texts_stop_at_a_number_of_tokens(bench, spare):
    texts = list(training_texts(bench))
    limit = sum(map(len, texts[:3])) + spare
    assert list(training_texts(bench, limit)) == texts[: 2 if spare < 0 else 3]


def test_the_suffix_corpus_is_bounded(bench, whole, monkeypatch):
    texts = list(training_texts(bench))
    monkeypatch.setattr(baselines, "SUFFIX_TOKENS", len(texts[0]))
    bench.eval.baselines = ["suffix"]
    [(_, drafter, _)] = others(bench, whole, MEASURED)
    assert reach(drafter.corpus, texts[0]) is not None
    assert drafter.corpus.length[drafter.corpus.last] == len(texts[0]) + 1


def test_the_datastore_is_made_once_and_again_when_features_are_newer(bench, monkeypatch):
    made, of = [], Datastore.of
    monkeypatch.setattr(Datastore, "of", lambda documents: made.append(1) or of(documents))
    path, source = bench.directory / "datastore.safetensors", store_path(bench, "train") / "manifest.json"
    first = datastore(bench)
    assert path.is_file()
    stamp = path.stat().st_mtime_ns
    assert datastore(bench).order_T.tolist() == first.order_T.tolist()
    assert made == [1]
    assert path.stat().st_mtime_ns == stamp
    os.utime(source, (path.stat().st_mtime + 10,) * 2)
    assert datastore(bench).tokens_T.tolist() == first.tokens_T.tolist()
    assert made == [1, 1]
    later = source.stat().st_mtime + 10
    os.utime(path, (later, later))
    datastore(bench)
    assert made == [1, 1]


def test_a_datastore_outlives_the_features_that_it_was_made_from(bench):
    """Features are large, and may be removed after training."""
    first = datastore(bench)
    shutil.rmtree(store_path(bench, "train"))
    assert datastore(bench).tokens_T.tolist() == first.tokens_T.tolist()


def test_a_broken_datastore_of_a_run_is_named(bench):
    path = bench.directory / "datastore.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"datastore\.safetensors: not a datastore"):
        datastore(bench)


@pytest.mark.parametrize("name", ["suffix", "retrieval"])
def test_without_training_features_there_is_a_message(bench, whole, name):
    """Training on live features leaves no store of texts."""
    bench.eval.baselines = [name]
    shutil.rmtree(store_path(bench, "train"))
    with pytest.raises(UserError, match="features"):
        list(others(bench, whole, MEASURED))


def test_a_draft_model_that_is_not_there_is_named(bench, whole, tmp_path):
    bench.eval.baselines, bench.eval.draft_model = [], str(tmp_path / "nowhere")
    with pytest.raises(UserError, match="nowhere"):
        list(others(bench, whole, MEASURED))


@pytest.mark.parametrize("verify", [1.5, 50.0])
def test_the_chosen_exit_is_the_best_of_the_report(bench, whole, capsys, monkeypatch, verify):
    """Measured on the first held-out documents, at the rows before learned tokens. Dear passes ask for long chains."""
    assert baselines.USUAL_VERIFY == 1.5
    monkeypatch.setattr(baselines, "USUAL_VERIFY", verify)
    bench.eval.baselines = ["early-exit"]
    [(name, drafter, [shape])] = others(bench, whole, MEASURED)
    reader = FeatureReader(store_path(bench, "held-out"))
    documents = []
    for number in range(min(4, len(reader))):
        ids, mask = reader[number].ids_T.tolist(), reader[number].mask_T.tolist()
        documents.append((ids, [n - 1 for n in range(1, len(ids)) if mask[n]]))
        assert rows_of(reader[number]) == documents[-1]
    values = {}
    for layers in range(1, 8):
        agreement, _, _ = naive_exit(whole, layers, documents)
        for depth in (1, 2, 3):
            tau = sum(agreement**k for k in range(depth + 1))
            values[layers, depth] = tau / (depth * layers / 8 + verify)
    assert values[drafter.model.exit, shape.depth] == pytest.approx(max(values.values()))
    assert name == f"early-exit-{drafter.model.exit}"
    assert verify == 1.5 or shape.depth == 3
    shown = capsys.readouterr().out
    assert f"early exit after {drafter.model.exit} of 8 layers in chains of {shape.depth}" in " ".join(shown.split())
    assert all(f"{layers} of 8" in shown for layers in range(1, 8))


def test_a_first_token_that_is_learned_has_no_row_before_it(bench):
    document = FeatureReader(store_path(bench, "train"))[0]
    learned = dataclasses.replace(document, mask_T=torch.ones_like(document.mask_T))
    ids, rows = rows_of(learned)
    assert rows == list(range(len(ids) - 1))


def test_the_run_file_names_its_baselines(model_dir, chats, tmp_path):
    """Each of them may be given; another name is an error."""
    run = tiny_run(model_dir, chats, tmp_path, eval={"baselines": NAMES})
    assert run.eval.baselines == NAMES
    with pytest.raises(UserError, match="baselines"):
        tiny_run(model_dir, chats, tmp_path, eval={"baselines": ["suffix-tree"]})


def test_the_share_of_a_model_is_that_of_the_weights_it_reads(tiny):
    """Layers and lm_head; the target itself reads all of them."""
    layers = [sum(weight.nbytes for weight in layer.parameters()) for layer in tiny.body.layers]
    head = tiny.lm_head.weight.nbytes
    assert ModelDrafter(tiny, 272).share(tiny) == 1
    assert ModelDrafter(EarlyExit(tiny, 3), 272).share(tiny) == (sum(layers[:3]) + head) / (sum(layers) + head)
