"""MTP tensors of published checkpoints: read, computed as their family defines it, written back; and the decoder layers that
MTP modules are made of.

Checkpoints are tiny and random, in the names and layouts that families publish. What a head computes is held against the
family's definition, written here from the raw tensors; of transformers only the decoder layer is used. Shapes: D width, N rows,
V vocabulary, E experts.
"""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from conftest import FAMILIES, VOCAB, make_target, make_tokenizer
from safetensors.torch import load_file, save_file
from test_families import CAUSAL, causal
from torch import Tensor, nn

from headwright.configs import UserError
from headwright.configs.load import build
from headwright.configs.schema import TargetConfig
from headwright.data.batch import DocumentFeatures, last_rows, pack
from headwright.data.block import DecoderBlock, full_layers, llama_block, make_block, own_block
from headwright.data.rows import plan_rows
from headwright.data.sampling import Policy
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab
from headwright.eval.decode import Settings, decode_plain, generate_one
from headwright.heads import get_head
from headwright.heads.base import Case, Context, make_head
from headwright.heads.doctor import Question, diagnose
from headwright.heads.draft_tree import TreeShape
from headwright.heads.export import read_back, stitch, with_dtype, write_directory
from headwright.heads.mtp import Head, LinkedDrafting
from headwright.heads.mtp_native import import_native
from headwright.heads.recurrent import Drafting
from headwright.heads.saved import load_head, save_head

WIDTH, LAYERS, EPS = 32, 4, 1e-5
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": EPS,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 258,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
QWEN_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LINEAR = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
}
ERNIE_MOE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1}


@dataclass(frozen=True)
class Names:
    """A family's names; {i}: the module, {n}: the number of layers plus i. `extra`: copies of the target's own."""

    enorm: str
    hnorm: str
    eh_proj: str
    norm: str | None
    layer: str
    extra: tuple[str, ...] = ()

    def at(self, name: str, number: int) -> str:
        """With its numbers."""
        return name.format(i=number, n=LAYERS + number)


DEEPSEEK = Names(
    "model.layers.{n}.enorm.weight",
    "model.layers.{n}.hnorm.weight",
    "model.layers.{n}.eh_proj.weight",
    "model.layers.{n}.shared_head.norm.weight",
    "model.layers.{n}.",
    ("model.layers.{n}.shared_head.head.weight", "model.layers.{n}.embed_tokens.weight"),
)
QWEN = Names(
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.layers.{i}.",
)
MIMO = Names(
    "model.mtp_layers.{i}.token_layernorm.weight",
    "model.mtp_layers.{i}.hidden_layernorm.weight",
    "model.mtp_layers.{i}.input_proj.weight",
    "model.mtp_layers.{i}.final_layernorm.weight",
    "model.mtp_layers.{i}.",
)
ERNIE = Names(
    "model.mtp_emb_norm.{i}.weight",
    "model.mtp_hidden_norm.{i}.weight",
    "model.mtp_linear_proj.{i}.weight",
    None,
    "model.mtp_block.{i}.",
)


@dataclass(frozen=True)
class Family:
    """A tiny model, its module's names, and how the module computes.

    like: the target's layer whose kind the module has. counts: the key of the number of modules. masked: whether the token at
    position 0 counts as zeros, as vLLM has it.
    """

    config: str
    names: Names
    changes: dict = field(default_factory=dict)
    like: int = LAYERS - 1
    counts: str = "num_nextn_predict_layers"
    feature_first: bool = False
    gain_from_zero: bool = False
    masked: bool = True
    options: dict = field(default_factory=dict)  # of the head


QWEN_KEYS = {
    "gain_from_zero": True,
    "masked": False,
    "counts": "mtp_num_hidden_layers",
    "options": {"mask_first": False},
}
KINDS = {
    "deepseek-v3": Family("DeepseekV3Config", DEEPSEEK, MLA | ROUTED),
    "glm-4-moe": Family(
        "Glm4MoeConfig", DEEPSEEK, ROUTED | {"head_dim": 8, "use_qk_norm": True, "attention_bias": True}
    ),
    "glm-4-moe-lite": Family("Glm4MoeLiteConfig", DEEPSEEK, MLA | ROUTED),
    "qwen3-next": Family("Qwen3NextConfig", QWEN, LINEAR | QWEN_MOE, **QWEN_KEYS),
    "qwen3.5": Family("Qwen3_5TextConfig", QWEN, LINEAR, **QWEN_KEYS),
    "qwen3.5-moe": Family("Qwen3_5MoeTextConfig", QWEN, LINEAR | QWEN_MOE, **QWEN_KEYS),
    "mimo": Family("Qwen2Config", MIMO, feature_first=True),
    # the module of the published ERNIE-4.5-MoE checkpoints is a dense layer, as the target's first
    "ernie-4.5-moe": Family("Ernie4_5_MoeConfig", ERNIE, ERNIE_MOE, like=0, options={"norm": False}),
    "ernie, its last layer dense": Family(
        "Ernie4_5_MoeConfig", ERNIE, ERNIE_MOE | {"moe_layer_end_index": 2}, options={"norm": False}
    ),
}
HYBRID = ("qwen3-next", "qwen3.5", "qwen3.5-moe")


def families(*but: str) -> list[str]:
    """All families but some."""
    return [family for family in KINDS if family not in but]


# Checkpoints


@torch.no_grad()
def shaken(module: nn.Module, seed: int) -> nn.Module:
    """Random weights, norms and biases too, so that a forgotten one shows."""
    torch.manual_seed(seed)
    for name, value in module.state_dict().items():
        if value.ndim > 1:
            value.normal_(std=value.shape[-1] ** -0.5)
        elif "norm" in name:
            value.add_(torch.rand_like(value) * 0.5)
        else:
            value.normal_(std=0.2)
    return module


def one_by_one(name: str, value: Tensor) -> dict[str, Tensor]:
    """A layer's tensor as it is published: experts apart."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: value}
    stem, kind = name.rsplit(".", 1)
    found = {}
    for expert, weight in enumerate(value):
        half = len(weight) // 2
        parts = {"gate_proj": weight[:half], "up_proj": weight[half:]} if kind == "gate_up_proj" else {kind: weight}
        found |= {f"{stem}.{expert}.{part}.weight": matrix for part, matrix in parts.items()}
    return found


def module_tensors(family: Family, model: transformers.PreTrainedModel, number: int) -> dict[str, Tensor]:
    """The published tensors of one random module."""
    names, layer = family.names, type(model.model.layers[family.like])(model.config, family.like)
    shaken(layer, 100 + number)
    torch.manual_seed(200 + number)
    found = {names.at(names.eh_proj, number): torch.randn(WIDTH, 2 * WIDTH) * WIDTH**-0.5}
    for name in (names.enorm, names.hnorm, names.norm):
        if name is not None:
            found[names.at(name, number)] = torch.rand(WIDTH) * 0.5 + (0.0 if family.gain_from_zero else 1.0)
    for name in names.extra:
        found[names.at(name, number)] = model.get_output_embeddings().weight.detach().clone()
    for key, value in layer.state_dict().items():
        found |= one_by_one(names.at(names.layer, number) + key, value)
    return found


def write_checkpoint(folder: Path, kind: str, dtype: torch.dtype, modules: int, fused: bool) -> Path:
    """A published checkpoint: two files and an index. In half precision the routers' corrections stay in fp32, as theirs do."""
    family = KINDS[kind]
    config = getattr(transformers, family.config)(**(SIZES | family.changes | {family.counts: modules}))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for layer in model.model.layers:
        shaken(layer, 50)
    shaken(model.model.norm, 60)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    files = {"model-00001-of-00002.safetensors": load_file(folder / "model.safetensors"), "mtp.safetensors": {}}
    (folder / "model.safetensors").unlink()
    for number in range(modules):
        files["mtp.safetensors"] |= module_tensors(family, model, number)
    if fused:
        files["mtp.safetensors"] = put_together(files["mtp.safetensors"])
    where = {}
    for file, tensors in files.items():
        kept = {
            name: value.contiguous().clone() if "e_score" in name else value.to(dtype).contiguous().clone()
            for name, value in tensors.items()
        }
        save_file(kept, folder / file, {"format": "pt"})
        where |= dict.fromkeys(kept, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def put_together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as one tensor of each kind, as Qwen3.5-MoE publishes them."""
    found = {name: value for name, value in tensors.items() if ".experts." not in name}
    [stem] = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    count = 1 + max(int(name.split(".experts.")[1].split(".")[0]) for name in tensors if ".experts." in name)
    gate, up, down = (
        torch.stack([tensors[f"{stem}.experts.{expert}.{part}.weight"] for expert in range(count)])
        for part in ("gate_proj", "up_proj", "down_proj")
    )
    return found | {f"{stem}.experts.gate_up_proj": torch.cat([gate, up], 1), f"{stem}.experts.down_proj": down}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Callable[..., Path]:
    """Checkpoints by family, made once. They are not to be changed."""
    made: dict[tuple, Path] = {}

    def checkpoint(kind: str, dtype: torch.dtype = torch.float32, modules: int = 1, fused: bool = False) -> Path:
        key = (kind, dtype, modules, fused)
        if key not in made:
            made[key] = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), *key)
        return made[key]

    return checkpoint


def open_target(folder: Path, taps: tuple[int, ...] = (LAYERS,)) -> Target:
    """The target in fp32, as a user loads it."""
    return Target.load(TargetConfig(model=str(folder), dtype="float32"), taps)


def any_target(folder: Path, kind: str) -> Target:
    """The target; a hybrid one without its check, which fails where a cache is extended: what needs no cache works."""
    with pytest.MonkeyPatch.context() as patch:
        if kind in HYBRID:
            patch.setattr(Target, "check", lambda self: None)
        return open_target(folder)


@pytest.fixture(scope="module")
def aims(shelf) -> Callable[..., Target]:
    """Targets by family, loaded once. They are not to be changed."""
    made: dict[tuple, Target] = {}

    def target(kind: str, **which) -> Target:
        key = (kind, *sorted(which.items(), key=str))
        if key not in made:
            made[key] = any_target(shelf(kind, **which), kind)
        return made[key]

    return target


def head_for(target: Target, **options) -> Head:
    """An MTP head that may say any token, as the run makes it."""
    torch.manual_seed(0)
    config = build(get_head("mtp").Config, {"kind": "mtp", **options}, "test")
    size = target.spec.vocab_size
    head = make_head(config, target.spec, target.taps, DraftVocab(torch.arange(size), size))
    head.attach(target)
    head.initialise(target)
    return head.eval()


def native_head(target: Target, kind: str, **options) -> Head:
    """A head that begins as the checkpoint's own."""
    return head_for(target, start="native", **(KINDS[kind].options | options))


def raw_tensors(folder: Path) -> dict[str, Tensor]:
    """Everything in a directory, as it stands there."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def published_modules(folder: Path, kind: str, modules: int = 1) -> dict[str, Tensor]:
    """What a module's export must give back: the MTP tensors without those that are the target's own."""
    names = KINDS[kind].names
    extra = {names.at(name, number) for name in names.extra for number in range(modules)}
    return {name: value for name, value in load_file(folder / "mtp.safetensors").items() if name not in extra}


# The family's definition, from the raw tensors


class Plain:
    """A module as its family defines it. Whole texts, no cache."""

    def __init__(self, folder: Path, kind: str, number: int = 0):
        self.family = family = KINDS[kind]
        names, raw = family.names, raw_tensors(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = copy.deepcopy(self.model.config)
        config._attn_implementation = "eager"
        self.enorm, self.hnorm, self.norm = (
            None if name is None else raw[names.at(name, number)].float()
            for name in (names.enorm, names.hnorm, names.norm)
        )
        self.weight = raw[names.at(names.eh_proj, number)].float()
        prefix = names.at(names.layer, number)
        tensors = {name.removeprefix(prefix): value.float() for name, value in raw.items() if name.startswith(prefix)}
        if any(".experts.0." in name for name in tensors):
            tensors = put_together(tensors)
        self.layer = type(self.model.model.layers[family.like])(config, family.like).eval()
        self.layer.load_state_dict({name: tensors[name] for name in self.layer.state_dict()})

    def normalise(self, x_ND: Tensor, weight_D: Tensor) -> Tensor:
        """RMSNorm."""
        gain_D = 1 + weight_D if self.family.gain_from_zero else weight_D
        return x_ND / (x_ND.square().mean(-1, keepdim=True) + EPS).sqrt() * gain_D

    @torch.no_grad()
    def run(self, tokens_N: Tensor, feature_ND: Tensor, first: int = 0) -> Tensor:
        """The layer's outputs [N, D] for rows at positions `first` on."""
        positions_N = torch.arange(first, first + len(tokens_N))
        token_ND = self.model.get_input_embeddings().weight[tokens_N]
        if self.family.masked:
            token_ND = torch.where(positions_N[:, None] == 0, 0.0, token_ND)
        token_ND, feature_ND = self.normalise(token_ND, self.enorm), self.normalise(feature_ND, self.hnorm)
        both = [feature_ND, token_ND] if self.family.feature_first else [token_ND, feature_ND]
        stream = (torch.cat(both, -1) @ self.weight.T)[None]
        mask = torch.full((len(tokens_N), len(tokens_N)), -torch.inf).triu(1)[None, None]
        turned = self.model.model.rotary_emb(stream, positions_N[None])
        out = self.layer(stream, attention_mask=mask, position_ids=positions_N[None], position_embeddings=turned)
        return (out if isinstance(out, Tensor) else out[0])[0]

    def handed(self, out_ND: Tensor) -> Tensor:
        """What the lm_head and the next step read."""
        return out_ND if self.norm is None else self.normalise(out_ND, self.norm)

    @torch.no_grad()
    def logits(self, out_ND: Tensor) -> Tensor:
        """Over all tokens."""
        return self.handed(out_ND) @ self.model.get_output_embeddings().weight.T

    @torch.no_grad()
    def features(self, ids_T: Tensor) -> Tensor:
        """The target's state after its final norm, by transformers."""
        return self.model(ids_T[None], output_hidden_states=True, use_cache=False).hidden_states[-1][0]

    def drafts(self, ids_T: Tensor, row: int, steps: int) -> Tensor:
        """Logits [steps, V] of a chain below x_{row+1} in which the text's own tokens are drafted."""
        feature_ND, found = self.features(ids_T)[: row + 1], []
        for step in range(steps):
            out_ND = self.run(ids_T[1 : row + 2 + step], feature_ND)
            found.append(self.logits(out_ND[-1]))
            feature_ND = torch.cat([feature_ND, self.handed(out_ND[-1:])])
        return torch.stack(found)


def modules_drafts(modules: list[Plain], ids_T: Tensor, row: int) -> Tensor:
    """The same with a module for each step: module i reads what the one below made of the row before."""
    feature_ND, found = modules[0].features(ids_T)[: row + 1], []
    for step, module in enumerate(modules):
        out_ND = module.run(ids_T[1 + step : row + 2 + step], feature_ND, step)
        found.append(module.logits(out_ND[-1]))
        feature_ND = module.handed(out_ND)
    return torch.stack(found)


def text_of(length: int, seed: int) -> Tensor:
    """Random tokens."""
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def document(target: Target, ids_T: Tensor, begin: int = 5) -> DocumentFeatures:
    """A text with the target's states, its answer from `begin` on."""
    mask_T = torch.arange(len(ids_T)) >= begin
    found = target.features(ids_T[None])
    taps_TKD, last_TD = found.taps_BNKD[0].clone(), found.last_BND[0].clone()
    last_RD = last_TD[last_rows(mask_T)]
    logits_RV = target.logits(last_RD).float()
    return DocumentFeatures(ids_T, mask_T, taps_TKD, last_RD, logits_RV.argmax(-1), logits_RV.logsumexp(-1))


@torch.no_grad()
def rolled(head: Head, target: Target, ids_T: Tensor) -> tuple[list[int], list[Tensor]]:
    """The rows that are computed, and each step's logits over all tokens."""
    batch = pack([document(target, ids_T)])
    plan = plan_rows(batch, head.config.steps)
    weights = head.projections(target)
    outputs = head.outputs(batch, target, plan)
    return plan.rows_P.tolist(), [out @ weights[min(i, len(weights) - 1)].T for i, out in enumerate(outputs)]


def assert_rollout(
    head: Head, target: Target, drafts: Callable[[Tensor, int], Tensor], tolerance: float = 2e-5
) -> None:
    """Each step of the rollout gives the logits that `drafts` gives for the row."""
    ids_T = text_of(16, 3)
    rows, steps = rolled(head, target, ids_T)
    compared = 0
    for row in (4, 5, 9, 12):
        expected = drafts(ids_T, row)
        place = rows.index(row)
        for step, logits in enumerate(steps):
            if place < len(logits):
                torch.testing.assert_close(logits[place], expected[step], rtol=tolerance, atol=tolerance)
                compared += 1
    assert compared >= 3 * len(steps)


# 1. The base model of a checkpoint that ships MTP tensors


@pytest.mark.parametrize("kind", families(*HYBRID))
def test_target_of_a_checkpoint_with_mtp_tensors(kind, shelf):
    target = open_target(shelf(kind))
    model = transformers.AutoModelForCausalLM.from_pretrained(shelf(kind), dtype=torch.float32)
    raw = raw_tensors(shelf(kind))
    assert torch.equal(model.get_input_embeddings().weight, raw["model.embed_tokens.weight"])
    assert len(target.body.layers) == LAYERS
    ids_T = text_of(13, 1)
    expected = model(ids_T[None], output_hidden_states=True, use_cache=False).hidden_states[-1][0]
    torch.testing.assert_close(target.features(ids_T[None]).last_BND[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", HYBRID)
def test_target_with_recurrent_layers_is_refused_with_one_message(kind, shelf):
    with pytest.raises(UserError, match="running state cannot be taken back"):
        open_target(shelf(kind))


@pytest.mark.parametrize("kind", HYBRID)
def test_states_of_a_hybrid_target_are_right_without_a_cache(kind, shelf, aims):
    ids_T = text_of(13, 1)
    expected = Plain(shelf(kind), kind).features(ids_T)
    torch.testing.assert_close(aims(kind).features(ids_T[None]).last_BND[0], expected, rtol=1e-4, atol=1e-4)


# 2. A head filled from them computes what the family defines


@pytest.mark.parametrize("kind", families())
def test_imported_head_computes_the_familys_definition(kind, shelf, aims):
    target, plain = aims(kind), Plain(shelf(kind), kind)
    head = native_head(target, kind, steps=3)
    assert_rollout(head, target, lambda ids_T, row: plain.drafts(ids_T, row, 3))


@pytest.mark.parametrize("kind", ["deepseek-v3", "glm-4-moe", "mimo"])
def test_imported_modules_compute_the_familys_definition(kind, shelf, aims):
    target = aims(kind, modules=2)
    plain = [Plain(shelf(kind, modules=2), kind, number) for number in range(2)]
    head = native_head(target, kind, steps=2, modules=2)
    assert_rollout(head, target, lambda ids_T, row: modules_drafts(plain, ids_T, row))


@pytest.mark.parametrize("kind", HYBRID)
def test_position_0_of_a_qwen_module_keeps_its_token(kind, shelf, aims):
    target, plain = aims(kind), Plain(shelf(kind), kind)
    head = head_for(target, start="native", steps=2)
    assert_rollout(head, target, lambda ids_T, row: plain.drafts(ids_T, row, 2))


def test_import_reads_half_precision(shelf, aims):
    kind = "deepseek-v3"
    target, plain = aims(kind, dtype=torch.bfloat16), Plain(shelf(kind, dtype=torch.bfloat16), kind)
    head = native_head(target, kind, steps=2)
    assert {weight.dtype for weight in head.parameters()} == {torch.float32}
    assert_rollout(head, target, lambda ids_T, row: plain.drafts(ids_T, row, 2))


def test_import_reads_fused_experts(shelf, aims):
    apart, fused = (native_head(aims("qwen3.5-moe", fused=fused), "qwen3.5-moe") for fused in (False, True))
    assert_same_weights(apart, fused)


def test_import_reads_a_checkpoint_without_an_index(shelf, aims, tmp_path):
    kind = "deepseek-v3"
    head = native_head(aims(kind), kind)
    other = copy.deepcopy(head)
    save_file(raw_tensors(shelf(kind)), tmp_path / "model.safetensors")
    shake_weights(other)
    import_native(other, tmp_path)
    assert_same_weights(head, other)


def test_scaled_fp8_is_refused_or_scaled(shelf, aims, tmp_path):
    """DeepSeek-V3 ships its MTP layer in fp8 with a scale per block of 128."""
    head, folder = native_head(aims("deepseek-v3"), "deepseek-v3"), tampered(shelf("deepseek-v3"), tmp_path)
    name = f"model.layers.{LAYERS}.self_attn.o_proj.weight"
    weight, scale = raw_tensors(folder)[name], torch.tensor([[0.01]])
    change(folder, {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale})
    try:
        import_native(head, folder)
    except UserError:
        return
    torch.testing.assert_close(head.links[0].block.layer.self_attn.o_proj.weight, weight, rtol=0.1, atol=0.01)


# 3. Written back


def shake_weights(head: Head) -> None:
    """Other weights in all of the head."""
    torch.manual_seed(7)
    with torch.no_grad():
        for value in head.state_dict().values():
            value.add_(torch.randn_like(value))


def assert_same_weights(one: Head, other: Head) -> None:
    """Bit for bit, buffers too."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def assert_same_tensors(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Names, shapes and bits."""
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name].shape == value.shape, name
        assert torch.equal(mine[name], value), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", families())
def test_untrained_export_is_the_checkpoints(kind, dtype, shelf, aims, request):
    export = native_head(aims(kind, dtype=dtype), kind).export("native")
    theirs = published_modules(shelf(kind, dtype=dtype), kind)
    assert export.shapes == {name: tuple(value.shape) for name, value in theirs.items()}
    mine = {name: value.to(theirs[name].dtype) for name, value in export.tensors.items()}
    assert_same_tensors(mine, theirs)


def test_untrained_export_of_a_small_gain(shelf, aims, tmp_path):
    kind = "qwen3.5"
    folder, head = tampered(shelf(kind), tmp_path), native_head(aims(kind), kind)
    small_D = torch.full((WIDTH,), 1e-6, dtype=torch.bfloat16)
    change(folder, {"mtp.norm.weight": small_D})
    import_native(head, folder)
    assert torch.equal(head.export("native").tensors["mtp.norm.weight"].bfloat16(), small_D)


def test_untrained_export_of_fused_experts(shelf, aims):
    """As Qwen3.5-MoE publishes them."""
    export = native_head(aims("qwen3.5-moe", dtype=torch.bfloat16, fused=True), "qwen3.5-moe").export("native")
    theirs = published_modules(shelf("qwen3.5-moe", dtype=torch.bfloat16, fused=True), "qwen3.5-moe")
    assert_same_tensors({name: value.bfloat16() for name, value in export.tensors.items()}, theirs)


@pytest.mark.parametrize("kind", ["deepseek-v3", "mimo"])
def test_untrained_modules_are_the_checkpoints(kind, shelf, aims):
    export = native_head(aims(kind, modules=2), kind, steps=2, modules=2).export("native")
    assert_same_tensors(export.tensors, published_modules(shelf(kind, modules=2), kind, 2))
    assert export.config["num_nextn_predict_layers"] == 2


def test_modules_that_share_tensors_lose_none_of_the_training(shelf, aims):
    try:
        head = native_head(aims("qwen3.5", modules=2), "qwen3.5", steps=2, modules=2)
    except UserError:
        return
    before = head.export("native").tensors["mtp.fc.weight"].clone()
    with torch.no_grad():
        head.links[0].eh_proj.weight.mul_(2)
    assert not torch.equal(head.export("native").tensors["mtp.fc.weight"], before)


@pytest.mark.parametrize("kind", families("ernie-4.5-moe"))
def test_a_training_step_changes_the_modules_tensors_and_nothing_else(kind, shelf, aims):
    target = aims(kind, dtype=torch.bfloat16)
    head = native_head(target, kind, steps=2).train()
    before = {name: value.clone() for name, value in head.export("native").tensors.items()}
    whole = [value.clone() for value in target.model.state_dict().values()]
    head.loss(pack([document(target, text_of(24, 1)), document(target, text_of(24, 2))]), target).total.backward()
    for weight in head.parameters():
        if weight.grad is not None:
            weight.data.add_(weight.grad.sign(), alpha=0.1)
    after = head.export("native").tensors
    assert after.keys() == before.keys()
    same = {name for name in after if torch.equal(after[name], before[name])}
    assert all("e_score_correction_bias" in name or ".experts." in name or "k_proj.bias" in name for name in same), same
    assert len(same) < len(after) / 2
    assert all(torch.equal(a, b) for a, b in zip(whole, target.model.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", families("ernie-4.5-moe"))
def test_there_and_back_is_the_identity(kind, shelf, aims, tmp_path):
    head = native_head(aims(kind, dtype=torch.bfloat16), kind)
    other = copy.deepcopy(head)
    write_directory(tmp_path / "overlay", with_dtype(head.export("native"), torch.float32))
    shake_weights(other)
    found = import_native(other, tmp_path / "overlay")
    assert (found["family"], found["layers"]) == (head.config.native["family"], LAYERS)
    assert_same_weights(head, other)


def test_trained_there_and_back_is_the_identity(shelf, aims, tmp_path):
    head = native_head(aims("deepseek-v3"), "deepseek-v3")
    shake_weights(head)
    other = native_head(aims("deepseek-v3"), "deepseek-v3")
    write_directory(tmp_path / "overlay", with_dtype(head.export("native"), torch.float32))
    import_native(other, tmp_path / "overlay")
    assert_same_weights(head, other)


def test_saved_head_exports_the_same(shelf, aims, tmp_path):
    target = aims("glm-4-moe")
    head = native_head(target, "glm-4-moe")
    save_head(head, tmp_path)
    loaded = load_head(tmp_path, target, torch.float32)
    assert loaded.config == head.config
    assert_same_tensors(loaded.export("native").tensors, head.export("native").tensors)


def cases_for(target: Target, *lengths: int) -> list[Case]:
    """Texts to draft from."""
    found = []
    for length in lengths:
        ids_T = text_of(length + 1, length)
        states = target.features(ids_T[None, :-1])
        found.append(Case(ids_T[1:].tolist(), states.taps_BNKD[0].clone(), states.last_BND[0].clone()))
    return found


@pytest.mark.parametrize("kind", ["glm-4-moe", "mimo", "ernie, its last layer dense"])
@pytest.mark.parametrize("modules", [1, 3])
def test_export_reads_back(kind, modules, shelf, aims, tmp_path):
    target = aims(kind, modules=modules)
    head = native_head(target, kind, steps=3, modules=modules)
    export = with_dtype(head.export("native"), torch.float32)
    write_directory(tmp_path / "overlay", export)
    proof = read_back(export.reader(tmp_path / "overlay"), head, target, cases_for(target, 5, 12), torch.float32)
    assert proof.equal == proof.drafted == (10 if modules == 1 else 6)


def test_export_in_half_precision_reads_back(shelf, aims, tmp_path):
    target = aims("mimo", dtype=torch.bfloat16)
    head = native_head(target, "mimo", steps=3)
    export = with_dtype(head.export("native"), torch.bfloat16)
    write_directory(tmp_path / "overlay", export)
    proof = read_back(export.reader(tmp_path / "overlay"), head, target, cases_for(target, 600), torch.bfloat16)
    assert proof.equal == proof.drafted


def stitched(head: Head, folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """A stitched copy's tensors, written as `headwright export` does."""
    stitch(folder, with_dtype(head.export("stitched"), dtype))
    return raw_tensors(folder)


CORRECTION = (
    "heads/export.py with_dtype rounds routers' corrections, which checkpoints keep in fp32, before stitch sees them"
)


ROUNDED = dict.fromkeys(("deepseek_v3", "glm_4_moe", "glm_4_moe_lite"), CORRECTION)


@pytest.mark.parametrize("kind", families("ernie-4.5-moe"))
def test_stitched_untrained_is_the_checkpoint(kind, shelf, aims, tmp_path):
    head, source = native_head(aims(kind, dtype=torch.bfloat16), kind), shelf(kind, dtype=torch.bfloat16)
    found = stitched(head, tmp_path / "copy", torch.bfloat16)
    assert_same_tensors(found, raw_tensors(source))
    assert {name: value.dtype for name, value in found.items()} == {
        name: value.dtype for name, value in raw_tensors(source).items()
    }
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {path.name for path in source.iterdir()}


def test_stitched_trained_changes_the_module_only_and_loads(shelf, aims, tmp_path):
    head, source = native_head(aims("deepseek-v3"), "deepseek-v3"), shelf("deepseek-v3")
    shake_weights(head)
    found, before = stitched(head, tmp_path / "copy", torch.float32), raw_tensors(source)
    changed = {name for name in before if not torch.equal(found[name], before[name])}
    assert changed == published_modules(source, "deepseek-v3").keys()
    again = native_head(open_target(tmp_path / "copy"), "deepseek-v3")
    assert_same_weights(head, again)
    assert_same_tensors(raw_tensors(source), before)


def test_stitching_into_another_checkpoint_is_refused(shelf, aims, tmp_path):
    head = native_head(aims("deepseek-v3"), "deepseek-v3")
    head.config.native["checkpoint"] = str(shelf("mimo"))
    with pytest.raises(UserError, match="is not the checkpoint that the head began as"):
        stitched(head, tmp_path / "copy", torch.float32)


@pytest.mark.parametrize("kind", families("ernie-4.5-moe"))
def test_the_doctor_knows_what_engines_need_of_them(kind, shelf, aims, tmp_path):
    """A stitched copy is served, and an overlay beside its target; a part that is missing is named."""
    head, family = native_head(aims(kind), kind), KINDS[kind]
    stitched(head, tmp_path / "copy", torch.float32)
    whole = diagnose(tmp_path / "copy", Question())
    assert whole.method.name == "mtp-native"
    assert not whole.errors("vllm") + whole.errors("sglang")
    write_directory(tmp_path / "overlay", with_dtype(head.export("native"), torch.float32))
    overlay = diagnose(tmp_path / "overlay", Question())
    assert not overlay.errors("vllm") + overlay.errors("sglang")
    lost = family.names.at(family.names.hnorm, 0)
    tensors = load_file(tmp_path / "overlay" / "model.safetensors")
    (tmp_path / "overlay" / "model.safetensors").unlink()
    save_file({name: t for name, t in tensors.items() if name != lost}, tmp_path / "overlay" / "model.safetensors")
    [finding] = diagnose(tmp_path / "overlay", Question()).errors("sglang")
    assert lost in finding.where
    assert "random memory" in finding.so


# 4. Errors


def tampered(source: Path, folder: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(source, folder / "tampered"))


def change(folder: Path, tensors: dict[str, Tensor | None]) -> None:
    """Other tensors in the MTP file and the index; None: none."""
    kept = load_file(folder / "mtp.safetensors") | tensors
    kept = {name: value.contiguous() for name, value in kept.items() if value is not None}
    save_file(kept, folder / "mtp.safetensors", {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    where = {name: file for name, file in raw["weight_map"].items() if file != "mtp.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": where | dict.fromkeys(kept, "mtp.safetensors")}))


@pytest.mark.parametrize("kind", ["deepseek-v3", "mimo"])
def test_no_mtp_tensors_is_one_message(kind, shelf, aims, tmp_path):
    head, folder = native_head(aims(kind), kind), tampered(shelf(kind), tmp_path)
    change(folder, dict.fromkeys(load_file(folder / "mtp.safetensors")))
    with pytest.raises(UserError, match=r"ships no MTP tensors of a known kind.*start from last-layer"):
        import_native(head, folder)
    with pytest.raises(UserError, match="ships no MTP tensors"):
        native_head(open_target(folder), kind)


def test_target_without_a_checkpoint_is_one_message():
    with pytest.raises(UserError, match="was not loaded from a checkpoint"):
        head_for(make_target(taps=(8,)), start="native")


@pytest.mark.parametrize("kind", families("ernie-4.5-moe"))
def test_each_missing_tensor_is_named(kind, shelf, aims, tmp_path):
    head, names = native_head(aims(kind), kind), published_modules(shelf(kind), kind)
    folder, joint = tampered(shelf(kind), tmp_path), KINDS[kind].names.at(KINDS[kind].names.eh_proj, 0)
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    for name in names:
        left = {key: file for key, file in raw["weight_map"].items() if key != name}
        index.write_text(json.dumps({"weight_map": left}))
        told = "ships no MTP tensors" if name == joint else name  # by the projection a family is known
        with pytest.raises(UserError) as caught:
            import_native(head, folder)
        assert told in str(caught.value)


SHAPES = {
    "projection": (f"model.layers.{LAYERS}.eh_proj.weight", (WIDTH, WIDTH)),
    "norm": (f"model.layers.{LAYERS}.hnorm.weight", (WIDTH + 1,)),
    "layer": (f"model.layers.{LAYERS}.self_attn.o_proj.weight", (WIDTH, 2 * WIDTH)),
    "one expert": (f"model.layers.{LAYERS}.mlp.experts.1.up_proj.weight", (17, WIDTH)),
    "number": (f"model.layers.{LAYERS}.enorm.weight", ()),
}


@pytest.mark.parametrize(
    "which",
    [
        "projection",
        "norm",
        "number",
        "one expert",
        "layer",
    ],
)
def test_wrong_shape_is_one_message_with_the_tensors_name(which, shelf, aims, tmp_path):
    head, folder = native_head(aims("deepseek-v3"), "deepseek-v3"), tampered(shelf("deepseek-v3"), tmp_path)
    name, shape = SHAPES[which]
    change(folder, {name: torch.ones(shape)})
    with pytest.raises(UserError) as caught:
        import_native(head, folder)
    assert name in str(caught.value)
    assert str(list(shape)) in str(caught.value)


def test_wrong_shape_of_the_projection_is_refused(shelf, aims, tmp_path):
    head, folder = native_head(aims("deepseek-v3"), "deepseek-v3"), tampered(shelf("deepseek-v3"), tmp_path)
    change(folder, {SHAPES["projection"][0]: torch.ones(WIDTH, WIDTH)})
    with pytest.raises(UserError, match=r"eh_proj.weight has shape"):
        import_native(head, folder)


@pytest.mark.parametrize("place", ["../tampered/mtp.safetensors", "/etc/passwd", "below/mtp.safetensors"])
def test_index_that_leads_out_of_the_directory_is_refused(place, shelf, aims, tmp_path):
    head, folder = native_head(aims("mimo"), "mimo"), tampered(shelf("mimo"), tmp_path)
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.mtp_layers.0.input_proj.weight"] = place
    index.write_text(json.dumps(raw))
    with pytest.raises(UserError, match="names a file outside the directory"):
        import_native(head, folder)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"weight_map": {"a": "gone.safetensors"}}',
        "[]",
        '{"weight_map": ["a"]}',
        '{"weight_map": {"a": 1}}',
    ],
)
def test_broken_index_is_one_message(text, shelf, aims, tmp_path):
    head, folder = native_head(aims("mimo"), "mimo"), tampered(shelf("mimo"), tmp_path)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=r"readable as JSON|no weight_map|holds a list|ships no MTP"):
        import_native(head, folder)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_truncated_weights_are_one_message(size, index, shelf, aims, tmp_path):
    head, folder = native_head(aims("mimo"), "mimo"), tampered(shelf("mimo"), tmp_path)
    path = folder / "mtp.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    if not index:
        (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"cannot be read|not a whole safetensors file"):
        import_native(head, folder)


def test_missing_file_is_one_message(shelf, aims, tmp_path):
    head, folder = native_head(aims("mimo"), "mimo"), tampered(shelf("mimo"), tmp_path)
    (folder / "mtp.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        import_native(head, folder)


def test_norm_that_the_family_has_or_not_is_told(aims):
    with pytest.raises(UserError, match=r"head.norm: deepseek modules have a norm after their layer"):
        native_head(aims("deepseek-v3"), "deepseek-v3", norm=False)
    with pytest.raises(UserError, match=r"head.norm: ernie modules have no norm after their layer"):
        native_head(aims("ernie, its last layer dense"), "ernie, its last layer dense", norm=True)


def test_more_modules_than_the_checkpoint_has(aims):
    with pytest.raises(UserError, match=rf"lacks model.layers.{LAYERS + 1}.enorm.weight"):
        native_head(aims("deepseek-v3"), "deepseek-v3", steps=3, modules=3)


def test_options_that_do_not_go_together():
    make = get_head("mtp").Config
    with pytest.raises(UserError, match=r"head.block=target"):
        make(block="llama", start="native")
    with pytest.raises(UserError, match=r"head.modules 2: 1, or as many as head.steps \(3\)"):
        make(steps=3, modules=2)
    assert make(steps=3, modules=3).modules == make(steps=1, modules=1).steps * 3


def test_export_of_what_did_not_begin_as_a_checkpoints_own(aims):
    with pytest.raises(UserError, match=r"export.engines 'native'"):
        head_for(aims("mimo")).export("native")
    with pytest.raises(UserError, match=r"export.engines 'vllm'"):
        native_head(aims("mimo"), "mimo").export("vllm")


# 5. Decoder layers of the target's kind


def dense(query_BQNE: Tensor, keys_BGNE: Tensor, values_BGNE: Tensor) -> Tensor:
    """Causal attention [B, N, Q, F] with a whole matrix of scores."""
    groups = query_BQNE.shape[1] // keys_BGNE.shape[1]
    keys, values = keys_BGNE.repeat_interleave(groups, 1), values_BGNE.repeat_interleave(groups, 1)
    scores = query_BQNE @ keys.transpose(-1, -2) * query_BQNE.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ values).transpose(1, 2)


TAP = 2
CAPPED = {"gemma2", "gpt-oss"}


def named_target(name: str) -> Target:
    """A target of any family that tests know, with a tap in its midst and one at its end."""
    if name in FAMILIES:
        return make_target(name, (TAP, 8), **({"sliding_window": None} if name == "mistral" else {}))
    if name in CAUSAL:
        return Target(causal(name), make_tokenizer(), name, (TAP, 8))
    family = KINDS[name]
    config = getattr(transformers, family.config)(**(SIZES | family.changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.MonkeyPatch.context() as patch:
        if name in HYBRID:
            patch.setattr(Target, "check", lambda self: None)
        return Target(model, make_tokenizer(), name, (TAP, LAYERS))


@torch.no_grad()
def own_layers_states(target: Target, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """What goes into the target's last layer with full attention, and what comes out, by transformers' own attention."""
    layer, seen = target.body.layers[full_layers(target)[0][-1]], {}

    def before(_, args, kwargs):
        seen["in"] = args[0] if args else kwargs["hidden_states"]

    def after(_, __, out):
        seen["out"] = out if isinstance(out, Tensor) else out[0]

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)]
    with target.attention("eager"):
        target.model(input_ids=ids_BT, use_cache=False)
    for handle in handles:
        handle.remove()
    target.captured.clear()
    return seen["in"].clone(), seen["out"].clone()


EVERY = [*FAMILIES, *CAUSAL, *(name for name in KINDS if name not in CAUSAL)]


@pytest.mark.parametrize("name", [name for name in EVERY if name not in CAPPED])
def test_own_block_is_the_targets_layer(name):
    target = named_target(name)
    ids_BT = torch.stack([text_of(8, seed) for seed in (1, 2)])  # within every window
    x_BTD, expected = own_layers_states(target, ids_BT)
    positions = torch.arange(8).expand(2, -1)
    block = own_block(target)
    whole = {name: value.clone() for name, value in target.model.state_dict().items()}
    out = block(x_BTD, positions, dense)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert not target.captured  # no hook of the target hears it
    other = block(x_BTD, positions, lambda *parts: dense(*parts).flip(1))
    assert not torch.allclose(other, expected, rtol=1e-2, atol=1e-2)  # the attention is the caller's

    for key, weight in block.named_parameters():
        assert weight.requires_grad or "e_score_correction_bias" in key
        assert weight.dtype == torch.float32
    out.square().sum().backward()
    assert all(weight.grad is None for weight in target.model.parameters())
    torch.optim.SGD(block.parameters(), lr=0.1).step()
    assert not torch.allclose(block(x_BTD, positions, dense), expected, rtol=1e-2, atol=1e-2)
    for key, value in target.model.state_dict().items():
        assert torch.equal(value, whole[key]), key
    again = own_layers_states(target, ids_BT)
    assert torch.equal(again[1], expected)
    target.features(ids_BT)  # and the target still has its hooks
    assert target.features(ids_BT).taps_BNKD.shape[2] == 2


@pytest.mark.parametrize(
    "name",
    [name for name in EVERY if name not in CAPPED],
)
def test_every_weight_of_a_block_is_learned(name):
    """Or a run of several processes would wait for its gradient."""
    block = own_block(named_target(name))
    block(torch.randn(1, 12, WIDTH), torch.arange(12)[None], dense).square().sum().backward()
    assert [key for key, weight in block.named_parameters() if weight.requires_grad and weight.grad is None] == []


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", "phi3"])
def test_own_block_on_long_texts(name):
    """Beyond any window of the target's other layers, at positions that do not begin at 0."""
    target = named_target(name)
    x_BTD, expected = own_layers_states(target, text_of(40, 1)[None])
    block = own_block(target)
    torch.testing.assert_close(block(x_BTD, torch.arange(40)[None], dense), expected, rtol=1e-4, atol=1e-4)
    shifted = block(x_BTD, torch.arange(40)[None] + 7, dense)
    torch.testing.assert_close(shifted, expected, rtol=1e-3, atol=1e-3)  # only distances count


def test_window_of_every_layer_is_kept_or_refused():
    """Mistral has no layer_types; what it computes in a window of 9, a block with full attention does not."""
    target = make_target("mistral", (8,))
    x_BTD, expected = own_layers_states(target, text_of(24, 1)[None])
    try:
        out = own_block(target)(x_BTD, torch.arange(24)[None], dense)
    except UserError:
        return
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_a_block_leaves_the_targets_attention_as_it_is():
    target = named_target("qwen3")
    before = target.body.layers[0].self_attn.config._attn_implementation
    block = own_block(target)
    assert target.body.layers[-1].self_attn.config._attn_implementation == before
    assert block.layer.self_attn.config is not target.body.layers[-1].self_attn.config


@pytest.mark.parametrize("name", sorted(CAPPED))
def test_capped_scores_and_sinks_are_refused(name):
    with pytest.raises(
        UserError, match=r"(caps its attention scores|has attention sinks), which .* set head.block=llama"
    ):
        own_block(named_target(name))(torch.randn(1, 4, WIDTH), torch.arange(4)[None], dense)


@pytest.mark.parametrize("name", sorted(CAPPED))
def test_capped_scores_and_sinks_are_refused_before_any_work(name):
    with pytest.raises(UserError, match=r"set head.block=llama"):
        own_block(named_target(name))


def test_target_without_full_attention_is_refused():
    target = make_target("gemma3", (8,), layer_types=["sliding_attention"] * 8)
    with pytest.raises(UserError, match=r"none of its layers has full attention: set head.block=llama"):
        make_block(target, "target")


@torch.no_grad()
def llama_out(target: Target, block: DecoderBlock, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
    """transformers' Llama layer, with the block's weights."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    spec = target.spec
    config = transformers.LlamaConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope["rope_theta"]},
        max_position_embeddings=spec.max_positions,
        attn_implementation="eager",
    )
    layer = LlamaDecoderLayer(config, 0).eval()
    layer.load_state_dict(block.layer.state_dict())
    mask = torch.full((x_BTD.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    turned = LlamaRotaryEmbedding(config)(x_BTD, positions_BT)
    out = layer(x_BTD, attention_mask=mask, position_ids=positions_BT, position_embeddings=turned)
    return out if isinstance(out, Tensor) else out[0]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral", "gpt-oss", "cohere", "mimo", "glm-4-moe"])
def test_llama_block_is_llamas_layer(name):
    target = named_target(name)
    block = make_block(target, "llama")
    assert isinstance(block, DecoderBlock)
    x_BTD = torch.randn(2, 15, WIDTH, generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.arange(15), torch.arange(30, 45)])
    shaken(block.layer, 3)
    expected = llama_out(target, block, x_BTD, positions)
    torch.testing.assert_close(block(x_BTD, positions, dense), expected, rtol=1e-5, atol=1e-5)
    assert all(weight.requires_grad for weight in block.parameters())


def test_llama_block_turns_as_its_target():
    target = make_target("llama", (8,), rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    assert target.spec.rope["rope_theta"] == 100.0
    block, x_BTD, positions = llama_block(target.spec), torch.randn(1, 15, WIDTH), torch.arange(15)[None]
    expected = llama_out(target, block, x_BTD, positions)
    torch.testing.assert_close(block(x_BTD, positions, dense), expected, rtol=1e-5, atol=1e-5)


def test_llama_block_has_random_matrices_and_plain_norms():
    block = llama_block(make_target("llama", (8,)).spec)
    for name, value in block.layer.state_dict().items():
        assert torch.equal(value, torch.ones(WIDTH)) if "norm" in name else 0.8 < value.std() * WIDTH**0.5 < 1.2, name


def test_start_as_copies_the_last_full_layer():
    target = make_target("llama", (8,))
    block = make_block(target, "llama")
    block.start_as(target)
    theirs = target.body.layers[-1].state_dict()
    assert block.layer.state_dict().keys() == theirs.keys()
    for name, value in block.layer.state_dict().items():
        assert torch.equal(value, theirs[name]), name
        assert value.data_ptr() != theirs[name].data_ptr()
    x_BTD, expected = own_layers_states(target, text_of(20, 1)[None])
    torch.testing.assert_close(block(x_BTD, torch.arange(20)[None], dense), expected, rtol=1e-4, atol=1e-4)


def test_start_as_leaves_what_the_layer_has_not():
    """Qwen3's norms of queries and keys have no place in a Llama layer; gemma3's last full layer is its sixth."""
    block, target = make_block(named_target("qwen3"), "llama"), named_target("qwen3")
    block.start_as(target)
    assert torch.equal(block.layer.self_attn.q_proj.weight, target.body.layers[-1].self_attn.q_proj.weight)
    gemma = named_target("gemma3")
    block = own_block(gemma)
    shaken(block.layer, 4)
    block.start_as(gemma)
    for name, value in gemma.body.layers[5].state_dict().items():
        assert torch.equal(block.layer.state_dict()[name], value), name


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3.5"])
def test_start_as_leaves_what_has_another_shape(name):
    target = named_target(name)
    block = make_block(target, "llama")
    block.start_as(target)
    assert torch.equal(block.layer.input_layernorm.weight, target.body.layers[-1].input_layernorm.weight)


def test_block_in_half_precision_turns_by_exact_angles():
    block = make_block(make_target("llama", (8,)), "llama")
    before = block.rotary(torch.zeros(1), torch.tensor([[3000]]))[0]
    torch.testing.assert_close(block.to(torch.bfloat16).rotary(torch.zeros(1), torch.tensor([[3000]]))[0], before)


def test_block_in_half_precision_keeps_the_routers_correction(aims):
    block = own_block(aims("deepseek-v3")).to(torch.bfloat16)
    kept = aims("deepseek-v3").body.layers[-1].mlp.gate.e_score_correction_bias
    assert torch.equal(block.layer.mlp.gate.e_score_correction_bias.float(), kept)


# 6. Heads whose layers are MLA or MoE


def context_of(target: Target, ids_T: Tensor, row: int) -> Context:
    """Rows 0 … row of a text, confirmed."""
    found = target.features(ids_T[None])
    return Context(
        target,
        ids_T[None, 1 : row + 2],
        found.taps_BNKD[:, : row + 1],
        found.last_BND[:, : row + 1],
        Policy(),
        lambda: torch.zeros(1, dtype=torch.float64),
        texts=[ids_T[: row + 2].tolist()],
    )


@torch.inference_mode()
def forced(head: Head, target: Target, ids_T: Tensor, row: int) -> Tensor:
    """Logits [steps, V] of drafting in which the text's own tokens are drafted, each step by the cache."""
    state, context = head.start(1, len(ids_T) + 4), context_of(target, ids_T, row)
    hidden = head.absorb(state, context)
    if head.chained:
        drafting, found = (
            LinkedDrafting(head, state, target, head.config.steps),
            [head.guess(0, hidden[:, 0], target)[0]],
        )
    else:
        drafting, found = (
            Drafting(head, state, target, hidden, head.config.steps),
            [head.logits(hidden[:, 0], target)[0]],
        )
    for step in range(1, head.config.steps):
        token = ids_T[row + 1 + step].reshape(1, 1)
        found.append(drafting.step(token, torch.zeros(1, 1, dtype=torch.long))[0, 0])
    return torch.stack(found)


def loud(head: Head) -> Head:
    """Weights moved, so that no part of the head does nothing."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return head


BOTH = [{"modules": 1}, {"modules": 3}]
DRAFTING = ["deepseek-v3", "glm-4-moe-lite", "glm-4-moe", "mimo", "ernie-4.5-moe"]  # MLA, MoE and dense


@pytest.mark.parametrize("options", BOTH, ids=str)
@pytest.mark.parametrize("kind", DRAFTING)
def test_rollout_is_sequential_drafting(kind, options, aims):
    target = aims(kind)
    head = loud(head_for(target, steps=3, **options))
    assert_rollout(head, target, lambda ids_T, row: forced(head, target, ids_T, row), tolerance=1e-4)


@pytest.mark.parametrize("options", BOTH, ids=str)
@pytest.mark.parametrize("kind", DRAFTING)
def test_greedy_text_is_the_targets(kind, options, aims):
    target = aims(kind)
    head = head_for(target, steps=3, **options)
    prompt = text_of(9, 5).tolist()
    plain = decode_plain(target, prompt, 20).tokens
    for shape in (TreeShape.chain(3), TreeShape("dynamic", 3, 2, 5)):
        assert generate_one(target, head, prompt, Settings(shape, 20)).tokens == plain


@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize("kind", DRAFTING)
def test_every_weight_of_a_head_is_learned(kind, modules, aims, request):
    target = aims(kind)
    head = loud(head_for(target, steps=3, modules=modules)).train()
    head.loss(pack([document(target, text_of(24, 1)), document(target, text_of(24, 2))]), target).total.backward()
    learned = {name: weight.grad for name, weight in head.named_parameters() if weight.requires_grad}
    assert [name for name, grad in learned.items() if grad is None or not grad.any()] == []
