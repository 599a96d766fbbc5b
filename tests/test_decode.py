"""Speculative decoding is the target's own text: token identity when greedy, the same distribution when sampled."""

import time
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from conftest import FAMILIES, make_model, make_target, make_tiny_head, make_tokenizer
from scipy.stats import chisquare

from headwright.configs import UserError
from headwright.data.batch import pack
from headwright.data.generate import Question, answer
from headwright.data.sampling import Policy
from headwright.data.target import Target
from headwright.eval.decode import PHASES, decode_plain, speculate
from headwright.eval.drafters import PromptLookup, chain_of
from headwright.eval.rollout_tau import replay
from headwright.heads.base import Context
from headwright.heads.draft_tree import Tree, TreeShape

CHAIN, TREE = TreeShape("chain", 4, 1, 4), TreeShape("dynamic", 3, 3, 8)
SHAPES = (CHAIN, TREE)
PROMPTS = ([65], [5, 6, 7, 8], list(range(30, 53)), [120, 120, 120, 9] * 10)


@pytest.fixture(scope="module")
def targets():
    """One tiny target per family."""
    return {family: make_target(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def drafty(tiny):
    """A head that agrees with its target now and then: fitted for a moment to the target's own greedy text."""
    head = make_tiny_head(tiny, None, steps=4)
    batch = pack(answer(tiny, [Question(prompt, Policy()) for prompt in PROMPTS], 24))
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        head.loss(batch, tiny).total.backward()
        optimizer.step()
    return head.eval()


@dataclass
class Row:
    """How far the text has come."""

    known: int = 1


@dataclass
class Oracle:
    """Knows the text that the target will write; with `wrong` it guesses anything but that."""

    text: list[int]
    wrong: bool = False
    vocab: int = 272

    def start(self, batch: int, slots: int) -> Row:
        return Row()

    def propose(self, state: Row, context: Context, shape: TreeShape) -> Tree:
        state.known += context.tokens_BM.shape[1]
        assert self.text[state.known - 1] == int(context.root_B), "the root is the target's own token"
        guesses = self.text[state.known : state.known + shape.depth]
        if self.wrong:
            guesses = [(token + 1) % self.vocab for token in guesses]
        return chain_of(context, guesses) if shape.kind == "chain" else bushy(int(context.root_B), guesses, self.vocab)


def bushy(root: int, guesses: list[int], vocab: int) -> Tree:
    """A decoy before and a decoy after every guess, so that the path is not simply 0, 1, 2, …"""
    tokens, parents, depth, above = [root], [-1], [0], 0
    for level, token in enumerate(guesses, 1):
        tokens += [(token + 7) % vocab, token, (token + 9) % vocab]
        parents += [above] * 3
        depth += [level] * 3
        above = len(tokens) - 2
    columns = (torch.tensor([part]) for part in (tokens, parents, depth))
    return Tree(*columns, torch.zeros(1, len(tokens)))


def check_counters(out) -> None:
    """Counters of a run fit each other."""
    assert sum(out.emitted) + 1 == len(out.tokens)
    assert len(out.emitted) == len(out.accepted) == len(out.drafted)
    for accepted, emitted, drafted in zip(out.accepted, out.emitted, out.drafted):
        assert 0 <= accepted <= drafted
        assert emitted in (accepted, accepted + 1)
        assert emitted >= 1
    assert all(emitted == accepted + 1 for accepted, emitted in list(zip(out.accepted, out.emitted))[:-1])


@pytest.mark.parametrize("size", [None, 60])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_plain_decoding(targets, family, shape, size):
    """Random heads, every family, full and reduced vocabulary, prompts of different lengths."""
    target = targets[family]
    head = make_tiny_head(target, size)
    for prompt in PROMPTS:
        plain = decode_plain(target, prompt, 24)
        ours = speculate(target, head, prompt, shape, 24)
        assert ours.tokens == plain.tokens
        check_counters(ours)
        assert all(drafted == shape.nodes for drafted in ours.drafted)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_that_of_transformers(targets, family):
    target = targets[family]
    for prompt in PROMPTS:
        assert decode_plain(target, prompt, 20).tokens == target.generate_hf(torch.tensor([prompt]), 20)


@pytest.mark.parametrize("shape", [*SHAPES, TreeShape("dynamic", 4, 4, 20), TreeShape("chain", 1, 1, 1)], ids=str)
def test_greedy_text_with_a_head_that_is_often_right(tiny, drafty, shape):
    """Partial acceptance of every length, and still the target's own text."""
    accepted = Counter()
    for prompt in PROMPTS:
        ours = speculate(tiny, drafty, prompt, shape, 40)
        assert ours.tokens == decode_plain(tiny, prompt, 40).tokens
        check_counters(ours)
        accepted.update(ours.accepted)
    assert sum(k > 0 for k in accepted.elements()) > 5
    assert len(accepted) >= min(3, shape.depth + 1)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_an_oracle_is_accepted_whole(tiny, shape):
    """Every cycle emits depth + 1 tokens, through chains and through trees with decoys."""
    for prompt in PROMPTS:
        cycles = 5
        limit = 1 + cycles * (shape.depth + 1)
        text = prompt + decode_plain(tiny, prompt, limit + shape.depth).tokens
        out = speculate(tiny, Oracle(text), prompt, shape, limit)
        assert out.tokens == text[len(prompt) : len(prompt) + limit]
        assert out.accepted == [shape.depth] * cycles
        assert out.emitted == [shape.depth + 1] * cycles
        assert out.acceptance_length == shape.depth + 1


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_a_drafter_that_is_never_right_loses_nothing(tiny, shape):
    for prompt in PROMPTS:
        plain = decode_plain(tiny, prompt, 20)
        text = prompt + decode_plain(tiny, prompt, 20 + shape.depth).tokens
        out = speculate(tiny, Oracle(text, wrong=True), prompt, shape, 20)
        assert out.tokens == plain.tokens
        if shape.kind == "chain":
            assert out.accepted == [0] * 19
            assert out.acceptance_length == 1.0


def test_prompt_lookup_is_lossless_and_useful(tiny):
    accepted = 0
    for prompt in PROMPTS:
        out = speculate(tiny, PromptLookup(), prompt, CHAIN, 40)
        assert out.tokens == decode_plain(tiny, prompt, 40).tokens
        check_counters(out)
        accepted += sum(out.accepted)
    assert accepted > 0


def test_prompt_lookup_finds_the_latest_longest_match():
    lookup = PromptLookup(longest=2).lookup
    assert lookup([1, 2, 3, 1, 2, 4, 1, 2], 2) == [4, 1]
    assert lookup([5, 1, 9, 2, 1], 3) == [9, 2, 1]
    assert lookup([1, 2, 3], 4) == []
    assert lookup([7], 4) == []


def test_end_token_inside_an_accepted_path_cuts_before_counting(tiny):
    """Nothing after the end token is emitted or counted."""
    prompt = PROMPTS[1]
    text = prompt + decode_plain(tiny, prompt, 40).tokens
    new = text[len(prompt) :]
    place = next(i for i in range(7, 30) if new[i] not in new[:i])  # first occurrence, within a cycle of the oracle
    target = make_target(eos_token_id=new[place])
    out = speculate(target, Oracle(text), prompt, CHAIN, 40)
    assert out.tokens == decode_plain(target, prompt, 40).tokens == new[: place + 1]
    check_counters(out)
    full, rest = divmod(place, CHAIN.depth + 1)
    assert out.emitted == [CHAIN.depth + 1] * full + ([rest] if rest else [])
    assert out.accepted == [CHAIN.depth] * full + ([rest] if rest else [])


def test_end_token_as_the_first_token_ends_before_any_cycle(tiny):
    first = decode_plain(tiny, PROMPTS[1], 1).tokens
    out = speculate(make_target(eos_token_id=first[0]), PromptLookup(), PROMPTS[1], CHAIN, 10)
    assert out.tokens == first
    assert out.emitted == []


@pytest.mark.parametrize("limit", range(1, 11))
def test_limit_is_met_exactly(tiny, drafty, limit):
    prompt = PROMPTS[3]
    plain = decode_plain(tiny, prompt, limit).tokens
    assert len(plain) == limit
    text = prompt + decode_plain(tiny, prompt, 30).tokens
    for drafter, shape in ((Oracle(text), CHAIN), (Oracle(text), TREE), (drafty, CHAIN), (drafty, TREE)):
        out = speculate(tiny, drafter, prompt, shape, limit)
        assert out.tokens == plain
        check_counters(out)


def test_prompt_and_limit_must_fit_the_context(tiny):
    size = tiny.spec.max_positions
    prompt = [7] * (size - 6)
    with pytest.raises(UserError, match=rf"{size - 6} tokens and 7 new ones.*{size}"):
        speculate(tiny, PromptLookup(), prompt, CHAIN, 7)
    with pytest.raises(UserError, match="context"):
        decode_plain(tiny, prompt, 7)
    assert len(speculate(tiny, make_tiny_head(tiny), prompt, TREE, 6).tokens) <= 6


def test_empty_prompt_is_refused(tiny):
    for call in (lambda: speculate(tiny, PromptLookup(), [], CHAIN, 4), lambda: decode_plain(tiny, [], 4)):
        with pytest.raises(UserError, match="at least one token"):
            call()


@dataclass
class Watched:
    """A head whose drafting state can be looked at afterwards."""

    head: object
    state: object = None

    def start(self, batch, slots):
        self.state = self.head.start(batch, slots)
        return self.state

    def propose(self, state, context, shape):
        return self.head.propose(state, context, shape)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("limit", [2, 9, 30])
def test_draft_cache_after_partial_acceptance_equals_fresh_prefill(tiny, drafty, shape, limit):
    """Keys and values of every committed slot, after cycles that accepted some tokens and rejected others."""
    for prompt in PROMPTS[1:]:
        watched = Watched(drafty)
        out = speculate(tiny, watched, prompt, shape, limit)
        count = watched.state.lengths[0]
        assert count == len(prompt) + sum(out.emitted[:-1])
        text = torch.tensor([prompt + out.tokens])
        features = tiny.features(text[:, :count])
        context = Context(tiny, text[:, 1 : count + 1], features.taps_BNKD, features.last_BND, Policy(), None)
        fresh = drafty.start(1, count + shape.depth * shape.top_k)
        drafty.propose(fresh, context, shape)
        assert fresh.lengths == [count]
        for ours, theirs in ((watched.state.keys, fresh.keys), (watched.state.values, fresh.values)):
            assert torch.allclose(ours[0][:, :, :count], theirs[0][:, :, :count], rtol=1e-3, atol=1e-4)


def test_phases_add_up_to_the_wall_time(tiny, drafty):
    begun = time.perf_counter()
    out = speculate(tiny, drafty, PROMPTS[1], TREE, 20)
    outside = time.perf_counter() - begun
    assert set(out.phases) == set(PHASES)
    assert all(seconds >= 0 for seconds in out.phases.values())
    assert sum(out.phases.values()) == pytest.approx(out.seconds, rel=0.02)
    assert out.seconds <= outside
    assert all(out.phases[name] > 0 for name in ("prefill", "draft", "verify", "select", "commit"))


# Sampling

WORDS = 12


@pytest.fixture(scope="module")
def toy():
    """A one-layer target over twelve tokens; its end tokens lie outside, so that no text ends early."""
    model = make_model(
        vocab=WORDS, num_hidden_layers=1, eos_token_id=None, pad_token_id=None, initializer_range=0.35, seed=3
    )
    target = Target(model, make_tokenizer(), "toy", (0, 1))
    assert all(token >= WORDS for token in target.spec.eos_token_ids)
    return target


def toy_head(target, size):
    """A head that has seen some of the target's sampled text, so that drafts of every length are accepted."""
    head = make_tiny_head(target, size, steps=2, out_of_vocab="renormalise")
    questions = [Question([a, b, 3], Policy(1.1, top_k=3), seed=a * WORDS + b) for a in range(4) for b in range(4)]
    batch = pack(answer(target, questions, 12))
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        head.loss(batch, target).total.backward()
        optimizer.step()
    return head.eval()


def exact_distribution(target, prompt: list[int], policy: Policy, length: int) -> dict[tuple[int, ...], float]:
    """The target's distribution over texts, by enumeration."""
    out: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown = {}
        for text, mass in out.items():
            probs = policy.probs(target.logits(target.features(torch.tensor([prompt + list(text)])).last_BND[0, -1]))
            for token in torch.nonzero(probs)[:, 0].tolist():
                grown[(*text, token)] = mass * float(probs[token])
        out = grown
    return out


def p_value(counts: Counter, expected: dict[tuple[int, ...], float], samples: int) -> float:
    """χ², with rare texts pooled; a text that the target cannot write gives 0."""
    if not counts.keys() <= expected.keys():
        return 0.0
    common = [text for text, mass in expected.items() if mass * samples >= 8]
    seen = [counts[text] for text in common]
    wanted = [expected[text] * samples for text in common]
    if samples - sum(wanted) > 1e-6 * samples:
        seen.append(samples - sum(seen))
        wanted.append(samples - sum(wanted))
    return chisquare(seen, [w * sum(seen) / sum(wanted) for w in wanted]).pvalue


SAMPLES = 4000
PROMPT = [1, 5, 3]


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        (TreeShape("chain", 2, 1, 2), None),
        (TreeShape("chain", 2, 1, 2), 9),
        (TreeShape("dynamic", 2, 3, 9), 9),
    ],
    ids=lambda value: value.name if isinstance(value, TreeShape) else "full" if value is None else f"{value}-words",
)
def test_sampled_text_has_the_targets_distribution(toy, shape, size):
    """χ² over the first three new tokens: the prefill's, and two of the first cycle (accepted, residual or bonus)."""
    policy = Policy(1.1, top_k=3)
    head = toy_head(toy, size)
    expected = exact_distribution(toy, PROMPT, policy, 3)
    assert len(expected) == 27
    counts, accepted = Counter(), Counter()
    for seed in range(SAMPLES):
        out = speculate(toy, head, PROMPT, shape, 3, policy, seed=seed)
        counts[tuple(out.tokens)] += 1
        accepted[out.accepted[0]] += 1
    assert set(accepted) == {0, 1, 2}, "rejected, partly and wholly accepted drafts all took part"
    assert p_value(counts, expected, SAMPLES) > 1e-3


def test_chi_square_sees_another_policy(toy):
    """Negative control: plain decoding at another temperature is told apart."""
    policy, other = Policy(1.1, top_k=3), Policy(0.7, top_k=3)
    expected = exact_distribution(toy, PROMPT, policy, 3)
    right, wrong = (
        Counter(tuple(decode_plain(toy, PROMPT, 3, p, seed=seed).tokens) for seed in range(SAMPLES // 4))
        for p in (policy, other)
    )
    assert p_value(right, expected, SAMPLES // 4) > 1e-3
    assert p_value(wrong, expected, SAMPLES // 4) < 1e-6


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_seed_decides_sampled_text(tiny, shape):
    policy = Policy(0.8, top_p=0.9)
    head = make_tiny_head(tiny, None)
    runs = [speculate(tiny, head, PROMPTS[1], shape, 16, policy, seed=seed) for seed in (1, 1, 2)]
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].accepted == runs[1].accepted
    assert runs[0].tokens != runs[2].tokens


# τ without decoding


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_replay_equals_the_decoders_counters(tiny, drafty, depth):
    """Cycle by cycle: accepted and emitted of a greedy chain follow from one rollout over the target's own text."""
    shape = TreeShape("chain", depth, 1, depth)
    prompts = [*PROMPTS, [9, 9], [200, 3, 77]]
    documents = answer(tiny, [Question(prompt, Policy()) for prompt in prompts], 30)
    right = drafty.agreement(pack(documents), tiny, depth)
    pieces = right.split([len(document.ids_T) for document in documents])
    accepted = 0
    for prompt, document, piece in zip(prompts, documents, pieces):
        out = speculate(tiny, drafty, prompt, shape, 30)
        assert document.ids_T.tolist() == prompt + out.tokens
        cycles = replay(document.mask_T, piece)
        assert cycles.accepted == out.accepted
        assert cycles.emitted == out.emitted
        accepted += sum(out.accepted)
    assert accepted > 10


def test_replay_of_a_text_that_ends_itself(tiny, drafty):
    """The end token cuts both in the same way."""
    new = decode_plain(tiny, PROMPTS[3], 30).tokens
    place = next(i for i in range(6, 30) if new[i] not in new[:i])
    target = make_target(eos_token_id=new[place])
    [document] = answer(target, [Question(PROMPTS[3], Policy())], 30)
    assert int(document.mask_T.sum()) == place + 1
    cycles = replay(document.mask_T, drafty.agreement(pack([document]), target, 4))
    out = speculate(target, drafty, PROMPTS[3], CHAIN, 30)
    assert (cycles.accepted, cycles.emitted) == (out.accepted, out.emitted)
