"""The training-time test: trimmed rollout ≡ dense reference ≡ drafting with a cache ≡ the paper, values and gradients."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import make_model, make_target, make_tiny_head, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.data.batch import DocumentFeatures, last_rows, pack
from headwright.data.rows import plan_rows
from headwright.data.sampling import Policy
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab
from headwright.heads.base import Context, make_head
from headwright.heads.draft_tree import TreeShape
from headwright.heads.eagle3 import Drafting
from headwright.heads.layers import RMSNorm
from headwright.heads.ttt import rollout, rollout_reference

WIDTH, TAPS = 32, 3


def norm_in_own_dtype(self, x):
    """RMSNorm without the rounding to fp32, so that fp64 comparisons can be tight."""
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


@pytest.fixture
def fp64(monkeypatch):
    """Norms that keep fp64."""
    monkeypatch.setattr(RMSNorm, "forward", norm_in_own_dtype)


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
def test_rollout_equals_dense_reference_fp64(fp64, heads, target64, steps):
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
    before, RMSNorm.forward = RMSNorm.forward, norm_in_own_dtype
    try:
        compare_with_reference(heads[torch.float64], target64, batch, steps, 1e-11)
    finally:
        RMSNorm.forward = before


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
def test_loss_is_that_of_the_paper(fp64, target64, out_of_vocab):
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
            float(make_tiny_head(tiny, size, out_of_vocab=way).loss(batch, tiny).total)
            for way in ("drop", "renormalise")
        ]

    dropped, whole = totals(100)
    assert dropped < whole
    assert torch.allclose(*map(torch.tensor, totals(None)), rtol=1e-6)


def test_packed_equals_sum_of_documents(fp64, heads, target64):
    head, documents = heads[torch.float64], documents_for(target64, MASKS[:5])
    packed = head.loss(pack(documents), target64)
    alone = [head.loss(pack([document]), target64) for document in documents]
    total = sum(part.total for part in alone)
    assert torch.allclose(packed.total, total, rtol=1e-6)
    assert_all_close(gradients(head, packed.total), gradients(head, total), 1e-5)
    for name, (top, bottom) in packed.metrics.items():
        assert int(bottom) == sum(int(part.metrics[name][1]) for part in alone), name
        assert torch.allclose(top.double(), sum(part.metrics[name][0].double() for part in alone), rtol=1e-5), name


def test_order_of_documents_does_not_matter(fp64, heads, target64):
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
    assert float(out.total) == 0.0
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
    drafting = Drafting(head, state, target, hidden[:, -1:])
    yield hidden[0, -1], head.logits(hidden[0, -1])
    for i in range(1, steps):
        logits = drafting.step(document.ids_T[None, row + 1 + i : row + 2 + i], torch.zeros(1, 1, dtype=torch.long))
        yield drafting.hidden_BkH[0, 0], logits[0, 0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_rollout_step_equals_sequential_draft_steps(monkeypatch, heads, tiny, target64, dtype, tolerance):
    """Row t of step i is what i steps of drafting give after t + 1 committed rows."""
    if dtype == torch.float64:
        monkeypatch.setattr(RMSNorm, "forward", norm_in_own_dtype)
    target, head, compared = {torch.float32: tiny, torch.float64: target64}[dtype], heads[dtype], 0
    for document in documents_for(target, MASKS[:5]):
        batch = pack([document])
        with torch.no_grad():
            outputs, plan = trimmed_rollout(head, target, batch, 4)
            for place, row in enumerate(plan.rows_P.tolist()):
                reach = sum(place < count for count in plan.counts)
                for i, (hidden, logits) in enumerate(draft_along(head, target, document, row, reach)):
                    assert torch.allclose(outputs[i][place], hidden, rtol=tolerance, atol=tolerance), (row, i)
                    assert torch.allclose(head.logits(outputs[i][place]), logits, rtol=tolerance, atol=10 * tolerance)
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
        logq = torch.stack([head.logits(step[place]).log_softmax(-1).max() for step in outputs])
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
    assert float(out.total) == pytest.approx(0.0, abs=1e-4)
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
