"""KL, TV and LK against formulas written out in fp64, and their gradients."""

import pytest
import torch

from headwright.configs import UserError
from headwright.heads.losses import acceptance, choose_loss, kl, lk, tv

SHAPES = [(7, 401), (1, 2), (3, 1), (0, 5), (64, 33)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def case(shape, seed: int = 0, dtype=torch.float64, zeros: bool = False):
    """p and logits of q."""
    generator = torch.Generator().manual_seed(seed)
    logits_p, logits_q = (3 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    if zeros:
        logits_p[:, ::3] = -torch.inf
        logits_p[:, 1 % shape[1]] = 0.0
    return logits_p.softmax(-1).to(dtype), logits_q.to(dtype)


def naive_kl(p, q):
    return torch.stack([sum((a * (a / b).log() for a, b in zip(r, s) if a > 0), r.sum() * 0) for r, s in zip(p, q)])


def naive_tv(p, q):
    return 0.5 * (p - q).abs().sum(-1)


def naive(name, p, q):
    """The loss of each row by its definition."""
    if not len(p):
        return torch.zeros(0, dtype=p.dtype)
    blend = torch.exp(-3 * (1 - naive_tv(p, q)))
    return {
        "kl": lambda: naive_kl(p, q),
        "tv": lambda: naive_tv(p, q),
        "lk": lambda: blend * naive_kl(p, q) + (1 - blend) * naive_tv(p, q),
    }[name]()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["kl", "tv", "lk"])
def test_values(name, shape, dtype, zeros):
    p, logits = case(shape, dtype=dtype, zeros=zeros)
    ours = choose_loss(name).value(p, logits.log_softmax(-1))
    theirs = naive(name, p.double(), logits.double().softmax(-1))
    assert ours.shape == shape[:1]
    assert ours.dtype == dtype
    assert torch.allclose(ours.double(), theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def gradient(loss, p, logits):
    logits = logits.clone().requires_grad_()
    loss(p, logits.log_softmax(-1)).sum().backward()
    return logits.grad


def formula(name, p, q):
    """∂loss/∂logits of q, by hand."""
    of_kl = q - p
    inside = (q < p).to(q.dtype)  # where min(p, q) is q
    of_alpha = q * (inside - (inside * q).sum(-1, keepdim=True))
    blend = torch.exp(-3 * torch.minimum(p, q).sum(-1, keepdim=True))
    return {"kl": of_kl, "tv": -of_alpha, "lk": blend * of_kl - (1 - blend) * of_alpha}[name]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] > 1], ids=str)
@pytest.mark.parametrize("name", ["kl", "tv", "lk"])
def test_gradients(name, shape, dtype):
    """The blend of LK is detached: its gradient is that of a fixed mixture."""
    p, logits = case(shape, seed=1, dtype=dtype)
    found = gradient(choose_loss(name).value, p, logits)
    wanted = formula(name, p.double(), logits.double().softmax(-1))
    assert torch.allclose(found.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_kl_has_the_gradient_of_soft_cross_entropy():
    p, logits = case((7, 401))
    cross_entropy = gradient(lambda p, logq: -(p * logq).sum(-1), p, logits)
    assert torch.allclose(gradient(kl, p, logits), cross_entropy, rtol=1e-12, atol=1e-15)
    entropy = -(p * p.log()).sum(-1)
    value = torch.nn.functional.cross_entropy(logits, p, reduction="none")
    assert torch.allclose(kl(p, logits.log_softmax(-1)) + entropy, value)


@pytest.mark.parametrize("zeros", [False, True])
def test_acceptance_is_one_minus_total_variation(zeros):
    p, logits = case((9, 50), zeros=zeros)
    q = logits.softmax(-1)
    assert torch.allclose(acceptance(p, q.log()), 1 - 0.5 * (p - q).abs().sum(-1))
    assert torch.allclose(tv(p, q.log()) + acceptance(p, q.log()), torch.ones(9, dtype=torch.float64))


def test_equal_and_disjoint_distributions():
    """The ends of the scale: nothing to lose, and nothing in common."""
    p, _ = case((4, 6))
    for loss in (kl, tv, lk):
        assert torch.allclose(loss(p, p.log()), torch.zeros(4, dtype=torch.float64), atol=1e-12)
    certain = torch.tensor([[1.0, 0.0, 0.0]])
    far = torch.tensor([[-40.0, 0.0, -40.0]]).log_softmax(-1)
    assert float(tv(certain, far)) == pytest.approx(1.0)
    assert float(kl(certain, far)) == pytest.approx(40.0)
    assert float(lk(certain, far)) == pytest.approx(40.0), "no overlap: all of it is KL"
    assert gradient(kl, certain, torch.tensor([[-40.0, 0.0, -40.0]])).isfinite().all()


def test_unknown_loss():
    with pytest.raises(UserError, match=r"head\.loss 'mse': there are kl, rkl, jsd, tv, nla, lk, ce, topk"):
        choose_loss("mse")
