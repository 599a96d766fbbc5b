"""The lossless rules give exactly the target's distribution: enumerated on a five-token vocabulary.

Nothing is simulated. A rule written out plainly from its paper splits every uniform number where the outcome may change. That
gives boxes of numbers, each with one outcome and an exact mass; children that a drafter draws are enumerated with their exact
probability too. The real rule then runs at corners of every box: it must do there what the plain rule says, and what it emits,
weighed with the masses, must be the target's own text.

Tokens are enumerated below visited nodes only. All other nodes hold arbitrary ones, which must not matter.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headwright.data.sampling import Policy, Said
from headwright.eval.decode import History
from headwright.eval.verify import LOSSLESS, Typical, Verdict, residual, verify, walk
from headwright.heads.base import Context
from headwright.heads.draft_tree import Proposal, RankPath, Tree, TreeShape, outline
from headwright.heads.grow import grow

V, ROOT, PROMPT = 5, 0, 1
ALL = tuple(range(V))
EXACT = 1e-12
Text = tuple[int, ...]
Box = tuple[float, float]


class Exact(Policy):
    """A policy whose fp32 probabilities are made to sum to one in fp64, so that the enumeration is exact."""

    def probs(self, logits_XV):
        probs = super().probs(logits_XV).double()
        return probs / probs.sum(-1, keepdim=True)


class Fixed(Policy):
    """Logits are already probabilities."""

    def probs(self, logits_XV):
        return logits_XV


POLICIES = (
    Exact(1.0),
    Exact(0.7),
    Exact(1.3, top_k=2),
    Exact(1.0, top_p=0.6),
    Exact(0.9, top_k=4, top_p=0.8),
    Exact(1.0, min_p=0.3),
    Exact(1.0, repetition_penalty=1.75),
    Exact(0.8, presence_penalty=1.5),
    Exact(0.9, top_k=3, repetition_penalty=0.5, presence_penalty=-0.75),
)


# What is verified


@dataclass
class Layout:
    """A static tree: parents, the children of each node, and its depth."""

    parents: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    depths: tuple[int, ...]

    @classmethod
    def of(cls, paths) -> "Layout":
        """From rank paths."""
        plan = outline(TreeShape.static(paths).paths)
        nodes = range(len(plan.parents))
        return cls(plan.parents, tuple(tuple(n for n in nodes if plan.parents[n] == m) for m in nodes), plan.depths)

    @property
    def most(self) -> list[int]:
        """The most children of a node, level by level."""
        levels = [[c for c, d in zip(self.children, self.depths) if d == level] for level in range(max(self.depths))]
        return [max(map(len, level)) for level in levels]


def full(*widths: int) -> list[RankPath]:
    """Every node of a level has as many children as is given for it."""
    return [p for depth in range(1, len(widths) + 1) for p in itertools.product(*map(range, widths[:depth]))]


def number(path: Text) -> int:
    """The place of a path in the tables."""
    place = 0
    for token in path:
        place = place * V + token + 1
    return place


class World:
    """A target and a head whose logits are tables over the path below the root, and what a verifier makes of them.

    `p` and `q` are the truth; `used` and `claimed` what the verifier is told. They are the same but in negative controls.
    """

    def __init__(self, paths, policy: Policy, seed: int = 0, ids=ALL, head_policy: Policy | None = None, spread=1.5):
        self.layout, self.policy, self.ids = Layout.of(paths), policy, ids
        self.head_policy = head_policy or policy
        self.depth = max(self.layout.depths)
        rows = sum(V**depth for depth in range(self.depth + 1))
        generator = torch.Generator().manual_seed(seed)
        self.target_XV = spread * torch.randn(rows, V, generator=generator)
        other_XV = spread * torch.randn(rows, V, generator=generator)
        self.head_XW = (0.6 * self.target_XV + 0.6 * other_XV)[:, list(ids)]  # right now and then
        self.edge = 1e-6  # distance of corners from a box's faces: p and q are rounded to fp32
        self.p, self.q = cache(self.p), cache(self.q)

    def p(self, path: Text) -> list[float]:
        """The target's probabilities after a path, under the policy, which counts all that was said."""
        logits_V = penalised(self.target_XV[number(path)], self.policy, {PROMPT, ROOT, *path}, {ROOT, *path})
        return self.policy.probs(logits_V).tolist()

    def q(self, path: Text) -> list[float]:
        """The head's probabilities of target ids."""
        found = [0.0] * V
        for token, share in zip(self.ids, self.head_policy.probs(self.head_XW[number(path)]).tolist()):
            found[token] = share
        return found

    def used(self, path: Text) -> list[float]:
        """p as the verifier sees it."""
        return self.p(path)

    def claimed(self, path: Text) -> list[float]:
        """q as the verifier sees it."""
        return self.q(path)

    def draws(self, path: Text, count: int) -> Iterator[tuple[Text, float]]:
        """A node's children in order, and how probable they are."""
        yield from without_replacement(self.q(path), count, self.ids[-1])

    def places(self, tokens_BN: torch.Tensor) -> torch.Tensor:
        """The place in the tables of each node's path."""
        places = torch.zeros_like(tokens_BN)
        for node, parent in list(enumerate(self.layout.parents))[1:]:
            places[:, node] = places[:, parent] * V + tokens_BN[:, node] + 1
        return places

    def tree(self, tokens_BN: torch.Tensor, drawn: bool) -> Tree:
        """Trees of the layout."""
        batch = len(tokens_BN)
        parents, depths = (torch.tensor(x).expand(batch, -1) for x in (self.layout.parents, self.layout.depths))
        tree = Tree(tokens_BN, parents, depths, torch.zeros(tokens_BN.shape))
        if drawn:
            owners = [node for node, below in enumerate(self.layout.children) if below]
            of = tuple(owners.index(node) if node in owners else -1 for node in range(len(self.layout.parents)))
            q_BFW = self.claims(self.places(tokens_BN)[:, owners])
            tree.proposal = Proposal(q_BFW, torch.tensor(self.ids), of, self.layout.children)
        return tree

    def claims(self, places_BF: torch.Tensor) -> torch.Tensor:
        """`claimed` for the verifier."""
        return self.head_policy.probs(self.head_XW)[places_BF]

    def logits(self, tree: Tree) -> torch.Tensor:
        """The target's logits at each node, as the decoder hands them to the verifier."""
        logits_BNV = self.target_XV[self.places(tree.tokens_BN)]
        if not self.policy.penalises:
            return logits_BNV
        history = History.of(torch.full((len(logits_BNV), 1), PROMPT), V)
        return self.policy.penalise(logits_BNV, history.before(tree))


def penalised(logits_V: torch.Tensor, policy: Policy, anywhere: set[int], answer: set[int]) -> torch.Tensor:
    """Both penalties, token by token."""
    out = logits_V.clone()
    for token in anywhere:
        rate = policy.repetition_penalty
        out[token] = out[token] / rate if out[token] > 0 else out[token] * rate
    for token in answer:
        out[token] -= policy.presence_penalty
    return out


def without_replacement(q: list[float], count: int, nothing: int) -> Iterator[tuple[Text, float]]:
    """Ordered draws; once all probability is used up, the token that stands for nothing."""
    if count == 0:
        yield (), 1.0
        return
    total = math.fsum(q)
    for token in [x for x, share in enumerate(q) if share > 0] or [nothing]:
        rest = [0.0 if x == token else share for x, share in enumerate(q)]
        for later, mass in without_replacement(rest, count - 1, nothing):
            yield (token, *later), mass * (q[token] / total if total else 1.0)


# The rules, written out plainly


@dataclass
class Leaf:
    """A box of uniform numbers on which the outcome is one and the same, its mass, and the tokens that it is about."""

    boxes: list[Box]
    mass: float
    tokens: dict[int, int]
    nodes: list[int]
    bonus: int


def pieces(p: list[float]) -> Iterator[tuple[int, Box]]:
    """Where the uniform number of an inverse-CDF draw gives which token."""
    total, at = math.fsum(p), 0.0
    for token, share in enumerate(p):
        if share / total > 1e-15:
            yield token, (at, at + share / total)
        at += share / total


def tries(p: list[float], q: list[float], drawn: Text) -> Iterator[tuple[list[Box], int | None, list[float]]]:
    """Recursive rejection sampling at one node: numbers, the place of the accepted child, and what is left of p without one."""
    boxes: list[Box] = []
    for place, token in enumerate(drawn):
        if not any(q):
            break
        q = [share / math.fsum(q) for share in q]
        accept = min(1.0, p[token] / q[token]) if q[token] else float(p[token] > 0)
        if accept > 0:
            yield [*boxes, (0.0, accept)], place, p
        if accept == 1:
            return
        boxes.append((accept, 1.0))
        left = [max(a - b, 0.0) for a, b in zip(p, q)]
        p, q = [a / math.fsum(left) for a in left], [0.0 if x == token else b for x, b in enumerate(q)]
    yield boxes, None, p


def volume(boxes: list[Box]) -> float:
    """The probability of a box."""
    return math.prod(high - low for low, high in boxes)


def wide(boxes: list[Box], count: int) -> list[Box]:
    """Numbers that nobody looks at may be anything."""
    return [*boxes, *[(0.0, 1.0)] * (count - len(boxes))]


def sampled_leaves(world: World) -> list[Leaf]:
    """Every draw of children, every outcome of their verification."""
    children, most, leaves = world.layout.children, world.layout.most, []
    count = sum(most) + len(most) + 1

    def end(boxes, share, tokens, nodes, rest):
        for token, piece in pieces(rest):
            every = wide([*boxes, piece], count)
            leaves.append(Leaf(every, share * volume(every), tokens, nodes, token))

    def descend(boxes, share, tokens, nodes, path):
        level, below = len(nodes) - 1, children[nodes[-1]]
        if level == len(most):
            return end(boxes, share, tokens, nodes, world.used(path))
        for drawn, chance in world.draws(path, len(below)):
            known = tokens | dict(zip(below, drawn))
            for tried, place, rest in tries(world.used(path), world.claimed(path), drawn):
                now = [*boxes, *wide(tried, most[level])]
                if place is None:
                    end(now, share * chance, known, nodes, rest)
                else:
                    text = (*path, drawn[place])
                    descend(wide(now, len(now) + 1), share * chance, known, [*nodes, below[place]], text)

    descend([], 1.0, {}, [0], ())
    return leaves


def walk_leaves(world: World, tokens: list[int]) -> list[Leaf]:
    """Every choice of the target over one deterministic tree."""
    children, leaves = world.layout.children, []

    def descend(boxes, nodes, path):
        for token, piece in pieces(world.used(path)):
            now = [*boxes, piece]
            child = next((n for n in children[nodes[-1]] if tokens[n] == token), None)
            if child is None:
                every = wide(now, world.depth + 1)
                leaves.append(Leaf(every, volume(every), dict(enumerate(tokens)), nodes, token))
            else:
                descend(now, [*nodes, child], (*path, token))

    descend([], [0], ())
    return leaves


# The real rules at the corners


class Numbers:
    """Uniform numbers fixed in advance, a column for each call."""

    def __init__(self, numbers_BU):
        self.numbers_BU, self.used = torch.as_tensor(numbers_BU, dtype=torch.float64), 0

    def __call__(self) -> torch.Tensor:
        self.used += 1
        return self.numbers_BU[:, self.used - 1]


def never() -> torch.Tensor:
    """For rules that draw nothing."""
    raise AssertionError("no number is needed")


def corners(leaves: list[Leaf], edge: float) -> Iterator[torch.Tensor]:
    """Numbers just inside the lower faces of all boxes, just inside the upper ones, and a mixture."""
    low, high = torch.tensor([leaf.boxes for leaf in leaves], dtype=torch.float64).unbind(-1)
    inside = (high - low).div(4).clamp_max(edge)
    below = torch.where(low == 0, low, low + inside)
    above = torch.where(high >= 1 - 1e-15, 1 - 2.0**-53, high - inside)
    mixed = torch.rand(low.shape, generator=torch.Generator().manual_seed(len(leaves))) < 0.5
    yield from (below, above, torch.where(mixed, below, above))


def token_rows(world: World, leaves: list[Leaf]) -> torch.Tensor:
    """The leaves' trees; arbitrary draft tokens stand where a leaf names none."""
    shape = (len(leaves), len(world.layout.parents))
    picks = torch.randint(len(world.ids), shape, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor(world.ids)[picks].tolist()
    for row, leaf in zip(rows, leaves):
        row[0] = ROOT
        for node, token in leaf.tokens.items():
            row[node] = token
    return torch.tensor(rows)


def emitted(world: World, leaves: list[Leaf], drawn: bool = True) -> dict[Text, float]:
    """The exact distribution of what the real rule emits in a cycle; it must follow the plain one at every corner."""
    tree = world.tree(token_rows(world, leaves), drawn)
    logits_BNV = world.logits(tree)
    nodes = torch.tensor([[*leaf.nodes, *[leaf.nodes[-1]] * (world.depth + 1 - len(leaf.nodes))] for leaf in leaves])
    for numbers_BU in corners(leaves, world.edge):
        uniform = never if world.policy.greedy else Numbers(numbers_BU)
        verdict = verify(tree, logits_BNV, world.policy, uniform)
        assert world.policy.greedy or uniform.used == numbers_BU.shape[1]
        assert torch.equal(verdict.nodes_BP, nodes)
        assert verdict.counts_B.tolist() == [len(leaf.nodes) - 1 for leaf in leaves]
        assert verdict.bonus_B.tolist() == [leaf.bonus for leaf in leaves]
    found: dict[Text, float] = defaultdict(float)
    for text, leaf in zip(texts(tree, verdict), leaves):
        found[text] += leaf.mass
    assert sum(found.values()) == pytest.approx(1, abs=EXACT)
    return found


def texts(tree: Tree, verdict: Verdict) -> list[Text]:
    """What a cycle adds to each text."""
    tokens_BP = tree.tokens_BN.gather(1, verdict.nodes_BP)[:, 1:]
    rows = zip(tokens_BP.tolist(), verdict.counts_B.tolist(), verdict.bonus_B.tolist())
    return [(*tokens[:count], bonus) for tokens, count, bonus in rows]


def continued(world: World, found: dict[Text, float]) -> dict[Text, float]:
    """Texts of unequal length, continued by the target itself to depth + 1 tokens."""
    out: dict[Text, float] = defaultdict(float)
    for text, mass in found.items():
        if len(text) > world.depth:
            out[text] += mass
        else:
            for longer, share in continued(world, {(*text, x): mass * p for x, p in enumerate(world.p(text))}).items():
                out[longer] += share
    return out


def distance(left: dict, right: dict) -> float:
    """Total variation distance."""
    return 0.5 * math.fsum(abs(left.get(k, 0.0) - right.get(k, 0.0)) for k in left.keys() | right.keys())


def error(world: World, found: dict[Text, float]) -> float:
    """How far an emitted text is from the target's own."""
    return distance(continued(world, found), continued(world, {(): 1.0}))


def sampled_error(world: World) -> float:
    """Of recursive rejection sampling."""
    return error(world, emitted(world, sampled_leaves(world)))


def top_tokens(world: World) -> list[int]:
    """The head's best children of every node, distinct among siblings."""
    tokens, paths = [ROOT], [()]
    for node, below in enumerate(world.layout.children):
        best = world.head_XW[number(paths[node])].topk(len(below)).indices.tolist()
        tokens += [world.ids[x] for x in best]
        paths += [(*paths[node], world.ids[x]) for x in best]
    return tokens


def walk_error(world: World) -> float:
    """Of the walk over the head's best tokens."""
    return error(world, emitted(world, walk_leaves(world, top_tokens(world)), drawn=False))


# Lossless

SEED = 3  # of the walks
UNEVEN = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
LATE = [(0,), (1,), (2,), (2, 0), (2, 1)]  # the last child alone has children
LAYOUTS = {
    "chain": (full(1, 1, 1), ALL),
    "two": (full(2, 2), ALL),
    "three": (full(3, 3), (0, 2, 3, 4)),
    "uneven": (UNEVEN, (1, 3, 4)),
    "late": (LATE, (0, 1, 3, 4)),
    "wide": (full(5), ALL),
    "gaps": ([(1,), (4,), (4, 2)], ALL),
}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_sampled_rule_is_lossless(name, policy):
    """Also where top-k leaves fewer tokens than a node has children, and where the draft vocabulary lacks tokens."""
    paths, ids = LAYOUTS[name]
    assert sampled_error(World(paths, policy, seed=3, ids=ids)) < EXACT


@pytest.mark.parametrize("ids", [(2,), (0, 2), (0, 1, 3, 4)], ids=str)
@pytest.mark.parametrize("policy", POLICIES[2::3], ids=str)
def test_sampled_rule_is_lossless_for_any_draft_vocabulary(ids, policy):
    """One of one token has no second child to offer."""
    assert sampled_error(World(full(3, 2), policy, seed=5, ids=ids)) < EXACT


@pytest.mark.parametrize("head_policy", [Exact(1.0), Exact(0.4), Exact(1.0, top_k=1), Exact(2.0, top_p=0.5)], ids=str)
@pytest.mark.parametrize("paths", [full(1, 1), full(2, 2), LATE], ids=["chain", "two", "late"])
def test_sampled_rule_is_lossless_for_any_proposal(paths, head_policy):
    """The head may be processed in any way, as long as the q that is kept is the q that was drawn from."""
    world = World(paths, Exact(0.8, top_k=3), seed=3, head_policy=head_policy)
    assert sampled_error(world) < EXACT


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_walk_is_lossless(name, policy, greedy):
    """Whatever the target chooses, also greedily."""
    if greedy:
        policy = Exact(0.0, repetition_penalty=policy.repetition_penalty, presence_penalty=policy.presence_penalty)
    paths, ids = LAYOUTS[name]
    assert walk_error(World(paths, policy, seed=SEED, ids=ids)) < EXACT


@pytest.mark.parametrize("policy", POLICIES[-3:], ids=str)
def test_penalties_change_greedy_texts(policy):
    """Without this the greedy cases above might never meet a penalty."""
    penalty = {"repetition_penalty": policy.repetition_penalty, "presence_penalty": policy.presence_penalty}
    plain, other = (World(full(2, 2), Exact(0.0, **kept), seed=SEED) for kept in ({}, penalty))
    assert distance(continued(plain, {(): 1.0}), continued(other, {(): 1.0})) == 1


@pytest.mark.parametrize("policy", [Exact(1.0), Exact(0.7, top_k=3), Exact(1.0, repetition_penalty=1.5)], ids=str)
def test_walk_over_a_tree_that_grow_made_is_lossless(policy):
    """The dynamic tree of the decoder itself, driven by the tables."""
    world = World(full(1, 1), policy, seed=17)
    frontier = [[()]]

    def step(tokens_Bk, parents_Bk):
        above = frontier[-1]
        frontier.append([(*above[p], t) for p, t in zip(parents_Bk[0].tolist(), tokens_Bk[0].tolist())])
        return torch.stack([world.head_XW[number(path)] for path in frontier[-1]])[None]

    nothing = torch.zeros(1, 1, 1)
    context = Context(None, torch.tensor([[ROOT]]), nothing[None], nothing, policy, never)
    tree = grow(TreeShape.dynamic(2, 3, 7), context, world.head_XW[:1], step, torch.arange(V))
    assert tree.proposal is None
    parents, nodes = tuple(tree.parents_BN[0].tolist()), range(8)
    children = tuple(tuple(n for n in nodes if parents[n] == m) for m in nodes)
    world.layout = Layout(parents, children, tuple(tree.depth_BN[0].tolist()))
    leaves = walk_leaves(world, tree.tokens_BN[0].tolist())
    assert max(len(leaf.nodes) for leaf in leaves) == 3
    assert error(world, emitted(world, leaves, drawn=False)) < EXACT


def test_the_rules_that_are_called_lossless():
    assert LOSSLESS == ("walk", "sampled")


class Given(World):
    """One level with p and q that floating point holds exactly."""

    def __init__(self, p, q, children: int):
        super().__init__(full(children), Fixed(1.0))
        assert sum(p) == sum(q) == 64
        self.target_XV = torch.tensor(p, dtype=torch.float64).div(64).expand_as(self.target_XV)
        self.head_XW = torch.tensor(q, dtype=torch.float64).div(64).expand_as(self.head_XW)
        self.edge = 1e-12


DYADIC = [
    ([8, 8, 16, 24, 8], [8, 8, 16, 24, 8]),  # p = q: never rejected
    ([64, 0, 0, 0, 0], [0, 0, 0, 0, 64]),  # disjoint: never accepted
    ([0, 32, 32, 0, 0], [16, 16, 16, 16, 0]),  # q has mass where p has none
    ([16, 16, 16, 16, 0], [0, 0, 0, 64, 0]),  # a certain draft, and nothing left for a second
    ([1, 2, 3, 4, 54], [54, 4, 3, 2, 1]),
    ([63, 1, 0, 0, 0], [1, 63, 0, 0, 0]),
    ([0, 0, 0, 0, 64], [0, 0, 16, 16, 32]),
]


@pytest.mark.parametrize(("p", "q"), DYADIC)
@pytest.mark.parametrize("children", [1, 2, 3, 5])
def test_sampled_rule_is_exact_to_rounding(p, q, children):
    """Cut points to 1e-12: the outcome changes where the papers say, not merely near it."""
    assert sampled_error(Given(p, q, children)) < EXACT


@pytest.mark.parametrize(("p", "q"), DYADIC)
def test_one_child_is_the_ratio_test(p, q):
    """A draft stands with probability Σ min(p, q), and its replacement has the distribution norm(max(p − q, 0))."""
    world = Given(p, q, 1)
    leaves = sampled_leaves(world)
    emitted(world, leaves)
    stands = math.fsum(leaf.mass for leaf in leaves if len(leaf.nodes) == 2)
    assert stands == pytest.approx(sum(map(min, p, q)) / 64, abs=EXACT)
    for token in range(V):
        replaced = math.fsum(leaf.mass for leaf in leaves if len(leaf.nodes) == 1 and leaf.bonus == token)
        assert replaced == pytest.approx(max(p[token] - q[token], 0) / 64, abs=EXACT)


def test_a_second_draw_makes_acceptance_more_likely():
    """What siblings are for: each further one adds to the mass that is accepted, up to all that q covers."""
    found = []
    for children in range(1, 6):
        leaves = sampled_leaves(World(full(children), Exact(1.0), seed=4))
        found.append(math.fsum(leaf.mass for leaf in leaves if len(leaf.nodes) == 2))
    assert all(more > less + 1e-3 for less, more in itertools.pairwise(found[:4]))
    assert found[-1] == pytest.approx(1, abs=EXACT)  # all five tokens are children


# Negative controls: known bugs, far from the target

FAR = 0.05


class TopChildren(World):
    """The head's best tokens, tested against q as if they had been drawn."""

    def draws(self, path, count):
        q = self.q(path)
        yield tuple(sorted(range(V), key=lambda x: -q[x])[:count]), 1.0


class Pruned(World):
    """One more child is drawn than is kept; which is dropped depends on the children's own probability."""

    def draws(self, path, count):
        q = self.q(path)
        for drawn, mass in super().draws(path, count + (count > 0)):
            kept = sorted(drawn, key=lambda x: -q[x])[:count]
            yield tuple(x for x in drawn if x in kept), mass


class Replaced(World):
    """Draws with replacement, verified as if without."""

    def draws(self, path, count):
        q = self.q(path)
        for drawn in itertools.product(range(V), repeat=count):
            yield drawn, math.prod(q[x] for x in drawn)


class OtherTemperature(World):
    """Drawn at one temperature, weighed with another."""

    weighed = Exact(1.0)

    def claimed(self, path):
        return self.weighed.probs(self.head_XW[number(path)]).tolist()

    def claims(self, places_BF):
        return self.weighed.probs(self.head_XW)[places_BF]


class RawBonus(World):
    """The bonus behind the last draft comes from raw logits (EAGLE v1)."""

    def used(self, path):
        return Exact(1.0).probs(self.target_XV[number(path)]).tolist() if len(path) == self.depth else self.p(path)

    def logits(self, tree):
        leaf_BN1 = (tree.depth_BN == self.depth)[..., None]
        logits_BNV = super().logits(tree)
        return torch.where(leaf_BN1, logits_BNV * self.policy.temperature, logits_BNV)  # which the policy undoes


class Standing(World):
    """Penalties count the text up to the root, not the path below it."""

    def used(self, path):
        logits_V = penalised(self.target_XV[number(path)], self.policy, {PROMPT, ROOT}, {ROOT})
        return self.policy.probs(logits_V).tolist()

    def logits(self, tree):
        said_1V = torch.zeros(1, V, dtype=torch.bool)
        said_1V[0, ROOT] = True
        anywhere_1V = said_1V.clone()
        anywhere_1V[0, PROMPT] = True
        return self.policy.penalise(self.target_XV[self.places(tree.tokens_BN)], Said(anywhere_1V, said_1V))


@pytest.mark.parametrize("paths", [full(1, 1), full(2, 2)], ids=["chain", "two"])
@pytest.mark.parametrize(
    ("wrong", "policy", "head_policy"),
    [
        (TopChildren, Exact(1.0), None),
        (Pruned, Exact(1.0), None),
        (OtherTemperature, Exact(1.0), Exact(0.4)),
        (RawBonus, Exact(0.3), None),
        (Standing, Exact(1.0, repetition_penalty=4.0), None),
        (Standing, Exact(1.0, presence_penalty=2.0), None),
    ],
)
def test_negative_control(wrong, policy, head_policy, paths):
    """The enumeration sees the bug, and the same world without it is exact."""
    right = World(paths, policy, seed=9, head_policy=head_policy)
    buggy = wrong(paths, policy, seed=9, head_policy=head_policy)
    assert distance(continued(right, emitted(buggy, sampled_leaves(buggy))), continued(right, {(): 1.0})) > FAR
    assert sampled_error(right) < EXACT


@pytest.mark.parametrize("paths", [full(1, 1), full(2, 2)], ids=["chain", "two"])
def test_negative_control_raw_logits(paths):
    """Drawn under the user's policy, verified without it."""
    policy = Exact(0.5, top_k=2)
    right, buggy = World(paths, policy, seed=9), World(paths, Exact(1.0), seed=9, head_policy=policy)
    assert distance(continued(right, emitted(buggy, sampled_leaves(buggy))), continued(right, {(): 1.0})) > FAR
    assert sampled_error(right) < EXACT


class ReplacedGiven(Replaced, Given):
    """The same with a head that is sure of what the target doubts."""


def test_negative_control_draws_with_replacement():
    """For one child they are the same; for two they are not."""
    p, q = [8, 8, 16, 16, 16], [56, 2, 2, 2, 2]
    assert sampled_error(ReplacedGiven(p, q, 1)) < EXACT
    assert sampled_error(ReplacedGiven(p, q, 2)) > FAR
    assert sampled_error(Given(p, q, 2)) < EXACT


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 4.0}, {"presence_penalty": 2.0}], ids=str)
def test_negative_control_walk_with_standing_penalties(penalty):
    """The walk too needs penalties that advance."""
    right, buggy = (cls(full(2, 2), Exact(1.0, **penalty), seed=9) for cls in (World, Standing))
    found = emitted(buggy, walk_leaves(buggy, top_tokens(buggy)), drawn=False)
    assert distance(continued(right, found), continued(right, {(): 1.0})) > FAR


# Numbers, edges, rows


def forest(rows: list[tuple[list[int], list[int]]]) -> Tree:
    """Trees from (tokens, parents), padded with nodes that have no parent. Padding holds token 2."""
    width = max(len(tokens) for tokens, _ in rows)
    depths = []
    for _, parents in rows:
        depth = [0]
        for parent in parents[1:]:
            depth.append(depth[parent] + 1)
        depths.append(depth + [0] * (width - len(depth)))
    tokens = [[*row, *[2] * (width - len(row))] for row, _ in rows]
    parents = [[*row, *[-1] * (width - len(row))] for _, row in rows]
    columns = [torch.tensor(column) for column in (tokens, parents, depths)]
    return Tree(*columns, torch.zeros(columns[0].shape))


@st.composite
def deterministic(draw):
    """A tree's tokens and parents; siblings may be equal."""
    nodes = draw(st.integers(0, 6))
    parents = [-1, *(draw(st.integers(0, node)) for node in range(nodes))]
    return [ROOT, *(draw(st.integers(0, V - 1)) for _ in range(nodes))], parents


def best(*tokens: int) -> torch.Tensor:
    """Logits of one row whose maxima are given."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), V).float()


def told(verdict: Verdict) -> tuple[list[list[int]], list[int], list[int]]:
    """A verdict as lists."""
    return verdict.nodes_BP.tolist(), verdict.counts_B.tolist(), verdict.bonus_B.tolist()


def accepted(verdict: Verdict) -> list[tuple[list[int], int]]:
    """The accepted path of each row, without repetitions, and its bonus."""
    nodes, counts, bonus = told(verdict)
    return [(row[: count + 1], token) for row, count, token in zip(nodes, counts, bonus)]


def test_greedy_walk_follows_the_maximum_and_draws_nothing():
    #        0
    #      /   \
    #     2     4
    #    / \
    #   1   3
    tree = forest([([0, 2, 4, 1, 3], [-1, 0, 0, 1, 1])])
    assert told(verify(tree, best(2, 3, 0, 0, 1), Policy(), never)) == ([[0, 1, 4]], [2], [1])
    assert told(verify(tree, best(4, 3, 0, 0, 1), Policy(), never)) == ([[0, 2, 2]], [1], [0])
    assert told(verify(tree, best(1, 3, 0, 0, 1), Policy(), never)) == ([[0, 0, 0]], [0], [1])
    assert told(verify(tree, best(2, 2, 0, 0, 1), Policy(), never)) == ([[0, 1, 1]], [1], [2])


def test_greedy_ties_go_to_the_first_maximum_as_in_plain_decoding():
    tree = forest([([0, 1], [-1, 0]), ([0, 0], [-1, 0])])
    assert accepted(verify(tree, torch.zeros(2, 2, V), Policy(), never)) == [([0], 0), ([0, 1], 0)]
    assert Policy().choose(torch.zeros(V)) == 0


def test_of_equal_siblings_the_first_counts():
    """Even where only the second has the continuation."""
    tree = forest([([0, 2, 2, 3], [-1, 0, 0, 2])])
    assert told(verify(tree, best(2, 3, 3, 0), Policy(), never)) == ([[0, 1, 1]], [1], [3])


def test_walk_ends_at_a_leaf_with_its_own_bonus():
    choices_N = torch.tensor([3, 4, 1])
    tree = forest([([0, 3, 4], [-1, 0, 1])])
    assert told(walk(tree, lambda node_B: choices_N[node_B])) == ([[0, 1, 2]], [2], [1])


@pytest.mark.parametrize("policy", [Policy(), Policy(1.0, top_k=1)], ids=str)
@pytest.mark.parametrize("typically", [None, Typical()], ids=["walk", "typical"])
def test_padding_is_never_accepted(policy, typically):
    """Padding holds token 2, the target's choice at every node; the other row's tree is longer (a bug of Medusa's)."""
    tree = forest([([0, 1], [-1, 0]), ([0, 2, 2, 2], [-1, 0, 1, 2]), ([0], [-1])])
    assert (tree.tokens_BN[0, 2:] == 2).all()
    logits_BNV = best(2, 2, 2, 2).expand(3, 4, V) * 20
    numbers = Numbers(torch.full((3, 4), 0.5))
    found = accepted(verify(tree, logits_BNV, policy, numbers, typically))
    assert found == [([0], 2), ([0, 1, 2, 3], 2), ([0], 2)]


def test_root_alone_is_plain_decoding():
    tree = forest([([4], [-1]), ([1], [-1])])
    assert told(verify(tree, best(2).expand(2, 1, V), Policy(), never)) == ([[0], [0]], [0, 0], [2, 2])
    numbers = Numbers([[0.0], [0.999]])
    logits_BNV = torch.zeros(2, 1, V)
    assert told(verify(tree, logits_BNV, Policy(1.0), numbers)) == ([[0], [0]], [0, 0], [0, 4])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(deterministic(), min_size=2, max_size=4),
    seed=st.integers(0, 10**6),
    policy=st.sampled_from([Policy(), Policy(1.0), Policy(0.7, top_k=3)]),
    typically=st.sampled_from([None, Typical(), Typical(0.3, 0.9)]),
)
def test_rows_of_deterministic_trees_are_independent(rows, seed, policy, typically):
    """A batch of ragged trees ≡ each row alone, by its own logits and numbers."""
    tree, generator = forest(rows), torch.Generator().manual_seed(seed)
    logits_BNV = 2 * torch.randn(*tree.tokens_BN.shape, V, generator=generator)
    numbers_BU = torch.rand(len(rows), 8, generator=generator)
    together = accepted(verify(tree, logits_BNV, policy, Numbers(numbers_BU), typically))
    for row, (tokens, parents) in enumerate(rows):
        one, logits = forest([(tokens, parents)]), logits_BNV[row : row + 1, : len(tokens)]
        assert accepted(verify(one, logits, policy, Numbers(numbers_BU[row : row + 1]), typically)) == [together[row]]


@st.composite
def rank_paths(draw, most: int = 7):
    """A static tree."""
    paths: list[RankPath] = [()]
    for _ in range(draw(st.integers(1, most))):
        parent = draw(st.sampled_from(paths))
        path = (*parent, draw(st.integers(0, 3)))
        if len(path) <= 3 and path not in paths:
            paths.append(path)
    return paths[1:]


def random_batch(world: World, batch: int, generator: torch.Generator) -> tuple[Tree, torch.Tensor, torch.Tensor]:
    """Sampled trees of distinct siblings with arbitrary distributions, logits, and numbers."""
    nodes = len(world.layout.parents)
    tokens_BN = torch.zeros(batch, nodes, dtype=torch.long)
    for row in range(batch):
        for below in world.layout.children:
            tokens_BN[row, list(below)] = torch.randperm(V, generator=generator)[: len(below)]
    tree = world.tree(tokens_BN, drawn=True)
    tree.proposal.q_BFW = torch.randn(tree.proposal.q_BFW.shape, generator=generator).mul(2).softmax(-1)
    logits_BNV = 2 * torch.randn(batch, nodes, V, generator=generator)
    return tree, logits_BNV, torch.rand(batch, 30, generator=generator, dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(paths=rank_paths(), seed=st.integers(0, 10**6), policy=st.sampled_from([Policy(1.0), Policy(0.7, top_k=2)]))
def test_rows_of_sampled_trees_are_independent(paths, seed, policy):
    """A batch ≡ each row alone, where nothing is known about nodes off the accepted path but their tokens."""
    world = World(paths, policy)
    tree, logits_BNV, numbers_BU = random_batch(world, 4, torch.Generator().manual_seed(seed))
    found = accepted(verify(tree, logits_BNV, policy, Numbers(numbers_BU)))
    for row in range(4):
        rows = slice(row, row + 1)
        one, logits = world.tree(tree.tokens_BN[rows], drawn=True), logits_BNV[rows].clone()
        one.proposal.q_BFW = tree.proposal.q_BFW[rows].clone()
        for node, place in enumerate(one.proposal.of):
            if node not in found[row][0]:
                logits[:, node] = torch.nan
                if place >= 0:
                    one.proposal.q_BFW[:, place] = torch.nan
        assert accepted(verify(one, logits, policy, Numbers(numbers_BU[rows]))) == [found[row]]


@settings(max_examples=40, deadline=None)
@given(paths=rank_paths(), seed=st.integers(0, 10**6), batch=st.integers(1, 3))
def test_how_many_numbers_are_drawn_depends_on_the_layout_alone(paths, seed, batch):
    """Sampled: one for each child of the widest node of a level, one more for each level, one for the bonus."""
    policy, world = Policy(1.0, top_k=2), World(paths, Policy(1.0))
    tree, logits_BNV, numbers_BU = random_batch(world, batch, torch.Generator().manual_seed(seed))
    for sharp in (0.0, 1.0, 100.0):
        numbers = Numbers(numbers_BU)
        verify(tree, logits_BNV * sharp, policy, numbers)
        assert numbers.used == sum(world.layout.most) + world.depth + 1
        numbers = Numbers(numbers_BU)
        verify(world.tree(tree.tokens_BN, drawn=False), logits_BNV * sharp, policy, numbers)
        assert numbers.used == world.depth + 1
        numbers = Numbers(numbers_BU)
        verify(tree, logits_BNV * sharp, policy, numbers, Typical())
        assert numbers.used == 1
        verify(tree, logits_BNV * sharp, Policy(), never)
        verify(tree, logits_BNV * sharp, Policy(), never, Typical())


def test_levels_that_the_host_knows_bound_the_path():
    """A tree that says how deep it is gives the same verdict; deeper than it is only repeats the last node."""
    tree = forest([([0, 3, 4], [-1, 0, 1])])
    short = told(verify(tree, best(3, 1, 2), Policy(), never))
    tree.levels = 4
    assert short == ([[0, 1, 1]], [1], [1])
    assert told(verify(tree, best(3, 1, 2), Policy(), never)) == ([[0, 1, 1, 1, 1]], [1], [1])


def test_a_draft_that_the_policy_forbids_is_never_accepted():
    """u = 0 is in the range of the generator, and p(x) = 0 must lose against it."""
    world = World(full(1), Exact(1.0, top_k=2), head_policy=Exact(1.0))
    world.target_XV = torch.tensor([5.0, 4.0, 0.0, 0.0, 0.0]).expand(6, V)
    tree = world.tree(torch.tensor([[ROOT, 3]]), drawn=True)
    verdict = verify(tree, world.logits(tree), world.policy, Numbers(torch.zeros(1, 3)))
    assert told(verdict) == ([[0, 0]], [0], [0])


def test_residual_edges():
    """p itself where nothing is left; and only the draft vocabulary's part of p is reduced."""
    same, ids = torch.tensor([[0.25, 0.5, 0.25]]), torch.arange(3)
    assert torch.equal(residual(same, same, ids), same)
    half = torch.tensor([[0.5, 0.5, 0.0]])
    assert residual(half, torch.tensor([[0.0, 0.5, 0.5]]), ids).tolist() == [[1.0, 0.0, 0.0]]
    assert residual(half, torch.tensor([[0.25, 0.75]]), torch.tensor([2, 0])).tolist() == [[0.0, 1.0, 0.0]]


# Medusa's typical acceptance


def medusa(tokens, parents, logits_NV, temperature: float, rule: Typical) -> tuple[list[int], list[float], float]:
    """Every path from the root, checked token by token in double precision: the longest, of equal ones the likeliest.

    Also the log-likelihoods of the longest paths, and how close the nearest decision was.
    """
    margin, candidates = 1.0, []
    for node in range(len(tokens)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        if path[0] != 0:
            continue
        stands, score = True, 0.0
        for above, below in itertools.pairwise(path):
            p = (logits_NV[above].double() / temperature).softmax(-1).tolist()
            entropy = -math.fsum(x * math.log(x) for x in p if x > 0)
            limit = min(rule.epsilon, rule.delta * math.exp(-entropy))
            stands &= p[tokens[below]] > limit
            margin = min(margin, abs(p[tokens[below]] - limit))
            score += math.log(p[tokens[below]])
        if stands:
            candidates.append((len(path), score, path))
    longest = max(length for length, _, _ in candidates)
    candidates = [(score, path) for length, score, path in candidates if length == longest]
    return max(candidates, key=lambda one: one[0])[1], sorted((score for score, _ in candidates), reverse=True), margin


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(deterministic(), min_size=1, max_size=3),
    seed=st.integers(0, 10**6),
    sharp=st.sampled_from([0.3, 1.0, 3.0]),
    rule=st.sampled_from([Typical(), Typical(0.3, 0.9), Typical(0.02, 0.05), Typical(0.9, 0.5)]),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_typical_is_medusas_rule(rows, seed, sharp, rule, temperature):
    """At temperature 0 the distribution is the target's at 1, as Medusa's thresholds need one."""
    tree, generator = forest(rows), torch.Generator().manual_seed(seed)
    logits_BNV = sharp * torch.randn(*tree.tokens_BN.shape, V, generator=generator)
    numbers_B1 = torch.rand(len(rows), 1, generator=generator, dtype=torch.float64)
    policy = Policy(temperature)
    verdict = verify(tree, logits_BNV, policy, Numbers(numbers_B1), rule)
    assert verdict.nodes_BP.shape[1] == int(tree.depth_BN.max()) + 1
    for row, (tokens, parents) in enumerate(rows):
        path, scores, margin = medusa(tokens, parents, logits_BNV[row], temperature or 1.0, rule)
        assume(margin > 1e-5)
        if len(scores) > 1 and scores[0] != scores[1]:
            assume(scores[0] - scores[1] > 0.01)
        nodes, bonus = accepted(verdict)[row]
        # equal siblings with equal scores: any is right, as long as it says the same
        assert [tokens[node] for node in nodes] == [tokens[node] for node in path]
        assert verdict.nodes_BP[row, len(nodes) :].tolist() == [nodes[-1]] * (verdict.nodes_BP.shape[1] - len(nodes))
        end = logits_BNV[row, nodes[-1]]
        assert bonus == int(policy.choose(end, numbers_B1[row, 0]))


def test_typical_needs_more_than_the_limit():
    """p = epsilon exactly is not enough."""
    logits_BNV = torch.zeros(1, 2, V)
    logits_BNV[0, 0] = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log()
    tree = forest([([0, 1], [-1, 0])])
    for epsilon, stands in ((0.25, 0), (0.2499, 1)):
        assert verify(tree, logits_BNV, Policy(), never, Typical(epsilon, 10.0)).counts_B.tolist() == [stands]


def test_typical_prefers_length_to_likelihood_and_then_likelihood():
    p = torch.tensor([[0.05, 0.15, 0.2, 0.3, 0.3], [0.2] * 5, [0.2] * 5, [0.2] * 5, [0.2] * 5])
    logits_BNV = p.log()[None]
    tree = forest([([0, 3, 1, 2, 4], [-1, 0, 0, 2, 2])])
    assert accepted(verify(tree, logits_BNV, Policy(), never, Typical(0.1, 1.0)))[0][0] == [0, 2, 3]
    tree = forest([([0, 1, 2, 3], [-1, 0, 0, 0])])
    assert accepted(verify(tree, logits_BNV[:, :4], Policy(), never, Typical(0.1, 1.0)))[0][0] == [0, 3]


def test_typical_tells_close_paths_apart():
    """Likelihoods of deep paths that differ by less than a thousandth."""
    depth = 5
    parents = [-1, 0, 0, *range(1, 2 * depth - 1)]
    tokens = [0, 1, 2, *[3] * (2 * depth - 2)]
    logits_BNV = torch.zeros(1, len(tokens), V)
    logits_BNV[0, 0, 2] = 4e-4
    tree = forest([(tokens, parents)])
    nodes = accepted(verify(tree, logits_BNV, Policy(), never, Typical()))[0][0]
    assert len(nodes) == depth + 1
    assert nodes[1] == 2


def test_typical_is_not_lossless():
    """A likely guess always stands, so the first token is no draw from p."""
    world = World(full(2), Exact(1.0), seed=3)
    tokens = top_tokens(world)
    found: dict[Text, float] = defaultdict(float)
    tree = world.tree(torch.tensor([tokens]), drawn=False)
    for token in [None, *tokens[1:]]:
        place = 0 if token is None else number((token,))
        for _, (low, high) in pieces(Exact(1.0).probs(world.target_XV[place]).tolist()):
            verdict = verify(tree, world.logits(tree), world.policy, Numbers([[(low + high) / 2]]), Typical())
            if int(verdict.nodes_BP[0, verdict.counts_B[0]]) == (0 if token is None else tokens.index(token)):
                found[texts(tree, verdict)[0]] += high - low
    assert sum(found.values()) == pytest.approx(1, abs=1e-9)
    assert error(world, found) > FAR
