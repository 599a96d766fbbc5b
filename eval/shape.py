"""What each draft shape would bring: exact τ of recorded text, times measured costs.

On text that the target wrote greedily, a greedy cycle that starts at any place of it is known without decoding: a guess stands
while it equals the text. So every shape's cycles follow from drafts at every place, and one pass of the widest shape gives them
for all smaller ones: a dynamic tree of fewer levels or nodes is a part of it.

Shapes of tensors: B documents, C candidates of a tree, T rows of a document, D levels.

Cost model (methods of Leviathan et al. with verification): speed-up S = τ · plain / (draft + verify + overhead), all measured.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwright.data.batch import DocumentFeatures, pack, runs_of
from headwright.data.sampling import Policy
from headwright.data.target import Target
from headwright.eval.decode import pass_nodes
from headwright.eval.rollout_tau import Cycles, cycles_of
from headwright.heads.base import Context, DraftHead, together
from headwright.heads.draft_tree import RankPath, Tree, TreeShape, best_paths, most_nodes, outline
from headwright.heads.serve import between

NEVER = 10**9  # the rank of what is not among the candidates
NODES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 60, 80, 100, 128)


@dataclass
class Costs:
    """Milliseconds: of target passes by number of nodes (the root included), of drafts by frontier width (the first level, and
    each further one), of select, commit and the rest, and of one plain step.
    """

    verify: dict[int, float]
    first: dict[int, float]
    level: dict[int, float]
    overhead: float
    plain: float

    def draft(self, shape: TreeShape) -> float:
        """One draft."""
        widths = widths_of(shape)
        return between(self.first, widths[0] if widths else 1) + sum(between(self.level, width) for width in widths)

    def cycle(self, shape: TreeShape) -> float:
        """One cycle of a shape."""
        return self.draft(shape) + between(self.verify, shape.nodes + 1) + self.overhead


def widths_of(shape: TreeShape) -> list[int]:
    """Nodes that a head runs at each level below the root's."""
    if shape.kind == "dynamic":
        return [shape.top_k] * (shape.depth - 1)
    return [len(level.expanded) for level in outline(shape.paths).levels[1:]]


@dataclass
class Prediction:
    """A shape, the τ that it has on the recorded text, and what follows."""

    shape: TreeShape
    tau: float
    cycle_ms: float
    speedup: float
    accepted: list[float] = field(default_factory=list)


def predict(shape: TreeShape, cycles: Cycles, costs: Costs) -> Prediction:
    """S = τ · plain / cycle."""
    tau, cycle = cycles.acceptance_length, costs.cycle(shape)
    return Prediction(shape, tau, cycle, tau * costs.plain / cycle, cycles.joint(shape.depth))


# Exact τ of recorded text


def first_answer(document: DocumentFeatures) -> tuple[int, int]:
    """Start and end of a document's first answer."""
    return runs_of(document.mask_T)[0]


@torch.inference_mode()
def drafts_everywhere(
    head: DraftHead, target: Target, documents: Sequence[DocumentFeatures], shape: TreeShape
) -> Iterator[tuple[int, Tree]]:
    """The trees that a head drafts at every place of the first answers, all documents at once: (place, trees)."""
    answers = [first_answer(document) for document in documents]
    longest = max(end - start for start, end in answers)
    slots = max(len(document.ids_T) for document in documents) + shape.rows + 2
    state = head.start(len(documents), slots)
    for place in range(longest):
        parts = [rows_until(head, target, d, *answer, place) for d, answer in zip(documents, answers)]
        yield place, head.propose(state, together(parts), shape)


def rows_until(
    head: DraftHead, target: Target, document: DocumentFeatures, start: int, end: int, place: int
) -> Context:
    """The rows that are new when the root is token `start + place`: the whole prompt's at first, then one by one. A
    document that has ended repeats its last row; what is drafted there is not looked at.
    """
    last = min(start + place, end - 1) - 1
    first = 0 if place == 0 else last
    rows = slice(first, last + 1)
    taps_1MKD = document.taps_TKD[None, rows].to(target.device, target.dtype)
    return Context(
        target,
        document.ids_T[None, first + 1 : last + 2].to(target.device),
        taps_1MKD,
        target.last_of(taps_1MKD),
        Policy(),
        lambda: torch.zeros(1, dtype=torch.float64),
        texts=[document.ids_T[first + (place > 0) : last + 2].tolist()],
    )


def text_after(document: DocumentFeatures, place: int, depth: int) -> list[int]:
    """The tokens after the root of a place, padded with -1 beyond the answer."""
    start, end = first_answer(document)
    ids: list[int] = document.ids_T[start + place + 1 : end][:depth].tolist()
    return ids + [-1] * (depth - len(ids))


def ranks_on_path(tree: Tree, text_BD: Tensor) -> Tensor:
    """[B, D, D]: the rank, among all candidates of at most d levels, of the node at level j on the text's path (entry
    [j-1, d-1]). A tree of depth d and n nodes holds that node if its rank is below n.
    """
    batch, depth = text_BD.shape
    ranks = torch.full((batch, depth, depth), NEVER)
    node_B, alive_B = torch.zeros(batch, dtype=torch.long), torch.ones(batch, dtype=torch.bool)
    order_BC = torch.arange(tree.tokens_BN.shape[1]).expand(batch, -1)
    for level in range(depth):
        holds_BC = (tree.parents_BN == node_B[:, None]) & (tree.tokens_BN == text_BD[:, level : level + 1])
        alive_B = alive_B & holds_BC.any(1)
        node_B = torch.where(alive_B, holds_BC.int().argmax(1), node_B)
        score_B1, node_B1 = tree.logprobs_BN.gather(1, node_B[:, None]), node_B[:, None]
        tied_BC = (tree.logprobs_BN == score_B1) & (order_BC < node_B1)
        before_BC = ((tree.logprobs_BN > score_B1) | tied_BC) & (order_BC > 0)
        for within in range(level, depth):
            rank_B = (before_BC & (tree.depth_BN <= within + 1)).sum(1)
            ranks[:, level, within] = torch.where(alive_B, rank_B, NEVER)
    return ranks


class Recorded:
    """Ranks of the text's path for one width at every place: all depths and node counts follow."""

    def __init__(self, head: DraftHead, target: Target, documents: Sequence[DocumentFeatures], depth: int, top_k: int):
        self.documents = documents
        places = []
        for place, tree in drafts_everywhere(head, target, documents, widest(top_k, depth)):
            text = torch.tensor([text_after(document, place, depth) for document in documents])
            places.append(ranks_on_path(on_host(tree), text))
        self.ranks_BPDD = torch.stack(places, 1)

    def cycles(self, shape: TreeShape) -> Cycles:
        """All cycles of a chain or dynamic tree of this width and at most this depth."""
        kept_BPD = self.ranks_BPDD[:, :, : shape.depth, shape.depth - 1] < shape.nodes
        accepted_BP = kept_BPD.int().cumprod(2).sum(2)
        total = Cycles()
        for document, accepted_P in zip(self.documents, accepted_BP.tolist()):
            before = [0] * (first_answer(document)[0] - 1)  # rows from which no cycle starts
            add(total, first_cycles(document, before + accepted_P))
        return total


def on_host(tree: Tree) -> Tree:
    """A tree's columns on the CPU."""
    return Tree(tree.tokens_BN.cpu(), tree.parents_BN.cpu(), tree.depth_BN.cpu(), tree.logprobs_BN.cpu())


def first_cycles(document: DocumentFeatures, accepted: Sequence[int]) -> Cycles:
    """The cycles of a document's first answer, given how many drafts each row would see accepted."""
    start, end = first_answer(document)
    mask_T = torch.zeros_like(document.mask_T)
    mask_T[start:end] = True
    return cycles_of(mask_T, accepted)


def add(total: Cycles, more: Cycles) -> None:
    """Pool cycles."""
    total.accepted += more.accepted
    total.emitted += more.emitted


# Static trees from measured ranks


def measure_ranks(head: DraftHead, target: Target, documents: Sequence[DocumentFeatures], depth: int) -> list[Tensor]:
    """For each document the rank of the text's token at every row and step [T, D]; -1 where there is none."""
    return [head.ranks(pack([document]).to(target.device), target, depth) for document in documents]


def rank_accuracies(ranks: Sequence[Tensor], width: int) -> list[list[float]]:
    """Share of the drafts at each depth whose guess of rank r was right [D][width], of those whose token the head can say."""
    out = []
    for step in range(ranks[0].shape[1]):
        column = torch.cat([ranks_TD[:, step] for ranks_TD in ranks])
        known = column[column >= 0]
        counts = torch.bincount(known.clamp_max(width), minlength=width + 1)[:width]
        out.append((counts / max(len(known), 1)).tolist())
    return out


def sparse_shape(ranks: Sequence[Tensor], nodes: int, width: int = 10) -> TreeShape:
    """Medusa's sparse tree for this traffic: the static tree of `nodes` guesses that are most often right."""
    paths = best_paths(rank_accuracies(ranks, width), nodes)
    return TreeShape.static(paths, f"sparse-{max(map(len, paths))}-{len(paths)}")


def static_cycles(documents: Sequence[DocumentFeatures], ranks: Sequence[Tensor], shape: TreeShape) -> Cycles:
    """All cycles of a static tree, from ranks."""
    paths = set(shape.paths)
    total = Cycles()
    for document, ranks_TD in zip(documents, ranks):
        add(total, first_cycles(document, [accepted_by(paths, row) for row in ranks_TD.tolist()]))
    return total


def accepted_by(paths: set[RankPath], ranks: Sequence[int]) -> int:
    """How far a static tree follows a path of ranks."""
    count = 0
    while count < len(ranks) and tuple(ranks[: count + 1]) in paths:
        count += 1
    return count


# Costs


WARM, TIMED = 3, 6  # calls of a burst


def medians_ms(jobs: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, float]:
    """Milliseconds of each job, the device's work included.

    Jobs take turns, so that a slow moment of the machine meets all. Each turn is a burst, because decoding repeats the same
    pass, and processors slow down under sustained load; the first calls of a burst are not counted.
    """
    times: dict[Any, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            times[name] += [timed_ms(job) for _ in range(WARM + TIMED)][WARM:]
    return {name: statistics.median(found) for name, found in times.items()}


def timed_ms(job: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    wait()
    begun = time.perf_counter()
    job()
    wait()
    return 1000 * (time.perf_counter() - begun)


def wait() -> None:
    """Until the GPU is done, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Bench:
    """Target passes and drafts behind a real prompt, as things to be timed."""

    def __init__(self, head: DraftHead, target: Target, document: DocumentFeatures):
        self.head, self.target, self.document = head, target, document
        start, end = first_answer(document)
        self.count = (start + end) // 2  # tokens of context: the middle of an answer
        ids = document.ids_T[None, : self.count].to(target.device)
        self.cache = target.new_cache(1, self.count + max(NODES))
        target.extend(ids, self.cache)
        self.cache.advance(self.count)

    def verify(self, nodes: int, pad: bool = True) -> Callable[[], object]:
        """A target pass over so many nodes, with its mask and logits; `pad`: to a size that the decoder would choose."""
        nodes = pass_nodes(nodes, 1, self.target.device) if pad else nodes
        self.cache.make_room(nodes)
        line = torch.arange(nodes, device=self.target.device)[None]
        tree = Tree(torch.full_like(line, 5), line - 1, line, line.float(), levels=min(nodes - 1, 6))

        def work() -> Tensor:
            sees = tree.ancestors() if nodes > 1 else None
            positions = self.count + tree.depth_BN
            return self.target.logits(self.target.extend(tree.tokens_BN, self.cache, positions, sees).last_BND)

        return work

    @torch.inference_mode()
    def draft(self, shape: TreeShape) -> Callable[[], object]:
        """One draft after a cycle that committed two rows."""
        state = self.head.start(1, self.count + shape.rows + 4)
        whole = rows_until(self.head, self.target, self.document, self.count, self.count + 1, 0)
        self.head.absorb(state, whole.part(0, self.count - 2))
        after, rest = list(state.lengths), whole.part(self.count - 2, self.count)

        def work() -> Tree:
            state.lengths = list(after)
            return self.head.propose(state, rest, shape)

        return work


def measure_costs(bench: Bench, widths: Sequence[int], depth: int, most: int, overhead: float, rounds: int) -> Costs:
    """All costs that predictions need."""
    nodes = [count for count in NODES if count <= most + 1] + [most + 1]
    jobs: dict[Any, Callable[[], object]] = {("verify", count): bench.verify(count) for count in nodes}
    for width in widths:
        jobs["short", width], jobs["long", width] = (bench.draft(widest(width, levels)) for levels in (1, depth))
    found = medians_ms(jobs, rounds)
    first = {width: found["short", width] for width in widths}
    level = {width: max(found["long", width] - first[width], 0.0) / max(depth - 1, 1) for width in widths}
    verify = {count: found["verify", count] for count in nodes}
    return Costs(verify, first, level, overhead, verify[1])


def widest(width: int, depth: int) -> TreeShape:
    """All that a width and a depth can hold."""
    return TreeShape.chain(depth) if width == 1 else TreeShape.dynamic(depth, width, most_nodes(depth, width))
