"""The training-time test: trimmed rollout ≡ dense reference ≡ drafting with a cache ≡ the paper, values and gradients."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import make_model, make_target, make_tiny_head, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from headwright.data.batch import DocumentFeatures, last_rows, pack
from headwright.data.rows import plan_rows
from headwright.data.sampling import Policy
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab
from headwright.heads import fused, layers, rotary
from headwright.heads.base import Context, make_head
from headwright.heads.draft_tree import TreeShape
from headwright.heads.eagle3 import Layer
from headwright.heads.layers import Block, Sizes
from headwright.heads.recurrent import Drafting
from headwright.heads.rotary import served_rope
from headwright.heads.ttt import rollout, rollout_reference

WIDTH, TAPS = 32, 3


@pytest.fixture(scope="module")
def target64() -> Target:
    """The tiny llama in fp64."""
    return Target(make_model().double(), make_tokenizer(), "tiny-llama", (1, 3, 6))


@pytest.fixture(scope="module")
def heads(tiny, target64):
    """A head with every weight random, by dtype."""
    found = {}
    for target in (tiny, target64):
        head = make_tiny_head(target, steps=3)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, weight in head.named_parameters():
                if "norm" in name:
                    weight.add_(torch.rand(weight.shape, generator=generator) * 0.5)
        found[target.dtype] = head.to(target.dtype)
    return found


def make_document(mask: list[bool], seed: int, target: Target) -> DocumentFeatures:
    """Random states and tokens under a given mask."""
    generator = torch.Generator().manual_seed(seed)
    mask_T = torch.tensor(mask)
    ids_T = torch.randint(target.spec.vocab_size, (len(mask),), generator=generator)
    taps = torch.randn(len(mask), TAPS, WIDTH, generator=generator, dtype=torch.float64).to(target.dtype)
    rows = len(last_rows(mask_T))
    last = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(target.dtype)
    logits = target.logits(last)
    return DocumentFeatures(ids_T, mask_T, taps, last, logits.argmax(-1), logits.logsumexp(-1).float())


MASKS = (
    [False, False, True, True, True, True, False, True, True, True, False],  # two turns
    [False] * 3 + [True] * 7,
    [True, True, True, True],  # nothing but an answer
    [False, False, True],  # one response token
    [False, True, False, True, False, True, True],  # short turns
    [False] * 5,  # nothing to learn
)


def documents_for(target: Target, masks=MASKS) -> list[DocumentFeatures]:
    """One document per mask."""
    return [make_document(mask, 100 + index, target) for index, mask in enumerate(masks)]


def gradients(head, loss) -> dict[str, torch.Tensor]:
    """Gradient of each parameter; zero where it does not take part."""
    names = [name for name, _ in head.named_parameters()]
    found = torch.autograd.grad(loss, list(head.parameters()), allow_unused=True)
    return {n: torch.zeros_like(w) if g is None else g for n, w, g in zip(names, head.parameters(), found)}


def assert_all_close(left: dict, right: dict, tolerance: float) -> None:
    """Equal names and values, relative to the largest value."""
    assert left.keys() == right.keys()
    for name in left:
        scale = right[name].abs().max().clamp_min(1.0)
        assert (left[name] - right[name]).abs().max() <= tolerance * scale, name


def trimmed_rollout(head, target, batch, steps: int):
    """Outputs of the computed rows at each step, and the plan."""
    plan = plan_rows(batch, steps)
    feature_CH = head.fuse(batch.taps_TKD[plan.context_C])
    return rollout([head.midlayer], target.embed, feature_CH, plan), plan


def compare_with_reference(head, target, batch, steps: int, tolerance: float) -> None:
    """Values at computed rows and gradients through a random loss on the rows that bear loss."""
    trimmed, plan = trimmed_rollout(head, target, batch, steps)
    dense = rollout_reference([head.midlayer], target.embed, head.fuse(batch.taps_TKD), batch, steps)
    generator = torch.Generator().manual_seed(0)
    losses = [0.0, 0.0]
    for i in range(steps):
        computed = plan.rows_P[: plan.counts[i]]
        assert torch.allclose(trimmed[i], dense[i][computed], rtol=tolerance, atol=tolerance * 10), f"step {i}"
        probe = torch.randn(len(batch.ids_T), WIDTH, generator=generator, dtype=torch.float64).to(target.dtype)
        bears = plan.bears_PI[: plan.counts[i], i]
        rows = computed[bears]
        losses[0] = losses[0] + (trimmed[i][bears] * probe[rows]).sum()
        losses[1] = losses[1] + (dense[i][rows] * probe[rows]).sum()
    assert_all_close(gradients(head, losses[0]), gradients(head, losses[1]), tolerance * 100)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_rollout_equals_dense_reference_fp64(heads, target64, steps):
    batch = pack(documents_for(target64))
    compare_with_reference(heads[torch.float64], target64, batch, steps, 1e-12)


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_rollout_equals_dense_reference_fp32(heads, tiny, steps):
    compare_with_reference(heads[torch.float32], tiny, pack(documents_for(tiny)), steps, 2e-5)


@settings(max_examples=25, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=13), min_size=1, max_size=4),
    steps=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_rollout_equals_dense_reference_on_any_batch(heads, target64, masks, steps, seed):
    """Any lengths, any turns, documents without an answer."""
    batch = pack([make_document(mask, seed + i, target64) for i, mask in enumerate(masks)])
    compare_with_reference(heads[torch.float64], target64, batch, steps, 1e-11)


# The paper's loss, written from its equations: one row at a time, as serving would run it.


def rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turn(x_NE, position: int, base: float):
    """Rotary position, pair by pair."""
    half = x_NE.shape[-1] // 2
    angle = position * base ** (-2 * torch.arange(half, dtype=torch.float64) / (2 * half))
    first, second = x_NE[:, :half], x_NE[:, half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
    ).to(x_NE.dtype)


class PaperHead:
    """One row of EAGLE-3 at a time, with the head's weights and none of its code."""

    def __init__(self, head, target):
        self.w, self.spec, self.embedding = dict(head.named_parameters()), head.spec, target.embed

    def norm(self, x, name):
        return rms(x, self.w[f"{name}.weight"], self.spec.rms_norm_eps)

    def feature(self, taps_KD):
        return self.w["fc.weight"] @ torch.cat([self.norm(x, f"fc_norm.{k}") for k, x in enumerate(taps_KD)])

    def qkv(self, token, feature, position):
        x = torch.cat([self.norm(self.embedding(token), "midlayer.input_layernorm"),
                       self.norm(feature, "midlayer.hidden_norm")])  # fmt: skip
        q, k, v = (
            (self.w[f"midlayer.self_attn.{n}_proj.weight"] @ x).view(-1, self.spec.head_dim) for n in ("q", "k", "v")
        )
        base = self.spec.rope["rope_theta"]
        return turn(q, position, base), turn(k, position, base), v

    def layer(self, feature, q, keys, values):
        heads = []
        for h in range(self.spec.num_heads):
            g = h // (self.spec.num_heads // self.spec.num_kv_heads)
            k, v = torch.stack([key[g] for key in keys]), torch.stack([value[g] for value in values])
            heads.append((k @ q[h] / self.spec.head_dim**0.5).softmax(0) @ v)
        middle = feature + self.w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        x = self.norm(middle, "midlayer.post_attention_layernorm")
        up = self.w["midlayer.mlp.up_proj.weight"] @ x
        return middle + self.w["midlayer.mlp.down_proj.weight"] @ (
            F.silu(self.w["midlayer.mlp.gate_proj.weight"] @ x) * up
        )

    def rollout_row(self, document, row: int, steps: int):
        """log q at steps 0 …, of a rollout that starts at `row`, as far as the document's tokens go."""
        ids = document.ids_T
        features = [self.feature(taps) for taps in document.taps_TKD[: row + 1]]
        context = [self.qkv(ids[t + 1], features[t], t) for t in range(row + 1)]
        keys, values = [k for _, k, _ in context], [v for _, _, v in context]
        query, hidden, out = context[row][0], features[row], []
        for i in range(steps):
            if row + 1 + i >= len(ids):
                break
            if i > 0:
                query, key, value = self.qkv(ids[row + 1 + i], hidden, row + i)
                keys, values = [*keys, key], [*values, value]
            hidden = self.layer(hidden, query, keys, values)
            out.append((self.w["lm_head.weight"] @ self.norm(hidden, "norm")).log_softmax(-1))
        return out


def paper_rows(head, target, document, steps: int):
    """(step, p over the draft vocabulary, log q, target's first choice) of every loss-bearing row."""
    paper, mask = PaperHead(head, target), document.mask_T.tolist()
    stored = last_rows(document.mask_T).tolist()
    for row in range(len(mask) - 1):
        if not mask[row + 1]:
            continue
        for i, logq in enumerate(paper.rollout_row(document, row, steps)):
            if row + 2 + i >= len(mask) or not all(mask[row + 1 : row + 3 + i]):
                break
            logits = target.lm_head.weight @ document.last_RD[stored.index(row + 1 + i)]
            yield i, logits, logq


def paper_loss(head, target, documents, steps: int, weight: float, drop: bool = True):
    """Σ_i weight^i Σ_rows KL(p ‖ q_i); a row whose first choice cannot be said is left out."""
    total, kept = sum(w.sum() * 0.0 for w in head.parameters()), head.vocab.ids_W
    for document in documents:
        for i, logits, logq in paper_rows(head, target, document, steps):
            if drop and int(logits.argmax()) not in kept.tolist():
                continue
            p = logits[kept].softmax(-1)
            total = total + weight**i * (p * (p.log() - logq)).sum()
    return total


@pytest.mark.parametrize("out_of_vocab", ["drop", "renormalise"])
def test_loss_is_that_of_the_paper(target64, out_of_vocab):
    head = make_tiny_head(target64, steps=3, step_weight=0.7, out_of_vocab=out_of_vocab).double()
    documents = documents_for(target64)
    ours = head.loss(pack(documents), target64).total
    theirs = paper_loss(head, target64, documents, 3, 0.7, out_of_vocab == "drop")
    assert float(theirs.detach()) > 1.0
    assert torch.allclose(ours.double(), theirs, rtol=1e-6)
    assert_all_close(gradients(head, ours), gradients(head, theirs), 2e-6)


def test_dropping_and_renormalising_differ_exactly_by_the_rows_that_cannot_be_said(tiny):
    """With the same weights the losses differ, and with a vocabulary that holds every first choice they do not."""
    documents = documents_for(tiny)
    batch = pack(documents)

    def totals(size):
        return [
            float(make_tiny_head(tiny, size, out_of_vocab=way).loss(batch, tiny).total.detach())
            for way in ("drop", "renormalise")
        ]

    dropped, whole = totals(100)
    assert dropped < whole
    assert torch.allclose(*map(torch.tensor, totals(None)), rtol=1e-6)


def test_packed_equals_sum_of_documents(heads, target64):
    head, documents = heads[torch.float64], documents_for(target64, MASKS[:5])
    packed = head.loss(pack(documents), target64)
    alone = [head.loss(pack([document]), target64) for document in documents]
    total = sum(part.total for part in alone)
    assert torch.allclose(packed.total, total, rtol=1e-6)
    assert_all_close(gradients(head, packed.total), gradients(head, total), 1e-5)
    for name, (top, bottom) in packed.metrics.items():
        assert int(bottom) == sum(int(part.metrics[name][1]) for part in alone), name
        assert torch.allclose(top.double(), sum(part.metrics[name][0].double() for part in alone), rtol=1e-5), name


def test_order_of_documents_does_not_matter(heads, target64):
    head, documents = heads[torch.float64], documents_for(target64)
    there, back = (head.loss(pack(d), target64).total for d in (documents, documents[::-1]))
    assert torch.allclose(there, back, rtol=1e-6)


def test_attention_does_not_leak_across_documents(heads, tiny):
    """Another neighbour changes nothing, to the last bit."""
    head = heads[torch.float32]
    first, second, last = documents_for(tiny)[:3]
    other = replace(
        second,
        ids_T=second.ids_T.flip(0),
        taps_TKD=second.taps_TKD.flip(0) * 3,
        mask_T=second.mask_T,
    )
    outputs = []
    for neighbour in (second, other):
        batch = pack([first, neighbour, last])
        steps, plan = trimmed_rollout(head, tiny, batch, 3)
        own = [(batch.segment_T[plan.rows_P] != 1)[:count] for count in plan.counts]
        outputs.append([step[rows] for step, rows in zip(steps, own)])
    for a, b in zip(*outputs):
        assert len(a) > 0
        assert torch.equal(a, b)


def test_prompt_is_read_and_future_is_not(heads, tiny):
    """A change in the prompt reaches the answer's rows; a change after a row never reaches back."""
    head, document = heads[torch.float32], documents_for(tiny)[1]

    def hidden(changed):
        batch = pack([changed])
        steps, plan = trimmed_rollout(head, tiny, batch, 2)
        return steps[0], plan.rows_P

    base, rows = hidden(document)
    prompt, future = document.taps_TKD.clone(), document.taps_TKD.clone()
    prompt[0] *= -2
    future[6:] *= -2
    assert not torch.allclose(hidden(replace(document, taps_TKD=prompt))[0], base, atol=1e-4)
    kept = hidden(replace(document, taps_TKD=future))[0]
    assert torch.equal(kept[rows < 6], base[rows < 6])
    assert not torch.allclose(kept[rows >= 6], base[rows >= 6], atol=1e-4)


@pytest.mark.parametrize("masks", [MASKS[:2], MASKS[5:]])
def test_batch_without_loss(tiny, masks):
    """Zero loss and zero, finite gradients for every parameter: a rank without work still takes part in a step."""
    head = make_tiny_head(tiny, steps=3)
    out = head.loss(pack(documents_for(tiny, masks)).without_loss(), tiny)
    assert float(out.total.detach()) == 0.0
    grads = torch.autograd.grad(out.total, list(head.parameters()), allow_unused=True)
    for grad in grads:
        assert grad is None or (grad.isfinite().all() and not grad.any())
    assert all(float(bottom) == 0 for _, bottom in out.metrics.values())


# Rollout ≡ drafting with a cache


def draft_along(head, target, document, row: int, steps: int):
    """Hidden states and logits of `steps` draft steps after rows 0 … row are committed, fed the document's own tokens."""
    state = head.start(1, row + 1 + steps)
    feature = head.fuse(document.taps_TKD[None, : row + 1])
    embedding = target.embed(document.ids_T[None, 1 : row + 2])
    hidden = head.run(state, embedding, feature, state.next_slots(row + 1), state.visible(row + 1))
    state.advance(row + 1)
    drafting = Drafting(head, state, target, hidden[:, -1:], steps)
    yield hidden[0, -1], head.logits(hidden[0, -1], target)
    for i in range(1, steps):
        logits = drafting.step(document.ids_T[None, row + 1 + i : row + 2 + i], torch.zeros(1, 1, dtype=torch.long))
        yield drafting.hidden_BkH[0, 0], logits[0, 0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_rollout_step_equals_sequential_draft_steps(heads, tiny, target64, dtype, tolerance):
    """Row t of step i is what i steps of drafting give after t + 1 committed rows."""
    target, head, compared = {torch.float32: tiny, torch.float64: target64}[dtype], heads[dtype], 0
    for document in documents_for(target, MASKS[:5]):
        batch = pack([document])
        with torch.no_grad():
            outputs, plan = trimmed_rollout(head, target, batch, 4)
            for place, row in enumerate(plan.rows_P.tolist()):
                reach = sum(place < count for count in plan.counts)
                for i, (hidden, logits) in enumerate(draft_along(head, target, document, row, reach)):
                    assert torch.allclose(outputs[i][place], hidden, rtol=tolerance, atol=tolerance), (row, i)
                    assert torch.allclose(
                        head.logits(outputs[i][place], tiny), logits, rtol=tolerance, atol=10 * tolerance
                    )
                    compared += i > 0
    assert compared > 12


def test_proposed_chain_equals_rollout_over_its_own_tokens(heads, tiny):
    """Head.propose, put back as text, is what the rollout guesses, with the same log-probabilities."""
    head, target = heads[torch.float32], tiny
    document, committed, depth = documents_for(tiny)[1], 6, 5
    context = Context(
        target,
        document.ids_T[None, 1 : committed + 1],
        document.taps_TKD[None, :committed],
        torch.zeros(1, committed, WIDTH),
        Policy(),
        lambda: torch.zeros(1, dtype=torch.float64),
    )
    tree = head.propose(head.start(1, committed + depth), context, TreeShape("chain", depth, 1, depth))
    ids_T = torch.cat([document.ids_T[: committed + 1], tree.tokens_BN[0, 1:]])
    mask = [t >= committed for t in range(len(ids_T))]
    text = make_document(mask, 0, target)
    text = replace(text, ids_T=ids_T, taps_TKD=torch.cat([document.taps_TKD[:committed], text.taps_TKD[committed:]]))
    batch = pack([text])
    right = head.agreement(batch, target, depth)
    assert right[committed - 1].tolist() == [True] * depth
    with torch.no_grad():
        outputs, plan = trimmed_rollout(head, target, batch, depth)
        place = plan.rows_P.tolist().index(committed - 1)
        logq = torch.stack([head.logits(step[place], target).log_softmax(-1).max() for step in outputs])
    assert torch.allclose(tree.logprobs_BN[0, 1:], logq.cumsum(0), atol=1e-4)


# Metrics


@pytest.mark.parametrize("out_of_vocab", ["drop", "renormalise"])
def test_metric_numerators_and_denominators(tiny, out_of_vocab):
    """loss_i over the rows that bear it; agree_i over all loss-bearing rows, where the unsayable is a miss."""
    head = make_tiny_head(tiny, steps=3, out_of_vocab=out_of_vocab)
    documents = documents_for(tiny)
    metrics = head.loss(pack(documents), tiny).metrics
    losses, counts, bearing, agree = [0.0] * 3, [0] * 3, [0] * 3, [0] * 3
    with torch.no_grad():
        for document in documents:
            for i, logits, logq in paper_rows(head, tiny, document, 3):
                bearing[i] += 1
                best = int(head.vocab.ids_W[logq.argmax()])
                agree[i] += best == int(logits.argmax())
                if out_of_vocab == "renormalise" or int(logits.argmax()) in head.vocab.ids_W.tolist():
                    p = logits[head.vocab.ids_W].softmax(-1)
                    losses[i] += float((p * (p.log() - logq)).sum())
                    counts[i] += 1
    assert counts[0] > 0
    assert bearing[0] == pack(documents).loss_rows()
    assert (counts[0] < bearing[0]) == (out_of_vocab == "drop")
    for i in range(3):
        top, bottom = metrics[f"loss_{i}"]
        assert int(bottom) == counts[i]
        assert float(top) == pytest.approx(losses[i], rel=1e-3)
        assert [int(x) for x in metrics[f"agree_{i}"]] == [agree[i], bearing[i]]
        assert int(metrics[f"alpha_{i}"][1]) == bearing[i]


@pytest.mark.parametrize("size", [None, 100])
@pytest.mark.parametrize("out_of_vocab", ["drop", "renormalise"])
def test_alpha_is_the_acceptance_of_a_sampled_draft(tiny, size, out_of_vocab):
    """Σ min(p, q) with the target's p over its whole vocabulary: mass that the head cannot say is never accepted."""
    head = make_tiny_head(tiny, size, steps=2, out_of_vocab=out_of_vocab)
    documents = documents_for(tiny)
    metrics = head.loss(pack(documents), tiny).metrics
    expected = [0.0, 0.0]
    with torch.no_grad():
        for document in documents:
            for i, logits, logq in paper_rows(head, tiny, document, 2):
                if out_of_vocab == "drop" and int(logits.argmax()) not in head.vocab.ids_W.tolist():
                    continue
                expected[i] += float(torch.minimum(logits.softmax(-1)[head.vocab.ids_W], logq.exp()).sum())
    for i in range(2):
        assert float(metrics[f"alpha_{i}"][0]) == pytest.approx(expected[i], rel=1e-3), f"step {i}"


def test_a_head_that_copies_the_target_has_zero_loss_and_full_agreement(tiny):
    """Negative control of the metrics: force q = p by handing the loss what the target's own lm_head reads."""
    head = make_tiny_head(tiny, None, steps=1)
    batch = pack(documents_for(tiny))
    wanted = batch.last_RD[plan_rows(batch, 1).target_PI[:, 0]]

    class Copy(torch.nn.Module):
        def forward(self, feature):
            return wanted + 0.0 * feature

    head.norm = Copy()
    out = head.loss(batch, tiny)
    assert float(out.total.detach()) == pytest.approx(0.0, abs=1e-4)
    assert float(out.metrics["alpha_0"][0] / out.metrics["alpha_0"][1]) == pytest.approx(1.0, abs=1e-5)
    assert int(out.metrics["agree_0"][0]) == int(out.metrics["agree_0"][1]) == batch.loss_rows()


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_loss_of_other_families_is_finite_and_learns(family):
    """One gradient step on a batch lowers its loss (soft-capped and scaled targets included)."""
    target = make_target(family)
    head = make_tiny_head(target, None, steps=2)
    batch = pack(documents_for(target))
    before = head.loss(batch, target).total
    before.backward()
    with torch.no_grad():
        for weight in head.parameters():
            if weight.grad is not None:
                weight.sub_(1e-3 * weight.grad / batch.loss_rows())
    after = head.loss(batch, target).total
    assert before.isfinite()
    assert float(after) < float(before)


def test_full_vocabulary_head_has_every_row(tiny):
    """A vocabulary of all tokens drops nothing."""
    vocab = DraftVocab(torch.arange(tiny.spec.vocab_size), tiny.spec.vocab_size)
    head = make_head(make_tiny_head(tiny, steps=1).config, tiny.spec, tiny.taps, vocab)
    head.initialise(tiny)
    metrics = head.loss(pack(documents_for(tiny)), tiny).metrics
    assert int(metrics["loss_0"][1]) == int(metrics["agree_0"][1])
    assert torch.equal(head.lm_head.weight, tiny.lm_head.weight)


# Heads of several layers


def make_layers(spec, depth: int, dtype=torch.float64) -> torch.nn.ModuleList:
    """EAGLE-3's layer and ordinary ones behind it, every weight random."""
    generator = torch.Generator().manual_seed(depth)
    sizes = Sizes.of(spec, inner=24)
    stack = torch.nn.ModuleList([Layer(sizes), *(Block(sizes) for _ in range(depth - 1))]).to(dtype)
    with torch.no_grad():
        for weight in stack.parameters():
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3
            weight.copy_(drawn if weight.dim() > 1 else 1 + drawn)
    return stack


def compare_layers(
    stack, target, batch, steps: int, tolerance: float, recompute: bool = False
) -> dict[str, torch.Tensor]:
    """Values at the computed rows, and gradients of weights and features through the loss-bearing ones, which it returns."""
    plan, generator = plan_rows(batch, steps), torch.Generator().manual_seed(1)
    feature_TH = torch.randn(len(batch.ids_T), WIDTH, generator=generator, dtype=torch.float64)
    feature_TH = feature_TH.to(target.dtype).requires_grad_()
    trimmed = rollout(stack, target.embed, feature_TH[plan.context_C], plan, recompute)
    dense = rollout_reference(stack, target.embed, feature_TH, batch, steps)
    sides = {**dict(stack.named_parameters()), "features": feature_TH}
    losses = [sum(x.sum() * 0.0 for x in sides.values()) for _ in range(2)]
    for i, count in enumerate(plan.counts):
        computed, bears = plan.rows_P[:count], plan.bears_PI[:count, i]
        assert torch.allclose(trimmed[i], dense[i][computed], rtol=tolerance, atol=tolerance * 10), f"step {i}"
        probe = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64).to(target.dtype)[bears]
        parts = (trimmed[i][bears], dense[i][computed[bears]])
        losses = [loss + (part * probe).sum() for loss, part in zip(losses, parts)]
    found, wanted = (dict(zip(sides, torch.autograd.grad(loss, list(sides.values())))) for loss in losses)
    assert_all_close(found, wanted, tolerance * 100)
    return found


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rollout_of_several_layers_equals_dense_reference(target64, depth, steps):
    """Below the last layer every context row is computed at step 0; the deeper layers read features alone."""
    batch = pack(documents_for(target64))
    grads = compare_layers(make_layers(target64.spec, depth), target64, batch, steps, 1e-12)
    assert all(grad.any() for grad in grads.values())


@settings(max_examples=25, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=13), min_size=1, max_size=4),
    depth=st.integers(1, 3),
    steps=st.integers(1, 5),
    recompute=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rollout_of_several_layers_on_any_batch(target64, masks, depth, steps, recompute, seed):
    batch = pack([make_document(mask, seed + i, target64) for i, mask in enumerate(masks)])
    compare_layers(make_layers(target64.spec, depth), target64, batch, steps, 1e-11, recompute)


@pytest.mark.parametrize("shape", [(6, 3, 10), (2, 1, 24), (4, 4, 2), (9, 3, 8)], ids=str)
def test_heads_that_do_not_fill_the_width(target64, shape):
    """Query heads, key-value heads and head width whose product is not H."""
    spec = replace(target64.spec, **dict(zip(("num_heads", "num_kv_heads", "head_dim"), shape)))
    for depth in (1, 2):
        compare_layers(make_layers(spec, depth), target64, pack(documents_for(target64)), 3, 1e-12)


# Ways to run it


def loss_and_gradients(head, batch, target, call=None):
    """Detached, by name."""
    total = (head.loss if call is None else call)(batch, target).total
    return total.detach(), gradients(head, total)


def kept_entries(head, batch, target) -> int:
    """Entries of all tensors kept for the backward pass, each once, the weights aside."""
    kept, weights = {}, {x.untyped_storage().data_ptr() for x in [*head.parameters(), target.embed(batch.ids_T)]}

    def keep(x):
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x  # alive, so that no other tensor gets its address
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        head.loss(batch, target)
    return sum(x.untyped_storage().nbytes() // x.element_size() for x in kept.values())


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_recompute_changes_memory_alone(tiny, autocast):
    """Bit-equal loss and gradients; of a later step only its output and its own keys and values are kept."""
    head = make_tiny_head(tiny, steps=5)
    batch = pack([make_document([False] * 20 + [True] * 180, 3, tiny), *documents_for(tiny)])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain, kept = head.loss(batch, tiny).total, kept_entries(head, batch, tiny)
        head.engine.recompute = True
        again, less = head.loss(batch, tiny).total, kept_entries(head, batch, tiny)
    assert torch.equal(plain, again)
    wanted, found = gradients(head, plain), gradients(head, again)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert less < 0.6 * kept


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


class LlamaRotary:
    """The rotation of transformers' Llama."""

    def __init__(self, rope: dict, width: int):
        shape = {"hidden_size": 4 * width, "num_attention_heads": 4, "head_dim": width}
        self.angles = modeling_llama.LlamaRotaryEmbedding(LlamaConfig(**shape, rope_parameters=dict(rope)))

    def __call__(self, x_NQE, positions_N):
        cos_NE, sin_NE = (part[0, :, None] for part in self.angles(x_NQE, positions_N[None]))
        return x_NQE * cos_NE + modeling_llama.rotate_half(x_NQE) * sin_NE


def reference_loss(head, batch, target):
    """The loss from every row of the dense rollout: Σ_i weight^i Σ KL(p ‖ q_i), where the first choice can be said."""
    steps, total = head.config.steps, sum(weight.sum() * 0.0 for weight in head.parameters())
    outputs = rollout_reference([head.midlayer], target.embed, head.fuse(batch.taps_TKD), batch, steps)
    stored = {position: place for place, position in enumerate(batch.last_index_R.tolist())}
    for i, bears_T in enumerate(batch.loss_masks(steps).T):
        for row in torch.nonzero(bears_T)[:, 0].tolist():
            last, first = (x[stored[row + 1 + i]] for x in (batch.last_RD, batch.argmax_R))
            if int(first) in head.vocab.ids_W.tolist():
                p = target.logits(last[None], head.ids_W)[0].softmax(-1)
                logq = (head.lm_head.weight @ head.norm(outputs[i][row : row + 1])[0]).log_softmax(-1)
                total = total + head.config.step_weight**i * (torch.xlogy(p, p) - p * logq).sum()
    return total


def head_of(target, spec, dtype=torch.float64, **config):
    """A random head for a changed spec."""
    like = make_tiny_head(target, steps=3, **config)
    head = make_head(like.config, spec, target.taps, like.vocab)
    head.initialise(target)
    return head.to(dtype)


@pytest.mark.parametrize("kind", ROPES)
def test_loss_equals_dense_reference_with_every_rope(target64, kind):
    """The whole loss with its gradients, by transformers' rotation; each rotation has its own loss, but dynamic."""
    documents = [*documents_for(target64), make_document([False] * 60 + [True] * 9 + [False] + [True] * 5, 4, target64)]
    batch, totals = pack(documents), {}
    for rope in {kind, "default"}:
        torch.manual_seed(0)
        head = head_of(target64, replace(target64.spec, rope=ROPES[rope]))
        ours = loss_and_gradients(head, batch, target64)
        head.midlayer.self_attn.rotary = LlamaRotary(served_rope(ROPES[rope]), head.spec.head_dim)
        theirs = reference_loss(head, batch, target64)
        assert torch.allclose(ours[0].double(), theirs, rtol=1e-6)
        assert_all_close(ours[1], gradients(head, theirs), 1e-6)
        totals[rope] = float(ours[0])
    assert (totals[kind] == totals["default"]) == (kind in ("default", "dynamic"))


def test_loss_in_bf16_autocast_is_near_fp32(tiny):
    """A few parts in a thousand of the loss; every gradient finite, in the weight's dtype, and in its direction."""
    head = make_tiny_head(tiny, steps=3)
    batch = pack([make_document([False] * 9 + [True] * 60, 3, tiny), *documents_for(tiny)])
    plain, wanted = loss_and_gradients(head, batch, tiny)
    with torch.autocast("cpu", torch.bfloat16):
        out = head.loss(batch, tiny)
    assert out.total.dtype == torch.float32
    assert float(out.total) == pytest.approx(float(plain), rel=1e-2)
    for name, grad in gradients(head, out.total).items():
        assert grad.dtype == torch.float32
        assert grad.isfinite().all(), name
        assert torch.cosine_similarity(grad.flatten(), wanted[name].flatten(), 0) > 0.99, name


FUSED = [
    (layers, "normed"),
    (layers, "normed_backward"),
    (layers, "gated"),
    (layers, "gated_backward"),
    (rotary, "turned"),
]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, weight: layers.normed.__wrapped__(x, weight, 1e-5), [(5, 8), (8,)]),
        (lambda *x: layers.normed_backward.__wrapped__(*x, True), [(5, 8), (5, 8), (8,), (5, 1)]),
        (layers.gated.__wrapped__, [(5, 8), (5, 8)]),
        (layers.gated_backward.__wrapped__, [(5, 8), (5, 8), (5, 8)]),
        (rotary.turned.__wrapped__, [(5, 4, 8), (5, 1, 4), (5, 1, 4)]),
    ],
    ids=[name for _, name in FUSED],
)
def test_compiled_functions_are_one_graph(function, shapes):
    """Nothing in them sends the compiler back to Python."""
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]
    found, wanted = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")(*inputs), function(*inputs)
    for ours, theirs in zip(found, wanted):
        assert torch.allclose(ours, theirs)


@pytest.fixture
def compiler(monkeypatch):
    """The functions that may be compiled, compiled by dynamo without code of its own."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for module, name in FUSED:
        monkeypatch.setattr(module, name, fused.fused(getattr(module, name).__wrapped__))
    monkeypatch.setattr(fused.State, "on", True)
    yield
    torch._dynamo.reset()


def test_compiled_functions_compute_the_same(compiler, monkeypatch, tiny):
    """Norms, activations and rotations through torch.compile; and it has not given up on them."""
    head, batch = make_tiny_head(tiny, steps=2), pack(documents_for(tiny))
    found, grads = loss_and_gradients(head, batch, tiny)
    assert fused.State.on
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= len(FUSED)
    monkeypatch.setattr(fused.State, "on", False)
    plain, wanted = loss_and_gradients(head, batch, tiny)
    assert torch.allclose(found, plain, rtol=1e-6)
    assert_all_close(grads, wanted, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_head_computes_the_same(tiny, backend):
    """torch.compile around the whole head: what it cannot trace it leaves alone."""
    torch._dynamo.reset()
    head, batch = make_tiny_head(tiny, steps=3), pack(documents_for(tiny))
    plain, wanted = loss_and_gradients(head, batch, tiny)
    found, grads = loss_and_gradients(head, batch, tiny, torch.compile(head, backend=backend))
    assert torch.allclose(found, plain, rtol=1e-6)
    assert_all_close(grads, wanted, 1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_loss_of_a_head_in_half_precision(tiny, dtype):
    """Weights, features and gradients in half precision: near fp32 of the same head."""
    head, batch = make_tiny_head(tiny, steps=3), pack(documents_for(tiny))
    plain, wanted = loss_and_gradients(head, batch, tiny)
    total, grads = loss_and_gradients(head.to(dtype), batch.to("cpu", dtype), tiny)
    assert float(total) == pytest.approx(float(plain), rel=2e-2)
    for name, grad in grads.items():
        assert grad.dtype == dtype
        assert torch.cosine_similarity(grad.flatten().float(), wanted[name].flatten(), 0) > 0.99, name


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_every_parameter_learns(tiny, steps, recompute):
    """On a normal batch no gradient is zero, nor that of any column of a projection's token half or feature half."""
    head = make_tiny_head(tiny, steps=steps)
    head.engine.recompute = recompute
    _, grads = loss_and_gradients(head, pack(documents_for(tiny)), tiny)
    for name, grad in grads.items():
        assert grad.isfinite().all(), name
        assert grad.any(), name
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            assert grad.any(0).all(), name


def test_frozen_parameters_change_no_other_gradient(tiny):
    """Each weight frozen in turn: it gets no gradient, and all others get what they got."""
    head, batch = make_tiny_head(tiny, steps=2), pack(documents_for(tiny))
    _, wanted = loss_and_gradients(head, batch, tiny)
    for frozen, weight in head.named_parameters():
        weight.requires_grad_(False)
        head.zero_grad()
        head.loss(batch, tiny).total.backward()
        weight.requires_grad_(True)
        assert weight.grad is None
        rest = {name: other.grad for name, other in head.named_parameters() if name != frozen}
        assert_all_close(rest, {name: wanted[name] for name in rest}, 1e-6)
