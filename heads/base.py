"""What every head is: three methods, a Config, and how it is saved.

Shapes: B rows, M new rows of context, K taps, D target width, V target vocabulary, W draft vocabulary.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from headwright.configs import UserError
from headwright.configs.load import build
from headwright.data.batch import FeatureBatch
from headwright.data.sampling import Policy
from headwright.data.store import replace_with, save_tensors, write_json
from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads import get_head
from headwright.heads.draft_tree import Tree, TreeShape

FORMAT = "headwright.head/1"


@dataclass
class HeadLoss:
    """A micro-batch's loss as a sum over loss-bearing rows; the loop divides by their number over all ranks.

    `metrics` are (numerator, denominator) pairs, so that they add up over batches and ranks. Nothing here has been
    moved to the host.
    """

    total: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass
class Engine:
    """How a loss is computed. Changes memory and time, never a value.

    recompute: run each rollout step again in the backward pass instead of keeping its inside. loss_mib: memory of a chunk of
    logits (heads/chunked.py).
    """

    recompute: bool = False
    loss_mib: float | None = None


@dataclass
class Drafts:
    """Greedy drafts, and the log-probability of each path up to them."""

    tokens: list[int]
    logprobs: list[float]


class PlainReader(Protocol):
    """An independent reader of an exported directory: it shares no code with the head."""

    def draft(self, embedding_VD: Tensor, following_T: list[int], taps_TKD: Tensor, count: int) -> Drafts:
        """`count` greedy tokens after the last of `following`, the token after each row of context."""
        ...


@dataclass
class Export:
    """An engine's directory: tensors and config.json, the shape that the format gives every tensor, what reads it back, and the
    launch lines for a target, a directory and a dtype.
    """

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    reader: Callable[[Path], PlainReader]
    launch: Callable[[str, Path, str], str]


@dataclass
class Context:
    """What a head learns between two drafts: M newly committed rows, one per token that the target has now processed.

    Row t carries the feature of position t (taps_BMKD, last_BMD) and the token after it, tokens_BM = x_{t+1}. The last
    of these is the root: chosen by the target, not yet processed. `uniform` draws a number in [0, 1) for each row [B].
    """

    target: Target
    tokens_BM: Tensor
    taps_BMKD: Tensor
    last_BMD: Tensor
    policy: Policy
    uniform: Callable[[], Tensor]

    @property
    def root_B(self) -> Tensor:
        """The token that drafting starts from."""
        return self.tokens_BM[:, -1]


class DraftHead(nn.Module):
    """A head. Subclasses live one to a file, as class `Head`, beside a dataclass `Config` with a field `kind`."""

    ids_W: Tensor

    def __init__(self, config: Any, spec: TargetSpec, taps: tuple[int, ...], vocab: DraftVocab):
        super().__init__()
        self.config, self.spec, self.taps, self.vocab = config, spec, tuple(taps), vocab
        self.register_buffer("ids_W", vocab.ids_W.clone(), persistent=False)
        self.choices_V = vocab.index_V  # draft id of each target id, on the host
        self.engine = Engine()

    @property
    def lookahead(self) -> int:
        """How many tokens after a row its loss reads."""
        raise NotImplementedError

    def initialise(self, target: Target) -> None:
        """Start from what the target already knows."""

    def loss(self, batch: FeatureBatch, target: Target) -> HeadLoss:
        """Loss and metrics of one packed batch."""
        raise NotImplementedError

    def forward(self, batch: FeatureBatch, target: Target) -> HeadLoss:
        """`loss`, by the name that wrappers such as DDP call."""
        return self.loss(batch, target)

    def start(self, batch: int, slots: int) -> Any:
        """Fresh drafting state for `batch` rows of at most `slots` tokens."""
        raise NotImplementedError

    def propose(self, state: Any, context: Context, shape: TreeShape) -> Tree:
        """Take in the new rows, draft a tree, and leave in `state` only what the target has confirmed."""
        raise NotImplementedError

    def agreement(self, batch: FeatureBatch, target: Target, steps: int) -> Tensor:
        """Whether each greedy guess equals the text: [T, steps] for rows t and rollout steps i.

        On text that the target wrote greedily this is what a greedy chain would see, so that τ follows without
        decoding.
        """
        raise NotImplementedError

    def export(self, engine: str) -> Export:
        """What `engine` loads. Raises UserError when it cannot serve this head."""
        raise NotImplementedError


def make_head(config: Any, spec: TargetSpec, taps: tuple[int, ...], vocab: DraftVocab) -> DraftHead:
    """A new head of the kind that its config names."""
    return get_head(config.kind).Head(config, spec, taps, vocab)


def save_head(head: DraftHead, folder: Path) -> None:
    """head.json and model.safetensors, each by atomic rename."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
    tensors["vocab.ids"] = head.vocab.ids_W.cpu()
    replace_with(folder / "model.safetensors", lambda path: save_tensors(tensors, path, {"format": FORMAT}))
    described = {
        "format": FORMAT,
        "head": asdict(head.config),
        "target": asdict(head.spec),
        "taps": list(head.taps),
    }
    write_json(folder / "head.json", described)


def load_head(folder: Path, target: Target | None = None, dtype: torch.dtype | None = None) -> DraftHead:
    """A saved head, on the target's device and in `dtype` (default: the target's).

    Raises UserError where something is missing, broken, or of another target.
    """
    path = folder / "head.json"
    if not path.is_file():
        raise UserError(f"{folder}: no head there (head.json is missing): train first")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
    except (ValueError, OSError, SafetensorError) as error:
        raise UserError(f"{folder}: the head cannot be read: {error}") from None
    if raw.get("format") != FORMAT:
        raise UserError(f"{path}: format {raw.get('format')!r}, this version reads {FORMAT}")
    spec = TargetSpec(**raw["target"] | {"eos_token_ids": tuple(raw["target"]["eos_token_ids"])})
    if target is not None:
        refuse_other_target(spec, tuple(raw["taps"]), target, folder)
    config = build(get_head(raw["head"]["kind"]).Config, raw["head"], str(path))
    vocab = DraftVocab(tensors.pop("vocab.ids"), spec.vocab_size)
    head = make_head(config, spec, tuple(raw["taps"]), vocab)
    try:
        head.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(f"{folder}: weights and head.json do not fit together: {error}") from None
    return head if target is None else head.to(target.device, dtype or target.dtype)


def refuse_other_target(spec: TargetSpec, taps: tuple[int, ...], target: Target, folder: Path) -> None:
    """A head serves the target that it was trained for, with the states that it was trained on."""
    if spec.fingerprint != target.spec.fingerprint:
        raise UserError(
            f"{folder}: a head for {spec.name} ({spec.fingerprint}), not for {target.spec.name} ({target.spec.fingerprint})"
        )
    if taps != target.taps:
        raise UserError(
            f"{folder}: trained on taps {list(taps)}, the target gives {list(target.taps)}; set harvest.taps"
        )
