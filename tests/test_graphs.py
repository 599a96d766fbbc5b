"""Passes of fixed shape say what `Target.extend` says: same buffers, no graph on a CPU; as graphs on a GPU."""

import warnings
from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES, fit, make_model, make_target, make_tiny_head, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shape import greedy, make_small, real_prompts

from headwright.data import graphs
from headwright.data.graphs import Passes, StaticPass, give_back, take, whole_steps
from headwright.data.sampling import Policy
from headwright.data.target import Target
from headwright.eval.decode import PLAIN, Decoder, Generation, Settings, generate
from headwright.eval.drafters import PromptLookup
from headwright.heads.draft_tree import TreeShape

CHAIN, TREE, EAGLE = TreeShape.chain(4), TreeShape.dynamic(3, 3, 8), TreeShape.parse("eagle-1")
NEW = 14


@pytest.fixture(scope="module")
def small() -> Target:
    return make_small()


@pytest.fixture(scope="module")
def prompts(small) -> list[list[int]]:
    return real_prompts(small, 12)


@pytest.fixture(scope="module")
def drafty(small, prompts):
    """A head that is often right."""
    return fit(make_tiny_head(small, None, steps=2), small, greedy(small, prompts, NEW), 40)


@pytest.fixture(autouse=True)
def fresh(small):
    """No storage of an earlier test."""
    small.spare.clear()


def counters(outs: list[Generation]) -> list[tuple]:
    """All that does not depend on the clock."""
    return [(out.tokens, out.accepted, out.emitted, out.drafted, out.finish) for out in outs]


def assert_same(target: Target, drafter, prompts, rules: Settings) -> list[Generation]:
    """With and without static passes."""
    wanted = generate(target, drafter, prompts, replace(rules, graphs=False)).generations
    found = generate(target, drafter, prompts, replace(rules, graphs=True)).generations
    assert counters(found) == counters(wanted)
    return found


# The same texts


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("shape", [CHAIN, TREE, EAGLE], ids=lambda shape: shape.name)
def test_static_passes_change_nothing(small, drafty, prompts, shape, batch):
    """Texts of many lengths that take each other's places, and a batch that shrinks in the end."""
    outs = assert_same(small, drafty, prompts, Settings(shape, NEW, batch=batch))
    assert len({accepted for out in outs for accepted in out.accepted}) > 3


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (Policy(1.2, top_p=0.9), {}),
        (Policy(0.7), {"verification": "walk"}),
        (Policy(0.0, repetition_penalty=1.3), {}),
        (Policy(), {"stop": ("e", "th")}),
    ],
    ids=str,
)
def test_sampling_penalties_and_stops(small, drafty, prompts, policy, options):
    assert_same(small, drafty, prompts[:6], Settings(TREE, NEW, policy, batch=3, **options))


def test_without_a_head(small, prompts):
    """Plain passes, and a drafter whose trees differ in size from cycle to cycle."""
    assert_same(small, None, prompts, Settings(PLAIN, NEW, batch=4))
    outs = assert_same(small, PromptLookup(), prompts, Settings(CHAIN, NEW, batch=1))
    assert len({drafted for out in outs for drafted in out.drafted}) > 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, monkeypatch):
    """Sliding windows of nine tokens, soft caps, norms of queries: over two steps of growth."""
    monkeypatch.setattr(graphs, "STEP", 16)
    target = make_target(family)
    some = [list(range(30, 45)), [65, 66, 67], [7] * 20]
    head = make_tiny_head(target, None)
    for shape in (CHAIN, TREE):
        assert_same(target, head, some, Settings(shape, 16, batch=2))
    ends = {end for found in target.spare.values() for passes in found for _, end in passes.made}
    assert len(ends) > 1


@settings(max_examples=8, deadline=None)
@given(
    step=st.sampled_from([1, 3, 16, 64]),
    batch=st.integers(1, 5),
    shape=st.sampled_from([CHAIN, TREE, EAGLE]),
    chosen=st.lists(st.integers(0, 11), min_size=1, max_size=6),
    new=st.integers(1, 30),
)
def test_any_step_of_growth(small, drafty, prompts, step, batch, shape, chosen, new):
    """One storage after the other, new or used before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "STEP", step)
        rules = Settings(shape, new, batch=batch, ignore_eos=True)
        assert_same(small, drafty, [prompts[number] for number in chosen], rules)


def test_a_pass_grows_by_steps(small, drafty, monkeypatch):
    """Every pass looks at the least whole number of steps that holds what is in use."""
    monkeypatch.setattr(graphs, "STEP", 16)
    needed = []
    ready = Passes.ready

    def watched(self, nodes):
        found = ready(self, nodes)
        needed.append((self.cache.room(nodes), found.end))
        return found

    monkeypatch.setattr(Passes, "ready", watched)
    generate(small, drafty, [[65] * 5], Settings(CHAIN, 60, ignore_eos=True, graphs=True))
    assert all(end == whole_steps(used) for used, end in needed)
    assert {end for _, end in needed} >= {16, 32, 48, 64}
    assert whole_steps(16) == 16
    assert whole_steps(17) == 32


def test_graphs_are_used_where_they_are_asked_for(small, drafty, prompts, monkeypatch):
    """On a CPU they are off by default; asked for, every pass but the prefills goes through them."""
    calls = []
    run = StaticPass.run
    monkeypatch.setattr(StaticPass, "run", lambda self: calls.append(self) or run(self))
    generate(small, drafty, prompts[:3], Settings(CHAIN, NEW))
    assert not calls
    outcome = generate(small, drafty, prompts[:3], Settings(CHAIN, NEW, graphs=True))
    assert len(calls) == outcome.passes > 5
    assert len(set(map(id, calls))) < len(calls), "a pass is made once and run again"


# A single pass


@torch.inference_mode()
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    nodes=st.integers(1, 7),
    end=st.sampled_from([27, 32, 40]),
    seed=st.integers(0, 99),
    dirt=st.booleans(),
)
def test_a_static_pass_equals_extend(small, lengths, nodes, end, seed, dirt):
    """Rows of any lengths, any mask among the new tokens, and slots beyond that hold anything: states, logits and what is
    written.
    """
    draw = torch.Generator().manual_seed(seed)
    batch, most = len(lengths), max(lengths)
    caches = [small.new_cache(batch, 40) for _ in range(2)]
    text = torch.randint(272, (batch, most), generator=draw)
    for cache in caches:
        if most:
            small.extend(text, cache)
        elif dirt:
            small.extend(torch.randint(272, (batch, 3), generator=draw), cache)
        cache.lengths = list(lengths)
    if dirt and most:
        for row, length in enumerate(lengths):
            for store in (*caches[1].keys, *caches[1].values):
                store[row, :, length:] = 1e3
            caches[1].positions[row, length:] = 7
    ids = torch.randint(272, (batch, nodes), generator=draw)
    among = torch.rand(batch, nodes, nodes, generator=draw).lt(0.5).tril() | torch.eye(nodes, dtype=torch.bool)
    positions = torch.tensor(lengths)[:, None] + among.sum(-1) - 1
    wanted = small.extend(ids, caches[0], positions, among)
    one = StaticPass(small, caches[1], nodes, end)
    for _ in range(2):  # the buffers hold the first run when the second one starts
        features, logits = one(ids, positions, among)
        assert torch.allclose(features.taps_BNKD, wanted.taps_BNKD, rtol=1e-3, atol=2e-5)
        assert torch.allclose(features.last_BND, wanted.last_BND, rtol=1e-3, atol=2e-5)
        assert torch.allclose(logits, small.logits(wanted.last_BND), rtol=1e-3, atol=2e-4)
    for row, length in enumerate(lengths):
        stop = length + nodes
        assert torch.equal(caches[0].positions[row, length:stop], caches[1].positions[row, length:stop])
        for ours, theirs in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values)):
            assert torch.allclose(ours[row, :, :stop], theirs[row, :, :stop], rtol=1e-3, atol=2e-5)
    assert caches[1].lengths == lengths, "advancing is the caller's"


# Storage


def test_storage_is_used_again_without_any_effect(small, drafty, prompts):
    """The next texts find keys, values and positions of the last ones, and say what they always say."""
    rules = Settings(TREE, NEW, batch=3, graphs=True)
    wanted = generate(small, drafty, prompts, replace(rules, graphs=False)).generations
    assert counters(generate(small, drafty, prompts, rules).generations) == counters(wanted)
    [[storage]] = small.spare.values()
    with torch.inference_mode():
        for store in (*storage.cache.keys, *storage.cache.values):
            store.fill_(1e4)
        storage.cache.positions.fill_(3)
    made = dict(storage.made)
    assert counters(generate(small, drafty, prompts, rules).generations) == counters(wanted)
    assert small.spare == {(3, graphs.STEP): [storage]}
    assert storage.made == made, "and its passes are the same"
    assert all(ours is theirs for ours, theirs in zip(storage.made.values(), made.values()))


def test_storage_that_is_taken_is_empty(small):
    """Whoever had it before."""
    passes = take(small, 2, 20)
    passes.cache.lengths, passes.seconds = [7, 9], 1.5
    give_back(passes)
    assert take(small, 1, 20) is not passes
    assert take(small, 2, 20) is passes
    assert (passes.cache.lengths, passes.seconds) == ([0, 0], 0.0)
    assert take(small, 2, 20) is not passes


def test_storage_of_other_sizes_is_kept_apart(small, drafty, prompts, monkeypatch):
    monkeypatch.setattr(graphs, "STEP", 32)
    for batch, new in ((1, 10), (2, 10), (2, 90), (1, 12)):
        generate(small, drafty, [prompts[0]] * batch, Settings(CHAIN, new, batch=batch, graphs=True))
    assert {key: len(found) for key, found in small.spare.items()} == {(1, 32): 1, (2, 32): 1, (2, 128): 1}
    for (batch, slots), [passes] in small.spare.items():
        assert (len(passes.cache.lengths), passes.cache.slots) == (batch, slots)


def stores(decoder: Decoder) -> set[int]:
    """Where its keys and values lie."""
    return {store.data_ptr() for store in (*decoder.cache.keys, *decoder.cache.values)}


@pytest.mark.parametrize("used", [0, 1, 2])
def test_two_decoders_at_once_share_nothing(small, drafty, prompts, used):
    """Cycle about, with some storage left by others."""
    groups = (prompts[2:5], prompts[5:8])
    rules = Settings(TREE, NEW, batch=3, ignore_eos=True)
    wanted = [generate(small, drafty, group, rules).generations for group in groups]
    passes = [take(small, 3, 90) for _ in range(used)]
    for one in passes:
        give_back(one)
    decoders = [Decoder(small, drafty, group, replace(rules, graphs=True)) for group in groups]
    turns = [decoder.cycles() for decoder in decoders]
    apart = False
    while turns:
        for turn in list(turns):
            if next(turn, None) is None:
                turns.remove(turn)
        if all(decoder.static is not None for decoder in decoders):
            assert not stores(decoders[0]) & stores(decoders[1])
            apart = True
    assert apart
    assert [counters(decoder.texts) for decoder in decoders] == [counters(outs) for outs in wanted]
    assert sum(map(len, small.spare.values())) == 2


def test_a_shrinking_batch_gives_its_storage_back_at_once(small, drafty, prompts):
    """What is left goes on in storage of its own, while others write where it was."""
    rules = Settings(CHAIN, 40, batch=2, ignore_eos=True)
    short, long = prompts[3], prompts[4]
    wanted = generate(small, drafty, [short, long], rules).generations
    decoder = Decoder(small, drafty, [short, long], replace(rules, graphs=True))
    decoder.limits[0] = 5
    other = None
    for _ in decoder.cycles():
        if decoder.static is None and len(decoder.rows) == 1 and other is None:
            assert sum(map(len, small.spare.values())) == 1
            other = generate(small, drafty, prompts[6:8], replace(rules, graphs=True)).generations
    assert other is not None
    assert counters(other) == counters(generate(small, drafty, prompts[6:8], rules).generations)
    assert decoder.texts[0].tokens == wanted[0].tokens[:5]
    assert counters(decoder.texts[1:]) == counters(wanted[1:])


def test_making_passes_is_told_apart(small, drafty, prompts):
    """Seconds of the first use, and none when all is there."""
    rules = Settings(CHAIN, NEW, graphs=True)
    assert generate(small, drafty, prompts[:2], rules).warmup > 0
    assert generate(small, drafty, prompts[:2], rules).warmup == 0
    assert generate(small, drafty, prompts[:2], replace(rules, graphs=False)).warmup == 0


# Waiting for the device


class OnDevice(torch.overrides.TorchFunctionMode):
    """Host data that is made straight on a device: on a GPU the host would wait until all work before it is done."""

    def __init__(self):
        super().__init__()
        self.found: list = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            self.found.append(args[0])
        return func(*args, **kwargs)


def hasty_cycles(target: Target, drafter, prompts, rules: Settings) -> tuple[list, int]:
    """Such data in cycles whose batch stays as it is; the first run warms up."""
    found, cycles = [], 0
    for warm in (False, True):
        decoder = Decoder(target, drafter, prompts, rules)
        work, size = decoder.cycle, len(prompts)

        def watched(work=work, decoder=decoder, warm=warm, size=size):
            nonlocal cycles
            if not warm or len(decoder.rows) < size:
                return work()
            with OnDevice() as watch:
                out = work()
            found.extend(watch.found)
            cycles += 1
            return out

        decoder.cycle = watched
        for _ in decoder.cycles():
            pass
    return found, cycles


@pytest.mark.parametrize("batch", [1, 3])
def test_a_chain_never_makes_the_host_wait(small, drafty, prompts, batch):
    """Seen without a GPU: nothing of a cycle is copied there in the slow way."""
    rules = Settings(CHAIN, NEW, batch=batch, ignore_eos=True, graphs=True)
    found, cycles = hasty_cycles(small, drafty, prompts[:batch], rules)
    assert cycles > 3
    assert found == []


@pytest.mark.parametrize("shape", [TREE, EAGLE], ids=lambda shape: shape.name)
def test_a_tree_never_makes_the_host_wait(small, drafty, prompts, shape):
    """Accepted paths that have to be moved together, one at a time."""
    rules = Settings(shape, 40, batch=1, ignore_eos=True, graphs=True)
    found, cycles = hasty_cycles(small, drafty, prompts[3:4], rules)
    assert cycles > 3
    assert found == []


# A GPU

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu() -> tuple[Target, torch.nn.Module, list[list[int]]]:
    """A target, a head that is often right, and prompts."""
    target = make_target()
    prompts = real_prompts(target, 6)
    head = fit(make_tiny_head(target, None, steps=2), target, greedy(target, prompts), 30)
    return Target(make_model().to("cuda"), make_tokenizer(), "tiny", target.taps), head.to("cuda"), prompts


@pytest.mark.cuda
@GPU
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=lambda shape: shape.name)
def test_captured_passes_equal_eager_ones(shape, batch):
    """Texts and counters, over and over in the same storage."""
    target, head, prompts = on_gpu()
    rules = Settings(shape, 24, batch=batch, ignore_eos=True)
    eager = counters(generate(target, head, prompts, replace(rules, graphs=False)).generations)
    for _ in range(2):
        assert counters(generate(target, head, prompts, rules).generations) == eager, "the default on a GPU"
    passes = [one for found in target.spare.values() for kept in found for one in kept.made.values()]
    assert passes
    assert all(one.graph is not None for one in passes)


@pytest.mark.cuda
@GPU
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=lambda shape: shape.name)
def test_a_cycle_waits_for_the_gpu_once(shape):
    """For its verdict; the first run makes what is made once."""
    target, head, prompts = on_gpu()
    rules = Settings(shape, 60, ignore_eos=True)
    generate(target, head, prompts[3:4], rules)
    assert waits(target, head, prompts[3:4], rules) == 1


def waits(target: Target, head, prompts, rules: Settings) -> int:
    """The most waits for the device in a cycle."""
    decoder, counts = Decoder(target, head, prompts, rules), []
    cycle = decoder.cycle

    def watched():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                news = cycle()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing" in str(warning.message) for warning in seen))
        return news

    decoder.cycle = watched
    for _ in decoder.cycles():
        pass
    return max(counts[1:])
