"""Losses: plain forms ≡ their definitions in fp64, fast forms ≡ autograd of the plain ones; weights of the steps ≡ a loop."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.configs import UserError
from headwright.heads.losses import (
    LEAST,
    LOSSES,
    Guess,
    Taught,
    acceptance,
    choose_loss,
    decayed,
    dpace,
    rowdot,
    smooth_l1,
)

SHAPES = [(7, 401), (1, 2), (3, 1), (0, 5), (64, 33)]
NAMES = [*LOSSES, "topk-1", "topk-3", "topk-10"]  # 10 exceeds some of the widths above
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6}  # of values up to 30, and of slopes up to 1


def loss_named(name: str):
    """A loss by the names of this file."""
    kind, _, count = name.partition("-")
    return choose_loss(kind, int(count or 0))


def random_logits(shape, seed: int = 0, scale: float = 3.0):
    """Logits of p and of q, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(scale * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


def with_zeros(logits_PW):
    """A third of p is exactly zero, but never all of it."""
    logits_PW = logits_PW.clone()
    logits_PW[:, ::3] = -torch.inf
    logits_PW[:, 1 % logits_PW.shape[1]] = 0.0
    return logits_PW


def definition(name: str, p, logq) -> float:
    """The loss of one row, term by term, from fp64 lists."""
    q = [math.exp(b) for b in logq]
    alpha = sum(min(a, b) for a, b in zip(p, q))
    apart = sum(abs(a - b) for a, b in zip(p, q)) / 2
    forward = sum(a * (math.log(a) - b) for a, b in zip(p, logq) if a > 0)
    if name == "kl":
        return forward
    if name == "rkl":
        return sum(b * (c - math.log(max(a, LEAST))) for a, b, c in zip(p, q, logq))
    if name == "jsd":
        of_p = sum(a * math.log(2 * a / (a + b)) for a, b in zip(p, q) if a > 0)
        return (of_p + sum(b * math.log(2 * b / (a + b)) for a, b in zip(p, q) if b > 0)) / 2
    if name == "tv":
        return apart
    if name == "nla":
        return -math.log(max(alpha, LEAST))
    if name == "lk":
        blend = math.exp(-3 * (1 - apart))
        return blend * forward + (1 - blend) * apart
    best = sorted(range(len(p)), key=lambda w: -p[w])
    if name == "ce":
        return -logq[best[0]]
    return -sum(p[w] * logq[w] for w in best[: int(name.removeprefix("topk-"))])


def definitions(name: str, p_PW, logq_PW):
    """The loss of each row [P] by its definition."""
    rows = zip(p_PW.double().tolist(), logq_PW.double().tolist())
    return torch.tensor([definition(name, p, logq) for p, logq in rows], dtype=torch.float64)


def taught_and_guess(logits_PW, z_PW, dtype):
    """What a slope is given."""
    p_PW, z_PW = logits_PW.softmax(-1).to(dtype), z_PW.to(dtype)
    taught = Taught(p_PW, torch.xlogy(p_PW, p_PW).sum(-1))
    return taught, Guess(z_PW=z_PW, q_PW=z_PW.softmax(-1), top_P=z_PW.amax(-1), lse_P=z_PW.logsumexp(-1))


def by_autograd(name: str, p_PW, z_PW):
    """Value and ∂value/∂z of the plain form, in fp64."""
    z_PW = z_PW.double().clone().requires_grad_()
    value_P = loss_named(name).value(p_PW.double(), z_PW.log_softmax(-1))
    (slope_PW,) = torch.autograd.grad(value_P.sum(), z_PW)
    return value_P.detach(), slope_PW


def assert_close(found, wanted, tolerance: float, value_P=None) -> None:
    """Relative to the largest entry of a row (a slope: or to the row's value) where that is above one."""
    assert found.shape == wanted.shape
    assert bool(found.isfinite().all())
    scale = wanted.abs() if wanted.dim() == 1 else wanted.abs().amax(-1, keepdim=True)
    scale = scale if value_P is None else torch.maximum(scale, value_P.abs()[:, None])
    assert bool(((found.double() - wanted).abs() <= tolerance * scale.clamp_min(1)).all())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_plain_form_is_the_definition(name, shape, dtype, zeros):
    logits, z = random_logits(shape)
    p = (with_zeros(logits) if zeros else logits).softmax(-1).to(dtype)
    logq = z.to(dtype).log_softmax(-1)
    found = loss_named(name).value(p, logq)
    assert found.dtype == dtype
    assert_close(found, definitions(name, p, logq), 10 * TOLERANCE[dtype])


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fast_form_is_autograd_of_the_plain_form(name, shape, dtype, zeros):
    """Values and ∂/∂logits. It may overwrite q, and nothing else."""
    logits, z = random_logits(shape, seed=1)
    taught, guess = taught_and_guess(with_zeros(logits) if zeros else logits, z, dtype)
    before = taught.p_PW.clone(), taught.negentropy_P.clone(), guess.z_PW.clone(), guess.lse_P.clone()
    value, slope = loss_named(name).slope(taught, guess)
    assert value.dtype == slope.dtype == dtype
    assert value.shape == shape[:1]
    wanted_value, wanted_slope = by_autograd(name, taught.p_PW, guess.z_PW)
    assert_close(value, wanted_value, 10 * TOLERANCE[dtype])
    assert_close(slope, wanted_slope, TOLERANCE[dtype], wanted_value)
    assert all(map(torch.equal, before, (taught.p_PW, taught.negentropy_P, guess.z_PW, guess.lse_P)))


# Extreme logits

PEAKS = {  # (logits of p, logits of q) from a gap: sure of the same, sure of another, one sure and the other not; no ties
    "both sure": lambda gap: ([gap, 0.1, 0.2, -0.3, 0.4], [gap, 0.3, 0.0, 1.0, -0.2]),
    "sure of another": lambda gap: ([gap, 0.1, 0.2, -0.3, 0.4], [0.3, gap, 0.0, 1.0, -0.2]),
    "only p sure": lambda gap: ([0.1, 0.2, gap, -0.3, 0.4], [0.3, 0.7, 0.0, 1.0, -0.2]),
    "only q sure": lambda gap: ([0.3, 0.7, 0.0, 1.0, -0.2], [0.1, 0.2, gap, -0.3, 0.4]),
    "nothing in common": lambda gap: ([gap, gap + 1, 0.1, 0.2, 0.4], [0.3, 0.2, gap, gap + 0.9, -0.2]),
    "far from zero": lambda gap: ([gap, gap + 1, gap, gap + 2, gap], [-gap, 0.5 - gap, 2 - gap, 1 - gap, -gap - 3]),
}


def peaks(kind: str, gap: float):
    """One row of each."""
    return (torch.tensor([part], dtype=torch.float64) for part in PEAKS[kind](gap))


@pytest.mark.parametrize("gap", [6.0, 12.0, 40.0, 120.0, 200.0])
@pytest.mark.parametrize("kind", PEAKS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_extreme_logits(name, dtype, kind, gap):
    """Finite and right where p or q underflows: by the definition, and by autograd of the plain form in fp64."""
    logits, z = peaks(kind, gap)
    taught, guess = taught_and_guess(logits, z, dtype)
    p, logq = taught.p_PW, guess.z_PW.double().log_softmax(-1)
    value, slope = loss_named(name).slope(taught, guess)
    wanted_value, wanted_slope = by_autograd(name, p, guess.z_PW)
    assert_close(wanted_value, definitions(name, p, logq), TOLERANCE[dtype])  # Σp = 1 is as exact as the dtype
    assert_close(value, wanted_value, 10 * TOLERANCE[dtype])
    assert_close(slope, wanted_slope, TOLERANCE[dtype], wanted_value)


# What each loss is


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    rows=st.integers(1, 4),
    width=st.integers(1, 9),
    shift=st.floats(-50, 50),
    seed=st.integers(0, 9999),
)
def test_slopes_sum_to_zero_and_follow_the_tokens(name, rows, width, shift, seed):
    """A constant on the logits changes nothing; another order of the tokens is another order of the slope."""
    logits, z = random_logits((rows, width), seed)
    loss = loss_named(name)
    value, slope = loss.slope(*taught_and_guess(logits, z, torch.float64))
    assert torch.allclose(slope.sum(-1), torch.zeros(rows, dtype=torch.float64), atol=1e-13)
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    moved_value, moved_slope = loss.slope(
        *taught_and_guess(logits[:, order] + shift, z[:, order] - shift, torch.float64)
    )
    assert torch.allclose(moved_value, value, rtol=1e-10, atol=1e-12)
    assert torch.allclose(moved_slope, slope[:, order], rtol=1e-10, atol=1e-12)


def plain(name: str, p, q):
    """A plain form, of p and q."""
    return loss_named(name).value(p, q.log())


def test_how_the_losses_hang_together():
    logits, z = random_logits((9, 50), seed=2)
    p, q = logits.softmax(-1), z.softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    assert torch.allclose(plain("rkl", p, q), plain("kl", q, p))
    assert torch.allclose(plain("jsd", p, q), plain("jsd", q, p))
    assert torch.allclose(plain("jsd", p, q), (plain("kl", p, (p + q) / 2) + plain("kl", q, (p + q) / 2)) / 2)
    assert torch.allclose(acceptance(p, q.log()), 1 - 0.5 * (p - q).abs().sum(-1))
    assert torch.allclose(plain("nla", p, q), -(1 - plain("tv", p, q)).log())
    assert torch.allclose(plain("kl", p, q) + entropy, F.cross_entropy(z, p, reduction="none"))
    assert torch.allclose(choose_loss("topk", 50).value(p, q.log()), plain("kl", p, q) + entropy)
    assert torch.allclose(plain("topk-1", p, q), p.amax(-1) * plain("ce", p, q))
    assert torch.allclose(plain("ce", p, q), F.cross_entropy(z, p.argmax(-1), reduction="none"))
    blend = (-3 * acceptance(p, q.log())).exp()
    assert torch.allclose(plain("lk", p, q), torch.lerp(plain("tv", p, q), plain("kl", p, q), blend))


@pytest.mark.parametrize("name", ["kl", "rkl", "jsd", "tv", "nla", "lk"])
def test_equal_distributions_have_nothing_to_lose(name):
    logits, _ = random_logits((4, 6))
    taught, guess = taught_and_guess(logits, logits, torch.float64)
    value, slope = loss_named(name).slope(taught, guess)
    assert torch.allclose(value, torch.zeros(4, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(plain(name, taught.p_PW, taught.p_PW), torch.zeros(4, dtype=torch.float64), atol=1e-14)
    if name in ("kl", "rkl", "jsd"):
        assert torch.allclose(slope, torch.zeros_like(slope), atol=1e-14)


def test_the_blend_of_lk_is_a_constant():
    """Its slope is that of a fixed mixture, by hand."""
    logits, z = random_logits((7, 401), seed=3)
    p, q = logits.softmax(-1), z.softmax(-1)
    inside = (q < p).double()
    of_alpha = q * (inside - (inside * q).sum(-1, keepdim=True))
    blend = torch.exp(-3 * torch.minimum(p, q).sum(-1, keepdim=True))
    _, found = loss_named("lk").slope(*taught_and_guess(logits, z, torch.float64))
    assert torch.allclose(found, blend * (q - p) - (1 - blend) * of_alpha, rtol=1e-12, atol=1e-14)


def test_top_k_is_by_the_target_and_ignores_the_rest():
    """What the head says among the other tokens enters by q's normaliser alone."""
    p = torch.tensor([[0.5, 0.1, 0.3, 0.1]], dtype=torch.float64)
    z = torch.tensor([[0.0, 9.0, 1.0, -2.0]], dtype=torch.float64)
    logq = z.log_softmax(-1)
    assert torch.allclose(choose_loss("topk", 2).value(p, logq), -(0.5 * logq[:, 0] + 0.3 * logq[:, 2]))
    _, slope = choose_loss("topk", 2).slope(*taught_and_guess(p.log(), z, torch.float64))
    q = logq.exp()[0]
    assert torch.allclose(slope[0], 0.8 * q - torch.tensor([0.5, 0.0, 0.3, 0.0], dtype=torch.float64))


def test_unknown_loss():
    with pytest.raises(UserError, match=r"head\.loss 'mse': there are kl, rkl, jsd, tv, nla, lk, ce, topk"):
        choose_loss("mse")


@pytest.mark.parametrize("shape", [(7, 401), (0, 5), (3, 1)], ids=str)
def test_row_dot_and_rows(shape):
    a, b = random_logits(shape)
    assert torch.allclose(rowdot(a, b), (a * b).sum(-1), rtol=1e-12)
    taught = Taught(a, b.sum(-1))
    for rows in (slice(1, 3), torch.arange(shape[0]).flip(0)):
        assert torch.equal(taught.rows(rows).p_PW, a[rows])
        assert torch.equal(taught.rows(rows).negentropy_P, b.sum(-1)[rows])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(6, 8), (3, 1), (0, 5)], ids=str)
def test_smooth_l1_is_torchs(shape, dtype):
    """Both branches, the edge between them, and equal features; values and gradients of both sides."""
    guess, feature = (part.to(dtype).requires_grad_() for part in random_logits(shape, scale=1.0))
    with torch.no_grad():
        guess[:1] = feature[:1]
        feature[1:2] = feature[1:2].round()
        guess[1:2] = feature[1:2] + torch.linspace(1.0, 1.1, shape[1])
        guess[2:3] += 1e4
    ours = smooth_l1(guess, feature)
    theirs = F.smooth_l1_loss(guess, feature, reduction="none").mean(-1)
    assert_close(ours, theirs, TOLERANCE[dtype])
    weights = torch.arange(1.0, shape[0] + 1, dtype=dtype)
    found, wanted = (torch.autograd.grad(side @ weights, (guess, feature)) for side in (ours, theirs))
    for mine, their in zip(found, wanted):
        assert_close(mine, their, TOLERANCE[dtype])


# Weights of the steps


@pytest.mark.parametrize("base", [0.5, 0.8, 1.0])
def test_decay_is_powers_of_the_base(base):
    weights = decayed(torch.rand(3, 5, dtype=torch.float64), base)
    assert torch.allclose(weights, torch.tensor([[base**i for i in range(5)]] * 3, dtype=torch.float64), rtol=1e-15)
    assert decayed(torch.zeros(0, 4), base).shape == (0, 4)


def dpace_by_hand(right: list[float], bears: list[bool], floor: float) -> list[float]:
    """The weight of each step of one row: Σ over the steps from it on of the probability that the step is passed."""
    reached, passed = [], 1.0
    for share, counts in zip(right, bears):
        passed *= floor + (1 - floor) * share
        reached.append(passed if counts else 0.0)
    return [sum(reached[j:]) for j in range(len(right))]


@settings(max_examples=60, deadline=None)
@given(
    floor=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    rows=st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), st.booleans()), min_size=4, max_size=4),
        max_size=5,
    ),
)
def test_dpace_is_its_loop(floor, rows):
    """Chains that stop early, with holes, or that bear nothing."""
    right = torch.tensor([[share for share, _ in row] for row in rows], dtype=torch.float64).reshape(-1, 4)
    bears = torch.tensor([[counts for _, counts in row] for row in rows], dtype=torch.bool).reshape(-1, 4)
    wanted = torch.tensor([dpace_by_hand(*zip(*row), floor) for row in rows], dtype=torch.float64).reshape(-1, 4)
    assert torch.allclose(dpace(right, bears, floor), wanted, rtol=1e-12)
    assert torch.allclose(dpace(right, bears.double(), floor), wanted, rtol=1e-12)


def test_dpace_ends():
    """Floor 1 counts the steps that follow; floor 0 stops at the first miss; what comes after the end counts nothing."""
    right, bears = torch.tensor([[0.5, 0.0, 1.0, 1.0]]), torch.tensor([[True, True, True, False]])
    assert dpace(right, bears, 1.0).tolist() == [[3.0, 2.0, 1.0, 0.0]]
    assert dpace(right, bears, 0.0).tolist() == [[0.5, 0.0, 0.0, 0.0]]
    assert dpace(right, bears).tolist() == [[0.75 + 0.375 + 0.375, 0.75, 0.375, 0.0]]
