"""Optimizers: schedules are functions of the step, every weight is moved by one of them, and a step can be left out."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from conftest import VOCAB, make_target, make_tiny_head
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headwright.configs import UserError
from headwright.configs.load import build
from headwright.configs.schema import TrainConfig
from headwright.data.batch import FeatureBatch, pack
from headwright.data.generate import read_documents
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab
from headwright.heads import get_head, kinds
from headwright.heads.base import DraftHead, make_head
from headwright.train import optim
from headwright.train import strategy as strategies
from headwright.train.launch import Launch
from headwright.train.loop import one_step
from headwright.train.optim import (
    is_inner_matrix,
    learning_rate,
    make_optimizers,
    matches,
    refuse_optimizer,
    set_learning_rate,
)
from headwright.train.strategy import Strategy, step_unless
from headwright.train.track import Meter

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MUON = hasattr(torch.optim, "Muon")
with_muon = pytest.mark.skipif(not MUON, reason="this torch has no Muon")
OPTIMIZERS = ["adamw", pytest.param("muon", marks=with_muon)]


@pytest.fixture(scope="module")
def target() -> Target:
    """A target that no test changes."""
    return make_target()


@pytest.fixture(scope="module")
def batches(target) -> list[FeatureBatch]:
    """A few batches of one text each."""
    generator = torch.Generator().manual_seed(3)
    lines = [torch.randint(256, (16 + 5 * i,), generator=generator).tolist() for i in range(4)]
    masks = [[3 <= place < 9 or place >= 12 for place in range(len(line))] for line in lines]
    return [pack([document]) for document in read_documents(target, list(zip(lines, masks)), torch.float32)]


def walk(strategy: Strategy, target: Target, batches: list[FeatureBatch], start: int, stop: int) -> None:
    """The steps `start` … `stop` - 1 of a training."""
    for step in range(start, stop):
        set_learning_rate(strategy.groups(), learning_rate(strategy.config, step, 20))
        torch.manual_seed(step)
        norm, _ = one_step(strategy, [batches[step % len(batches)]], target, Meter())
        assert float(norm) > 0


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are the same bits."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def copied(strategy: Strategy) -> dict[str, Tensor]:
    """Weights, and all that the optimizers remember."""
    return strategy.weights() | strategy.moments()


# Schedules

SHARES = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))
SCHEDULES = ("cosine", "linear", "wsd", "constant")


@st.composite
def plans(draw) -> tuple[TrainConfig, int]:
    """A schedule, and the steps of its run."""
    config = TrainConfig(
        lr=draw(st.floats(1e-6, 10.0)),
        schedule=draw(st.sampled_from(SCHEDULES)),
        warmup=draw(SHARES),
        decay=draw(SHARES),
        final_lr=draw(SHARES),
    )
    return config, draw(st.integers(1, 300))


def warm_steps(config: TrainConfig, total: int) -> int:
    """Steps of the warm-up: one at least."""
    return max(1, round(config.warmup * total))


def fall(config: TrainConfig, total: int) -> int:
    """The step after which the rate falls."""
    warm = warm_steps(config, total)
    return max(warm, round(total * (1 - config.decay))) if config.schedule == "wsd" else warm


@given(plans())
@settings(max_examples=200, deadline=None)
@example((TrainConfig(warmup=0.0, schedule="cosine"), 1))
@example((TrainConfig(warmup=1.0, schedule="wsd", decay=1.0), 7))
def test_rates_are_straight_lines_between_their_corners(plan):
    """Up to the peak in the warm-up, then down to the floor; a cosine bends its way down and nothing else."""
    config, total = plan
    warm, start = warm_steps(config, total), fall(config, total)
    steps = np.arange(total)
    up = config.lr * (steps + 1) / warm
    share = np.clip((steps - start) / max(1, total - start), 0, 1)
    if config.schedule == "cosine":
        share = (1 - np.cos(np.pi * share)) / 2
    elif config.schedule == "constant":
        share = 0 * share
    down = config.lr * (1 - share) + config.final_lr * config.lr * share
    found = [learning_rate(config, int(step), total) for step in steps]
    assert found == pytest.approx(np.where(steps < warm, up, down).tolist(), rel=1e-9, abs=1e-15)


@given(plans())
@settings(max_examples=200, deadline=None)
def test_rates_stay_within_peak_and_floor_and_never_jump(plan):
    config, total = plan
    warm, start = warm_steps(config, total), fall(config, total)
    rates = [learning_rate(config, step, total) for step in range(total + 1)]
    steepest = config.lr * max(1 / warm, (1 - config.final_lr) * math.pi / 2 / max(1, total - start))
    assert all(abs(b - a) <= steepest * (1 + 1e-9) for a, b in itertools.pairwise(rates))
    assert all(0 < rate <= config.lr * (1 + 1e-12) for rate in rates[:warm])
    assert all(config.final_lr * config.lr * (1 - 1e-12) <= rate <= config.lr * (1 + 1e-12) for rate in rates[warm:])
    hair = 1e-12 * config.lr
    assert all(a <= b + hair for a, b in itertools.pairwise(rates[: warm + 1]))
    assert all(b <= a + hair for a, b in itertools.pairwise(rates[warm:]))


@given(plans())
@settings(max_examples=200, deadline=None)
def test_rates_end_where_they_should(plan):
    config, total = plan
    warm, start = warm_steps(config, total), fall(config, total)
    assert learning_rate(config, 0, total) == pytest.approx(config.lr / warm)
    assert learning_rate(config, warm - 1, total) == pytest.approx(config.lr, rel=1e-12)
    if config.schedule == "constant" or start >= total:  # nothing is left in which it could fall
        assert learning_rate(config, total, total) == pytest.approx(config.lr)
    else:
        assert learning_rate(config, total, total) == pytest.approx(config.final_lr * config.lr, abs=1e-15)


@given(plans(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_rates_do_not_know_how_a_step_was_come_to(plan, random):
    config, total = plan
    before = copy.deepcopy(config)
    straight = [learning_rate(config, step, total) for step in range(total)]
    order = list(range(total))
    random.shuffle(order)
    assert {step: learning_rate(config, step, total) for step in order} == dict(enumerate(straight))
    assert config == before


@given(plans())
@settings(max_examples=100, deadline=None)
def test_wsd_keeps_its_peak_until_its_last_part(plan):
    config, total = plan
    config.schedule = "wsd"
    warm, start = warm_steps(config, total), fall(config, total)
    assert start == max(warm, round((1 - config.decay) * total))
    for step in range(warm, start + 1):
        assert learning_rate(config, step, total) == pytest.approx(config.lr, rel=1e-12)
    if config.final_lr < 0.99 and start + 1 < total:
        assert learning_rate(config, start + 1, total) < config.lr


@pytest.mark.parametrize(("decay", "other"), [(0.0, "constant"), (1.0, "linear")])
def test_wsd_at_its_ends_is_another_schedule(decay, other):
    one, two = (TrainConfig(schedule=name, decay=decay, warmup=0.1, lr=3.0) for name in ("wsd", other))
    for step in range(100):
        assert learning_rate(one, step, 100) == learning_rate(two, step, 100)


# Rates of parts


def rates_by_name(head: DraftHead, config: TrainConfig) -> dict[str, float]:
    """The learning rate that each parameter is stepped with, from the optimizers themselves."""
    made = make_optimizers(head, config)
    groups = [group for optimizer in made for group in optimizer.param_groups]
    set_learning_rate(groups, config.lr)
    names = {weight: name for name, weight in head.named_parameters()}
    return {names[weight]: group["lr"] for group in groups for weight in group["params"]}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({}, {}),
        ({"lm_head": 0.5}, {"lm_head.weight": 0.5}),
        ({"lm_head.weight": 0.5}, {"lm_head.weight": 0.5}),
        ({"midlayer.*": 3.0}, {"midlayer.": 3.0}),
        ({"midlayer": 3.0}, {"midlayer.": 3.0}),
        ({"*norm*": 2.0}, {"norm": 2.0}),
        ({"fc": 0.0}, {"fc.": 0.0}),  # and not fc_norm
        ({"lm_head": 0.5, "*norm*": 2.0, "midlayer.*": 3.0}, {"lm_head": 0.5, "norm": 2.0, "midlayer.": 3.0}),
    ],
)
def test_rates_of_parts(target, optimizer, scales, expected):
    """Each parameter's rate is the run's, times every scale whose pattern means it."""
    head = make_tiny_head(target, size=None)
    config = TrainConfig(lr=0.25, lr_scale=scales, optimizer=optimizer)
    found = rates_by_name(head, config)
    assert found.keys() == dict(head.named_parameters()).keys()
    for name, rate in found.items():
        factors = [factor for part, factor in expected.items() if part in name]
        assert rate == pytest.approx(0.25 * math.prod(factors)), name


@pytest.mark.parametrize(
    ("name", "pattern", "meant"),
    [
        ("fc.weight", "fc", True),
        ("fc_norm.0.weight", "fc", False),
        ("fc_norm.0.weight", "fc_norm", True),
        ("fc_norm.0.weight", "fc_norm.0", True),
        ("fc_norm.10.weight", "fc_norm.1", False),
        ("midlayer.mlp.up_proj.weight", "midlayer.mlp", True),
        ("midlayer.mlp.up_proj.weight", "mlp", False),
        ("midlayer.mlp.up_proj.weight", "*mlp*", True),
        ("midlayer.mlp.up_proj.weight", "midlayer.?lp.*", True),
        ("lm_head.weight", "LM_HEAD", False),
        ("lm_head.weight", "*", True),
    ],
)
def test_patterns_mean_parameters_and_modules(name, pattern, meant):
    assert matches(name, pattern) == meant


@pytest.mark.parametrize("pattern", ["lm_haed", "norms", "midlayer.mlpp.*", "mid"])
def test_unknown_patterns_are_refused_with_the_names(target, pattern):
    head = make_tiny_head(target, size=None)
    with pytest.raises(UserError, match=r"train\.lr_scale") as caught:
        make_optimizers(head, TrainConfig(lr_scale={"lm_head": 0.5, pattern: 2.0}))
    assert repr(pattern) in str(caught.value)
    assert all(name in str(caught.value) for name, _ in head.named_parameters())


def test_patterns_of_frozen_parameters_are_refused(target):
    """A rate for what is not trained would do nothing."""
    head = make_tiny_head(target, size=None)
    head.lm_head.weight.requires_grad_(False)
    with pytest.raises(UserError, match="no trained parameter is called 'lm_head'") as caught:
        make_optimizers(head, TrainConfig(lr_scale={"lm_head": 0.5}))
    assert "lm_head.weight" not in str(caught.value).split("there are")[1]


def test_rates_of_the_run_and_of_the_head_multiply(target, monkeypatch):
    head = make_tiny_head(target, size=None)
    monkeypatch.setattr(head, "rate_of", lambda name: 0.1 if name.startswith("midlayer.") else 1.0)
    found = rates_by_name(head, TrainConfig(lr=1.0, lr_scale={"*norm*": 2.0, "midlayer": 3.0}))
    for name, rate in found.items():
        inside, norm = name.startswith("midlayer."), "norm" in name
        assert rate == pytest.approx((0.3 if inside else 1.0) * (2.0 if norm else 1.0)), name
    assert found["midlayer.hidden_norm.weight"] == pytest.approx(0.6)


def test_medusas_adapter_has_its_own_rate_times_the_runs():
    head = any_head("medusa", make_target(taps=(8,)), steps=2, adapter={"rank": 2, "rate": 0.25})
    found = rates_by_name(head, TrainConfig(lr=2.0, lr_scale={"adapter": 0.5}))
    assert {rate for name, rate in found.items() if name.startswith("adapter.")} == {0.25}
    assert {rate for name, rate in found.items() if not name.startswith("adapter.")} == {2.0}


# Who moves what


def any_head(kind: str, target: Target, **options) -> DraftHead:
    """A new head of any kind."""
    torch.manual_seed(1)
    config = build(get_head(kind).Config, {"kind": kind, **options}, "test")
    head = make_head(config, target.spec, target.taps, DraftVocab(torch.arange(VOCAB), VOCAB))
    head.attach(target)
    head.initialise(target)
    return head


def all_kinds(target: Target) -> dict[str, DraftHead]:
    """One head of each kind."""
    found = {}
    for kind in kinds():
        taps = build(get_head(kind).Config, {"kind": kind}, "test").choose_taps(8)
        found[kind] = any_head(kind, make_target(taps=tuple(taps)))
    return found


@pytest.fixture(scope="module")
def heads(target) -> dict[str, DraftHead]:
    """One head of each kind, not to be changed."""
    return all_kinds(target)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_trained_parameter_is_moved_by_one_group(heads, optimizer):
    """Of every kind of head: each once, frozen ones never; only matrices decay."""
    config = TrainConfig(weight_decay=0.3, optimizer=optimizer)
    for kind, head in heads.items():
        made = make_optimizers(head, config)
        members = [
            (weight, group["weight_decay"]) for one in made for group in one.param_groups for weight in group["params"]
        ]
        assert len(members) == len({weight for weight, _ in members}), kind
        assert {weight for weight, _ in members} == {w for w in head.parameters() if w.requires_grad}, kind
        assert all((decay == 0.3) == (weight.ndim > 1) for weight, decay in members), kind


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_frozen_parameters_are_never_moved(target, batches, optimizer):
    head = make_tiny_head(target, size=None, steps=2).train()
    head.lm_head.weight.requires_grad_(False)
    head.midlayer.mlp.requires_grad_(False)
    frozen = {name for name, weight in head.named_parameters() if not weight.requires_grad}
    before = {name: weight.detach().clone() for name, weight in head.named_parameters()}
    strategy = Strategy(head, TrainConfig(lr=0.1, weight_decay=0.5, optimizer=optimizer), Launch())
    walk(strategy, target, batches, 0, 2)
    moved = {name for name, weight in head.named_parameters() if not torch.equal(weight, before[name])}
    assert moved.isdisjoint(frozen)
    assert moved == before.keys() - frozen


@pytest.mark.parametrize(
    ("name", "shape", "inner"),
    [
        ("fc.weight", (4, 8), True),
        ("fc.weight", (8, 4), True),
        ("fc.weight", (2, 2), True),
        ("gate.weight", (1, 8), False),
        ("gate.weight", (8, 1), False),
        ("gate.weight", (1, 1), False),
        ("norm.weight", (8,), False),
        ("scale", (), False),
        ("conv.weight", (4, 4, 3), False),
        ("lm_head.weight", (24, 8), False),
        ("heads.0.lm_head.weight", (24, 8), False),
        ("model.embed_tokens.weight", (24, 8), False),
        ("embedding.weight", (24, 8), False),
    ],
)
def test_inner_matrices(name, shape, inner):
    assert is_inner_matrix(name, nn.Parameter(torch.zeros(shape))) == inner


@with_muon
def test_muon_has_the_matrices_inside_and_adamw_the_rest(heads):
    """In no head of any kind does Muon get a table of tokens."""
    for kind, head in heads.items():
        names = {weight: name for name, weight in head.named_parameters()}
        muon, adamw = make_optimizers(head, TrainConfig(optimizer="muon"))
        assert (type(muon), type(adamw)) == (torch.optim.Muon, torch.optim.AdamW), kind
        inside = {names[w]: w for group in muon.param_groups for w in group["params"]}
        outside = {names[w]: w for group in adamw.param_groups for w in group["params"]}
        assert all(weight.ndim == 2 and VOCAB not in weight.shape for weight in inside.values()), kind
        for name, weight in outside.items():
            assert weight.ndim == 1 or min(weight.shape) == 1 or VOCAB in weight.shape, (kind, name)


@with_muon
def test_a_step_of_muon_is_torchs_muon_and_adamw_apart(target, batches):
    """Three steps, bit for bit, each with the run's rate."""
    head = make_tiny_head(target, size=None, steps=2).train()
    config = TrainConfig(optimizer="muon", lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), clip=1e9)
    twin = copy.deepcopy(head)
    strategy = Strategy(head, config, Launch())
    named = dict(twin.named_parameters())
    tables = {"lm_head.weight"}
    inside = [w for name, w in named.items() if w.ndim == 2 and name not in tables]
    rest = [w for name, w in named.items() if w.ndim == 2 and name in tables]
    vectors = [w for w in named.values() if w.ndim == 1]
    muon = torch.optim.Muon(inside, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.8, 0.9),
        fused=True,
    )
    for step in range(3):
        rate = 0.01 / (step + 1)
        set_learning_rate(strategy.groups(), rate)
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = rate
        batch = batches[step]
        one_step(strategy, [batch], target, Meter())
        (twin.loss(batch, target).total / batch.loss_rows()).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for name, weight in head.named_parameters():
            assert torch.equal(weight, named[name]), (step, name)


# What is refused


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "muon"}, ("train.optimizer muon", "use FSDP2, DDP or adamw")),
        ({"ema": 0.99}, ("train.ema", "use FSDP2 or DDP")),
    ],
)
def test_what_zero_cannot_do_is_refused(strategy, changes, words):
    with pytest.raises(UserError) as caught:
        refuse_optimizer(TrainConfig(**changes), strategy, CPU)
    assert all(word in str(caught.value) for word in (*words, strategy))


def test_adamw_in_8_bits_needs_a_gpu_and_its_library(monkeypatch):
    config = TrainConfig(optimizer="adamw-8bit")
    monkeypatch.setattr(optim.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match=r"train\.optimizer adamw-8bit: needs a CUDA GPU"):
        refuse_optimizer(config, "single", CPU)
    refuse_optimizer(config, "ddp", GPU)
    with pytest.raises(UserError, match="FSDP2's sharded tensors"):
        refuse_optimizer(config, "fsdp2", GPU)
    monkeypatch.setattr(optim.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install bitsandbytes"):
        refuse_optimizer(config, "single", GPU)


def test_torch_without_muon_is_told(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(UserError, match=r"has no Muon: use torch 2\.9 or later"):
        refuse_optimizer(TrainConfig(optimizer="muon"), "single", CPU)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2"])
@pytest.mark.parametrize("changes", [{}, {"ema": 0.9}, pytest.param({"optimizer": "muon"}, marks=with_muon)])
def test_what_works_is_not_refused(strategy, changes):
    refuse_optimizer(TrainConfig(**changes), strategy, CPU)


def test_plain_adamw_works_everywhere():
    for strategy in ("zero1", "zero2", "zero3"):
        refuse_optimizer(TrainConfig(), strategy, CPU)


# Steps that are left out


def pushed(weights: list[nn.Parameter], seed: int, poison: float | None = None) -> None:
    """Give every weight a gradient; one number of one of them may be poison."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    if poison is not None:
        weights[0].grad.view(-1)[0] = poison


def some_weights() -> list[nn.Parameter]:
    """Matrices and vectors."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 6), (5, 3))]


def make_one(name: str, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer as a training makes it."""
    if name == "muon":
        return torch.optim.Muon(weights, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return optim.adamw([{"params": weights, "weight_decay": 0.1}], TrainConfig(lr=0.1))


def remembered(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights, moments and step counts."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = [torch.as_tensor(value) for w in weights for _, value in sorted(optimizer.state.get(w, {}).items())]
    return [value.detach().clone() for value in (*weights, *state)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("good", [0, 1, 3])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_bad_step_leaves_everything_and_the_next_is_as_without_it(name, good, poison):
    """Weights, moments and step counts; also where the first step of all is bad."""
    straight, other = some_weights(), some_weights()
    one, two = make_one(name, straight), make_one(name, other)
    no, yes = torch.tensor(False), torch.tensor(True)
    for step in range(good):
        for weights, optimizer in ((straight, one), (other, two)):
            pushed(weights, step)
            step_unless(optimizer, no)
    before = remembered(two)
    for _ in range(2):
        pushed(other, 77, poison)
        step_unless(two, yes)
    after = remembered(two)
    if good:
        assert len(before) == len(after)
        assert all(torch.equal(a, b) for a, b in zip(before, after))
    else:  # a fused optimizer makes its moments even then: as they begin
        assert all(torch.equal(a, b) for a, b in zip(before, after[:2]))
        assert not any(value.any() for value in after[2:])
    for weights, optimizer in ((straight, one), (other, two)):
        pushed(weights, 99)
        step_unless(optimizer, no)
    assert all(torch.equal(a, b) for a, b in zip(remembered(one), remembered(two)))
    assert not torch.equal(remembered(two)[0], before[0])


def test_fused_adamw_decides_on_the_device():
    """It must not ask the host whether the step counts."""

    class Untold:
        """A flag that cannot be looked at."""

        def __init__(self, value: bool):
            self.value = value

        def float(self) -> Tensor:
            return torch.tensor(float(self.value))

        def __bool__(self) -> bool:
            raise AssertionError("the host was asked")

    weights = some_weights()
    optimizer = make_one("adamw", weights)
    before = remembered(optimizer)
    pushed(weights, 1)
    step_unless(optimizer, Untold(True))
    assert all(torch.equal(a, b) for a, b in zip(before, remembered(optimizer)))
    step_unless(optimizer, Untold(False))
    assert not torch.equal(before[0], remembered(optimizer)[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_goes_on_as_if_there_had_been_no_bad_step(target, batches, optimizer):
    """A loss that is not a number, between two steps."""
    config = TrainConfig(lr=1e-2, optimizer=optimizer)
    start = make_tiny_head(target, size=None, steps=2).train()
    one, two = (Strategy(copy.deepcopy(start), config, Launch()) for _ in range(2))
    walk(one, target, batches, 0, 2)
    walk(two, target, batches, 0, 1)
    before = copied(two)
    broken = copy.copy(batches[1])
    broken.taps_TKD = torch.full_like(broken.taps_TKD, math.nan)
    norm, flags = one_step(two, [broken], target, Meter())
    assert not math.isfinite(float(norm))
    assert flags.tolist() == [0.0, 1.0, 1.0]
    assert same(copied(two), before)
    walk(two, target, batches, 1, 2)
    assert same(copied(one), copied(two))


# The moving average


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_average_is_the_recurrence_by_hand(target, batches, optimizer):
    """Over ten steps; and the weights themselves know nothing of it."""
    start, decay = make_tiny_head(target, size=None, steps=2).train(), 0.9
    plain = Strategy(copy.deepcopy(start), TrainConfig(lr=1e-2, optimizer=optimizer), Launch())
    averaging = Strategy(copy.deepcopy(start), TrainConfig(lr=1e-2, optimizer=optimizer, ema=decay), Launch())
    expected = {name: value.double() for name, value in plain.weights().items()}
    for step in range(10):
        walk(plain, target, batches, step, step + 1)
        walk(averaging, target, batches, step, step + 1)
        for name, value in plain.weights().items():
            expected[name] = decay * expected[name] + (1 - decay) * value.double()
    assert same(plain.weights(), averaging.weights())
    for name, value in averaging.average.items():
        assert torch.allclose(value.double(), expected[name], rtol=1e-5, atol=1e-7), name
        assert not torch.equal(value, averaging.weights()[name]), name


def test_average_is_shown_and_the_weights_come_back(target, batches):
    """The exact bits of both, in evaluation mode and out of it; what is kept is the average."""
    strategy = Strategy(make_tiny_head(target, size=None, steps=2).train(), TrainConfig(lr=1e-2, ema=0.5), Launch())
    walk(strategy, target, batches, 0, 3)
    before, average = copied(strategy), {name: value.clone() for name, value in strategy.average.items()}
    with strategy.shown() as head:
        assert not head.training
        assert same({name: value.detach() for name, value in head.named_parameters()}, average)
        assert same(strategy.weights(), average)
    assert strategy.head.training
    assert same(copied(strategy), before)
    assert same(strategy.shown_weights(), average)
    assert same(copied(strategy), before)
    with strategy.averaged():
        assert same({name: value.detach() for name, value in strategy.head.named_parameters()}, average)
    assert same(copied(strategy), before)
    with pytest.raises(KeyError), strategy.averaged():
        raise KeyError
    assert same(copied(strategy), before)


def test_without_an_average_the_weights_are_shown(target, batches):
    strategy = Strategy(make_tiny_head(target, size=None, steps=2).train(), TrainConfig(lr=1e-2), Launch())
    walk(strategy, target, batches, 0, 1)
    before = strategy.weights()
    with strategy.shown() as head:
        assert same({name: value.detach() for name, value in head.state_dict().items()}, before)
    assert same(strategy.shown_weights(), before)


def test_an_average_of_a_part_leaves_the_frozen_rest(target, batches):
    """Frozen weights have no average and are shown as they are."""
    head = make_tiny_head(target, size=None, steps=2).train()
    head.lm_head.weight.requires_grad_(False)
    strategy = Strategy(head, TrainConfig(lr=1e-2, ema=0.5), Launch())
    walk(strategy, target, batches, 0, 2)
    shown = strategy.shown_weights()
    assert "lm_head.weight" not in strategy.average
    assert shown.keys() == head.state_dict().keys()
    for name, value in shown.items():
        assert torch.equal(value, strategy.average.get(name, head.state_dict()[name]))


# Stopped and continued


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ema": 0.7},
        {"lr_scale": {"*norm*": 2.0}, "weight_decay": 0.1},
        pytest.param({"optimizer": "muon"}, marks=with_muon),
        pytest.param({"optimizer": "muon", "ema": 0.7}, marks=with_muon),
    ],
    ids=lambda changes: "-".join(f"{key}" for key in changes) or "adamw",
)
def test_restored_and_continued_equals_straight(target, batches, tmp_path, changes):
    """Weights, moments and average, bit for bit, through files."""
    config = TrainConfig(**{"lr": 1e-2} | changes)
    start = make_tiny_head(target, size=None, steps=2).train()
    straight, before = (Strategy(copy.deepcopy(start), config, Launch()) for _ in range(2))
    walk(straight, target, batches, 0, 8)
    walk(before, target, batches, 0, 5)
    save_file(before.weights(), tmp_path / "weights")
    save_file(before.moments(), tmp_path / "moments")
    walk(before, target, batches, 5, 6)  # what was read out is a copy
    head = copy.deepcopy(start)
    head.load_state_dict(load_file(tmp_path / "weights"))
    after = Strategy(head, config, Launch())
    after.restore(load_file(tmp_path / "moments"))
    assert same(copied(after), load_file(tmp_path / "weights") | load_file(tmp_path / "moments"))
    walk(after, target, batches, 5, 8)
    assert same(copied(after), copied(straight))


# The scale of fp16 losses

HALF = Launch(precision="fp16")


def push(strategy: Strategy, strength: float = 1.0) -> tuple[float, bool]:
    """One step down a plain slope, which needs no half precision: the norm, and whether it was left out."""
    generator = torch.Generator().manual_seed(5)
    weights = [weight for _, weight in strategy.trained()]
    strategy.backward(
        strength * sum((weight * torch.randn(weight.shape, generator=generator)).sum() for weight in weights)
    )
    norm, bad = strategy.advance()
    return float(norm), bool(bad)


def scaled(target: Target, **changes) -> Strategy:
    """A strategy with a loss scale."""
    return Strategy(make_tiny_head(target, size=None, steps=2).train(), TrainConfig(**{"lr": 1e-2} | changes), HALF)


def test_scale_halves_on_overflow_and_grows_after_finite_steps(target, monkeypatch):
    monkeypatch.setattr(strategies, "GROWTH_STEPS", 3)
    strategy = scaled(target)
    first, seen = strategies.FIRST_SCALE, []
    for strength in (1.0, 1.0, 1.0, 1e36, 1.0, 1.0, 1e36, 1.0, 1.0, 1.0):
        before = copied(strategy)
        _, bad = push(strategy, strength)
        assert bad == (strength == 1e36)
        kept = {name: value for name, value in before.items() if not name.endswith(":")}  # all but the scale's own
        assert same({name: copied(strategy)[name] for name in kept}, kept) == bad
        seen.append(float(strategy.scaler.scale) / first)
    assert seen == [1, 1, 2, 1, 1, 1, 0.5, 0.5, 0.5, 1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_norm_and_clipping_are_those_of_unscaled_gradients(target, optimizer, clip):
    """The scale is a power of two: the same step as in full precision, to the last bits of the norm."""
    config = {"optimizer": optimizer, "clip": clip}
    one = scaled(target, **config)
    two = Strategy(copy.deepcopy(one.head), TrainConfig(**{"lr": 1e-2} | config), Launch())
    for strength in (1.0, 0.01, 100.0):
        (ours, bad), (plain, worse) = push(one, strength), push(two, strength)
        assert (bad, worse) == (False, False)
        assert ours == pytest.approx(plain, rel=1e-6)
    for name, value in two.weights().items():
        assert torch.allclose(one.weights()[name], value, rtol=1e-5, atol=1e-7), name


def test_clipped_gradients_have_the_norm_of_the_clip(target):
    strategy = scaled(target, clip=0.25)
    strategy.optimizers = [torch.optim.SGD(strategy.head.parameters(), lr=1.0)]
    before = strategy.weights()
    norm, _ = push(strategy)
    moved = math.sqrt(sum(float((value - before[name]).square().sum()) for name, value in strategy.weights().items()))
    assert norm > 0.25
    assert moved == pytest.approx(0.25, rel=1e-3)


def test_scale_is_saved_and_restored(target, monkeypatch):
    """With the count of finite steps: the next growth comes where it would have come."""
    monkeypatch.setattr(strategies, "GROWTH_STEPS", 4)
    strategy = scaled(target)
    for strength in (1e36, 1.0, 1.0, 1.0):
        push(strategy, strength)
    found = strategy.moments()
    assert float(found["scale:"]) == strategies.FIRST_SCALE / 2
    assert int(found["growth:"]) == 3
    fresh = scaled(target)
    fresh.head.load_state_dict(strategy.weights())
    fresh.restore(found)
    assert same(copied(fresh), copied(strategy))
    for one in (strategy, fresh):
        push(one)
        assert float(one.scaler.scale) == strategies.FIRST_SCALE
    assert same(copied(fresh), copied(strategy))


def test_scale_of_another_precision_is_left_aside(target):
    """A checkpoint of fp16 has a scale; who needs none reads on."""
    strategy = scaled(target)
    push(strategy)
    other = Strategy(make_tiny_head(target, size=None, steps=2).train(), TrainConfig(lr=1e-2), Launch())
    other.restore(strategy.moments())
    assert other.scaler is None
    assert other.moments().keys() == strategy.moments().keys() - {"scale:", "growth:"}
