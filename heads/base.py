"""What every head is: three methods and a Config. How it is saved: saved.py.

Shapes: B rows, M new rows of context, K taps, D target width, V target vocabulary, W draft vocabulary.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headwright.data.batch import FeatureBatch, to_device
from headwright.data.sampling import Policy
from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads import get_head
from headwright.heads.contract import Contract
from headwright.heads.draft_tree import Tree, TreeShape


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
    """An engine's directory: tensors and config.json, the shape that the format gives every tensor, and what reads it back.

    contracts: the engines' tables that it must satisfy; of those named in `strict` an error ends the export, of others it is
    noted in SERVE.md. launch: launch lines for a target, a directory and a dtype, where no table has them. into: a
    checkpoint whose copy takes the tensors in. shares: whether engines share the target's embedding with it.
    from_target: tensors that are rows of the target's lm_head, by their token ids. spread: tensors of some tokens' rows that
    the format wants of all tokens, by these tokens' ids; the others get their mean. beside: writes further files. warnings:
    what a user should know before serving.
    """

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    reader: Callable[[Path], PlainReader]
    contracts: tuple[Contract, ...] = ()
    strict: tuple[str, ...] | None = None
    launch: Callable[[str, Path, str], str] | None = None
    into: Path | None = None
    shares: bool = True
    from_target: dict[str, Tensor] = field(default_factory=dict)
    spread: dict[str, Tensor] = field(default_factory=dict)
    beside: Callable[[Path], None] | None = None
    warnings: list[str] = field(default_factory=list)


@dataclass
class Adopted:
    """A head of ours made of a directory: its options, its tensors, the taps that it reads and the tokens that it can say."""

    options: dict[str, Any]
    tensors: dict[str, Tensor]
    taps: tuple[int, ...]
    ids_W: Tensor


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

    def save_beside(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Further files of a saved head, whose state is `weights`."""

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
