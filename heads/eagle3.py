"""EAGLE-3 (arXiv 2503.01840): fused taps, one decoder layer over [embedding ; feature], training-time test, reduced
vocabulary.

The module computes exactly what vLLM and SGLang compute for `LlamaForCausalLMEagle3`: the residual is the fused feature
before `hidden_norm` (norm_before_residual false), logits come from `norm`, and the state fed to the next step is the
one before `norm`.

Shapes: B rows, M new rows, k frontier nodes, T packed tokens, P live rows, K taps, D target width, H head width (= D),
V target vocabulary, W draft vocabulary.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from headwright.configs import UserError
from headwright.data.batch import FeatureBatch, to_device
from headwright.data.cache import KVCache
from headwright.data.rows import Rows, plan_rows
from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads.base import Context, DraftHead, Export, HeadLoss
from headwright.heads.chunked import (
    METRICS,
    Task,
    Weights,
    chunked_loss,
    first_choices,
    plan_pairs,
    ranks_of,
    rows_in_memory,
)
from headwright.heads.draft_tree import Tree, TreeShape
from headwright.heads.eagle3_plain import PlainEagle3
from headwright.heads.grow import Frontier, grow
from headwright.heads.layers import Attention, RMSNorm, SwiGLU, attend
from headwright.heads.losses import choose_loss
from headwright.heads.rotary import Rotary, served_rope
from headwright.heads.ttt import rollout


@dataclass
class Config:
    """Keys of an EAGLE-3 head."""

    kind: Literal["eagle3"] = "eagle3"
    steps: Annotated[
        int, "length of the training-time test: how many of its own outputs the head learns to read", Ge(1)
    ] = 3
    step_weights: Annotated[
        Literal["decay", "dpace"], "of the steps: powers of step_weight, or D-PACE (what is likely to be reached)"
    ] = "decay"
    step_weight: Annotated[float, "decay: weight of step i is step_weight**i; 1 is uniform", Gt(0), Le(1)] = 0.8
    dpace_floor: Annotated[float, "dpace: the least probability with which a step counts as passed", Ge(0), Le(1)] = 0.5
    loss: Annotated[
        Literal["kl", "rkl", "jsd", "tv", "nla", "lk", "ce", "topk"],
        "kl (soft cross-entropy); rkl: reverse; jsd; tv (1 - acceptance); nla (-log acceptance); lk: kl early, tv late; "
        "ce: of the target's first choice; topk: soft cross-entropy over its first choices",
    ] = "kl"
    loss_top_k: Annotated[int, "topk: how many", Ge(1)] = 10
    fc_norm: Annotated[bool, "RMSNorm on each tap before they are fused; taps differ widely in scale"] = True
    out_of_vocab: Annotated[
        Literal["drop", "renormalise"],
        "rows where the target's first choice is outside the draft vocabulary: no loss, or loss on the rest of the mass",
    ] = "drop"
    intermediate_size: Annotated[int | None, "width of the MLP; default: the target's", Gt(0)] = None


class Layer(nn.Module):
    """The decoder layer: attention reads [norm(embedding) ; norm(feature)], the residual is the feature itself."""

    def __init__(self, spec: TargetSpec, inner: int):
        super().__init__()
        width, eps = spec.hidden_size, spec.rms_norm_eps
        rotary = Rotary(spec.rope, spec.head_dim)
        self.self_attn = Attention(2 * width, width, spec.num_heads, spec.num_kv_heads, spec.head_dim, rotary)
        self.mlp = SwiGLU(width, inner)
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)

    def mix(self, embedding_XH: Tensor, feature_XH: Tensor) -> Tensor:
        """The attention's input [..., 2H]."""
        embedding_XH = embedding_XH.to(feature_XH.dtype)  # a half-precision target's table under a head in fp32
        return torch.cat([self.embedded(embedding_XH), self.normed(feature_XH)], dim=-1)

    def embedded(self, embedding_XH: Tensor) -> Tensor:
        """Its token half."""
        return self.input_layernorm(embedding_XH)

    def normed(self, feature_XH: Tensor) -> Tensor:
        """Its feature half."""
        return self.hidden_norm(feature_XH)

    def finish(self, feature_XH: Tensor, mixed_XQE: Tensor) -> Tensor:
        """Output projection, residual, MLP, residual."""
        middle_XH = feature_XH + self.self_attn.output(mixed_XQE)
        return middle_XH + self.mlp(self.post_attention_layernorm(middle_XH))


class Head(DraftHead):
    """The trainable head."""

    config: Config

    def __init__(self, config: Config, spec: TargetSpec, taps: tuple[int, ...], vocab: DraftVocab):
        super().__init__(config, spec, taps, vocab)
        width, eps = spec.hidden_size, spec.rms_norm_eps
        self.measure = choose_loss(config.loss, config.loss_top_k)
        self.weights = Weights(config.step_weight, config.dpace_floor if config.step_weights == "dpace" else None)
        self.fc = nn.Linear(len(taps) * width, width, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in taps)
        self.midlayer = Layer(spec, config.intermediate_size or spec.intermediate_size)
        self.norm = RMSNorm(width, eps)
        self.lm_head = nn.Linear(width, len(vocab), bias=False)

    @property
    def lookahead(self) -> int:
        """Row t of step i predicts x_{t+2+i}."""
        return self.config.steps + 1

    @torch.no_grad()
    def initialise(self, target: Target) -> None:
        """The lm_head starts from the target's rows of the draft vocabulary."""
        self.lm_head.weight.copy_(target.lm_head.weight[self.ids_W.to(target.device)])

    def fuse(self, taps_XKD: Tensor) -> Tensor:
        """Taps → one feature [..., H]."""
        if self.config.fc_norm:
            normed = [norm(taps_XKD[..., k, :]) for k, norm in enumerate(self.fc_norm)]
            return self.fc(torch.cat(normed, dim=-1))
        return self.fc(taps_XKD.flatten(-2))

    def loss(self, batch: FeatureBatch, target: Target) -> HeadLoss:
        """Σ_i weight_i Σ_rows loss(p, q_i), with per-step metrics.

        loss_i: mean loss; alpha_i: Σ min(p, q), the acceptance of a sampled draft; agree_i: head's and target's first
        choices are the same. What the head cannot say counts as a miss in both.
        """
        first_R = self.choices_V[batch.argmax_R]
        plan = plan_rows(batch, self.config.steps, first_R >= 0 if self.config.out_of_vocab == "drop" else None)
        weight, device = self.lm_head.weight, batch.last_RD.device
        per_chunk = rows_in_memory(weight, self.config.steps, self.engine.loss_mib)
        task = Task(
            plan_pairs(plan, per_chunk).to(device),
            lambda where: target.logits(batch.last_RD[where], self.ids_W),
            to_device(batch.logz_R, device),
            to_device(first_R, device),
            self.measure,
            self.weights,
        )
        outputs = self.rollout(batch, target, plan.to(device))
        total, sums = chunked_loss(task, weight, [self.norm(output) for output in outputs])
        return HeadLoss(total, step_metrics(sums, plan, batch))

    def rollout(self, batch: FeatureBatch, target: Target, plan: Rows) -> list[Tensor]:
        """Outputs of every step, of the rows that are computed."""
        taps = batch.taps_TKD
        if len(plan.context_C) < len(taps):
            taps = taps[plan.context_C]
        feature_CH = self.fuse(taps.to(self.fc.weight.dtype))
        return rollout([self.midlayer], target.embed, feature_CH, plan, self.engine.recompute)

    def logits(self, feature_XH: Tensor) -> Tensor:
        """Logits over the draft vocabulary [..., W], in fp32: paths are compared by sums of their log-softmax."""
        return self.lm_head(self.norm(feature_XH)).float()

    @torch.no_grad()
    def agreement(self, batch: FeatureBatch, target: Target, steps: int) -> Tensor:
        """Greedy guesses against the text, [T, steps], on the host."""
        plan = plan_rows(batch, steps)
        right_TI = torch.zeros(len(batch.ids_T), steps, dtype=torch.bool)
        for i, output in enumerate(self.rollout(batch, target, plan.to(batch.taps_TKD.device))):
            guess = first_choices(self.norm(output), self.lm_head.weight, self.engine.loss_mib)
            said = self.vocab.ids_W[guess.cpu()]
            right_TI[plan.rows_P[: len(said)], i] = (said == plan.labels_PI[: len(said), i]) & plan.bears_PI[
                : len(said), i
            ]
        return right_TI

    @torch.no_grad()
    def ranks(self, batch: FeatureBatch, target: Target, steps: int) -> Tensor:
        """Where the text's token stands among the guesses, [T, steps], on the host."""
        plan = plan_rows(batch, steps)
        ranks_TI = torch.full((len(batch.ids_T), steps), -1)
        for i, output in enumerate(self.rollout(batch, target, plan.to(batch.taps_TKD.device))):
            label_P = self.choices_V[plan.labels_PI[: len(output), i]]
            rank_P = ranks_of(self.norm(output), self.lm_head.weight, label_P.clamp_min(0), self.engine.loss_mib)
            known_P = plan.bears_PI[: len(output), i] & (label_P >= 0)
            ranks_TI[plan.rows_P[: len(output)], i] = torch.where(known_P, rank_P.cpu(), -1)
        return ranks_TI

    def start(self, batch: int, slots: int) -> KVCache:
        """The head's own cache: one layer, a slot per token."""
        return KVCache(1, batch, slots, self.fc.weight.device)

    @torch.inference_mode()
    def absorb(self, state: KVCache, context: Context) -> Tensor:
        """Confirmed rows into the cache; the output [B, 1, H] of each text's last one."""
        feature_BMH = self.fuse(context.taps_BMKD)
        new = feature_BMH.shape[1]
        state.make_room(new)
        embedding_BMH = context.target.embed(context.tokens_BM)
        hidden_BMH = self.run(state, embedding_BMH, feature_BMH, state.next_slots(new), state.visible(new))
        state.advance(context.counts)
        return context.final(hidden_BMH)[:, None]

    @torch.inference_mode()
    def propose(self, state: KVCache, context: Context, shape: TreeShape) -> Tree:
        """Take in the rows that the target has confirmed, then draft below the root."""
        drafting = Drafting(self, state, context.target, self.absorb(state, context), shape.rows)
        tree = grow(shape, context, self.logits(drafting.hidden_BkH[:, 0]), drafting.step, self.ids_W)
        drafting.frontier.forget()
        return tree

    def run(self, cache: KVCache, embedding: Tensor, feature: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """The layer on new rows [B, M, H] with a cache; the caller advances it."""
        layer = self.midlayer
        mixed = layer.mix(embedding, feature)
        keys, values = layer.self_attn.keys_values(mixed, positions)
        keys, values = cache.write(0, keys.transpose(1, 2), values.transpose(1, 2))
        attended = attend(layer.self_attn.query(mixed, positions), keys, values, mask)
        return layer.finish(feature, attended)

    def export(self, engine: str) -> Export:
        """One directory for vLLM and SGLang (reference formats: vLLM 0.32, SGLang 0.5.23)."""
        if engine != "portable":
            raise UserError(f"export.engines {engine!r}: an EAGLE-3 head exports as: portable")
        refuse_unservable(self)
        tensors = dict(self.state_dict())
        if not self.vocab.full:
            tensors |= {"d2t": self.vocab.d2t_W, "t2d": self.vocab.t2d_V}
        config = portable_config(self)
        return Export(tensors, config, portable_shapes(config), PlainEagle3, launch_lines)


class Drafting:
    """One draft: each new node reads its parent's output."""

    def __init__(self, head: Head, cache: KVCache, target: Target, hidden_B1H: Tensor, rows: int):
        self.head, self.target, self.hidden_BkH = head, target, hidden_B1H
        self.frontier = Frontier(cache, rows)

    def step(self, tokens_Bk: Tensor, parents_Bk: Tensor) -> Tensor:
        """Run the head on a new frontier."""
        feature_BkH = self.hidden_BkH.gather(1, parents_Bk[..., None].expand(-1, -1, self.hidden_BkH.shape[2]))
        with self.frontier.level(parents_Bk) as (positions_Bk, mask_BkS):
            embedding_BkH, cache = self.target.embed(tokens_Bk), self.frontier.cache
            self.hidden_BkH = self.head.run(cache, embedding_BkH, feature_BkH, positions_Bk, mask_BkS)
        return self.head.logits(self.hidden_BkH)


def step_metrics(sums: Tensor, plan: Rows, batch: FeatureBatch) -> dict[str, tuple[Tensor, Tensor]]:
    """Numerators and denominators by name and step: the loss over the rows that bear it, the others over all that might."""
    device = sums.device
    kept = to_device(plan.bears_PI.sum(0).to(sums.dtype), device)
    might = to_device(batch.loss_masks(plan.steps).sum(0).to(sums.dtype), device)
    bottoms = {"loss": kept, "alpha": might, "agree": might}
    return {
        f"{name}_{i}": (sums[place, i], bottoms[name][i])
        for i in range(plan.steps)
        for place, name in enumerate(METRICS)
    }


def refuse_unservable(head: Head) -> None:
    """Taps that an engine would misread without a word: SGLang skips `fc` for a single state, and can capture neither the
    embeddings nor the last layer's output.
    """
    if len(head.taps) < 2 or head.taps[0] < 1 or head.taps[-1] >= head.spec.num_layers:
        raise UserError(
            f"export: taps {list(head.taps)}: the portable format needs two or more, from 1 to {head.spec.num_layers - 1}; "
            "harvest and train with such taps"
        )


def portable_config(head: Head) -> dict[str, Any]:
    """config.json for both engines.

    vLLM numbers captured states by how many layers came before (our taps), SGLang by the layer whose output they are
    (one less); vLLM reads the top-level list first, SGLang only the nested one. Rotary keys are written in both
    spellings.
    """
    spec, taps = head.spec, list(head.taps)
    rope = served_rope(dict(spec.rope))
    scaling = None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": head.config.intermediate_size or spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": len(head.vocab),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "num_aux_hidden_states": len(taps),
        "eagle_aux_hidden_state_layer_ids": taps,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],
            "norm_before_fc": False,
        },
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": head.config.fc_norm,
        "norm_output": False,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_ids[0] if spec.eos_token_ids else None,
    }


def portable_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the portable directory and its shape: no less, no more."""
    H, V = config["hidden_size"], config["vocab_size"]
    W, inner, taps = config["draft_vocab_size"], config["intermediate_size"], config["num_aux_hidden_states"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, taps * H),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * H),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * H),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, queries),
        "midlayer.mlp.gate_proj.weight": (inner, H),
        "midlayer.mlp.up_proj.weight": (inner, H),
        "midlayer.mlp.down_proj.weight": (H, inner),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (W, H),
    }
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{k}.weight": (H,) for k in range(taps)}
    if W != V:
        shapes |= {"d2t": (W,), "t2d": (V,)}
    return shapes


def launch_lines(target: str, folder: Path, dtype: str) -> str:
    """How vLLM and SGLang are started with this head."""
    speculative = json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3})
    return f"""vLLM (0.32 or later; drafts chains):

    vllm serve {target} --speculative-config '{speculative}'

SGLang (0.5.23 or later; drafts trees when `--speculative-eagle-topk` is above 1):

    python -m sglang.launch_server --model-path {target} --dtype {dtype} --speculative-algorithm EAGLE3 \\
      --speculative-draft-model-path {folder} \\
      --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4

config.json says whether each tap is normed before fusing (`fc_norm`, an option of EAGLE-3.1). These versions read the key; an
engine that does not know it would serve such a head wrongly.
"""
