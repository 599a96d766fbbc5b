"""Half-precision targets under heads that train in fp32 and serve in the target's dtype; and the same on a GPU."""

import pytest
import torch
from conftest import TAPS, make_model, make_tiny_head, make_tokenizer

from headwright.data.batch import pack
from headwright.data.generate import Question, answer
from headwright.data.sampling import Policy
from headwright.data.target import Target
from headwright.eval.decode import decode_plain, speculate
from headwright.heads.draft_tree import TreeShape
from headwright.heads.saved import load_head, save_head

CHAIN, TREE = TreeShape("chain", 3, 1, 3), TreeShape("dynamic", 3, 2, 6)
HAS_GPU = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")])]
PROMPTS = [[5, 6, 7, 8, 9], list(range(40, 80))]


def half_target(device: str, dtype: torch.dtype = torch.bfloat16) -> Target:
    """A tiny target in half precision; checked at loading as any other."""
    return Target(make_model().to(device, dtype), make_tokenizer(), "tiny-half", TAPS)


@pytest.mark.parametrize("fc_norm", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_fp32_head_trains_on_a_half_precision_target(device, fc_norm):
    """Loss and gradients of the bf16 target's features are those of the same features on the fp32 target, up to rounding."""
    target, exact = half_target(device), Target(make_model().to(device), make_tokenizer(), "tiny", TAPS)
    head = make_tiny_head(exact, fc_norm=fc_norm).to(device)
    documents = answer(exact, [Question(ids, Policy()) for ids in PROMPTS], 12)
    batch = pack(documents).to(device, torch.float32)
    losses, gradients = [], []
    for side in (target, exact):
        head.zero_grad()
        loss = head.loss(batch, side).total
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(torch.cat([weight.grad.flatten() for weight in head.parameters()]))
        assert head.agreement(batch, side, 3).shape == (len(batch.ids_T), 3)
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert torch.cosine_similarity(gradients[0], gradients[1], dim=0) > 0.98


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=lambda shape: shape.name)
@pytest.mark.parametrize("policy", [Policy(), Policy(0.8, top_k=20)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("device", DEVICES)
def test_half_precision_heads_decode(device, policy, shape, tmp_path):
    """Saved, loaded in the target's dtype, decoded: the length is right, and greedy text parts from plain text at near-ties
    only."""
    target = half_target(device)
    save_head(make_tiny_head(target), tmp_path)
    head = load_head(tmp_path, target).eval()
    assert {weight.dtype for weight in head.parameters()} == {torch.bfloat16}
    for prompt in PROMPTS:
        text = speculate(target, head, prompt, shape, 12, policy, seed=3).tokens
        assert len(text) == 12 or text[-1] in target.spec.eos_token_ids
        plain = decode_plain(target, prompt, 12).tokens
        parted = next((i for i, (a, b) in enumerate(zip(text, plain)) if a != b), None)
        if policy.greedy and parted is not None:
            ids = torch.tensor([prompt + plain[:parted]], device=device)
            logits = target.logits(target.features(ids).last_BND[0, -1]).float()
            assert abs(logits[text[parted]] - logits[plain[parted]]) < 0.05 * logits.abs().max()


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=lambda shape: shape.name)
def test_greedy_identity_on_a_gpu(shape):
    """fp32 on the GPU: the same tokens as plain decoding there."""
    target = Target(make_model().to("cuda"), make_tokenizer(), "tiny", TAPS)
    head = make_tiny_head(target).to("cuda")
    for prompt in PROMPTS:
        assert speculate(target, head, prompt, shape, 24).tokens == decode_plain(target, prompt, 24).tokens
