"""Draft trees and their shapes, as data.

Shapes of tensors: B rows, N nodes (the root included), F nodes that have children, W draft vocabulary.

Node 0 is the root: a token that the target itself has already chosen. Every other node is a guess. A parent always stands
before its children, and siblings in the order of their ranks.
"""

import heapq
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from headwright.configs import UserError
from headwright.configs.schema import ShapeConfig

# A node of a static tree: the rank, among its siblings, of each node on the way to it.
RankPath = tuple[int, ...]

# EAGLE-1's tree (arXiv 2401.15077, appendix): 25 nodes, five deep.
EAGLE_1 = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
BUILT_IN = {"eagle-1": tuple(tuple(map(int, path)) for path in EAGLE_1.split())}

# Share of first guesses that were right, by rank among the siblings, of the quickstart's head on its held-out text:
# what a sampled tree is laid out by. The order matters more than the values.
USUAL_RANKS = (0.595, 0.128, 0.056, 0.035, 0.025, 0.018, 0.013, 0.013, 0.011, 0.01)


@dataclass(frozen=True)
class TreeShape:
    """How much to draft.

    chain: one node per level. static: the given rank paths. dynamic (EAGLE-2): level by level the `top_k` best nodes get
    `top_k` children each, and the `nodes` best of all are verified. free: the bounds of what a drafter lays out by itself.
    """

    kind: str
    depth: int
    top_k: int = 1
    nodes: int = 0
    given: tuple[RankPath, ...] = ()
    label: str = ""

    @classmethod
    def chain(cls, depth: int) -> "TreeShape":
        """`depth` guesses, one after the other."""
        return cls("chain", depth, 1, depth)

    @classmethod
    def dynamic(cls, depth: int, top_k: int, nodes: int | None = None) -> "TreeShape":
        """An EAGLE-2 tree. Raises UserError where the numbers do not fit together."""
        most = most_nodes(depth, top_k)
        kept = most if nodes is None else nodes
        if top_k < 2 or not depth <= kept <= most:
            raise UserError(
                f"shape dynamic: depth {depth}, top_k {top_k}, nodes {nodes}: "
                f"top_k must be 2 or more, nodes from {depth} to {most}"
            )
        return cls("dynamic", depth, top_k, kept)

    @classmethod
    def static(cls, paths: Sequence[Sequence[int]], label: str = "", where: str = "static tree") -> "TreeShape":
        """A tree of rank paths, as EAGLE-1 and Medusa write them: [[0], [1], [0, 0], …]. Raises UserError."""
        checked = check_paths(paths, where)
        return cls("static", len(checked[-1]), 1 + max(path[-1] for path in checked), len(checked), checked, label)

    @classmethod
    def of(cls, config: ShapeConfig) -> "TreeShape":
        """From its section of a run file. Raises UserError where the numbers do not fit together."""
        if config.kind == "static":
            if config.file is None:
                raise UserError(f"shape static: give its file: JSON, or one of {', '.join(BUILT_IN)}")
            return read_static(config.file)
        if config.file is not None:
            raise UserError(f"shape {config.kind}: a file belongs to a static shape")
        if config.kind == "chain":
            return cls.chain(config.depth)
        return cls.dynamic(config.depth, config.top_k, config.nodes)

    @classmethod
    def parse(cls, text: str) -> "TreeShape":
        """From a name: chain-5, tree-4x4-12 (depth × top_k - nodes), eagle-1, or a JSON file. Raises UserError."""
        kind, _, numbers = text.partition("-")
        parts = numbers.replace("x", "-").split("-")
        if kind == "chain" and len(parts) == 1 and parts[0].isdecimal() and int(parts[0]) > 0:
            return cls.chain(int(parts[0]))
        if kind == "tree" and len(parts) == 3 and all(part.isdecimal() for part in parts):
            return cls.dynamic(*map(int, parts))
        if text in BUILT_IN or text.endswith(".json"):
            return read_static(text)
        raise UserError(f"shape {text!r}: give chain-K, tree-DEPTHxTOP_K-NODES, {', '.join(BUILT_IN)}, or a .json file")

    @property
    def name(self) -> str:
        """As it stands in reports."""
        names = {
            "plain": "plain",
            "chain": f"chain-{self.depth}",
            "dynamic": f"tree-{self.depth}x{self.top_k}-{self.nodes}",
        }
        return self.label or names.get(self.kind, f"{self.kind}-{self.depth}-{self.nodes}")

    @cached_property
    def rows(self) -> int:
        """Nodes that a head is run on at most, the root not counted."""
        expanded = sum(len(level.expanded) for level in outline(self.paths).levels[1:])
        return max(expanded, (self.depth - 1) * self.top_k) if self.kind == "dynamic" else expanded

    @cached_property
    def paths(self) -> tuple[RankPath, ...]:
        """The rank paths of a shape whose nodes are fixed before anything is drafted.

        For a dynamic shape this is how it is drawn when children are sampled: to choose nodes by the probability of their own
        tokens would then bias the text, so child counts are allotted beforehand.
        """
        if self.kind in ("chain", "plain"):
            return tuple((0,) * depth for depth in range(1, self.depth + 1))
        return self.given or best_paths((USUAL_RANKS[: self.top_k],) * self.depth, self.nodes)


def most_nodes(depth: int, top_k: int) -> int:
    """All candidates of a dynamic tree."""
    return top_k + (depth - 1) * top_k**2


def check_paths(paths: Sequence[Sequence[int]], where: str) -> tuple[RankPath, ...]:
    """Rank paths in the order of levels. Raises UserError for duplicates, and for nodes without their parent."""
    if not isinstance(paths, list | tuple) or not paths:
        raise UserError(f"{where}: expected a list of rank paths such as [[0], [1], [0, 0]]")
    found: set[RankPath] = set()
    for place, path in enumerate(paths):
        if not isinstance(path, list | tuple) or not path or any(type(rank) is not int or rank < 0 for rank in path):
            raise UserError(f"{where}: entry {place}: {path!r} is not a list of ranks from 0")
        if tuple(path) in found:
            raise UserError(f"{where}: entry {place}: {list(path)} stands twice: siblings must differ")
        found.add(tuple(path))
    for path in found:
        if len(path) > 1 and path[:-1] not in found:
            raise UserError(f"{where}: {list(path)} has no parent: add {list(path[:-1])}")
    return tuple(sorted(found, key=lambda path: (len(path), path)))


def read_static(name: str) -> TreeShape:
    """A built-in tree by name, or a JSON file of rank paths. Raises UserError."""
    if name in BUILT_IN:
        return TreeShape.static(BUILT_IN[name], name)
    path = Path(name)
    try:
        paths = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"static tree {name}: cannot be read: {error}") from None
    return TreeShape.static(paths, path.stem, f"static tree {name}")


def best_paths(accuracy_DR: Sequence[Sequence[float]], nodes: int) -> tuple[RankPath, ...]:
    """The `nodes` rank paths that are most often right (Medusa, arXiv 2401.10774, section 2.3.3).

    Args:
        accuracy_DR: share of drafts at depth d whose guess of rank r was right, given that those before were.
    """
    found: list[RankPath] = []
    heap: list[tuple[float, RankPath]] = [(-share, (rank,)) for rank, share in enumerate(accuracy_DR[0])]
    heapq.heapify(heap)
    while heap and len(found) < nodes:
        value, path = heapq.heappop(heap)
        found.append(path)
        if len(path) < len(accuracy_DR):
            for rank, share in enumerate(accuracy_DR[len(path)]):
                heapq.heappush(heap, (value * share, (*path, rank)))
    return tuple(sorted(found, key=lambda path: (len(path), path)))


@dataclass(frozen=True)
class Level:
    """One level of a static tree: which of its nodes have children, and who these children are."""

    expanded: tuple[int, ...]  # places among the level's nodes
    above: tuple[int, ...]  # for each expanded node its parent's place among the expanded nodes one level up
    owners: tuple[int, ...]  # for each child, in node order, its parent's place among `expanded`
    ranks: tuple[int, ...]  # and its rank


@dataclass(frozen=True)
class Outline:
    """A static tree worked out: parents and depths of all nodes, and its levels from the root down."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    levels: tuple[Level, ...]


@lru_cache(maxsize=256)
def outline(paths: tuple[RankPath, ...]) -> Outline:
    """Work out rank paths that are sorted by level."""
    place: dict[RankPath, int] = {(): 0} | {path: node for node, path in enumerate(paths, 1)}
    rows: list[list[RankPath]] = [[()]]
    for path in paths:
        if len(path) == len(rows):
            rows.append([])
        rows[-1].append(path)
    parents_with_children = {path[:-1] for path in paths}
    levels: list[Level] = []
    before: dict[RankPath, int] = {(): 0}
    for row, children in itertools.pairwise(rows):
        expanded = [path for path in row if path in parents_with_children]
        here = {path: number for number, path in enumerate(expanded)}
        levels.append(
            Level(
                tuple(row.index(path) for path in expanded),
                tuple(before.get(path[:-1], 0) for path in expanded),
                tuple(here[path[:-1]] for path in children),
                tuple(path[-1] for path in children),
            )
        )
        before = here
    parents = (-1, *(place[path[:-1]] for path in paths))
    return Outline(parents, (0, *map(len, paths)), tuple(levels))


@dataclass
class Proposal:
    """What sampled children were drawn from: without replacement, siblings in node order.

    q_BFW: one distribution over the draft vocabulary (target ids `ids_W`) for each node that has children. of: the place in F
    of node n's distribution, or -1. children: the nodes below node n. The layout is the same in every row, and was fixed before
    anything was drawn.
    """

    q_BFW: Tensor
    ids_W: Tensor
    of: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]


@dataclass
class Tree:
    """Drafted tokens. logprobs_BN is the drafter's log-probability of the path to a node.

    proposal: for sampled children; None where they are deterministic. levels: depth of the deepest node, where the host knows
    it.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    depth_BN: Tensor
    logprobs_BN: Tensor
    proposal: Proposal | None = None
    levels: int | None = None

    def height(self) -> int:
        """Depth of the deepest node."""
        return int(self.depth_BN.max()) if self.levels is None else self.levels

    def padded(self, nodes: int) -> "Tree":
        """The same tree with nodes behind it that have no parent: nothing reads or accepts them."""
        extra = nodes - self.tokens_BN.shape[1]
        if extra <= 0:
            return self
        columns = ((self.tokens_BN, 0), (self.parents_BN, -1), (self.depth_BN, 0), (self.logprobs_BN, 0))
        tokens, parents, depths, scores = (F.pad(column, (0, extra), value=value) for column, value in columns)
        return Tree(tokens, parents, depths, scores, self.proposal, self.levels)

    def ancestors(self) -> Tensor:
        """Mask [B, N, N]: node n sees itself and the path that leads to it."""
        batch, nodes = self.tokens_BN.shape
        own = torch.eye(nodes, dtype=torch.bool, device=self.tokens_BN.device).expand(batch, nodes, nodes)
        above = self.parents_BN.clamp_min(0)[:, :, None].expand(batch, nodes, nodes)
        mask = own
        for _ in range(self.height()):
            mask = own | (mask.gather(1, above) & (self.parents_BN >= 0)[:, :, None])
        return mask


def root_only(root_B: Tensor) -> Tree:
    """A tree without guesses: plain decoding."""
    zeros = torch.zeros_like(root_B)[:, None]
    return Tree(root_B[:, None], zeros - 1, zeros, zeros.float(), levels=0)
