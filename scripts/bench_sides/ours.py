"""Headwright's training step.

--plain   the dense formulation that the fast one must equal: every row, one mask over all keys, whole matrices of logits
--check   both once; prints how far loss and gradients are apart
--recompute   train.recompute
"""

import json
import sys
import time

import torch
from common import Data, Problem, Side, main, make_data, parse
from torch import Tensor
from torch.nn.functional import embedding, linear

from headwright.data.batch import DocumentFeatures, FeatureBatch, last_rows, pack
from headwright.data.rows import Rows, plan_rows
from headwright.data.target import TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads.base import DraftHead, Engine, make_head
from headwright.heads.eagle3 import Config
from headwright.heads.losses import kl
from headwright.heads.ttt import rollout_reference


class Tables:
    """What a head asks of a target, and what a harvest stores of it."""

    def __init__(self, data: Data):
        self.embedding, self.rows = data.embedding_VH, data.lm_head_VH[data.ids_W]
        logits = (linear(part, data.lm_head_VH).float() for part in data.last_TH.split(256))
        found = [(part.argmax(-1), part.logsumexp(-1)) for part in logits]
        self.argmax_T, self.logz_T = (torch.cat(parts) for parts in zip(*found))

    def embed(self, ids_X: Tensor) -> Tensor:
        """Rows of the table."""
        return embedding(ids_X.to(self.embedding.device), self.embedding)

    def logits(self, last_XH: Tensor, ids_W: Tensor) -> Tensor:
        """Of the draft vocabulary."""
        return linear(last_XH, self.rows)


def make_side(problem: Problem, data: Data) -> tuple[DraftHead, FeatureBatch, Tables]:
    """The head, the document as a harvest stores it, and its target. All rows bear loss, as in speculators and ModelOpt."""
    tables, rows = Tables(data), last_rows(data.mask_T.cpu())
    document = DocumentFeatures(
        data.ids_T.cpu(),
        data.mask_T.cpu(),
        data.taps_T3H,
        data.last_TH[rows.to(data.last_TH.device)],
        tables.argmax_T.cpu()[rows],
        tables.logz_T.cpu()[rows],
    )
    config = Config(steps=problem.steps, step_weight=problem.decay, fc_norm=False, out_of_vocab="renormalise")
    vocab = DraftVocab(data.ids_W.cpu(), problem.vocabulary)
    head = make_head(config, spec_of(problem), (2, 16, 29), vocab).to(problem.device)
    head.engine = Engine(recompute="--recompute" in sys.argv)
    return head, pack([document]), tables


def spec_of(problem: Problem) -> TargetSpec:
    """The target's facts."""
    return TargetSpec(
        name="bench",
        revision=None,
        architecture="LlamaForCausalLM",
        vocab_size=problem.vocabulary,
        hidden_size=problem.hidden,
        num_layers=32,
        num_heads=problem.heads,
        num_kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        intermediate_size=problem.intermediate,
        rms_norm_eps=problem.epsilon,
        rope={"rope_type": "default", "rope_theta": problem.rope_theta},
        max_positions=1 << 20,
        dtype=problem.dtype,
        bos_token_id=None,
        eos_token_ids=(),
        fingerprint="",
        template_hash="",
    )


def plain_loss(head: DraftHead, batch: FeatureBatch, tables: Tables) -> Tensor:
    """The rollout and the loss as they are written on paper."""
    steps, masks = head.config.steps, batch.loss_masks(head.config.steps)
    feature_TH = head.fuse(batch.taps_TKD)  # type: ignore[operator]
    outputs = rollout_reference([head.midlayer], tables.embed, feature_TH, batch, steps)  # type: ignore[list-item,arg-type]
    probs_TW = torch.zeros(len(batch.ids_T), len(head.vocab), device=feature_TH.device)
    probs_TW[batch.last_index_R] = tables.logits(batch.last_RD, head.ids_W).softmax(-1)
    total = feature_TH.new_zeros(())
    for i, output_TH in enumerate(outputs):
        rows = torch.nonzero(masks[:, i])[:, 0]
        logq = head.logits(output_TH[rows], None).log_softmax(-1)  # type: ignore[operator]
        total = total + head.config.step_weight**i * kl(probs_TW[rows + 1 + i], logq).sum()
    return total


def counted_flops(problem: Problem, plan: Rows, positions: int) -> float:
    """Multiplications and additions of a step, forward and backward, of what is computed: matrix products and attention."""
    H, queries, keys = problem.hidden, problem.heads * problem.head_dim, problem.kv_heads * problem.head_dim
    first, rows = len(plan.context_C), sum(plan.counts)
    weights = 2 * H * queries + 3 * H * problem.intermediate
    linear_work = (
        4 * first * 3 * H * H
        + 6 * (first + rows - plan.counts[0]) * 2 * H * keys
        + 6 * rows * weights
        + 6 * len(plan.tokens_U) * 2 * H * keys
        + 6 * len(plan.asks_X) * H * queries
        + 6 * int(plan.bears_PI.sum()) * H * problem.draft_vocabulary
        + 2 * positions * H * problem.draft_vocabulary
    )
    seen = sum(
        (span.own - span.first) * (span.stop - span.start) + (span.stop - span.start) * (span.stop - span.start + 1) / 2
        for spans in plan.spans
        for span in spans.parts
    )
    return linear_work + 14 * queries * seen  # a flash kernel: two products forward, five backward


def matrix_rate(problem: Problem) -> float:
    """FLOP/s of this process at a product of the step's own shape, the best of some."""
    a, b = (torch.randn(n, problem.hidden, device=problem.device) for n in (problem.sequence, problem.draft_vocabulary))
    best = 0.0
    for _ in range(20):
        started = time.process_time()
        _ = a @ b.T
        best = max(best, 2 * a.numel() * len(b) / (time.process_time() - started))
    return best


def build(problem: Problem, data: Data) -> Side:
    """The step, fast or plain."""
    head, batch, tables = make_side(problem, data)
    rows = max(batch.loss_rows(), 1)

    def loss() -> Tensor:
        if "--plain" in sys.argv:
            return plain_loss(head, batch, tables) / rows
        return head.loss(batch, tables).total / rows  # type: ignore[arg-type]

    plan = plan_rows(batch, problem.steps)
    about = {"flops": counted_flops(problem, plan, len(batch.last_RD)), "rate": matrix_rate(problem), "rows": rows}
    return Side(torch.__version__, head, loss, about)


def check(problem: Problem) -> None:
    """Print the largest difference of loss and gradients, relative to the largest value of each."""
    torch.manual_seed(problem.seed)
    head, batch, tables = make_side(problem, make_data(problem))
    weights = list(head.parameters())
    ours, theirs = head.loss(batch, tables).total, plain_loss(head, batch, tables)  # type: ignore[arg-type]
    found, wanted = torch.autograd.grad(ours, weights), torch.autograd.grad(theirs, weights)
    apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted))
    print(json.dumps({"loss": abs(float((ours / theirs).detach()) - 1), "gradient": apart}))


if __name__ == "__main__":
    if "--check" in sys.argv:
        check(parse())
    else:
        main("headwright", build)
