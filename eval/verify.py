"""Verification: which drafted tokens stand, and which token comes after them. Pure functions of tensors.

Shapes: B rows, N nodes of a tree (the root included), D levels below the root, P = D + 1 places of a path, V target vocabulary,
W draft vocabulary.

Three rules are exactly lossless: what they emit has the target's own distribution.

walk      For deterministic guesses. The target chooses a token at the node (its maximum, or a draw from its policy); where a
          child holds that token the walk goes on there, else the token is the bonus.
sampled   For children that were drawn from the drafter's distribution q without replacement (recursive rejection sampling:
          SpecInfer, arXiv 2305.09781; without replacement: Sequoia, arXiv 2402.12374). In the order of their drawing each child
          x is accepted with probability min(1, p(x)/q(x)); if it is not, p becomes the normalised positive part of p − q, and q
          loses x. With one child per node this is the ratio test of Leviathan et al. (2211.17192) and Chen et al. (2302.01318).

One rule is not:

typical   Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1): a guess stands if the target finds it likely
          enough. The text is then no longer the target's own; numbers made with it carry that label.

p comes from the user's policy at every step, for acceptance, residual and bonus alike; probabilities are computed in fp32 and
weighed in fp64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from headwright.data.sampling import Policy, draw
from headwright.heads.draft_tree import Proposal, Tree

LOSSLESS = ("walk", "sampled")
Uniform = Callable[[], Tensor]


@dataclass
class Verdict:
    """What stands: nodes_BP (the root first; behind the last accepted node it is repeated), the number of accepted drafts, and
    the token that the target adds.
    """

    nodes_BP: Tensor
    counts_B: Tensor
    bonus_B: Tensor


@dataclass(frozen=True)
class Typical:
    """Medusa's thresholds: a guess stands where p > min(epsilon, delta · exp(−entropy of p))."""

    epsilon: float = 0.09
    delta: float = 0.3


def verify(
    tree: Tree, logits_BNV: Tensor, policy: Policy, uniform: Uniform, typically: Typical | None = None
) -> Verdict:
    """Verify trees against the target's logits at each of their nodes.

    `uniform` draws one number in [0, 1) per row; greedy verification draws none. How many are drawn depends on the tree's
    layout alone, never on another row.
    """
    if typically is not None:
        return typical(tree, logits_BNV, policy, uniform, typically)
    if tree.proposal is not None and not policy.greedy:
        return sampled(tree, tree.proposal, logits_BNV, policy, uniform)
    if policy.greedy:
        choices_BN = logits_BNV.argmax(-1)
        return walk(tree, lambda node_B: at(choices_BN, node_B))
    return walk(tree, lambda node_B: chosen(at(logits_BNV, node_B), policy, uniform))


def chosen(logits_BV: Tensor, policy: Policy, uniform: Uniform) -> Tensor:
    """A token per row: the maximum, or a draw."""
    return logits_BV.argmax(-1) if policy.greedy else draw(policy.probs(logits_BV), uniform().to(logits_BV.device))


def at(values_BNX: Tensor, node_B: Tensor) -> Tensor:
    """values[b, node[b]]: [B, …]."""
    return values_BNX[torch.arange(len(node_B), device=node_B.device), node_B]


def walk(tree: Tree, choose: Callable[[Tensor], Tensor]) -> Verdict:
    """Follow the target's choices down each tree, from node to the first child that holds the choice."""
    path = Path(tree)
    for _ in range(tree.height()):
        token_B = choose(path.node_B)
        holds_BN = (tree.parents_BN == path.node_B[:, None]) & (tree.tokens_BN == token_B[:, None])
        path.go(holds_BN.any(1), holds_BN.int().argmax(1), token_B)
    return path.end(choose(path.node_B))


class Path:
    """How far each row has come down its tree."""

    def __init__(self, tree: Tree):
        self.node_B = torch.zeros_like(tree.tokens_BN[:, 0])
        self.nodes = [self.node_B]
        self.alive_B = torch.ones_like(self.node_B, dtype=torch.bool)
        self.bonus_B, self.counts_B = torch.zeros_like(self.node_B), torch.zeros_like(self.node_B)

    def go(self, found_B: Tensor, child_B: Tensor, token_B: Tensor) -> None:
        """One level down where a child was accepted; elsewhere the row ends with `token_B`, if it has not before."""
        going_B = self.alive_B & found_B
        self.bonus_B = torch.where(self.alive_B & ~found_B, token_B, self.bonus_B)
        self.node_B = torch.where(going_B, child_B, self.node_B)
        self.nodes.append(self.node_B)
        self.counts_B = self.counts_B + going_B
        self.alive_B = going_B

    def end(self, token_B: Tensor) -> Verdict:
        """`token_B` comes after the rows that are still alive."""
        return Verdict(torch.stack(self.nodes, 1), self.counts_B, torch.where(self.alive_B, token_B, self.bonus_B))


def sampled(tree: Tree, proposal: Proposal, logits_BNV: Tensor, policy: Policy, uniform: Uniform) -> Verdict:
    """Recursive rejection sampling without replacement, all rows level by level."""
    rule = Rejection(tree, proposal, logits_BNV, policy, uniform)
    path = Path(tree)
    for most in rule.layout.most:
        found_B, child_B, rest_BV = rule.children(path.node_B, most)
        path.go(found_B, child_B, draw(rest_BV, uniform().to(rest_BV.device)))
    return path.end(chosen(at(logits_BNV, path.node_B), policy, uniform))


@dataclass
class Layout:
    """A proposal's layout as tensors: the place of node n's distribution, its children padded with −1, and the most children
    that a node of each level has.
    """

    of_N: Tensor
    children_NC: Tensor
    most: list[int]


@lru_cache(maxsize=256)
def layout_of(of: tuple[int, ...], children: tuple[tuple[int, ...], ...], device: torch.device) -> Layout:
    """Work it out, once: it is the same in every cycle."""
    width = max(map(len, children))
    most, row = [], [0]
    while any(children[node] for node in row):
        most.append(max(len(children[node]) for node in row))
        row = [child for node in row for child in children[node]]
    padded = torch.tensor([[*below, *[-1] * (width - len(below))] for below in children], device=device)
    return Layout(torch.tensor(of, device=device), padded, most)


class Rejection:
    """The children of one node per row, tried in the order in which they were drawn."""

    def __init__(self, tree: Tree, proposal: Proposal, logits_BNV: Tensor, policy: Policy, uniform: Uniform):
        self.tree, self.proposal, self.logits_BNV = tree, proposal, logits_BNV
        self.policy, self.uniform = policy, uniform
        device = tree.tokens_BN.device
        self.layout = layout_of(proposal.of, proposal.children, device)
        self.draft_of_V = torch.zeros(logits_BNV.shape[-1], dtype=torch.long, device=device)
        self.draft_of_V[proposal.ids_W] = torch.arange(len(proposal.ids_W), device=device)

    def children(self, node_B: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Whether a child of each row's node is accepted, which, and what is left of p where none is."""
        p_BV = self.policy.probs(at(self.logits_BNV, node_B)).double()
        q_BW = at(self.proposal.q_BFW, self.layout.of_N[node_B].clamp_min(0)).double()
        found_B, child_B = torch.zeros_like(node_B, dtype=torch.bool), torch.zeros_like(node_B)
        for place in range(most):
            tried_B = self.layout.children_NC[node_B, place]
            token_B = at(self.tree.tokens_BN, tried_B.clamp_min(0))
            mass_B = q_BW.sum(1)
            real_B = (tried_B >= 0) & (mass_B > 0) & ~found_B  # a draw from nothing stands for nothing
            q_BW = q_BW / mass_B.clamp_min(torch.finfo(q_BW.dtype).tiny)[:, None]
            draft_B1 = self.draft_of_V[token_B][:, None]
            p_B, q_B = p_BV.gather(1, token_B[:, None])[:, 0], q_BW.gather(1, draft_B1)[:, 0]
            # p ≥ q: always accepted; p < q: accepted with probability p/q
            accepted_B = real_B & (self.uniform().to(p_B.device) * q_B < p_B)
            found_B, child_B = found_B | accepted_B, torch.where(accepted_B, tried_B, child_B)
            refused_B1 = (real_B & ~accepted_B)[:, None]
            p_BV = torch.where(refused_B1, residual(p_BV, q_BW, self.proposal.ids_W), p_BV)
            q_BW = torch.where(refused_B1, q_BW.scatter(1, draft_B1, 0.0), q_BW)
        return found_B, child_B, p_BV


def residual(p_BV: Tensor, q_BW: Tensor, ids_W: Tensor) -> Tensor:
    """norm(max(p − q, 0)); p itself where rounding leaves nothing of the difference."""
    rest_BV = p_BV.index_add(1, ids_W, q_BW.to(p_BV.dtype), alpha=-1).clamp_min(0)
    mass_B1 = rest_BV.sum(1, keepdim=True)
    return torch.where(mass_B1 > 0, rest_BV / mass_B1.clamp_min(torch.finfo(p_BV.dtype).tiny), p_BV)


def typical(tree: Tree, logits_BNV: Tensor, policy: Policy, uniform: Uniform, rule: Typical) -> Verdict:
    """The longest path of guesses that the target finds likely enough; of equal ones, the likeliest. Not lossless."""
    probs_BNV = (logits_BNV.float() / (policy.temperature or 1.0)).softmax(-1)
    entropy_BN = -torch.xlogy(probs_BNV, probs_BNV).sum(-1)
    limit_BN = (rule.delta * (-entropy_BN).exp()).clamp_max(rule.epsilon)
    above_BN = tree.parents_BN.clamp_min(0)
    p_BN = probs_BNV[torch.arange(len(above_BN), device=above_BN.device)[:, None], above_BN, tree.tokens_BN]
    likely_BN = (p_BN > limit_BN.gather(1, above_BN)) | (tree.parents_BN < 0)
    sees_BNN = tree.ancestors()
    whole_BN = ~(sees_BNN & ~likely_BN[:, None, :]).any(-1)
    scores_BN = (sees_BNN * p_BN.log().masked_fill(tree.parents_BN < 0, 0.0)[:, None, :].nan_to_num(neginf=-1e9)).sum(
        -1
    )
    deep_BN = tree.depth_BN.masked_fill(~whole_BN, -1)
    best_B = scores_BN.masked_fill(deep_BN != deep_BN.amax(1, keepdim=True), -torch.inf).argmax(1)
    on_path_BN = at(sees_BNN, best_B)
    places = tree.height() + 1
    order_BP = torch.where(on_path_BN, tree.depth_BN, places).argsort(stable=True, dim=1)[:, :places]
    counts_B = at(tree.depth_BN, best_B)
    places_P = torch.arange(order_BP.shape[1], device=best_B.device)
    nodes_BP = torch.where(places_P <= counts_B[:, None], order_BP, best_B[:, None])
    return Verdict(nodes_BP, counts_B, chosen(at(logits_BNV, best_B), policy, uniform))
