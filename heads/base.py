"""What every head is: three methods, a Config, and how it is saved.

Shapes: B rows, M new rows of context, K taps, D target width, V target vocabulary, W draft vocabulary.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from headwright.configs import UserError
from headwright.configs.load import build
from headwright.data.batch import FeatureBatch, to_device
from headwright.data.sampling import Policy
from headwright.data.store import replace_with, save_tensors, write_json
from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads import get_head
from headwright.heads.draft_tree import Tree, TreeShape

FORMAT = "headwright.head/1"
SHOWN = 12  # names of tensors that a warm start left as they were


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
    """How a loss is computed: its memory and time; and where the training stands.

    recompute: run each rollout step again in the backward pass instead of keeping its inside. loss_mib: memory of a chunk of
    logits (heads/chunked.py). progress: the share of the training that is done, for heads whose loss changes on the way.
    """

    recompute: bool = False
    loss_mib: float | None = None
    progress: float = 0.0


@dataclass
class Drafts:
    """Greedy drafts, and the log-probability of each path up to them."""

    tokens: list[int]
    logprobs: list[float]


@dataclass
class Case:
    """A prompt's states, and the token after each of its rows, from which to draft."""

    following: list[int]
    taps_TKD: Tensor
    last_TD: Tensor


@dataclass
class Tables:
    """What an engine shares with the target: embeddings and lm_head [V, D]."""

    embedding_VD: Tensor
    lm_head_VD: Tensor


class PlainReader(Protocol):
    """An independent reader of an exported directory: it shares no code with the head."""

    def draft(self, tables: Tables, case: Case, count: int) -> Drafts:
        """`count` greedy tokens after the last of the case's."""
        ...


@dataclass
class Export:
    """An engine's directory: tensors and config.json, the shape that the format gives every tensor, what reads it back, and the
    launch lines for a target, a directory and a dtype. into: a checkpoint whose copy takes the tensors in.
    shares: whether engines share the target's embedding with it.
    from_target: tensors that are rows of the target's lm_head, by their token ids.
    warnings: what a user should know before serving.
    """

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    reader: Callable[[Path], PlainReader]
    launch: Callable[[str, Path, str], str]
    into: Path | None = None
    shares: bool = True
    from_target: dict[str, Tensor] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass
class Context:
    """What a drafter learns between two drafts: newly committed rows, one per token that the target has now processed.

    Row t carries the feature of position t (taps_BMKD, last_BMD) and the token after it, tokens_BM = x_{t+1}. The last
    of these is the root: chosen by the target, not yet processed. Texts of a batch advance by different numbers of rows:
    `counts` of each are meant, the rest is padding.

    uniform: draws a number in [0, 1) for each text, [B]. sampled: whether children are to be drawn from the head's distribution
    under `policy`, or are its most likely tokens. texts: the new tokens on the host; a text's first begin with x_0.
    choices: for drafters that want them, the target's most likely token at each node of the last tree, accepted or not.
    """

    target: Target
    tokens_BM: Tensor
    taps_BMKD: Tensor
    last_BMD: Tensor
    policy: Policy
    uniform: Callable[[], Tensor]
    counts: list[int] = field(default_factory=list)
    sampled: bool = False
    texts: list[list[int]] = field(default_factory=list)
    choices: list[list[int]] | None = None

    def __post_init__(self) -> None:
        self.counts = self.counts or [self.tokens_BM.shape[1]] * len(self.tokens_BM)
        self.texts = self.texts or [row[:count] for row, count in zip(self.tokens_BM.tolist(), self.counts)]

    @property
    def root_B(self) -> Tensor:
        """The token that drafting starts from."""
        return self.final(self.tokens_BM)

    def final(self, rows_BMX: Tensor) -> Tensor:
        """Each text's last row that is meant, [B, …]."""
        if len(set(self.counts)) == 1:
            return rows_BMX[:, self.counts[0] - 1]
        ends_B = to_device(torch.tensor(self.counts) - 1, rows_BMX.device)
        return rows_BMX[torch.arange(len(ends_B), device=ends_B.device), ends_B]

    def part(self, start: int, stop: int) -> "Context":
        """Rows `start` to `stop` of a single text."""
        begin = len(self.texts[0]) - self.counts[0]  # x_0 goes with the first part
        text = self.texts[0][begin + start if start else 0 : begin + stop]
        rows = slice(start, stop)
        return replace(
            self,
            tokens_BM=self.tokens_BM[:, rows],
            taps_BMKD=self.taps_BMKD[:, rows],
            last_BMD=self.last_BMD[:, rows],
            counts=[stop - start],
            texts=[text],
        )

    def rows_of(self, row: int) -> "Context":
        """One text of the batch, without padding."""
        rows, count = slice(row, row + 1), self.counts[row]
        return replace(
            self,
            tokens_BM=self.tokens_BM[rows, :count],
            taps_BMKD=self.taps_BMKD[rows, :count],
            last_BMD=self.last_BMD[rows, :count],
            counts=[count],
            texts=[self.texts[row]],
            choices=None if self.choices is None else [self.choices[row]],
        )

    def then(self, other: "Context") -> "Context":
        """The rows of `other` behind these, for one text."""
        return replace(
            other,
            tokens_BM=torch.cat([self.tokens_BM, other.tokens_BM], 1),
            taps_BMKD=torch.cat([self.taps_BMKD, other.taps_BMKD], 1),
            last_BMD=torch.cat([self.last_BMD, other.last_BMD], 1),
            counts=[self.counts[0] + other.counts[0]],
            texts=[self.texts[0] + other.texts[0]],
            choices=self.choices,  # of the last tree that was drafted
        )


def together(contexts: Sequence[Context]) -> Context:
    """One batch of single texts, padded to the longest."""
    if len(contexts) == 1:
        return contexts[0]

    def padded(parts: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence([part[0] for part in parts], batch_first=True)

    known = [context.choices[0] if context.choices is not None else [] for context in contexts]
    return replace(
        contexts[0],
        tokens_BM=padded([context.tokens_BM for context in contexts]),
        taps_BMKD=padded([context.taps_BMKD for context in contexts]),
        last_BMD=padded([context.last_BMD for context in contexts]),
        counts=[context.counts[0] for context in contexts],
        texts=[context.texts[0] for context in contexts],
        choices=known if any(known) else None,
    )


class State(Protocol):
    """What a drafter remembers of the texts of a batch, one row each."""

    def put(self, row: int, other: Any) -> None:
        """Let `row` hold what the only row of `other` holds."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in that order."""
        ...


class Drafter(Protocol):
    """Anything that guesses: a head, a small model, or a method that needs no training."""

    wants_choices: bool  # whether contexts should carry `choices`
    deepest: int | None  # how many tokens it can guess ahead; None: any number

    def start(self, batch: int, slots: int) -> Any:
        """Fresh state (`State`) for `batch` texts of at most `slots` tokens, drafts not counted."""
        ...

    def absorb(self, state: Any, context: Context) -> Any:
        """Take in rows that the target has confirmed."""
        ...

    def propose(self, state: Any, context: Context, shape: TreeShape) -> Tree:
        """Take in the new rows and draft a tree below each root. `state` then holds confirmed rows only."""
        ...


class DraftHead(nn.Module):
    """A head. Subclasses live one to a file, as class `Head`, beside a dataclass `Config` with a field `kind`."""

    ids_W: Tensor
    wants_choices = False
    deepest: int | None = None

    def __init__(self, config: Any, spec: TargetSpec, taps: tuple[int, ...], vocab: DraftVocab):
        super().__init__()
        self.config = copy.copy(config)  # what a head fills in belongs to it, not to the run file
        self.spec, self.taps, self.vocab = spec, tuple(taps), vocab
        self.register_buffer("ids_W", vocab.ids_W.clone(), persistent=False)
        self.choices_V = vocab.index_V  # draft id of each target id, on the host
        self.engine = Engine()

    @property
    def lookahead(self) -> int:
        """How many tokens after a row its loss reads."""
        raise NotImplementedError

    def attach(self, target: Target) -> None:
        """Take what the head needs of its target besides states: a kind of layer, or a place for an adapter."""
        target.as_it_was()

    def initialise(self, target: Target) -> None:
        """Start from what the target already knows."""

    def changes_target(self) -> dict[str, Any] | None:
        """What the head changes in its target, for heads that adapt it; None: nothing, so that the text is the target's own."""
        return None

    def save_beside(self, folder: Path) -> None:
        """Further files of a saved head."""

    def rate_of(self, name: str) -> float:
        """The learning rate of a parameter, in rates of the run."""
        return 1.0

    def loss(self, batch: FeatureBatch, target: Target) -> HeadLoss:
        """Loss and metrics of one packed batch."""
        raise NotImplementedError

    def forward(self, batch: FeatureBatch, target: Target) -> HeadLoss:
        """`loss`, by the name that wrappers such as DDP call."""
        return self.loss(batch, target)

    def start(self, batch: int, slots: int) -> Any:
        """Fresh drafting state for `batch` texts of at most `slots` tokens, drafts not counted."""
        raise NotImplementedError

    def absorb(self, state: Any, context: Context) -> Any:
        """Take in rows that the target has confirmed. Returns what drafting from the last of them needs."""
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

    def ranks(self, batch: FeatureBatch, target: Target, steps: int) -> Tensor:
        """The place of the text's token among the head's guesses, given that the text came before: [T, steps] on the
        host, 0 for its first choice. -1 where row t has no guess at step i, or the head cannot say the token.
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
    head.save_beside(folder)


def load_head(folder: Path, target: Target | None = None, dtype: torch.dtype | None = None) -> DraftHead:
    """A saved head, on the target's device and in `dtype` (default: the target's).

    Raises UserError where something is missing, broken, or of another target.
    """
    saved = read_head(folder)
    if target is not None:
        refuse_other_target(saved.spec, saved.taps, target, folder)
    head = make_head(saved.config, saved.spec, saved.taps, saved.vocab)
    if target is not None:
        head.attach(target)
        head = head.to(target.device, dtype or target.dtype)
    try:
        head.load_state_dict(saved.tensors)
    except RuntimeError as error:
        raise UserError(f"{folder}: weights and head.json do not fit together: {error}") from None
    return head


@dataclass
class Saved:
    """What lies in a head's directory."""

    config: Any
    spec: TargetSpec
    taps: tuple[int, ...]
    vocab: DraftVocab
    tensors: dict[str, Tensor]


def read_head(folder: Path) -> Saved:
    """A head's directory, or UserError."""
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
    config = build(get_head(raw["head"]["kind"]).Config, raw["head"], str(path))
    vocab = DraftVocab(tensors.pop("vocab.ids"), spec.vocab_size)
    return Saved(config, spec, tuple(raw["taps"]), vocab, tensors)


@torch.no_grad()
def warm_start(head: DraftHead, folder: Path) -> str:
    """Take over what fits of another head's weights: equal names and shapes, and rows of the draft vocabulary token by token.

    Returns what was taken. Raises UserError where nothing fits, or the other head's target has other tokens or another width.
    """
    saved = read_head(folder)
    if (saved.spec.hidden_size, saved.spec.vocab_size) != (head.spec.hidden_size, head.spec.vocab_size):
        raise UserError(
            f"train.warm_start {folder}: a head for {saved.spec.name} (width {saved.spec.hidden_size}, {saved.spec.vocab_size} "
            f"tokens), not for {head.spec.name} ({head.spec.hidden_size}, {head.spec.vocab_size})"
        )
    here, there = matching_rows(head.vocab.ids_W, saved.vocab.ids_W)
    taken, left, sizes = [], [], (len(head.vocab), len(saved.vocab))
    for name, own in head.state_dict().items():
        theirs = saved.tensors.get(name)
        if theirs is None:
            left.append(name)
        elif "lm_head" in name and own.shape[1:] == theirs.shape[1:] and (len(own), len(theirs)) == sizes:
            own[here.to(own.device)] = theirs[there].to(own)
            taken.append(name)
        elif own.shape == theirs.shape:
            own.copy_(theirs)
            taken.append(name)
        else:
            left.append(name)
    if not taken:
        raise UserError(
            f"train.warm_start {folder}: no tensor of that {saved.config.kind} head fits this {head.config.kind} head"
        )
    return (
        f"warm start from {folder}: {len(taken)} of {len(taken) + len(left)} tensors"
        + (
            f" (new: {', '.join(left[:SHOWN])}{f' and {len(left) - SHOWN} more' if len(left) > SHOWN else ''})"
            if left
            else ""
        )
        + f"; {len(here)} of {len(head.vocab)} draft tokens were known to it"
    )


def matching_rows(ours_W: Tensor, theirs_W: Tensor) -> tuple[Tensor, Tensor]:
    """Places (here, there) of the tokens that two draft vocabularies share. Both ascend."""
    ours_W, theirs_W = ours_W.cpu(), theirs_W.cpu()
    place_W = torch.searchsorted(theirs_W, ours_W).clamp_max(len(theirs_W) - 1)
    here = torch.nonzero(theirs_W[place_W] == ours_W)[:, 0]
    return here, place_W[here]


def refuse_other_target(spec: TargetSpec, taps: tuple[int, ...], target: Target, folder: Path) -> None:
    """A head serves the target that it was trained for, with the states that it was trained on."""
    if spec.fingerprint != target.spec.fingerprint:
        raise UserError(
            f"{folder}: a head for {spec.name} ({spec.fingerprint}), not for {target.spec.name} ({target.spec.fingerprint})"
        )
    if taps != target.taps:
        raise UserError(
            f"{folder}: trained on taps {list(taps)}, the target gives {list(target.taps)}: set head.taps or harvest.taps"
        )
