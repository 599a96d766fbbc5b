"""Draft trees: their data, and how they grow from a head's guesses.

Shapes: B rows, N nodes (the root included), k frontier nodes, W draft vocabulary, V target vocabulary.

Node 0 is the root: a token that the target itself has already chosen. Every other node is a guess. A parent always
stands before its children.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.configs.schema import ShapeConfig
from headwright.data.sampling import Policy, draw

# step(tokens_Bk, parents_Bk) -> logits_BkW: run the head on a new frontier; `parents` are places in the frontier before it
Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TreeShape:
    """How much to draft. A chain has one node per level; a dynamic tree (EAGLE-2) keeps the `nodes` best of its
    candidates.
    """

    kind: str
    depth: int
    top_k: int = 1
    nodes: int = 0

    @classmethod
    def of(cls, config: ShapeConfig) -> "TreeShape":
        """From its section of a run file. Raises UserError where the numbers do not fit together."""
        if config.kind == "chain":
            return cls("chain", config.depth, 1, config.depth)
        most = config.top_k + (config.depth - 1) * config.top_k**2
        nodes = config.nodes or most
        if config.top_k < 2 or not config.depth <= nodes <= most:
            raise UserError(
                f"shape dynamic: depth {config.depth}, top_k {config.top_k}, nodes {config.nodes}: "
                f"top_k must be 2 or more, nodes from {config.depth} to {most}"
            )
        return cls("dynamic", config.depth, config.top_k, nodes)

    @property
    def name(self) -> str:
        """As it stands in reports."""
        return f"chain-{self.depth}" if self.kind == "chain" else f"tree-{self.depth}x{self.top_k}-{self.nodes}"


@dataclass
class Tree:
    """Drafted tokens. logprobs_BN is the head's log-probability of the path to a node.

    proposal_BNV, for sampled chains: the distribution over target ids that node n was drawn from; None for deterministic
    children.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    depth_BN: Tensor
    logprobs_BN: Tensor
    proposal_BNV: Tensor | None = None

    def ancestors(self) -> Tensor:
        """Mask [B, N, N]: node n sees itself and the path that leads to it."""
        batch, nodes = self.tokens_BN.shape
        own = torch.eye(nodes, dtype=torch.bool, device=self.tokens_BN.device).expand(batch, nodes, nodes)
        above = self.parents_BN.clamp_min(0)[:, :, None].expand(batch, nodes, nodes)
        mask = own
        for _ in range(int(self.depth_BN.max())):
            mask = own | (mask.gather(1, above) & (self.parents_BN >= 0)[:, :, None])
        return mask


def root_only(root_B: Tensor) -> Tree:
    """A tree without guesses: plain decoding."""
    zeros = torch.zeros_like(root_B)[:, None]
    return Tree(root_B[:, None], zeros - 1, zeros, zeros.float())


def grow(
    shape: TreeShape,
    root_B: Tensor,
    logits_BW: Tensor,
    step: Step,
    ids_W: Tensor,
    policy: Policy,
    uniform: Callable[[], Tensor],
    vocabulary: int | None = None,
) -> Tree:
    """Grow a tree below the root from the head's first logits and its `step`.

    Args:
        ids_W: target id of each draft id.
        policy: of the target; a chain at temperature > 0 is sampled from the head under it.
        uniform: draws a number in [0, 1) for each row [B].
        vocabulary: size of the target's; default: up to the highest of `ids_W`.
    """
    if shape.kind == "chain":
        return grow_chain(shape, root_B, logits_BW, step, ids_W, policy, uniform, vocabulary)
    return grow_dynamic(shape, root_B, logits_BW, step, ids_W)


def grow_chain(
    shape: TreeShape,
    root_B: Tensor,
    logits_BW: Tensor,
    step: Step,
    ids_W: Tensor,
    policy: Policy,
    uniform: Callable[[], Tensor],
    vocabulary: int | None = None,
) -> Tree:
    """One guess per level: the most likely token, or a draw that the verifier can weigh (its distribution is kept)."""
    tokens, logprobs = [root_B], [torch.zeros_like(logits_BW[:, 0])]
    proposals: list[Tensor] = []
    first = torch.zeros_like(root_B)[:, None]
    for depth in range(1, shape.depth + 1):
        if policy.greedy:
            draft_B, scores_BW = logits_BW.argmax(-1), logits_BW.log_softmax(-1)
        else:
            proposals.append(policy.probs(logits_BW))
            draft_B, scores_BW = draw(proposals[-1], uniform().to(logits_BW.device)), proposals[-1].log()
        logprobs.append(logprobs[-1] + scores_BW.gather(-1, draft_B[:, None])[:, 0])
        tokens.append(ids_W[draft_B])
        if depth < shape.depth:
            logits_BW = step(tokens[-1][:, None], first)[:, 0]
    line = torch.arange(shape.depth + 1, device=root_B.device).expand(len(root_B), -1)
    tree = Tree(torch.stack(tokens, 1), line - 1, line, torch.stack(logprobs, 1))
    if proposals:
        width = vocabulary or int(ids_W[-1]) + 1
        wide = [q_BW.new_zeros(len(q_BW), width).scatter_(1, ids_W.expand_as(q_BW), q_BW) for q_BW in proposals]
        tree.proposal_BNV = torch.stack([torch.zeros_like(wide[0]), *wide], 1)
    return tree


def grow_dynamic(shape: TreeShape, root_B: Tensor, logits_BW: Tensor, step: Step, ids_W: Tensor) -> Tree:
    """EAGLE-2 (arXiv 2406.16858): expand the most likely frontier level by level, then keep the best nodes of all.

    A node's value is the product of the head's probabilities along its path. Children are deterministic, so the
    verifier may walk with any choice of the target.
    """
    batch, k = len(root_B), min(shape.top_k, len(ids_W))
    scores_Bk, draft_Bk = logits_BW.log_softmax(-1).topk(k, dim=-1)
    tokens, scores = [ids_W[draft_Bk]], [scores_Bk]
    parents, depths = [torch.zeros_like(draft_Bk)], [torch.ones_like(draft_Bk)]
    # candidates count from 1; 0 is the root
    frontier_Bk = torch.arange(1, k + 1, device=root_B.device).expand(batch, k)
    above_Bk, count = torch.zeros_like(draft_Bk), 1 + k
    for depth in range(2, shape.depth + 1):
        logp_Bkk, draft_Bkk = step(tokens_at(tokens, frontier_Bk), above_Bk).log_softmax(-1).topk(k, dim=-1)
        level_Bc = (scores_Bk[:, :, None] + logp_Bkk).flatten(1)
        tokens.append(ids_W[draft_Bkk].flatten(1))
        scores.append(level_Bc)
        parents.append(frontier_Bk.repeat_interleave(k, dim=1))
        depths.append(torch.full_like(parents[-1], depth))
        best_Bk = level_Bc.sort(descending=True, stable=True).indices[:, :k]
        scores_Bk, above_Bk = level_Bc.gather(1, best_Bk), best_Bk // k
        frontier_Bk, count = count + best_Bk, count + k * k
    return best_nodes(shape.nodes, root_B, *(torch.cat(part, 1) for part in (tokens, scores, parents, depths)))


def tokens_at(tokens: list[Tensor], candidates_Bk: Tensor) -> Tensor:
    """Tokens of candidates that are numbered from 1 through all levels."""
    return torch.cat(tokens, 1).gather(1, candidates_Bk - 1)


def best_nodes(
    count: int, root_B: Tensor, tokens_BC: Tensor, scores_BC: Tensor, parents_BC: Tensor, depths_BC: Tensor
) -> Tree:
    """The `count` most likely of C candidates. Stable order: a child never beats its parent, so the set is a tree."""
    chosen_BN = scores_BC.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
    place_BC = torch.zeros(len(root_B), scores_BC.shape[1] + 1, dtype=torch.long, device=root_B.device)
    place_BC.scatter_(
        1, chosen_BN + 1, torch.arange(1, chosen_BN.shape[1] + 1, device=root_B.device).expand_as(chosen_BN)
    )
    parents_BN = place_BC.gather(1, parents_BC.gather(1, chosen_BN))
    root = root_only(root_B)
    return Tree(
        torch.cat([root.tokens_BN, tokens_BC.gather(1, chosen_BN)], 1),
        torch.cat([root.parents_BN, parents_BN], 1),
        torch.cat([root.depth_BN, depths_BC.gather(1, chosen_BN)], 1),
        torch.cat([root.logprobs_BN, scores_BC.gather(1, chosen_BN)], 1),
    )
