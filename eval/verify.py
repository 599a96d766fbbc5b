"""Verification: which drafted tokens stand, and which token comes after them. Pure functions of tensors.

Shapes: N nodes of one tree (the root included), V target vocabulary.

Two rules, both exactly lossless (they give the target's own distribution):

walk    For deterministic guesses. The target chooses a token at the node (its maximum, or a draw from its policy);
where a child
        holds that token the walk goes on there, else the token is the bonus.
ratio   For a chain that was drawn from the head's distribution q (Leviathan et al., Chen et al.): accept x with
probability
        min(1, p(x)/q(x)); at the first rejection draw from the normalised positive part of p − q.

p comes from the user's policy at every step, for acceptance, residual and bonus alike, in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headwright.data.sampling import Policy, draw
from headwright.heads.draft_tree import Tree


@dataclass
class Verdict:
    """Accepted nodes, the root first, and the token that the target adds."""

    path: list[int]
    bonus: int


def verify(tree: Tree, logits_NV: Tensor, policy: Policy, uniform: Callable[[], Tensor], row: int = 0) -> Verdict:
    """Verify row `row` of a tree against the target's logits at each of its nodes.

    `uniform` draws one number in [0, 1); greedy verification draws none.
    """
    if tree.proposal_BNV is not None and not policy.greedy:
        return ratio(tree.tokens_BN[row].tolist(), tree.proposal_BNV[row], logits_NV, policy, uniform)
    tokens, parents = tree.tokens_BN[row].tolist(), tree.parents_BN[row].tolist()
    children: dict[tuple[int, int], int] = {}
    for node in range(len(tokens) - 1, 0, -1):  # of equal siblings the first counts
        children[parents[node], tokens[node]] = node
    if policy.greedy:
        choices = logits_NV.argmax(-1).tolist()
        return walk(children, lambda node: choices[node])
    return walk(children, lambda node: int(draw(policy.probs(logits_NV[node]), uniform().to(logits_NV.device))))


def walk(children: dict[tuple[int, int], int], choose: Callable[[int], int]) -> Verdict:
    """Follow the target's choices down the tree."""
    path = [0]
    while True:
        token = choose(path[-1])
        child = children.get((path[-1], token))
        if child is None:
            return Verdict(path, token)
        path.append(child)


def ratio(
    tokens: list[int], proposal_NV: Tensor, logits_NV: Tensor, policy: Policy, uniform: Callable[[], Tensor]
) -> Verdict:
    """The ratio test along a sampled chain."""
    for node in range(1, len(tokens)):
        p_V, q_V, x = policy.probs(logits_NV[node - 1]), proposal_NV[node], tokens[node]
        # p ≥ q: always accepted; p < q: accepted with probability p/q
        if float(uniform()) * float(q_V[x]) >= float(p_V[x]):
            return Verdict(list(range(node)), int(draw(residual(p_V, q_V), uniform().to(p_V.device))))
    last_V = policy.probs(logits_NV[len(tokens) - 1])
    return Verdict(list(range(len(tokens))), int(draw(last_V, uniform().to(last_V.device))))


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """norm(max(p − q, 0)); p itself where rounding leaves nothing of the difference."""
    rest_V = (p_V - q_V).clamp_min(0)
    return rest_V / rest_V.sum() if rest_V.sum() > 0 else p_V
