"""The MTP tensors that checkpoints ship: how families name them, where their layout differs from ours, reading and writing
back.

Formats (vLLM 0.32): DeepSeek-V3 and GLM-4-MoE `model.layers.{L}.*`, Qwen3-Next and Qwen3.5 `mtp.*` with norm gains of 1 + w,
MiMo `model.mtp_layers.{i}.*` with the feature's half of the projection first, ERNIE-4.5 `model.mtp_*` without a norm after the
layer.
Shapes: D target width, E experts, I width of an expert.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from headwright.configs import UserError, reason
from headwright.heads.base import Case, Drafts, Tables
from headwright.heads.directory import indexed, read_entries
from headwright.heads.plain import Chain

if TYPE_CHECKING:
    from headwright.heads.mtp import Head

PARTS = ("enorm", "hnorm", "eh_proj", "norm")


@dataclass(frozen=True)
class Family:
    """Names of a module's parts. {i}: the module; {n}: the number of the target's layers plus i; the layer's own tensors stand
    under `layer` in the names of the target's layers. `extra`: tensors beside them that are the target's own. `mask_first`: the
    token at position 0 counts as zeros (vLLM 0.32).
    """

    enorm: str
    hnorm: str
    eh_proj: str
    norm: str | None
    layer: str
    extra: tuple[str, ...] = ()
    feature_first: bool = False
    gain_from_zero: bool = False
    mask_first: bool = True

    @property
    def numbered(self) -> bool:
        """Whether names tell modules apart."""
        return "{" in self.eh_proj

    def place(self, name: str, module: int, layers: int) -> str:
        """A name with its numbers."""
        return name.format(i=module, n=layers + module)


DEEPSEEK = Family(
    "model.layers.{n}.enorm.weight",
    "model.layers.{n}.hnorm.weight",
    "model.layers.{n}.eh_proj.weight",
    "model.layers.{n}.shared_head.norm.weight",
    "model.layers.{n}.",
    ("model.layers.{n}.shared_head.head.weight", "model.layers.{n}.embed_tokens.weight"),
)
QWEN = Family(
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.layers.{i}.",
    gain_from_zero=True,
    mask_first=False,
)
MIMO = Family(
    "model.mtp_layers.{i}.token_layernorm.weight",
    "model.mtp_layers.{i}.hidden_layernorm.weight",
    "model.mtp_layers.{i}.input_proj.weight",
    "model.mtp_layers.{i}.final_layernorm.weight",
    "model.mtp_layers.{i}.",
    feature_first=True,
)
ERNIE = Family(
    "model.mtp_emb_norm.{i}.weight",
    "model.mtp_hidden_norm.{i}.weight",
    "model.mtp_linear_proj.{i}.weight",
    None,
    "model.mtp_block.{i}.",
)
FAMILIES = {"deepseek": DEEPSEEK, "qwen": QWEN, "mimo": MIMO, "ernie": ERNIE}


class Checkpoint:
    """The safetensors files of a directory, read tensor by tensor."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.where = indexed(folder) or {name: entry.file for name, entry in read_entries(folder).items()}

    def read(self, name: str) -> Tensor:
        """One tensor in fp32. Raises UserError for one that is quantised: its scales lie elsewhere."""
        try:
            with safe_open(self.folder / self.where[name], "pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.folder}: {name} cannot be read: {reason(error)}") from None
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(
                f"{self.folder}: {name} is {str(tensor.dtype)[6:]}: a quantised MTP module cannot be trained on"
            )
        return tensor.float()


def find_family(checkpoint: Checkpoint, layers: int) -> str:
    """Which family's names the checkpoint has. Raises UserError where it ships no MTP tensors that are known."""
    for name, family in FAMILIES.items():
        if family.place(family.eh_proj, 0, layers) in checkpoint.where:
            return name
    raise UserError(
        f"head.start native: {checkpoint.folder} ships no MTP tensors of a known kind (looked for "
        f"{', '.join(family.place(family.eh_proj, 0, layers) for family in FAMILIES.values())}): start from last-layer"
    )


def layer_place(folder: Path, layers: Sequence[nn.Module]) -> int | None:
    """Which of the target's layers has the tensors of the checkpoint's module: published modules are not always of the last
    layer's kind (ERNIE-4.5's are dense). None: the last.
    """
    checkpoint = Checkpoint(folder)
    family = FAMILIES[find_family(checkpoint, len(layers))]
    prefix = family.place(family.layer, 0, len(layers))
    for place, layer in reversed(list(enumerate(layers))):
        if all(there(checkpoint, prefix + key, value) for key, value in layer.state_dict().items()):
            return place
    return None


def there(checkpoint: Checkpoint, name: str, like: Tensor) -> bool:
    """Whether a tensor of a layer is in the checkpoint, experts together or apart."""
    if name in checkpoint.where:
        return True
    return (
        ".experts." in name
        and like.ndim == 3
        and all(part in checkpoint.where for names in experts(name, len(like)) for part in names)
    )


@torch.no_grad()
def import_native(head: "Head", folder: Path) -> dict[str, Any]:
    """Fill the head's modules from the target's checkpoint. Returns what an export needs to write them back.

    Raises UserError where a tensor is missing, or the head's options differ from what the family computes.
    """
    checkpoint, layers = Checkpoint(folder), head.spec.num_layers
    name = find_family(checkpoint, layers)
    family = FAMILIES[name]
    if (family.norm is None) == head.config.norm:
        raise UserError(f"head.norm: {name} modules have {'no' if family.norm is None else 'a'} norm after their layer")
    if len(head.links) > 1 and not family.numbered:
        raise UserError(f"head.modules {len(head.links)}: {name} checkpoints ship one module: head.modules=1")
    head.config.mask_first = family.mask_first
    together = False
    for number, module in enumerate(head.links):
        module.like(family.gain_from_zero, family.mask_first)
        for part in PARTS:
            source = getattr(family, part)
            if source is not None:
                place = family.place(source, number, layers)
                value = need(checkpoint, place)
                own = module.get_submodule(part).get_parameter("weight")
                put(own, swapped(value) if part == "eh_proj" and family.feature_first else value, place)
        prefix = family.place(family.layer, number, layers)
        for key, own_value in module.block.layer.state_dict().items():
            together |= fill(own_value, checkpoint, prefix + key)
    return {"family": name, "layers": layers, "checkpoint": str(folder.resolve()), "experts_together": together}


def put(own: Tensor, value: Tensor, name: str) -> None:
    """A tensor of the same shape."""
    if own.shape != value.shape:
        raise UserError(
            f"head.start native: {name} has shape {list(value.shape)}, the target's layer {list(own.shape)}"
        )
    own.copy_(value)


def need(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor that must be there."""
    if name not in checkpoint.where:
        raise UserError(f"head.start native: {checkpoint.folder} lacks {name}: its MTP module is not whole")
    return checkpoint.read(name)


def theirs(part: str, value: Tensor, family: Family) -> Tensor:
    """A module's tensor in the family's layout."""
    return swapped(value) if part == "eh_proj" and family.feature_first else value


def swapped(weight_D2D: Tensor) -> Tensor:
    """The two halves of the columns, changed over."""
    return torch.cat(list(reversed(weight_D2D.chunk(2, 1))), 1)


# A layer's tensors. Checkpoints keep experts one by one, transformers as one tensor of each kind.


def fill(own: Tensor, checkpoint: Checkpoint, name: str) -> bool:
    """Copy a tensor of the layer, experts together or one by one; whether it is one of experts that stand together."""
    if name in checkpoint.where or own.ndim != 3 or ".experts." not in name:
        put(own, need(checkpoint, name), name)
        return own.ndim == 3 and ".experts." in name
    for expert, names in zip(own, experts(name, len(own))):
        for room, part in zip(expert.chunk(len(names)), names):
            put(room, need(checkpoint, part), part)
    return False


def experts(name: str, count: int) -> Iterator[list[str]]:
    """The names of each expert's tensors that `…experts.gate_up_proj` or `…experts.down_proj` holds."""
    stem, kind = re.fullmatch(r"(.*\.experts)\.(\w+)", name).groups()  # type: ignore[union-attr]
    parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
    for expert in range(count):
        yield [f"{stem}.{expert}.{part}.weight" for part in parts]


def apart(name: str, value: Tensor) -> dict[str, Tensor]:
    """A layer's tensor as checkpoints keep it."""
    if value.ndim != 3 or ".experts." not in name:
        return {name: value}
    found: dict[str, Tensor] = {}
    for names, expert in zip(experts(name, len(value)), value):
        found |= dict(zip(names, expert.chunk(len(names))))
    return found


def native_tensors(head: "Head") -> dict[str, Tensor]:
    """The head's tensors under the checkpoint's names."""
    family, layers = FAMILIES[head.config.native["family"]], int(head.config.native["layers"])
    tensors: dict[str, Tensor] = {}
    for number, module in enumerate(head.links):
        for part in PARTS:
            source = getattr(family, part)
            if source is not None:
                tensors[family.place(source, number, layers)] = theirs(
                    part, getattr(module, part).weight.detach(), family
                )
        prefix = family.place(family.layer, number, layers)
        for key, value in module.block.layer.state_dict().items():
            tensors |= {prefix + key: value} if head.config.native["experts_together"] else apart(prefix + key, value)
    return tensors


class NativeReader:
    """The written tensors, put into a copy of the head by the importer. Whole texts are run anew for every token, without a
    cache; the decoder layer is transformers' own.
    """

    def __init__(self, head: "Head", folder: Path):
        self.head = copy.deepcopy(head).float().eval()
        for weight in self.head.parameters():
            weight.data.zero_()  # what is not read back must show
        import_native(self.head, folder)

    @torch.inference_mode()
    def draft(self, tables: Tables, case: Case, count: int) -> Drafts:
        """`count` greedy tokens after the last of the case's."""
        chain, ids_W = Chain(case), self.head.vocab.ids_W
        for number in range(count):
            state_D = self.last_state(tables, case, chain.tokens, number)
            chain.take(state_D @ tables.lm_head_VD[ids_W].T, ids_W)
        return chain.drafts()

    def last_state(self, tables: Tables, case: Case, tokens: list[int], number: int) -> Tensor:
        """What the lm_head reads for draft `number`."""
        feature_TD, links = case.last_TD, self.head.links
        embedding_ND = tables.embedding_VD[torch.tensor(tokens)]
        if not self.head.chained:
            for step in range(number + 1):
                rows = len(case.following) + step
                out_ND = self.run(links[0], embedding_ND[:rows], feature_TD, 0)
                feature_TD = torch.cat([feature_TD, self.head.handed(0, out_ND[-1:])])
            return links[0].norm(out_ND[-1])  # type: ignore[no-any-return]
        for step in range(number + 1):
            out_ND = self.run(links[step], embedding_ND[step : step + len(feature_TD)], feature_TD, step)
            feature_TD = self.head.handed(step, out_ND)
        return links[number].norm(out_ND[-1])  # type: ignore[no-any-return]

    @staticmethod
    def run(module: Any, embedding_ND: Tensor, feature_ND: Tensor, first: int) -> Tensor:
        """A module over a whole text, rotated from position `first` on."""

        def causal(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            repeat = query.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
            scores = query @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            return (scores.masked_fill(later, -torch.inf).softmax(-1) @ values).transpose(1, 2)

        positions = torch.arange(first, first + len(feature_ND))
        out: Tensor = module(module.pair.token(embedding_ND), feature_ND, positions, causal)
        return out
