"""Both verification rules give exactly the target's distribution: enumerated on a five-token vocabulary.

Draws are not simulated. Every value that a rule can see is enumerated with its exact probability: drafted tokens by
their proposal, and each uniform number by the middle of every interval on which the outcome cannot change.
"""

import itertools
from collections import Counter, defaultdict
from fractions import Fraction

import pytest
import torch

from headwright.data.sampling import Policy
from headwright.eval.verify import Verdict, ratio, residual, verify, walk
from headwright.heads.draft_tree import Tree, TreeShape, grow

V, DEPTH = 5, 2


class Exact(Policy):
    """A policy whose fp32 probabilities are made to sum to one in fp64, so that the enumeration is exact."""

    def probs(self, logits_XV: torch.Tensor) -> torch.Tensor:
        probs = super().probs(logits_XV).double()
        return probs / probs.sum(-1, keepdim=True)


POLICIES = (
    Exact(1.0),
    Exact(0.7),
    Exact(1.3, top_k=2),
    Exact(1.0, top_p=0.6),
    Exact(0.9, top_k=4, top_p=0.8),
    Exact(1.0, min_p=0.3),
)


class TreeOfTables:
    """A target and a head whose logits are tables over the path of tokens so far."""

    def __init__(self, seed: int, spread: float = 1.5):
        generator = torch.Generator().manual_seed(seed)
        paths = [p for depth in range(DEPTH + 1) for p in itertools.product(range(V), repeat=depth)]
        self.target = {p: spread * torch.randn(V, generator=generator) for p in paths}
        self.head = {p: spread * torch.randn(V, generator=generator) for p in paths}


def expected(tables: TreeOfTables, policy: Policy, length: int) -> dict[tuple[int, ...], float]:
    """The target's own distribution over texts of `length` tokens."""
    out: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        out = {
            (*text, x): mass * float(p)
            for text, mass in out.items()
            for x, p in enumerate(policy.probs(tables.target[text]).double())
        }
    return out


class Script:
    """Uniform numbers that were fixed in advance; asking for more is an outcome of its own."""

    def __init__(self, numbers: list[float]):
        self.numbers, self.used = numbers, 0

    def __call__(self) -> torch.Tensor:
        if self.used == len(self.numbers):
            raise NeedsMore
        self.used += 1
        return torch.tensor([self.numbers[self.used - 1]], dtype=torch.float64)


class NeedsMore(Exception):
    """The rule wants one more uniform number."""


def outcomes(run, boundaries, prefix=()):
    """Every (result, probability) of `run(uniform)`: each uniform number is split where the result may change.

    boundaries(prefix) lists the cut points in [0, 1] of the number that comes after those in `prefix`.
    """
    try:
        yield (
            run(Script([u for u, _ in prefix])),
            float(torch.tensor([m for _, m in prefix], dtype=torch.float64).prod()),
        )
    except NeedsMore:
        cuts = sorted({0.0, 1.0, *(c for c in boundaries(prefix) if 0 < c < 1)})
        for low, high in itertools.pairwise(cuts):
            yield from outcomes(run, boundaries, (*prefix, ((low + high) / 2, high - low)))


def cumulative(p_V: torch.Tensor) -> list[float]:
    """Cut points of an inverse-CDF draw."""
    total = p_V.double().cumsum(-1)
    return (total / total[-1]).tolist()


def chain_tree(tokens: list[int], proposals: list[torch.Tensor] | None) -> Tree:
    """Root 0 and a chain below it."""
    line = torch.arange(len(tokens) + 1)[None]
    proposal = None if proposals is None else torch.stack([torch.zeros_like(proposals[0]), *proposals])[None]
    return Tree(torch.tensor([[0, *tokens]]), line - 1, line, torch.zeros(line.shape), proposal)


def emitted(verdict: Verdict, tree: Tree) -> tuple[int, ...]:
    """What a cycle adds to the text."""
    return (*tree.tokens_BN[0, verdict.path[1:]].tolist(), verdict.bonus)


def completed(
    found: dict[tuple[int, ...], float], tables: TreeOfTables, policy: Policy
) -> dict[tuple[int, ...], float]:
    """Texts of unequal length, continued by the target itself up to DEPTH + 1 tokens."""
    out: dict[tuple[int, ...], float] = defaultdict(float)
    for text, mass in found.items():
        for tail in itertools.product(range(V), repeat=DEPTH + 1 - len(text)):
            share, so_far = mass, text
            for x in tail:
                share, so_far = share * float(policy.probs(tables.target[so_far]).double()[x]), (*so_far, x)
            out[so_far] += share
    return out


def distance(left: dict, right: dict) -> float:
    """Total variation distance."""
    return 0.5 * sum(abs(left.get(k, 0.0) - right.get(k, 0.0)) for k in left.keys() | right.keys())


def ratio_distribution(tables, policy, head_policy, chosen=None, verify_policy=None):
    """The exact distribution of the text that the ratio rule emits.

    `chosen(logits)` replaces drawing from the head: a deterministic draft whose q is still claimed to be the head's.
    """
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for drafts in itertools.product(range(V), repeat=DEPTH):
        proposals = [head_policy.probs(tables.head[drafts[:d]]) for d in range(DEPTH)]
        if chosen is None:
            weight = float(torch.stack([q.double()[x] for q, x in zip(proposals, drafts)]).prod())
        else:
            weight = float(all(chosen(tables.head[drafts[:d]]) == x for d, x in enumerate(drafts)))
        if weight == 0:
            continue
        tree = chain_tree(list(drafts), proposals)
        logits = torch.stack([tables.target[drafts[:d]] for d in range(DEPTH + 1)])
        used = verify_policy or policy

        def boundaries(prefix, proposals=proposals, logits=logits, drafts=drafts, used=used):
            """Cuts of the next number: it may accept a draft, replace the one before it, or be the bonus."""
            place, cuts = len(prefix), []
            if place < DEPTH:
                p, q, x = used.probs(logits[place]), proposals[place], drafts[place]
                cuts.append(float(p[x]) / float(q[x]))
            if place > 0:
                cuts += cumulative(residual(used.probs(logits[place - 1]), proposals[place - 1]))
            return cuts + (cumulative(used.probs(logits[place])) if place == DEPTH else [])

        for verdict, mass in outcomes(lambda u, t=tree, lo=logits, us=used: verify(t, lo, us, u), boundaries):
            found[emitted(verdict, tree)] += weight * mass
    return found


def walk_distribution(tables, policy, tree_of):
    """The exact distribution of the text that the walk emits over a deterministic tree."""
    tree, paths = tree_of(tables)
    logits = torch.stack([tables.target[path] for path in paths])
    depth = tree.depth_BN[0].tolist()

    def boundaries(prefix):
        """Cuts of the draw at any node of the next depth."""
        return [c for row, d in zip(logits, depth) if d == len(prefix) for c in cumulative(policy.probs(row))]

    found: dict[tuple[int, ...], float] = defaultdict(float)
    for verdict, mass in outcomes(lambda u: verify(tree, logits, policy, u), boundaries):
        found[emitted(verdict, tree)] += mass
    return found


def top_tree(tables: TreeOfTables, width: int) -> tuple[Tree, list[tuple[int, ...]]]:
    """The head's `width` best children of every node, two levels."""
    tokens, parents, depth, paths = [0], [-1], [0], [()]
    for node in range(1 + width):
        for x in tables.head[paths[node]].topk(width).indices.tolist():
            tokens.append(x)
            parents.append(node)
            depth.append(depth[node] + 1)
            paths.append((*paths[node], x))
    columns = (torch.tensor([part]) for part in (tokens, parents, depth))
    return Tree(*columns, torch.zeros(1, len(tokens))), paths


EXACT = 1e-12


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_ratio_rule_is_lossless(policy, seed):
    """Also with top-k, top-p and min-p, where p is zero on tokens that the head may have drawn."""
    tables = TreeOfTables(seed)
    found = ratio_distribution(tables, policy, policy)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    assert distance(completed(found, tables, policy), expected(tables, policy, DEPTH + 1)) < EXACT


@pytest.mark.parametrize("head_policy", [Exact(1.0), Exact(0.4), Exact(1.0, top_k=1), Exact(2.0, top_p=0.5)], ids=str)
def test_ratio_rule_is_lossless_for_any_proposal(head_policy):
    """The head may be processed in any way, as long as the q that is kept is the q that was drawn from."""
    tables, policy = TreeOfTables(3), Exact(0.8, top_k=3)
    found = ratio_distribution(tables, policy, head_policy)
    assert distance(completed(found, tables, policy), expected(tables, policy, DEPTH + 1)) < EXACT


def dyadic(counts: list[int]) -> torch.Tensor:
    """Probabilities that floating point holds exactly."""
    assert sum(counts) == 64
    return torch.tensor(counts, dtype=torch.float64) / sum(counts)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([8, 8, 16, 24, 8], [8, 8, 16, 24, 8]),  # p = q: never rejected
        ([64, 0, 0, 0, 0], [0, 0, 0, 0, 64]),  # disjoint: never accepted
        ([0, 32, 32, 0, 0], [16, 16, 16, 16, 0]),  # q has mass where p has none
        ([16, 16, 16, 16, 0], [0, 0, 0, 64, 0]),  # a certain draft
        ([1, 2, 3, 4, 54], [54, 4, 3, 2, 1]),
        ([63, 1, 0, 0, 0], [1, 63, 0, 0, 0]),
    ],
)
def test_ratio_rule_is_exact_to_rounding(p, q):
    """One level with dyadic p and q, in exact arithmetic: the emitted token has the target's distribution to 1e-12."""
    p_V, q_V = dyadic(p), dyadic(q)

    class Fixed(Policy):
        """Logits are already probabilities."""

        def probs(self, logits_XV):
            return logits_XV

    policy = Fixed(1.0)
    found = Counter()
    for x in range(V):
        if q[x] == 0:
            continue
        accept = min(Fraction(1), Fraction(p[x], q[x]))
        boundaries = lambda prefix, x=x: (  # noqa: E731
            [float(Fraction(p[x], q[x]))] if not prefix else [*cumulative(residual(p_V, q_V)), *cumulative(p_V)]
        )
        tree, logits = chain_tree([x], [q_V]), torch.stack([p_V, p_V])
        for verdict, mass in outcomes(lambda u, t=tree, lo=logits: verify(t, lo, policy, u), boundaries):
            found[emitted(verdict, tree)[0]] += float(Fraction(q[x], 64)) * mass
            assert (len(verdict.path) == 2) <= (accept > 0)
    for token in range(V):
        assert found[token] == pytest.approx(p[token] / 64, abs=1e-12)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_walk_over_deterministic_children_is_lossless(policy, width):
    tables = TreeOfTables(11)
    found = walk_distribution(tables, policy, lambda t: top_tree(t, width))
    assert distance(completed(found, tables, policy), expected(tables, policy, DEPTH + 1)) < EXACT


@pytest.mark.parametrize("policy", [Exact(1.0), Exact(0.7, top_k=3)], ids=str)
def test_walk_over_a_tree_that_grow_made_is_lossless(policy):
    """The dynamic tree of the decoder itself, driven by the table."""
    tables = TreeOfTables(17)

    def tree_of(tables):
        frontier = [[()]]

        def step(tokens, parents):
            above = frontier[-1]
            frontier.append([(*above[p], t) for p, t in zip(parents[0].tolist(), tokens[0].tolist())])
            return torch.stack([tables.head[path] for path in frontier[-1]])[None]

        shape, root = TreeShape("dynamic", DEPTH, 3, 7), torch.tensor([0])
        tree = grow(shape, root, tables.head[()][None], step, torch.arange(V), policy, lambda: None)
        paths = [()]
        for token, parent in list(zip(tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist()))[1:]:
            paths.append((*paths[parent], token))
        return tree, paths

    assert tree_of(tables)[0].proposal_BNV is None
    found = walk_distribution(tables, policy, tree_of)
    assert distance(completed(found, tables, policy), expected(tables, policy, DEPTH + 1)) < EXACT


def test_negative_control_ratio_rule_on_deterministic_children():
    """The head's best token, tested against q as if it had been drawn: a known bug, far from the target."""
    tables, policy = TreeOfTables(0), Exact(1.0)
    found = ratio_distribution(tables, policy, policy, chosen=lambda logits: int(logits.argmax()))
    assert distance(completed(found, tables, policy), expected(tables, policy, DEPTH + 1)) > 0.05


def test_negative_control_unprocessed_target():
    """Verifying against raw logits where the user asked for temperature and top-k: far from the target."""
    tables, policy = TreeOfTables(0), Exact(0.5, top_k=2)
    found = ratio_distribution(tables, policy, policy, verify_policy=Exact(1.0))
    assert distance(completed(found, tables, policy), expected(tables, policy, DEPTH + 1)) > 0.05


def test_negative_control_wrong_proposal():
    """Drawn at one temperature, weighed with another."""
    tables, policy, drawn = TreeOfTables(0), Exact(1.0), Exact(0.4)
    wrong = 0.0
    found: dict[tuple[int, ...], float] = defaultdict(float)
    p, q, claimed = (f(tables) for f in (lambda t: policy.probs(t.target[()]), lambda t: drawn.probs(t.head[()]),
                                         lambda t: policy.probs(t.head[()])))  # fmt: skip
    for x in range(V):
        tree, logits = chain_tree([x], [claimed]), torch.stack([tables.target[()], tables.target[(x,)]])
        cuts = [float(p[x] / claimed[x]), *cumulative(residual(p, claimed)), *cumulative(policy.probs(logits[1]))]
        for verdict, mass in outcomes(lambda u, t=tree, lo=logits: verify(t, lo, policy, u), lambda _, c=cuts: c):
            found[emitted(verdict, tree)[:1]] += float(q[x]) * mass
    wrong = distance(found, {(x,): float(p[x]) for x in range(V)})
    assert wrong > 0.05


def test_acceptance_probability_is_one_minus_total_variation():
    """The mass of the accepted drafts is Σ min(p, q)."""
    tables, policy = TreeOfTables(5), Exact(1.0)
    p, q = policy.probs(tables.target[()]), policy.probs(tables.head[()])
    accepted = 0.0
    for x in range(V):
        tree, logits = chain_tree([x], [q]), torch.stack([tables.target[()], tables.target[(x,)]])
        cuts = [float(p[x] / q[x]), *cumulative(residual(p, q)), *cumulative(policy.probs(logits[1]))]
        for verdict, mass in outcomes(lambda u, t=tree, lo=logits: verify(t, lo, policy, u), lambda _, c=cuts: c):
            accepted += float(q[x]) * mass * (len(verdict.path) == 2)
    assert accepted == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


def test_residual_edges():
    same = torch.tensor([0.25, 0.5, 0.25])
    assert torch.equal(residual(same, same), same)
    rest = residual(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.5, 0.5]))
    assert rest.tolist() == [1.0, 0.0, 0.0]


def test_a_draft_that_the_policy_forbids_is_never_accepted():
    """u = 0 is in the range of the generator, and p(x) = 0 must lose against it."""
    logits = torch.tensor([[5.0, 4.0, 0.0, 0.0, 0.0]] * 2)
    policy = Exact(1.0, top_k=2)
    q = torch.tensor([0.2] * 5)
    verdict = ratio(
        [0, 3], torch.stack([torch.zeros(5), q]), logits, policy, lambda: torch.zeros(1, dtype=torch.float64)
    )
    assert verdict.path == [0]
    assert verdict.bonus in (0, 1)


def test_greedy_walk_follows_the_maximum_and_draws_nothing():
    def never():
        raise AssertionError("greedy verification draws no number")

    #        0
    #      /   \
    #     2     4
    #    / \
    #   1   3
    tree = Tree(
        torch.tensor([[0, 2, 4, 1, 3]]),
        torch.tensor([[-1, 0, 0, 1, 1]]),
        torch.tensor([[0, 1, 1, 2, 2]]),
        torch.zeros(1, 5),
    )
    best = lambda *tokens: torch.nn.functional.one_hot(torch.tensor(tokens), V).float()  # noqa: E731
    assert verify(tree, best(2, 3, 0, 0, 1), Policy(), never) == Verdict([0, 1, 4], 1)
    assert verify(tree, best(4, 3, 0, 0, 1), Policy(), never) == Verdict([0, 2], 0)
    assert verify(tree, best(1, 3, 0, 0, 1), Policy(), never) == Verdict([0], 1)
    assert verify(tree, best(2, 2, 0, 0, 1), Policy(), never) == Verdict([0, 1], 2)


def test_greedy_ties_go_to_the_first_maximum_as_in_plain_decoding():
    tree, logits = chain_tree([1], None), torch.zeros(2, V)
    assert verify(tree, logits, Policy(), lambda: None) == Verdict([0], 0)
    assert int(Policy().choose(logits[0])) == 0


def test_of_equal_siblings_the_first_counts():
    tree = Tree(
        torch.tensor([[0, 2, 2, 3]]), torch.tensor([[-1, 0, 0, 2]]), torch.tensor([[0, 1, 1, 2]]), torch.zeros(1, 4)
    )
    logits = torch.nn.functional.one_hot(torch.tensor([2, 3, 3, 0]), V).float()
    assert verify(tree, logits, Policy(), lambda: None) == Verdict([0, 1], 3)


def test_walk_ends_at_a_leaf_with_its_own_bonus():
    assert walk({(0, 7): 1, (1, 8): 2}, lambda node: (7, 8, 9)[node]) == Verdict([0, 1, 2], 9)


def test_row_of_a_batch_is_verified_by_its_own_tokens():
    tree = Tree(
        torch.tensor([[0, 1], [0, 2]]), torch.tensor([[-1, 0]] * 2), torch.tensor([[0, 1]] * 2), torch.zeros(2, 2)
    )
    logits = torch.nn.functional.one_hot(torch.tensor([2, 4]), V).float()
    assert verify(tree, logits, Policy(), lambda: None, row=0) == Verdict([0], 2)
    assert verify(tree, logits, Policy(), lambda: None, row=1) == Verdict([0, 1], 4)
