"""Which shape pays: τ of recorded text equals the decoder's counters, costs are what was measured, and the stage says so."""

import copy
import inspect
import itertools
import json
import math
import textwrap
import typing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import TAPS, fit, make_target, make_tiny_head, tiny_run
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headwright.configs import UserError, dump
from headwright.configs.schema import RunConfig, ShapeConfig, TuneConfig
from headwright.data.batch import DocumentFeatures, pack
from headwright.data.generate import Question, answer
from headwright.data.harvest import harvest, store_path
from headwright.data.sampling import Policy
from headwright.data.store import FeatureReader
from headwright.data.target import Target
from headwright.eval import shape as shape_module
from headwright.eval import tune as tune_module
from headwright.eval.clock import PHASES
from headwright.eval.decode import Generation, Settings, generate
from headwright.eval.rollout_tau import Cycles, rollout_tau, rollout_taus
from headwright.eval.shape import (
    Bench,
    Costs,
    Prediction,
    Recorded,
    accepted_by,
    between,
    first_answer,
    measure_costs,
    measure_ranks,
    medians_ms,
    predict,
    rank_accuracies,
    sparse_shape,
    static_cycles,
    widest,
    widths_of,
)
from headwright.eval.tune import Trial, spread, tune, verdict
from headwright.heads.base import Context
from headwright.heads.chunked import ranks_of
from headwright.heads.draft_tree import TreeShape, best_paths, most_nodes
from headwright.heads.recurrent import Drafting
from headwright.heads.saved import load_head
from headwright.train.cli import main as command
from headwright.train.run import train

NEW, DEPTH = 24, 5


def make_small(**changes) -> Target:
    """A quick target of two layers."""
    return make_target(taps=(0, 1, 2), num_hidden_layers=2, **changes)


def with_spec(target: Target, **changes) -> Target:
    """The same weights with other end tokens or another context."""
    twin = copy.copy(target)
    twin.spec, twin.spare = replace(target.spec, **changes), {}
    return twin


def real_prompts(target: Target, count: int) -> list[list[int]]:
    """Pieces of the standard library's source, from 1 to 61 tokens long."""
    ids = target.tokenizer.encode(inspect.getsource(textwrap), add_special_tokens=False)
    return [ids[i * 53 : i * 53 + 1 + (i * 37) % 61] for i in range(count)]


def greedy(target: Target, prompts: list[list[int]], count: int = NEW) -> list[DocumentFeatures]:
    """What the target says to prompts, with its states."""
    return answer(target, [Question(prompt, Policy()) for prompt in prompts], count)


@pytest.fixture(scope="module")
def small() -> Target:
    """A target that ends some of its answers by itself: one of the tokens that it often says is an end token."""
    target = make_small()
    texts = [document.ids_T[document.mask_T].tolist() for document in greedy(target, real_prompts(target, 12))]
    counts = {token: sum(token in text[3:] for text in texts) for token in set(itertools.chain(*texts))}
    common = max(counts, key=lambda token: (counts[token] if counts[token] < 7 else 0, token))
    return with_spec(target, eos_token_ids=(common,))


@pytest.fixture(scope="module")
def prompts(small) -> list[list[int]]:
    return real_prompts(small, 12)


@pytest.fixture(scope="module")
def documents(small, prompts) -> list[DocumentFeatures]:
    """Greedy answers of many lengths, some ended by the end token."""
    found = greedy(small, prompts)
    lengths = [int(document.mask_T.sum()) for document in found]
    ended = [int(document.ids_T[-1]) in small.spec.eos_token_ids for document in found]
    assert len(set(lengths)) > 3
    assert 2 < sum(ended) < len(ended)
    assert {length == NEW for length in lengths} == {True, False}
    return found


@pytest.fixture(scope="module")
def drafty(small, documents):
    """A head that is often right, of the full vocabulary."""
    return fit(make_tiny_head(small, None, steps=3), small, documents)


@pytest.fixture(scope="module")
def narrow(small, documents):
    """One that cannot say all tokens."""
    said = torch.cat([document.ids_T[document.mask_T] for document in documents])
    head = make_tiny_head(small, 150, steps=3, out_of_vocab="renormalise")
    assert 0.2 < float((head.choices_V[said] >= 0).float().mean()) < 0.9
    return fit(head, small, documents)


@pytest.fixture(scope="module", params=["full", "reduced"])
def head(request, drafty, narrow):
    return drafty if request.param == "full" else narrow


def really(small, head, prompts, shape) -> list[Generation]:
    """The decoder's runs."""
    return generate(small, head, prompts, Settings(shape, NEW, batch=5)).generations


def assert_decoders(small, head, prompts, shape, cycles: Cycles) -> None:
    """Cycle by cycle the decoder's counters."""
    outs = really(small, head, prompts, shape)
    assert cycles.accepted == [count for out in outs for count in out.accepted], shape.name
    assert cycles.emitted == [count for out in outs for count in out.emitted], shape.name


# τ of recorded text


@pytest.fixture(scope="module")
def recorded(small, documents, head):
    """One record for each width."""
    return {width: Recorded(head, small, documents, DEPTH, width) for width in (1, 2, 3, 6)}


def counts_of(depth: int, width: int) -> list[int]:
    """Fewest, most and other numbers of nodes."""
    most = most_nodes(depth, width)
    return sorted({depth, min(depth + 2, most), min(2 * depth + 3, most), most})


GRID = [
    *(TreeShape.chain(depth) for depth in range(1, DEPTH + 1)),
    *(
        TreeShape.dynamic(depth, width, nodes)
        for width, depths in ((2, (1, 3, 5)), (3, (2, 4)), (6, (1, 5)))
        for depth in depths
        for nodes in counts_of(depth, width)
    ),
]


@pytest.mark.parametrize("shape", GRID, ids=lambda shape: shape.name)
def test_recorded_cycles_equal_the_decoders(small, prompts, head, recorded, shape):
    """One pass of the widest tree knows all smaller ones, whatever ends a text."""
    assert_decoders(small, head, prompts, shape, recorded[shape.top_k].cycles(shape))


def test_every_length_of_acceptance_took_part(small, prompts, drafty, narrow, documents):
    """Or equality would mean little."""
    for head in (drafty, narrow):
        seen = set(Recorded(head, small, documents, DEPTH, 3).cycles(TreeShape.dynamic(DEPTH, 3, 20)).accepted)
        assert seen == set(range(DEPTH + 1))


@settings(max_examples=12, deadline=None)
@given(depth=st.integers(1, 4), width=st.integers(1, 9), share=st.floats(0, 1), start=st.integers(0, 8))
def test_recorded_cycles_of_any_shape(small, prompts, drafty, documents, depth, width, share, start):
    """Some of the documents, in records no deeper than the shape."""
    most = most_nodes(depth, width)
    nodes = round(depth + share * (most - depth))
    shape = TreeShape.chain(depth) if width == 1 else TreeShape.dynamic(depth, width, nodes)
    part = slice(start, start + 4)
    cycles = Recorded(drafty, small, documents[part], depth, width).cycles(shape)
    assert_decoders(small, drafty, prompts[part], shape, cycles)


def test_wider_than_the_vocabulary(small, prompts, documents):
    """A tree that asks for more children than there are draft tokens."""
    head = make_tiny_head(small, 4)
    shape = TreeShape.dynamic(2, 6, 20)
    cycles = Recorded(head, small, documents, 2, 6).cycles(shape)
    assert_decoders(small, head, prompts, shape, cycles)


@pytest.fixture(scope="module")
def ranks(small, documents, head):
    return measure_ranks(head, small, documents, DEPTH)


@st.composite
def trees(draw) -> list[tuple[int, ...]]:
    """Rank paths with their parents: any tree that a user may write, in any order."""
    found = {(): 0}
    for _ in range(draw(st.integers(1, 14))):
        above = draw(st.sampled_from([path for path in found if len(path) < DEPTH]))
        found[(*above, draw(st.integers(0, 4)))] = 0
    return draw(st.permutations([path for path in found if path]))


@settings(max_examples=10, deadline=None)
@given(paths=trees())
def test_static_cycles_of_any_tree_equal_the_decoders(small, prompts, documents, head, ranks, paths):
    shape = TreeShape.static(paths)
    assert_decoders(small, head, prompts, shape, static_cycles(documents, ranks, shape))


def test_static_cycles_of_known_trees_equal_the_decoders(small, prompts, documents, head, ranks):
    """EAGLE-1's tree, the trees made for this text, and a chain as a static tree."""
    chain = TreeShape.static([(0,) * depth for depth in range(1, 4)])
    sparse = [sparse_shape(ranks, count) for count in (1, 3, 9, 20)]
    assert [shape.nodes for shape in sparse] == [1, 3, 9, 20]
    for shape in (TreeShape.parse("eagle-1"), chain, *sparse):
        assert_decoders(small, head, prompts, shape, static_cycles(documents, ranks, shape))
    taus = [static_cycles(documents, ranks, shape).acceptance_length for shape in sparse]
    assert taus == sorted(taus)
    assert taus[-1] > taus[0]


def test_a_chain_is_the_same_in_every_way(small, documents, head, ranks, recorded):
    """By drafts at every place, by ranks, by ranks as a static tree."""
    for depth in range(1, DEPTH + 1):
        shape = TreeShape.chain(depth)
        by_ranks = static_cycles(documents, ranks, shape)
        assert by_ranks == recorded[1].cycles(shape)


def test_a_later_answer_of_a_document_is_not_looked_at(small, documents, drafty):
    """Its prompt holds what the target did not write in one go."""
    other = documents[3]
    ids = torch.cat([documents[1].ids_T, other.ids_T])
    mask = torch.cat([documents[1].mask_T, other.mask_T])
    taps = small.features(ids[None]).taps_BNKD[0]
    both = DocumentFeatures(ids, mask, taps, other.last_RD[:0], other.argmax_R[:0], other.logz_R[:0])
    shape = TreeShape.dynamic(3, 3, 8)
    alone, twice = (Recorded(drafty, small, [found], 3, 3).cycles(shape) for found in (documents[1], both))
    assert alone.emitted
    assert alone == twice


# Ranks


def naive_ranks(head, target, document: DocumentFeatures, steps: int) -> torch.Tensor:
    """Row by row: take in what the target has confirmed, then draft the text itself and sort all logits."""
    ids, mask = document.ids_T.tolist(), document.mask_T.tolist()
    out = torch.full((len(ids), steps), -1)
    for row in range(len(ids)):
        state = head.start(1, len(ids) + steps + 2)
        following = (document.ids_T[None, 1 : row + 2], document.taps_TKD[None, : row + 1])
        if row + 2 >= len(ids) or not mask[row + 1]:
            continue
        context = Context(target, *following, torch.zeros(1, row + 1, 1), Policy(), lambda: torch.zeros(1))
        drafting = Drafting(head, state, target, head.absorb(state, context), steps)
        logits_W = head.logits(drafting.hidden_BkH[:, 0], target)[0]
        for step in range(steps):
            place = row + 2 + step
            if place >= len(ids) or not mask[place]:
                break
            order = head.ids_W[logits_W.argsort(descending=True)].tolist()
            out[row, step] = order.index(ids[place]) if ids[place] in order else -1
            logits_W = drafting.step(torch.tensor([[ids[place]]]), torch.zeros(1, 1, dtype=torch.long))[0, 0]
    return out


@torch.no_grad()
def test_ranks_equal_full_logits_step_by_step(small, documents, head):
    """-1 where a row has no guess: outside the answer, behind its end, and where the head cannot say the token."""
    some = documents[:3]
    found = head.ranks(pack(some), small, 3).split([len(document.ids_T) for document in some])
    for document, ranks_TI in zip(some, found):
        assert torch.equal(ranks_TI, naive_ranks(head, small, document, 3))
    everything = torch.cat(found)
    assert (everything > 0).any()
    assert (everything == 0).any()


def test_unsayable_tokens_have_no_rank(small, documents, narrow):
    """And a token that can be said has one."""
    document = documents[0]
    ranks_TI = narrow.ranks(pack([document]), small, 2)
    start, end = first_answer(document)
    sayable = narrow.choices_V[document.ids_T] >= 0
    assert not sayable[start + 1 : end].all()
    for row, step in itertools.product(range(len(document.ids_T)), range(2)):
        place = row + 2 + step
        guessed = row + 1 >= start and place < end and bool(sayable[place])
        assert (int(ranks_TI[row, step]) >= 0) == guessed
    assert int(ranks_TI.max()) < len(narrow.vocab)


def test_first_rank_exactly_where_guesses_agree(small, documents, head):
    batch = pack(documents)
    ranks_TI, right_TI = head.ranks(batch, small, 4), head.agreement(batch, small, 4)
    assert torch.equal(ranks_TI == 0, right_TI)
    assert 30 < int(right_TI.sum()) < right_TI.numel()


def test_ranks_of_a_batch_are_those_of_each_document(small, documents, head):
    """Packed or alone, and in chunks of any size."""
    packed = head.ranks(pack(documents), small, 3)
    alone = torch.cat(measure_ranks(head, small, documents, 3))
    assert torch.equal(packed, alone)
    before = head.engine.loss_mib
    try:
        head.engine.loss_mib = 0.01
        assert torch.equal(head.ranks(pack(documents), small, 3), packed)
    finally:
        head.engine.loss_mib = before


@settings(max_examples=40, deadline=None)
@given(data=st.data(), rows=st.integers(0, 9), vocabulary=st.integers(1, 7), mib=st.sampled_from([None, 1e-6, 3e-4]))
def test_ranks_of_counts_what_stands_before(data, rows, vocabulary, mib):
    """Small whole numbers, so that many logits are equal: then the lower id comes first."""
    values = st.integers(-2, 2)
    feature = torch.tensor(data.draw(st.lists(st.lists(values, min_size=2, max_size=2), min_size=rows, max_size=rows)))
    weight = data.draw(st.lists(st.lists(values, min_size=2, max_size=2), min_size=vocabulary, max_size=vocabulary))
    label = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=rows, max_size=rows))
    feature = feature.view(rows, 2).float()
    found = ranks_of(feature, torch.tensor(weight).float(), torch.tensor(label, dtype=torch.long), mib)
    wanted = []
    for row, own in zip(feature.tolist(), label):
        logits = [sum(a * b for a, b in zip(row, line)) for line in weight]
        wanted.append(sorted(range(vocabulary), key=lambda token: (-logits[token], token)).index(own))
    assert found.tolist() == wanted


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.lists(st.lists(st.tuples(*[st.integers(-1, 6)] * 3), min_size=1, max_size=6), min_size=1, max_size=4),
    width=st.integers(1, 5),
)
def test_rank_accuracies_are_counts(ranks, width):
    """Of all rows of a depth that have a rank, the share that has this one."""
    found = rank_accuracies([torch.tensor(rows) for rows in ranks], width)
    for step, shares in enumerate(found):
        column = [row[step] for rows in ranks for row in rows if row[step] >= 0]
        wanted = [column.count(rank) / len(column) if column else 0.0 for rank in range(width)]
        assert shares == pytest.approx(wanted)
    assert len(found) == 3


def small_trees(depth: int, width: int, nodes: int) -> list[frozenset[tuple[int, ...]]]:
    """All trees of so many nodes."""
    known = {frozenset()}
    for _ in range(nodes):
        known = {
            tree | {(*above, rank)}
            for tree in known
            for above in [(), *tree]
            for rank in range(width)
            if len(above) < depth and (*above, rank) not in tree
        }
    return list(known)


def expected(tree, accuracy) -> float:
    """Accepted drafts of a first cycle, if each depth is right by its own shares."""
    return sum(math.prod(accuracy[depth][rank] for depth, rank in enumerate(path)) for path in tree)


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(1, 5),
    shares=st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3), min_size=3, max_size=3),
)
def test_best_paths_are_the_best_of_all_trees(nodes, shares):
    accuracy = [[share / max(sum(level), 1) for share in level] for level in shares]
    tree = best_paths(accuracy, nodes)
    best = max(expected(other, accuracy) for other in small_trees(3, 3, nodes))
    assert len(tree) == nodes
    assert expected(tree, accuracy) == pytest.approx(best)


def test_sparse_shape_is_the_best_tree_of_the_measured_shares(ranks):
    """No tree of as many nodes is expected to accept more; of this text, in the first levels."""
    shallow = [ranks_TD[:, :2] for ranks_TD in ranks]
    accuracy = rank_accuracies(shallow, 4)
    for nodes in (1, 2, 4):
        shape = sparse_shape(shallow, nodes, width=4)
        best = max(expected(other, accuracy) for other in small_trees(2, 4, nodes))
        assert expected(shape.paths, accuracy) == pytest.approx(best)
        assert shape.name == f"sparse-{shape.depth}-{nodes}"


@given(ranks=st.lists(st.integers(-1, 3), min_size=1, max_size=5), paths=trees())
def test_a_static_tree_follows_ranks_as_far_as_it_reaches(ranks, paths):
    count = accepted_by(set(paths), ranks)
    assert all(tuple(ranks[:level]) in paths for level in range(1, count + 1))
    assert count == len(ranks) or tuple(ranks[: count + 1]) not in paths


# Costs


FINITE = st.floats(-100, 100)


@given(
    places=st.lists(st.integers(1, 200), min_size=2, max_size=8, unique=True),
    place=st.integers(1, 400),
    slope=FINITE,
    offset=FINITE,
)
def test_lines_are_continued_exactly(places, place, slope, offset):
    """Between two measurements and beyond both ends."""
    measured = {known: offset + slope * known for known in places}
    assert between(measured, place) == pytest.approx(offset + slope * place, rel=1e-6, abs=1e-6)


@given(places=st.lists(st.integers(1, 50), min_size=3, max_size=8, unique=True), data=st.data())
def test_between_two_measurements_lies_nothing_else(places, data):
    """Whatever stands elsewhere; and a measured place is its own."""
    measured = {known: data.draw(st.floats(0, 10)) for known in places}
    assert all(between(measured, known) == value for known, value in measured.items())
    known = sorted(measured)
    place = data.draw(st.integers(known[0], known[-1]))
    assume(place not in measured)
    low = max(number for number in known if number < place)
    high = min(number for number in known if number > place)
    share = (place - low) / (high - low)
    assert between(measured, place) == pytest.approx((1 - share) * measured[low] + share * measured[high])


def test_a_single_measurement_holds_everywhere():
    assert between({4: 2.5}, 1) == between({4: 2.5}, 4) == between({4: 2.5}, 99) == 2.5


@pytest.mark.parametrize(
    ("shape", "widths"),
    [
        (TreeShape.chain(1), []),
        (TreeShape.chain(4), [1, 1, 1]),
        (TreeShape.dynamic(1, 4, 4), []),
        (TreeShape.dynamic(3, 4, 9), [4, 4]),
        (TreeShape.parse("eagle-1"), [4, 4, 1, 1]),
        (TreeShape.static([[0], [1], [0, 0]]), [1]),
    ],
    ids=lambda value: value.name if isinstance(value, TreeShape) else "",
)
def test_widths_are_the_nodes_that_a_head_runs(shape, widths):
    assert widths_of(shape) == widths
    assert sum(widths) == shape.rows


def test_a_head_is_run_on_these_widths(small, drafty, documents, monkeypatch):
    """Counted where the head draws its levels."""
    seen = []
    step = Drafting.step

    def counted(self, tokens_Bk, parents_Bk):
        seen.append(tokens_Bk.shape[1])
        return step(self, tokens_Bk, parents_Bk)

    monkeypatch.setattr(Drafting, "step", counted)
    for shape in (TreeShape.chain(4), TreeShape.dynamic(3, 4, 9), TreeShape.parse("eagle-1")):
        seen.clear()
        Bench(drafty, small, documents[5]).draft(shape)()
        assert seen == widths_of(shape)


COSTS = Costs({1: 10.0, 2: 11.0, 6: 15.0, 11: 25.0}, {1: 1.0, 4: 2.5}, {1: 0.5, 4: 2.0}, 0.25, 10.0)


@pytest.mark.parametrize(
    ("shape", "draft", "verify"),
    [
        (TreeShape.chain(1), 1.0, 11.0),
        (TreeShape.chain(3), 1.0 + 2 * 0.5, 13.0),
        (TreeShape.dynamic(3, 4, 5), 2.5 + 2 * 2.0, 15.0),
        (TreeShape.dynamic(2, 2, 5), 1.5 + 1.0, 15.0),
        (TreeShape.static([[0], [1], [2], [0, 0], [1, 0]]), 1.5 + 1.0, 15.0),
        (TreeShape.dynamic(3, 4, 10), 2.5 + 2 * 2.0, 25.0),
    ],
    ids=lambda value: value.name if isinstance(value, TreeShape) else "",
)
def test_a_cycle_costs_its_parts(shape, draft, verify):
    """By hand; the last node count counts the root."""
    assert COSTS.draft(shape) == pytest.approx(draft)
    assert COSTS.cycle(shape) == pytest.approx(draft + verify + 0.25)


@given(
    emitted=st.lists(st.integers(1, 4), min_size=1, max_size=9),
    plain=st.floats(0.1, 50),
    draft=st.floats(0, 50),
    verify=st.floats(0.1, 50),
    overhead=st.floats(0, 5),
)
def test_speedup_is_tau_over_relative_cost(emitted, plain, draft, verify, overhead):
    """S = τ · plain / (draft + verify + overhead)."""
    cycles = Cycles([count - 1 for count in emitted], emitted)
    costs = Costs({1: plain, 4: verify}, {1: draft}, {1: 0.0}, overhead, plain)
    found = predict(TreeShape.chain(3), cycles, costs)
    tau = sum(emitted) / len(emitted)
    assert found.tau == pytest.approx(tau)
    assert found.cycle_ms == pytest.approx(draft + verify + overhead)
    assert found.speedup == pytest.approx(tau * plain / (draft + verify + overhead))
    assert found.accepted == [sum(count > level for count in emitted) / len(emitted) for level in (1, 2, 3)]


def test_jobs_take_turns_in_bursts_whose_first_calls_warm_up(monkeypatch):
    """On a clock that only jobs move."""
    now, calls = [0.0], []
    cold = [9.0] * shape_module.WARM
    spent = {"a": 2 * (cold + [1.0, 2.0, 6.0] * 2), "b": 2 * (cold + [0.5, 0.1, 0.2] * 2)}
    monkeypatch.setattr(shape_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def job(name):
        def work():
            now[0] += spent[name][calls.count(name)]
            calls.append(name)

        return work

    found = medians_ms({name: job(name) for name in spent}, 2)
    burst = shape_module.WARM + shape_module.TIMED
    assert calls == (["a"] * burst + ["b"] * burst) * 2
    assert found == {"a": pytest.approx(2000), "b": pytest.approx(200)}


def test_costs_are_measured_for_all_that_is_asked(small, drafty, documents, monkeypatch):
    """Every node count up to the most, every width, the plain step among them; a level is what more depth adds."""
    fake = {("verify", 1): 10.0, ("verify", 7): 20.0, ("short", 3): 2.0, ("long", 3): 8.0}
    seen = {}

    def medians(jobs, rounds):
        for job in jobs.values():
            job()
        seen.update(jobs=set(jobs), rounds=rounds)
        return {name: fake.get(name, 1.0) for name in jobs}

    monkeypatch.setattr(shape_module, "medians_ms", medians)
    costs = measure_costs(Bench(drafty, small, documents[5]), [1, 3], 4, 6, 0.5, 7)
    assert seen["rounds"] == 7
    nodes = {1, 2, 3, 4, 5, 6, 7}
    assert seen["jobs"] == {("verify", n) for n in nodes} | set(itertools.product(("short", "long"), (1, 3)))
    assert costs.verify == {n: fake.get(("verify", n), 1.0) for n in nodes}
    assert costs.plain == 10.0
    assert costs.first == {1: 1.0, 3: 2.0}
    assert costs.level == {1: 0.0, 3: 2.0}
    assert costs.overhead == 0.5


def test_the_bench_times_what_the_decoder_does(small, drafty, documents):
    """A draft behind the middle of an answer is the decoder's own, again and again; a pass reads no more than its nodes."""
    bench = Bench(drafty, small, documents[5])
    text = documents[5].ids_T.tolist()
    shape = TreeShape.dynamic(3, 3, 8)
    work = bench.draft(shape)
    first, again = work(), work()
    assert torch.equal(first.tokens_BN, again.tokens_BN)
    assert torch.equal(first.logprobs_BN, again.logprobs_BN)
    state = drafty.start(1, 200)
    taps = small.features(torch.tensor([text[: bench.count]])).taps_BNKD
    tokens = torch.tensor([text[1 : bench.count + 1]])
    context = Context(small, tokens, taps, torch.zeros(1, bench.count, 1), Policy(), lambda: torch.zeros(1))
    straight = drafty.propose(state, context, shape)
    assert torch.equal(first.tokens_BN, straight.tokens_BN)
    assert torch.equal(first.parents_BN, straight.parents_BN)
    for nodes in (1, 5, 33):
        logits = bench.verify(nodes)()
        assert logits.shape == (1, nodes, small.spec.vocab_size)
    assert bench.cache.lengths == [bench.count]


@pytest.mark.parametrize(("width", "depth", "nodes"), [(1, 4, 4), (3, 1, 3), (3, 3, 21)])
def test_the_widest_tree_keeps_every_candidate(width, depth, nodes):
    shape = widest(width, depth)
    assert (shape.depth, shape.top_k, shape.nodes) == (depth, width, nodes)


# τ of several depths from one rollout


@pytest.fixture(scope="module")
def run(model_dir, chats, tmp_path_factory):
    """A run that is harvested and trained."""
    found = tiny_run(model_dir, chats, tmp_path_factory.mktemp("runs"), tune=SMALL_TUNE)
    harvest(found)
    train(found)
    return found


SMALL_TUNE = {
    "depth": 3,
    "widths": [1, 2],
    "nodes": 6,
    "prompts": 5,
    "real_runs": 4,
    "run_prompts": 3,
    "rounds": 3,
}


@pytest.fixture(scope="module")
def learned(run):
    """The run's target, its held-out store, and a head that knows that store by heart."""
    target = Target.load(run.target, TAPS)
    reader = FeatureReader(store_path(run, "held-out"))
    return target, reader, fit(make_tiny_head(target, None, steps=3), target, list(reader), 40)


def test_taus_of_several_depths_from_one_rollout(learned):
    """Those of each depth alone, and the decoder's."""
    target, reader, head = learned
    depths = [4, 1, 2]
    found = rollout_taus(head, target, reader, depths, 64)
    assert list(found) == depths
    prompts = [d.ids_T[: d.mask_T.tolist().index(True)].tolist() for d in reader]
    for depth in depths:
        assert found[depth] == rollout_tau(head, target, reader, depth, 512)
        outs = generate(target, head, prompts, Settings(TreeShape.chain(depth), 12, batch=8)).generations
        assert found[depth].accepted == [count for out in outs for count in out.accepted]
        assert found[depth].emitted == [count for out in outs for count in out.emitted]
    assert max(found[4].accepted) > 2


# The stage


@pytest.fixture(scope="module")
def tuned(run):
    """tune.json of the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_module, "say", SAID.append)
        patch.setattr(tune_module, "table", lambda title, columns, rows: SAID.append((title, list(rows))))
        tune(run)
    return json.loads((run.directory / "tune.json").read_text(encoding="utf-8"))


SAID: list = []  # what `tuned` told the user
SHAPE_KEYS = {"name", "kind", "depth", "top_k", "nodes"}


def test_tune_writes_costs_predictions_and_trials(run, tuned):
    assert set(tuned) == {"schema", "head", "device", "costs_ms", "predictions", "trials", "break_even_tau"}
    assert tuned["schema"] == "headwright.tune/1"
    assert set(tuned["costs_ms"]) == {"verify", "first", "level", "overhead", "plain"}
    assert set(tuned["costs_ms"]["verify"]) == {"1", "2", "3", "4", "5", "6", "7"}
    assert set(tuned["costs_ms"]["first"]) == set(tuned["costs_ms"]["level"]) == {"1", "2"}
    for found in tuned["predictions"]:
        assert set(found) == SHAPE_KEYS | {"tau", "cycle_ms", "predicted_speedup", "accepted_per_position"}
    speedups = [found["predicted_speedup"] for found in tuned["predictions"]]
    assert speedups == sorted(speedups, reverse=True)
    assert all(value > 0 for value in speedups)


def test_tune_compares_all_shapes_within_its_bounds(tuned):
    """Chains, dynamic trees of all sizes, and static trees of their own."""
    names = {found["name"] for found in tuned["predictions"]}
    chains = {f"chain-{depth}" for depth in (1, 2, 3)}
    dynamic = {
        f"tree-{depth}x2-{nodes}"
        for depth in (1, 2, 3)
        for nodes in (1, 2, 3, 4, 5, 6)
        if depth <= nodes <= most_nodes(depth, 2)
    }
    assert chains | dynamic <= names
    rest = [found for found in tuned["predictions"] if found["name"] not in chains | dynamic]
    assert sorted(found["nodes"] for found in rest) == [1, 2, 3, 4, 5, 6]
    assert {found["kind"] for found in rest} == {"static"}


def test_predictions_follow_from_what_is_written(tuned):
    """τ and costs of the file give its cycle and speed-up again."""
    raw = tuned["costs_ms"]
    tables = ({int(key): value for key, value in raw[name].items()} for name in ("verify", "first", "level"))
    costs = Costs(*tables, raw["overhead"], raw["plain"])
    for found in tuned["predictions"]:
        assert len(found["accepted_per_position"]) == found["depth"]
        assert found["predicted_speedup"] == pytest.approx(found["tau"] * raw["plain"] / found["cycle_ms"])
        if found["kind"] != "static":
            shape = TreeShape(found["kind"], found["depth"], found["top_k"], found["nodes"])
            assert found["cycle_ms"] == pytest.approx(costs.cycle(shape))


def test_tune_tries_different_shapes(run, tuned):
    """The best of each kind, depth and width; texts are the target's own; break-even is that of the fastest."""
    trials = tuned["trials"]
    assert len(trials) == 4
    keys = [
        (t["kind"], t["depth"] if t["kind"] != "static" else 0, t["top_k"] * (t["kind"] != "static")) for t in trials
    ]
    assert len(set(keys)) == len(keys)
    predicted = [trial["predicted_speedup"] for trial in trials]
    assert predicted == sorted(predicted, reverse=True)
    assert predicted[0] == tuned["predictions"][0]["predicted_speedup"]
    for trial in trials:
        assert trial["same_text"] == 3
        assert trial["speedup"] == pytest.approx(trial["tau"] * trial["plain_ms"] / trial["cycle_ms"])
    best = max(trials, key=lambda trial: trial["speedup"])
    assert tuned["break_even_tau"] == pytest.approx(best["cycle_ms"] / best["plain_ms"])


def test_tune_counts_what_the_decoder_counts(run, tuned):
    """τ of every shape over the same prompts, decoded; trials over the first of them."""
    target, reader = Target.load(run.target, TAPS), FeatureReader(store_path(run, "held-out"))
    head = load_head(run.directory / "head", target).eval()
    documents = tune_module.answered(run, reader)
    prompts = [d.ids_T[: first_answer(d)[0]].tolist() for d in documents]
    assert len(prompts) == 5
    for found in tuned["predictions"]:
        if found["kind"] == "static" or found["nodes"] in (4, 5):
            continue
        shape = TreeShape(found["kind"], found["depth"], found["top_k"], found["nodes"])
        outs = generate(target, head, prompts, Settings(shape, 12, batch=5)).generations
        cycles = [count for out in outs for count in out.emitted]
        assert found["tau"] == pytest.approx(sum(cycles) / len(cycles))
        for trial in tuned["trials"]:
            if trial["name"] == shape.name:
                some = [count for out in outs[:3] for count in out.emitted]
                assert trial["tau"] == pytest.approx(sum(some) / len(some))


def test_tree_json_is_a_shape_of_a_run_file(run, tuned, tmp_path):
    """`{kind: static, file: …}` reads back the best static tree."""
    best = next(found for found in tuned["predictions"] if found["kind"] == "static")
    shape = TreeShape.of(ShapeConfig("static", file=str(run.directory / "tree.json")))
    assert (shape.kind, shape.depth, shape.nodes, shape.top_k) == (
        "static",
        best["depth"],
        best["nodes"],
        best["top_k"],
    )
    assert TreeShape.parse(str(run.directory / "tree.json")).paths == shape.paths


def test_tune_says_what_it_measured(tuned):
    """Costs, predictions and trials as tables, and one verdict at the end."""
    tables = dict(item for item in SAID if isinstance(item, tuple))
    assert [int(row[0]) for row in tables["cost of a target pass"]] == [1, 2, 3, 4, 5, 6, 7]
    assert [row[0] for row in tables["predicted"]] == [found["name"] for found in tuned["predictions"][:10]]
    trials = tuned["trials"]
    assert [(row[0], row[4]) for row in tables["really run"]] == [(t["name"], t["same_text"]) for t in trials]
    best = max(trials, key=lambda trial: trial["speedup"])
    words = "Use " if best["speedup"] > 1 else "Do not speculate "
    assert SAID[-1].startswith(words)
    assert best["name"] in SAID[-1]
    assert f"{best['speedup']:.2f}×" in SAID[-1]


def timed(emitted: list[int], seconds: float, **phases: float) -> Generation:
    """A run whose times are known."""
    return Generation([1], [0] * len(emitted), emitted, seconds=seconds, phases=dict.fromkeys(PHASES, 0.0) | phases)


def test_times_of_a_cycle_leave_the_prefill_out(run, learned, monkeypatch):
    """The median over prompts, of each shape and of plain decoding; overhead is what is neither draft nor target pass."""
    _, reader, head = learned
    documents = tune_module.answered(run, reader)
    drafting = [timed([2, 3], 1.0 + n, prefill=0.5, draft=0.2, select=0.03, commit=0.01) for n in (1, 5, 0)]
    plain = [timed([1] * 5, 2.0, prefill=1.0), timed([1] * 4, 2.0, prefill=1.0), timed([], 9.0, prefill=8.0)]
    shapes = [predict(TreeShape.chain(2), Cycles([1, 2], [2, 3]), COSTS)]
    for name, outs in (("speculate", drafting), ("decode_plain", plain)):
        turns = iter(outs * 2)
        monkeypatch.setattr(tune_module, name, lambda *_, turns=turns: next(turns))
    [trial] = tune_module.try_best(run, head, None, documents, shapes)
    assert trial.cycle_ms == pytest.approx(1000 * (2.0 - 0.5) / 2)
    assert trial.plain_ms == pytest.approx((200 + 250) / 2)
    assert trial.tau == 2.5
    assert trial.speedup == pytest.approx(2.5 * 225 / 750)
    assert tune_module.measure_overhead(run, head, None, documents) == pytest.approx(1000 * 0.04 / 2)


def test_times_of_a_cycle_leave_capturing_out():
    """It happens once, and has no share in what a shape costs."""
    out = timed([2, 3], 2.0, prefill=0.5, other=1.0)
    out.warmup = 1.0
    assert tune_module.cycle_ms(out) == pytest.approx(1000 * 0.5 / 2)


def trial_of(shape: TreeShape, tau: float, cycle_ms: float, plain_ms: float) -> Trial:
    """A shape that was really run."""
    return Trial(Prediction(shape, tau, cycle_ms, 1.0), tau, cycle_ms, plain_ms, 3)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (TreeShape.chain(4), {"kind": "chain", "depth": 4}),
        (TreeShape.dynamic(3, 4, 9), {"kind": "dynamic", "depth": 3, "top_k": 4, "nodes": 9}),
        (TreeShape.static([[0], [1]], "sparse"), {"kind": "static", "file": "runs/x/tree.json"}),
    ],
    ids=lambda value: value.name if isinstance(value, TreeShape) else "",
)
def test_verdict_where_drafting_pays(shape, wanted):
    """The fastest shape as a line for a run file, and the τ down to which it pays."""
    run = RunConfig(name="x")
    worse = trial_of(TreeShape.chain(1), 1.5, 20.0, 15.0)
    text = verdict(run, [worse, trial_of(shape, 3.0, 30.0, 20.0)])
    assert text.startswith(f"Use {shape.name}: 2.00×")
    assert "τ stays above 1.50" in text
    [line] = yaml.safe_load(text.partition("In the run file: ")[2].replace("eval.shapes:", "shapes:"))["shapes"]
    assert line == wanted
    if shape.kind != "static":
        assert TreeShape.of(ShapeConfig(**line)) == shape


@pytest.mark.parametrize("cycle_ms", [40.0, 60.0])
def test_verdict_where_it_does_not(cycle_ms):
    """No faster than plain is no reason to speculate."""
    text = verdict(RunConfig(name="x"), [trial_of(TreeShape.chain(2), 2.0, cycle_ms, 20.0)])
    assert text.startswith("Do not speculate on this device with this head")
    assert f"chain-2, reaches {40 / cycle_ms:.2f}×" in text
    assert f"τ 2.00, break-even {cycle_ms / 20:.2f}" in text
    assert "Use" not in text


def test_tune_refuses_answers_of_the_corpus(run):
    """They say nothing about what the target will write."""
    other = replace(run, answers=replace(run.answers, by="corpus"))
    with pytest.raises(UserError, match=r"answers\.by: target"):
        tune(other)


def test_tune_before_harvest_and_training_says_so(model_dir, chats, tmp_path):
    bare = tiny_run(model_dir, chats, tmp_path)
    with pytest.raises(UserError, match="run the harvest first"):
        tune(bare)
    harvest(bare)
    with pytest.raises(UserError, match="train first"):
        tune(bare)


def test_tune_needs_answers_to_draft_in(run, learned):
    """Held-out documents without an answer, with a short one, or without a prompt."""
    _, reader, _ = learned
    document = next(found for found in reader if int(found.mask_T.sum()) > 4)
    _, end = first_answer(document)
    empty = replace(document, mask_T=torch.zeros_like(document.mask_T))
    short = replace(document, mask_T=empty.mask_T.index_fill(0, torch.tensor([end - 2, end - 1]), True))
    early = replace(document, mask_T=torch.ones_like(document.mask_T))
    with pytest.raises(UserError, match=r"raise corpus\.held_out"):
        tune_module.answered(run, Shelf([empty, short, early]))
    assert [found is document for found in tune_module.answered(run, Shelf([empty, document, early]))] == [True]
    assert len(tune_module.answered(run, Shelf([document] * 9))) == 5


class Shelf(list):
    """A store in memory."""

    root = "store"


def test_tune_with_more_nodes_than_the_usual_ones(small, drafty, documents):
    costs = measure_costs(Bench(drafty, small, documents[5]), [1], 2, 150, 0.0, 1)
    assert 151 in costs.verify


# Its command line


@pytest.fixture(scope="module")
def config(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("tune") / "run.yaml"
    path.write_text(dump(run), encoding="utf-8")
    return path


def headwright(monkeypatch, *arguments: str) -> int:
    """The command in this process: its exit code."""
    monkeypatch.setattr("sys.argv", ["headwright", *arguments])
    try:
        command()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_dry_run_writes_nothing(run, config, tmp_path, monkeypatch, capsys):
    assert headwright(monkeypatch, "tune", "--config", str(config), "--dry-run", f"runs={tmp_path}") == 0
    assert capsys.readouterr().out.startswith("dry run: ")
    assert not list(tmp_path.iterdir())


def test_tune_from_the_command_line(run, config, monkeypatch, capsys):
    """Overrides reach it."""
    (run.directory / "tune.json").unlink(missing_ok=True)
    arguments = ("tune.widths=[1]", "tune.depth=2", "tune.nodes=2", "tune.real_runs=1")
    assert headwright(monkeypatch, "tune", "--config", str(config), *arguments) == 0
    found = json.loads((run.directory / "tune.json").read_text(encoding="utf-8"))
    assert {row["kind"] for row in found["predictions"]} == {"chain", "static"}
    assert max(row["depth"] for row in found["predictions"]) == 2
    assert len(found["trials"]) == 1
    assert "really run" in capsys.readouterr().out


def test_a_missing_head_is_one_line(model_dir, chats, config, tmp_path, monkeypatch, capsys):
    assert headwright(monkeypatch, "tune", "--config", str(config), f"runs={tmp_path}") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1


def test_help_explains_every_key(monkeypatch, capsys):
    assert headwright(monkeypatch, "tune", "--help") == 0
    flat = " ".join(capsys.readouterr().out.split())
    for name, hint in typing.get_type_hints(TuneConfig, include_extras=True).items():
        words = " ".join(note for note in hint.__metadata__ if isinstance(note, str))
        assert words
        assert f"tune.{name} = {getattr(TuneConfig(), name)}" in flat
        assert " ".join(words.split()) in flat


@pytest.mark.parametrize(("count", "places"), [(1, [0]), (3, [0, 3, 6]), (10, list(range(10))), (99, list(range(10)))])
def test_documents_are_taken_from_all_lengths(count, places):
    """A store is sorted by length: the first ones would all be short."""
    assert spread(list(range(10)), count) == places
