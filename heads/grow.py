"""How trees grow from a head's guesses.

Shapes: B rows, N nodes (the root included), k or F frontier nodes, C candidates, W draft vocabulary.

Children are deterministic (the head's most likely tokens), or sampled from its distribution. Which of the two decides how they
may be verified (eval/verify.py), and how a tree may be laid out: what is drawn must be kept whatever it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.data.batch import to_device
from headwright.data.cache import KVCache
from headwright.data.sampling import draw
from headwright.heads.base import Context
from headwright.heads.draft_tree import Level, Outline, Proposal, Tree, TreeShape, outline, root_only

# step(tokens_Bk, parents_Bk) -> logits_BkW: run the head on a new frontier; `parents` are places in the frontier before it
Step = Callable[[Tensor, Tensor], Tensor]


def grow(shape: TreeShape, context: Context, logits_BW: Tensor, step: Step, ids_W: Tensor) -> Tree:
    """Grow a tree below the context's root from the head's first logits and its `step`. ids_W: target id of each draft id."""
    if shape.kind == "dynamic" and not context.sampled:
        return grow_dynamic(shape, context.root_B, logits_BW, step, ids_W)
    plan = outline(shape.paths)
    return Grower(context, step, ids_W, plan).grow(logits_BW[:, None])


class Grower:
    """A tree of fixed layout, level by level."""

    def __init__(self, context: Context, step: Step, ids_W: Tensor, plan: Outline):
        self.context, self.step, self.ids_W, self.plan = context, step, ids_W, plan
        self.device = context.root_B.device
        self.tokens = [context.root_B[:, None]]
        self.scores = [torch.zeros(self.tokens[0].shape, device=self.device)]
        self.proposals: list[Tensor] = []

    def grow(self, logits_BFW: Tensor) -> Tree:
        """All levels, from the root's logits [B, 1, W]."""
        for number, level in enumerate(self.plan.levels):
            if number:
                tokens_BF = self.tokens[-1][:, self.index(level.expanded)]
                logits_BFW = self.step(tokens_BF, self.index(level.above).expand_as(tokens_BF))
            self.add(level, *self.choose(level, logits_BFW))
        batch = len(self.context.root_B)
        parents, depths = (self.index(column).expand(batch, -1) for column in (self.plan.parents, self.plan.depths))
        tokens, scores = torch.cat(self.tokens, 1), torch.cat(self.scores, 1)
        return Tree(tokens, parents, depths, scores, self.proposal(), len(self.plan.levels))

    def index(self, places: tuple[int, ...]) -> Tensor:
        """Places as a tensor on the rows' device."""
        return index_tensor(places, self.device)

    def choose(self, level: Level, logits_BFW: Tensor) -> tuple[Tensor, Tensor]:
        """Draft ids [B, F, R] by rank, and the log-probabilities [B, F, W] of all."""
        count = 1 + max(draw_order(level) if self.context.sampled else level.ranks)
        if count > len(self.ids_W):
            raise UserError(f"the tree asks for {count} siblings, the draft vocabulary has {len(self.ids_W)} tokens")
        if self.context.sampled:
            q_BFW = self.context.policy.probs(logits_BFW)
            self.proposals.append(q_BFW)
            return self.sample(level, q_BFW, count), q_BFW.log()
        logp_BFW = logits_BFW.log_softmax(-1)
        if count == 1:
            return logits_BFW.argmax(-1, keepdim=True), logp_BFW
        return logp_BFW.topk(count, dim=-1).indices, logp_BFW

    def sample(self, level: Level, q_BFW: Tensor, count: int) -> Tensor:
        """Draws without replacement, one after the other, each by one number of its row's stream.

        Where fewer tokens than children have any probability, the last children hold a token that stands for nothing; the
        verifier sees that their distribution is empty and passes over them.
        """
        rest_BFW, found = q_BFW.clone(), []
        for rank in range(count):
            owners = [place for place in range(len(level.expanded)) if level.owners.count(place) > rank]
            picked_BF = torch.zeros(rest_BFW.shape[:2], dtype=torch.long, device=self.device)
            uniform_BF = torch.stack([self.context.uniform() for _ in owners], 1).to(self.device)
            picked_BF[:, owners] = draw(rest_BFW[:, owners], uniform_BF)
            rest_BFW.scatter_(2, picked_BF[..., None], 0.0)
            found.append(picked_BF)
        return torch.stack(found, 2)

    def add(self, level: Level, chosen_BFR: Tensor, logp_BFW: Tensor) -> None:
        """Append the level's children. Sampled siblings stand in the order in which they were drawn."""
        owners = self.index(level.owners)
        ranks = self.index(draw_order(level) if self.context.sampled else level.ranks)
        above = self.scores[-1][:, self.index(level.expanded)]
        draft_BC = chosen_BFR[:, owners, ranks]
        self.scores.append(above[:, owners] + logp_BFW[:, owners].gather(2, draft_BC[..., None])[..., 0])
        self.tokens.append(self.ids_W[draft_BC])

    def proposal(self) -> Proposal | None:
        """The distributions of sampled children."""
        if not self.proposals:
            return None
        parents = self.plan.parents
        children = tuple(tuple(n for n, p in enumerate(parents) if p == node) for node in range(len(parents)))
        owners = [node for node in range(len(parents)) if children[node]]  # level order, as the distributions are
        of = tuple(owners.index(node) if children[node] else -1 for node in range(len(parents)))
        return Proposal(torch.cat(self.proposals, 1), self.ids_W, of, children)


@lru_cache(maxsize=4096)
def index_tensor(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Places as a tensor, made once: they are the same in every cycle."""
    with torch.inference_mode(False):
        return torch.tensor(places, device=device)


@lru_cache(maxsize=4096)
def draw_order(level: Level) -> tuple[int, ...]:
    """Each child's place among its siblings: gaps between ranks mean nothing to a draw."""
    return tuple(level.owners[:place].count(owner) for place, owner in enumerate(level.owners))


class Frontier:
    """The speculative end of a cache, level by level. Each node sees the confirmed rows, its ancestors and itself."""

    def __init__(self, cache: KVCache, rows: int):
        cache.make_room(rows)
        self.cache, self.committed = cache, list(cache.lengths)
        self.start_B = to_device(torch.tensor(self.committed), cache.device)
        self.depth = 0  # levels below the root so far
        self.sees_Bks = torch.zeros(len(self.committed), 1, 0, dtype=torch.bool, device=cache.device)

    @contextmanager
    def level(self, parents_Bk: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions [B, k] and mask [B, k, S] of a new level, whose nodes the body writes to the cache."""
        batch, count = parents_Bk.shape
        inherited = self.sees_Bks.gather(1, parents_Bk[..., None].expand(-1, -1, self.sees_Bks.shape[2]))
        own = torch.eye(count, dtype=torch.bool, device=parents_Bk.device).expand(batch, count, count)
        self.sees_Bks = torch.cat([inherited, own], dim=2)
        yield (self.start_B[:, None] + self.depth).expand(batch, count), self.mask(count)
        self.cache.advance(count)
        self.depth += 1

    def mask(self, count: int) -> Tensor:
        """Who of the frontier sees which slots."""
        slots = torch.arange(self.cache.room(count), device=self.start_B.device)
        mask = (slots < self.start_B[:, None, None]).expand(-1, count, -1).clone()
        speculative = self.start_B[:, None, None] + torch.arange(self.sees_Bks.shape[2], device=self.start_B.device)
        return mask.scatter_(2, speculative.expand_as(self.sees_Bks), self.sees_Bks)

    def forget(self) -> None:
        """Drop all that is speculative."""
        self.cache.lengths = self.committed


def grow_dynamic(shape: TreeShape, root_B: Tensor, logits_BW: Tensor, step: Step, ids_W: Tensor) -> Tree:
    """EAGLE-2 (arXiv 2406.16858): expand the most likely frontier level by level, then keep the best nodes of all.

    A node's value is the product of the head's probabilities along its path. Children are deterministic, so the
    verifier may walk with any choice of the target.
    """
    return best_nodes(shape.nodes, root_B, *candidates(shape, logits_BW, step, ids_W), levels=shape.depth)


def candidates(shape: TreeShape, logits_BW: Tensor, step: Step, ids_W: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, values, parents and depths [B, C] of all nodes that a dynamic tree scores. They count from 1; 0 is the root."""
    batch, k = len(logits_BW), min(shape.top_k, len(ids_W))
    scores_Bk, draft_Bk = logits_BW.log_softmax(-1).topk(k, dim=-1)
    tokens, scores = [ids_W[draft_Bk]], [scores_Bk]
    parents, depths = [torch.zeros_like(draft_Bk)], [torch.ones_like(draft_Bk)]
    frontier_Bk = torch.arange(1, k + 1, device=draft_Bk.device).expand(batch, k)
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
    return torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1), torch.cat(depths, 1)


def tokens_at(tokens: list[Tensor], candidates_Bk: Tensor) -> Tensor:
    """Tokens of candidates that are numbered from 1 through all levels."""
    return torch.cat(tokens, 1).gather(1, candidates_Bk - 1)


def best_nodes(
    count: int,
    root_B: Tensor,
    tokens_BC: Tensor,
    scores_BC: Tensor,
    parents_BC: Tensor,
    depths_BC: Tensor,
    levels: int | None = None,
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
        levels=levels,
    )
