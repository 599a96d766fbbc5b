"""What engines load for an MTP head that was trained for an ordinary target: dressed as the MTP layer of another family.

mimo: MiMo's (vLLM 0.32 and SGLang 0.5.23), norm after the layer, which is handed on, biases on queries, keys and values, the
feature's half of the projection first. ernie: ERNIE-4.5's (vLLM 0.32), no norm after the layer. Both build the layer from the
target's own sizes, so that it must be a Llama layer of these; one module, applied to its own output.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.heads.base import Case, Drafts, Export, Tables
from headwright.heads.engine_tables import Shapes, layer_shapes, llama_keys
from headwright.heads.layers import Sizes
from headwright.heads.mtp_native import ERNIE, MIMO, PARTS, Family, theirs
from headwright.heads.plain import Chain, PlainLlama

if TYPE_CHECKING:
    from headwright.heads.mtp import Head

FAMILIES = {"mimo": MIMO, "ernie": ERNIE}
BIASES = tuple(f"self_attn.{part}_proj.bias" for part in "qkv")


def export_vehicle(head: "Head", engine: str) -> Export:
    """The directory. Raises UserError where the engine would compute something else."""
    family, sizes = FAMILIES[engine], Sizes.of(head.spec)
    refuse_unservable(head, engine, sizes)
    config = vehicle_config(head, engine, sizes)
    shapes = vehicle_shapes(config, family)
    tensors = vehicle_tensors(head, family)
    for name in set(shapes) - set(tensors):
        if name.endswith("bias"):
            tensors[name] = torch.zeros(shapes[name])
    warnings, ids_W = [], head.vocab.ids_W
    if not head.vocab.full:
        warnings = [
            f"this head was measured over {len(ids_W)} tokens; the engine drafts over all {head.spec.vocab_size}"
        ]
    launch = launch_lines(engine)
    return Export(tensors, config, shapes, lambda folder: PlainMtp(folder, family, ids_W), launch, warnings=warnings)


def refuse_unservable(head: "Head", engine: str, sizes: Sizes) -> None:
    """Options that the vehicle does not compute."""
    config, normed = head.config, engine == "mimo"
    if config.modules != 1:
        raise UserError(f"export.engines {engine}: engines serve one module, applied to its own output: head.modules=1")
    if config.norm != normed or (config.feed == "normed") != normed or not config.mask_first:
        wanted = "head.norm=true head.feed=normed" if normed else "head.norm=false head.feed=raw"
        raise UserError(
            f"export.engines {engine}: computes {wanted} head.mask_first=true: train so, or take the other vehicle"
        )
    known = {*layer_shapes(llama_keys(head.spec, sizes), "", 0), ".input_layernorm.weight"}
    known |= {f".{name}" for name in BIASES} if normed else set()
    strange = sorted(f".{name}" for name in head.links[0].block.layer.state_dict() if f".{name}" not in known)
    if strange:
        raise UserError(
            f"export.engines {engine}: its layer has no {strange[0][1:]}, which this target's kind of layer has: train with "
            "head.block=llama"
        )
    if normed and sizes.head_dim * sizes.heads != sizes.width:
        raise UserError(
            f"export.engines mimo: wants heads that fill the width; this target's {sizes.heads} of {sizes.head_dim} do not"
        )


def vehicle_config(head: "Head", engine: str, sizes: Sizes) -> dict[str, Any]:
    """config.json: it chooses the class; the sizes that count are the target's."""
    keys = llama_keys(head.spec, sizes) | {"num_nextn_predict_layers": 1}
    if engine == "mimo":
        return keys | {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    ernie = {"use_bias": False, "moe_num_experts": 2, "moe_k": 1, "num_hidden_layers": head.spec.num_layers}
    return keys | {"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe"} | ernie


def vehicle_shapes(config: dict[str, Any], family: Family) -> Shapes:
    """Every tensor and its shape."""
    width, prefix = config["hidden_size"], family.layer.format(i=0)
    shapes: Shapes = {family.enorm: (width,), family.hnorm: (width,), family.eh_proj: (width, 2 * width)}
    if family.norm is not None:
        shapes[family.norm] = (width,)
    shapes = {name.format(i=0): shape for name, shape in shapes.items()}
    shapes |= layer_shapes(config, prefix[:-1], width) | {f"{prefix}input_layernorm.weight": (width,)}
    if family is MIMO:
        heads = {
            "q": config["num_attention_heads"],
            "k": config["num_key_value_heads"],
            "v": config["num_key_value_heads"],
        }
        shapes |= {
            f"{prefix}self_attn.{part}_proj.bias": (count * config["head_dim"],) for part, count in heads.items()
        }
    return shapes


def vehicle_tensors(head: "Head", family: Family) -> dict[str, Tensor]:
    """The module's tensors under the family's names."""
    module, prefix = head.links[0], family.layer.format(i=0)
    tensors = {prefix + name: tensor for name, tensor in module.block.layer.state_dict().items()}
    for part in PARTS:
        source = getattr(family, part)
        if source is not None:
            weight = module.get_submodule(part).get_parameter("weight").detach()
            tensors[source.format(i=0)] = theirs(part, weight, family)
    return tensors


class PlainMtp(PlainLlama):
    """An independent reader. `ids_W`: the tokens that the head is compared over."""

    def __init__(self, folder: Path, family: Family, ids_W: Tensor):
        super().__init__(folder)
        self.family, self.ids_W = family, ids_W

    def draft(self, tables: Tables, case: Case, count: int) -> Drafts:
        """`count` greedy tokens after the last of the case's, by full recomputation."""
        feature, chain = case.last_TD, Chain(case)
        for _ in range(count):
            state = self.module(tables.embedding_VD[torch.tensor(chain.tokens)], feature)[-1]
            chain.take(tables.lm_head_VD[self.ids_W] @ state, self.ids_W)
            feature = torch.cat([feature, state[None]])
        return chain.drafts()

    def module(self, embedding_TD: Tensor, feature_TD: Tensor) -> Tensor:
        """The module over a whole text: what the lm_head reads, and the next step."""

        def name(part: str) -> str:
            return part.format(i=0).removesuffix(".weight")

        token = embedding_TD.clone()
        token[0] = 0.0
        sides = [self.norm(token, name(self.family.enorm)), self.norm(feature_TD, name(self.family.hnorm))]
        if self.family.feature_first:
            sides.reverse()
        stream, prefix = self.linear(torch.cat(sides, -1), name(self.family.eh_proj)), self.family.layer.format(i=0)
        out = self.layer(prefix[:-1], self.norm(stream, f"{prefix}input_layernorm"), stream)
        return out if self.family.norm is None else self.norm(out, name(self.family.norm))


def launch_lines(engine: str) -> Callable[[str, Path, str], str]:
    """How the engines are started with this head. The target must be told that it has an MTP layer."""

    def lines(target: str, folder: Path, dtype: str) -> str:
        speculative = json.dumps({"method": "mtp", "model": str(folder), "num_speculative_tokens": 3})
        overrides = json.dumps({"num_nextn_predict_layers": 1})
        vllm = f"""vLLM (0.32 or later; drafts chains):

    vllm serve {target} --hf-overrides '{overrides}' --speculative-config '{speculative}'
"""
        sglang = f"""
SGLang (0.5.23 or later):

    python -m sglang.launch_server --model-path {target} --dtype {dtype} --speculative-algorithm NEXTN \\
      --speculative-draft-model-path {folder} \\
      --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4
"""
        return vllm + (sglang if engine == "mimo" else "")

    return lines
