"""Draft trees: how they are laid out and grow, against plain recursions; and what a head proposes, against its own chains."""

import json
import math
from collections import Counter, defaultdict

import pytest
import scipy.stats
import torch
from conftest import make_target, make_tiny_head
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headwright.configs import UserError
from headwright.configs.schema import ShapeConfig
from headwright.data.sampling import Policy
from headwright.heads.base import Context, together
from headwright.heads.draft_tree import (
    BUILT_IN,
    USUAL_RANKS,
    Tree,
    TreeShape,
    best_paths,
    most_nodes,
    outline,
    root_only,
)
from headwright.heads.grow import Grower, grow

W = 6
IDS = torch.tensor([1, 4, 5, 9, 12, 30])  # target ids of the draft ids
ROOT = 77


def never() -> torch.Tensor:
    """For what draws nothing."""
    raise AssertionError("no number is needed")


def stream(*seeds: int):
    """A seeded stream of uniform numbers for each row; counts its calls."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def uniform() -> torch.Tensor:
        uniform.calls += 1
        return torch.cat([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])

    uniform.calls = 0
    return uniform


# Trees over tables


def table(seed: int) -> dict[tuple[int, ...], torch.Tensor]:
    """Draft logits as a function of the path of target ids below the root, made when first asked for."""

    class Logits(defaultdict):
        def __missing__(self, path):
            generator = torch.Generator().manual_seed(hash((seed, path)) % 2**31)
            self[path] = 2 * torch.randn(W, generator=generator)
            return self[path]

    return Logits()


class Steps:
    """The head's `step` for several rows, from tables; remembers what it was asked."""

    def __init__(self, tables):
        self.tables, self.frontiers, self.widths = tables, [[()] for _ in tables], []

    def __call__(self, tokens_Bk, parents_Bk):
        self.widths.append(tokens_Bk.shape[1])
        self.frontiers = [
            [(*above[p], t) for t, p in zip(tokens, parents)]
            for above, tokens, parents in zip(self.frontiers, tokens_Bk.tolist(), parents_Bk.tolist())
        ]
        return torch.stack([torch.stack([t[path] for path in row]) for t, row in zip(self.tables, self.frontiers)])


def roots(batch: int, policy: Policy | None = None, uniform=never, sampled: bool = False) -> Context:
    """A context that knows the roots alone."""
    rows = torch.zeros(batch, 1, 1)
    return Context(
        None, torch.full((batch, 1), ROOT), rows[..., None], rows, policy or Policy(), uniform, sampled=sampled
    )


def grown(shape: TreeShape, seeds, policy=None, uniform=never, sampled=False):
    """A tree over tables, the tables, and the step function that fed it."""
    tables = [table(seed) for seed in seeds]
    steps = Steps(tables)
    first = torch.stack([t[()] for t in tables])
    return grow(shape, roots(len(tables), policy, uniform, sampled), first, steps, IDS), tables, steps


def paths_of(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """The tokens below the root that lead to each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens_BN[row].tolist(), tree.parents_BN[row].tolist()):
        paths.append(() if parent < 0 else (*paths[parent], token))
    return paths


@st.composite
def rank_paths(draw, depth: int = 4, rank: int = W - 1, most: int = 12):
    """Rank paths of a static tree in any order, each with its parent; ranks may have gaps."""
    paths = [()]
    for _ in range(draw(st.integers(1, most))):
        path = (*draw(st.sampled_from(paths)), draw(st.integers(0, rank)))
        if len(path) <= depth and path not in paths:
            paths.append(path)
    return draw(st.permutations(paths[1:]))


# Dynamic trees


def eagle2(logits, depth: int, top_k: int, nodes: int) -> dict[tuple[int, ...], float]:
    """EAGLE-2 as the paper tells it: expand the best k of each level, then rerank all candidates."""
    frontier, candidates = {(): 0.0}, {}
    for _ in range(depth):
        level = {}
        for path, score in frontier.items():
            logp = logits[path].log_softmax(-1)
            for draft in sorted(range(W), key=lambda w: -float(logp[w]))[:top_k]:
                level[(*path, int(IDS[draft]))] = score + float(logp[draft])
        candidates |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:top_k])
    return dict(sorted(candidates.items(), key=lambda item: -item[1])[:nodes])


@settings(max_examples=40, deadline=None)
@given(
    depth=st.integers(1, 4),
    top_k=st.integers(2, 6),
    share=st.floats(0, 1),
    seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=3),
)
def test_dynamic_tree_is_eagle_2(depth, top_k, share, seeds):
    """The same nodes with the same scores, in every row of a batch."""
    most = top_k + (depth - 1) * top_k**2
    nodes = depth + round(share * (most - depth))
    shape = TreeShape.of(ShapeConfig("dynamic", depth, top_k, nodes))
    tree, tables, steps = grown(shape, seeds)
    assert tree.proposal is None
    assert steps.widths == [top_k] * (depth - 1)
    assert sum(steps.widths) <= shape.rows
    for row, logits in enumerate(tables):
        wanted = eagle2(logits, depth, top_k, nodes)
        paths = paths_of(tree, row)
        assert len(paths) == nodes + 1
        assert set(paths[1:]) == set(wanted)
        for place, path in enumerate(paths[1:], 1):
            assert float(tree.logprobs_BN[row, place]) == pytest.approx(wanted[path], abs=1e-4)
            assert int(tree.depth_BN[row, place]) == len(path)


@settings(max_examples=25, deadline=None)
@given(depth=st.integers(1, 4), top_k=st.integers(2, 5), seed=st.integers(0, 10**6), extra=st.integers(0, 40))
def test_dynamic_tree_is_well_formed(depth, top_k, seed, extra):
    """Parents stand before their children, no two siblings are equal, and the root is the target's token."""
    tree, _, _ = grown(TreeShape.dynamic(depth, top_k, min(most_nodes(depth, top_k), depth + extra)), [seed, seed + 1])
    assert tree.height() >= int(tree.depth_BN.max())
    for row in range(2):
        tokens, parents, depths = (x[row].tolist() for x in (tree.tokens_BN, tree.parents_BN, tree.depth_BN))
        assert (tokens[0], parents[0], depths[0], float(tree.logprobs_BN[row, 0])) == (ROOT, -1, 0, 0.0)
        for node in range(1, len(tokens)):
            assert 0 <= parents[node] < node
            assert depths[node] == depths[parents[node]] + 1
            assert tree.logprobs_BN[row, node] <= tree.logprobs_BN[row, parents[node]]
        pairs = list(zip(parents, tokens))
        assert len(set(pairs)) == len(pairs)


def test_equal_scores_still_make_a_tree():
    """With flat logits every candidate of a level ties; parents are kept before children."""
    flat = defaultdict(lambda: torch.zeros(W))
    tree = grow(TreeShape.dynamic(3, 3, 9), roots(1), flat[()][None], Steps([flat]), IDS)
    parents = tree.parents_BN[0].tolist()
    assert all(parent < node for node, parent in enumerate(parents))
    assert len(set(paths_of(tree, 0))) == 10


def test_top_k_wider_than_the_draft_vocabulary_is_cut():
    tree, _, steps = grown(TreeShape.dynamic(2, 10, 20), [3])
    assert steps.widths == [W]
    assert tree.tokens_BN.shape == (1, 21)
    assert len(set(paths_of(tree, 0))) == 21


# Trees of fixed layout


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_greedy_chain_takes_the_best_token_at_each_level(depth):
    tree, tables, steps = grown(TreeShape.chain(depth), [1, 2, 3])
    assert steps.widths == [1] * (depth - 1)
    assert tree.proposal is None
    for row, logits in enumerate(tables):
        path, score = (), 0.0
        for place in range(1, depth + 1):
            logp = logits[path].log_softmax(-1)
            path, score = (*path, int(IDS[logp.argmax()])), score + float(logp.max())
            assert paths_of(tree, row)[place] == path
            assert float(tree.logprobs_BN[row, place]) == pytest.approx(score, abs=1e-5)
    assert tree.parents_BN[0].tolist() == list(range(-1, depth))
    assert tree.depth_BN[0].tolist() == list(range(depth + 1))


def ranked(logits, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    """The path of tokens that a path of ranks means, and its log-probability: token by token."""
    path, score = (), 0.0
    for rank in ranks:
        logp = logits[path].log_softmax(-1).tolist()
        draft = sorted(range(W), key=lambda w: -logp[w])[rank]
        path, score = (*path, int(IDS[draft])), score + logp[draft]
    return path, score


@settings(max_examples=60, deadline=None)
@given(paths=rank_paths(), seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=3))
def test_static_tree_holds_the_children_of_the_given_ranks(paths, seeds):
    """Node by node in the order of levels, and the head is run on no more nodes than have children."""
    shape = TreeShape.static(paths)
    tree, tables, steps = grown(shape, seeds)
    assert tree.proposal is None
    assert tree.levels == int(tree.depth_BN.max()) == shape.depth
    assert sum(steps.widths) == shape.rows == len({path[:-1] for path in paths} - {()})
    order = [(), *sorted(paths, key=lambda path: (len(path), path))]
    for row, logits in enumerate(tables):
        found = paths_of(tree, row)
        assert len(found) == len(order)
        for node, ranks in enumerate(order):
            path, score = ranked(logits, ranks)
            assert found[node] == path
            assert float(tree.logprobs_BN[row, node]) == pytest.approx(score, abs=1e-4)
            assert int(tree.depth_BN[row, node]) == len(ranks)
            assert int(tree.parents_BN[row, node]) == (order.index(ranks[:-1]) if ranks else -1)


def test_more_siblings_than_draft_tokens_are_refused():
    with pytest.raises(UserError, match="the tree asks for 7 siblings, the draft vocabulary has 6 tokens"):
        grown(TreeShape.static([[6]]), [0])
    with pytest.raises(UserError, match="the tree asks for 7 siblings, the draft vocabulary has 6 tokens"):
        grown(TreeShape.static([[rank] for rank in range(7)]), [0], Policy(1.0), stream(0), sampled=True)
    tree, _, _ = grown(TreeShape.static([[6]]), [0], Policy(1.0), stream(0), sampled=True)
    assert tree.tokens_BN.shape == (1, 2)  # to a draw, ranks are only an order


# Sampled trees


@settings(max_examples=60, deadline=None)
@given(
    paths=rank_paths(),
    seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=3, unique=True),
    policy=st.sampled_from([Policy(1.0), Policy(0.7, top_k=3), Policy(1.5, top_p=0.7), Policy(1.0, min_p=0.2)]),
)
def test_sampled_tree_keeps_what_it_drew_from(paths, seeds, policy):
    """Distributions under the policy, siblings distinct while there is probability, one number for each node, and a layout
    that is that of the ranks' order.
    """
    shape, uniform = TreeShape.static(paths), stream(*seeds)
    tree, tables, steps = grown(shape, seeds, policy, uniform, sampled=True)
    proposal, parents = tree.proposal, tree.parents_BN[0].tolist()
    assert uniform.calls == len(paths)
    assert sum(steps.widths) == shape.rows
    assert torch.equal(proposal.ids_W, IDS)
    assert (tree.parents_BN == tree.parents_BN[0]).all()
    assert parents == list(outline(shape.paths).parents)
    assert sorted(place for place in proposal.of if place >= 0) == list(range(proposal.q_BFW.shape[1]))
    for node, (place, below) in enumerate(zip(proposal.of, proposal.children)):
        assert below == tuple(n for n, parent in enumerate(parents) if parent == node)
        assert (place >= 0) == bool(below)
        for row, logits in enumerate(tables):
            if below:
                q_W = policy.probs(logits[paths_of(tree, row)[node]])
                torch.testing.assert_close(proposal.q_BFW[row, place], q_W)
                drawn = [IDS.tolist().index(token) for token in tree.tokens_BN[row, list(below)].tolist()]
                real = drawn[: int((q_W > 0).sum())]
                assert len(set(real)) == len(real)
                assert (q_W[real] > 0).all()
                assert drawn[len(real) :] == [W - 1] * (len(drawn) - len(real))  # stands for nothing
                scores = tree.logprobs_BN[row, node] + q_W[drawn].log()
                torch.testing.assert_close(tree.logprobs_BN[row, list(below)], scores, atol=1e-4, rtol=0)


@settings(max_examples=30, deadline=None)
@given(paths=rank_paths(), seed=st.integers(0, 10**6))
def test_rows_of_a_sampled_tree_are_those_of_each_alone(paths, seed):
    policy, shape, seeds = Policy(0.9, top_p=0.9), TreeShape.static(paths), [seed, seed + 1, seed + 2]
    tree, _, _ = grown(shape, seeds, policy, stream(*seeds), sampled=True)
    for row, own in enumerate(seeds):
        alone, _, _ = grown(shape, [own], policy, stream(own), sampled=True)
        assert torch.equal(alone.tokens_BN[0], tree.tokens_BN[row])
        assert torch.equal(alone.proposal.q_BFW[0], tree.proposal.q_BFW[row])


@pytest.mark.parametrize(("depth", "top_k", "nodes"), [(3, 2, 6), (4, 3, 20), (2, 6, 12)])
def test_a_dynamic_shape_is_sampled_with_a_layout_fixed_beforehand(depth, top_k, nodes):
    """Whatever is drawn is kept: the layout is the same for any logits, and every rank below top_k."""
    shape = TreeShape.dynamic(depth, top_k, nodes)
    trees = [grown(shape, [seed], Policy(1.0), stream(seed), sampled=True)[0] for seed in range(3)]
    assert len(shape.paths) == nodes
    assert max(max(path) for path in shape.paths) < top_k
    assert max(map(len, shape.paths)) <= depth
    for tree in trees:
        assert tree.parents_BN[0].tolist() == list(outline(shape.paths).parents)
        assert tree.proposal is not None


@pytest.mark.parametrize(("depth", "top_k", "nodes"), [(3, 2, 10), (6, 5, 60)])
def test_rows_of_a_dynamic_shape_hold_its_sampled_tree(depth, top_k, nodes):
    """Drafters make room for `rows` nodes."""
    shape = TreeShape.dynamic(depth, top_k, nodes)
    _, _, steps = grown(shape, [1], Policy(1.0), stream(1), sampled=True)
    assert sum(steps.widths) <= shape.rows


def orders(q: list[float], count: int) -> dict[tuple[int, ...], float]:
    """Ordered draws without replacement and their probabilities."""
    found = {(): 1.0}
    for _ in range(count):
        found = {
            (*drawn, x): mass * q[x] / math.fsum(q[y] for y in range(len(q)) if y not in drawn)
            for drawn, mass in found.items()
            for x in range(len(q))
            if x not in drawn and q[x] > 0
        }
    return found


def assert_frequencies(seen: Counter, wanted: dict) -> None:
    """Draws ≡ their probabilities (chi-square; what is too rare for it is pooled), and nothing impossible is drawn."""
    count = sum(seen.values())
    assert set(seen) <= {key for key, mass in wanted.items() if mass > 0}
    often = [key for key, mass in wanted.items() if mass * count >= 5]
    observed, share = [seen[key] for key in often], [wanted[key] for key in often]
    observed, share = [*observed, count - sum(observed)], [*share, max(1 - math.fsum(share), 0.0)]
    if share[-1] * count < 5:  # no pool of its own
        observed, share = [*observed[:-2], sum(observed[-2:])], [*share[:-2], sum(share[-2:])]
    expected = [count * one / math.fsum(share) for one in share]
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-3


def test_frequencies_that_are_not_the_wanted_ones_are_seen():
    """The check itself: one hundredth of the draws elsewhere."""
    wanted = {0: 0.5, 1: 0.3, 2: 0.2}
    assert_frequencies(Counter({0: 20000, 1: 12000, 2: 8000}), wanted)
    with pytest.raises(AssertionError):
        assert_frequencies(Counter({0: 20400, 1: 11600, 2: 8000}), wanted)
    with pytest.raises(AssertionError):
        assert_frequencies(Counter({0: 20000, 1: 12000, 2: 8000, 3: 1}), wanted)


@pytest.mark.parametrize(
    ("policy", "paths"),
    [
        (Policy(1.0), [[0], [1]]),
        (Policy(0.8, top_k=4), [[0], [2], [5]]),
        (Policy(1.0, top_p=0.9), [[0], [0, 0], [0, 1], [0, 2]]),
    ],
)
def test_sampler_draws_without_replacement(policy, paths):
    """Frequencies of ordered children ≡ their probabilities, 40000 draws of one node."""
    count, logits_W = 40000, torch.randn(W, generator=torch.Generator().manual_seed(2))
    plan = outline(TreeShape.static(paths).paths)
    generator = torch.Generator().manual_seed(3)
    uniform = lambda: torch.rand(count, generator=generator, dtype=torch.float64)  # noqa: E731
    grower = Grower(roots(count, policy, uniform, sampled=True), never, IDS, plan)
    level = plan.levels[-1]
    q_W = policy.probs(logits_W)
    drawn_BR = grower.sample(level, q_W.expand(count, 1, W), len(level.owners))[:, 0]
    assert_frequencies(Counter(map(tuple, drawn_BR.tolist())), orders(q_W.tolist(), len(level.owners)))


def test_sampled_trees_have_the_distribution_of_their_draws():
    """Whole trees: two children at the root, and below the first of them one; 20000 trees of one batch."""
    count, policy, logits = 20000, Policy(1.0, top_k=3), table(5)
    generator = torch.Generator().manual_seed(4)
    uniform = lambda: torch.rand(count, generator=generator, dtype=torch.float64)  # noqa: E731

    def step(tokens_Bk, _):
        return torch.stack([logits[(token,)] for token in tokens_Bk[:, 0].tolist()])[:, None]

    shape = TreeShape.static([[0], [1], [0, 0]])
    tree = grow(shape, roots(count, policy, uniform, sampled=True), logits[()].expand(count, W), step, IDS)
    seen = Counter(map(tuple, tree.tokens_BN[:, 1:].tolist()))
    wanted = {}
    for (a, b), mass in orders(policy.probs(logits[()]).tolist(), 2).items():
        first, second = int(IDS[a]), int(IDS[b])
        for (c,), share in orders(policy.probs(logits[(first,)]).tolist(), 1).items():
            wanted[(first, second, int(IDS[c]))] = mass * share
    assert_frequencies(seen, wanted)


# Ancestors


def naive_ancestors(parents: list[int]) -> list[list[bool]]:
    mask = [[False] * len(parents) for _ in parents]
    for node in range(len(parents)):
        at = node
        while at >= 0:
            mask[node][at] = True
            at = parents[at]
    return mask


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 5), min_size=6, max_size=6), min_size=1, max_size=3), st.booleans())
def test_ancestors(picks, known):
    """Any trees of seven nodes; nodes without a parent are padding, and see themselves alone."""
    rows = [[-1] + [pick if pick < 0 else pick % (node + 1) for node, pick in enumerate(row)] for row in picks]
    depth = [[0] * 7 for _ in rows]
    for row, parents in enumerate(rows):
        for node in range(1, 7):
            depth[row][node] = depth[row][parents[node]] + 1 if parents[node] >= 0 else 0
    zeros = torch.zeros(len(rows), 7)
    levels = max(map(max, depth)) if known else None
    tree = Tree(zeros.long(), torch.tensor(rows), torch.tensor(depth), zeros, levels=levels)
    assert tree.ancestors().tolist() == [naive_ancestors(parents) for parents in rows]


def test_ancestors_of_a_root_alone():
    tree = root_only(torch.tensor([3, 4]))
    assert tree.ancestors().tolist() == [[[True]], [[True]]]
    assert tree.tokens_BN.tolist() == [[3], [4]]
    assert tree.parents_BN.tolist() == [[-1], [-1]]
    assert tree.height() == 0


# Layouts


@settings(max_examples=100, deadline=None)
@given(paths=rank_paths())
def test_outline_is_the_naive_one(paths):
    """Parents, depths, and for each level who has children, where their parents stand, and whose children follow."""
    shape = TreeShape.static(paths)
    plan = outline(shape.paths)
    order = [(), *sorted(paths, key=lambda path: (len(path), path))]
    assert plan.parents == tuple(-1 if not path else order.index(path[:-1]) for path in order)
    assert plan.depths == tuple(map(len, order))
    rows = [[path for path in order if len(path) == depth] for depth in range(shape.depth + 1)]
    assert len(plan.levels) == shape.depth
    above: list = []
    for level, row, below in zip(plan.levels, rows, rows[1:]):
        expanded = [path for path in row if any(child[:-1] == path for child in below)]
        assert [row[place] for place in level.expanded] == expanded
        assert level.above == tuple(above.index(path[:-1]) if above else 0 for path in expanded)
        assert [(*expanded[owner], rank) for owner, rank in zip(level.owners, level.ranks)] == below
        above = expanded


@settings(max_examples=40, deadline=None)
@given(
    accuracy=st.lists(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3), min_size=1, max_size=3),
    nodes=st.integers(1, 5),
)
def test_best_paths_are_the_best_of_all_trees(accuracy, nodes):
    """No tree with as many nodes has a larger sum of products: every tree is tried."""
    values = {(): 1.0}
    for shares in accuracy:
        deeper = {
            (*p, r): v * x for p, v in values.items() if len(p) == max(map(len, values)) for r, x in enumerate(shares)
        }
        values |= deeper
    count = min(nodes, len(values) - 1)
    assume(math.comb(len(values) - 1, count) < 20000)

    def grows(kept: frozenset) -> set[frozenset]:
        return {kept | {path} for path in values if path and path not in kept and (path[:-1] in kept or len(path) == 1)}

    trees = {frozenset()}
    for _ in range(count):
        trees = {tree for kept in trees for tree in grows(kept)}
    found = best_paths(accuracy, nodes)
    assert len(found) == len(set(found)) == count
    assert frozenset(found) in trees
    assert list(found) == sorted(found, key=lambda path: (len(path), path))
    best = max(math.fsum(values[path] for path in tree) for tree in trees)
    assert math.fsum(values[path] for path in found) == pytest.approx(best, abs=1e-12)


def test_best_paths_of_a_measured_accuracy():
    """By hand: 0.6, 0.6·0.5 = 0.3, 0.25, 0.25·0.5 = 0.125; 0.6·0.2 = 0.12 is too little."""
    assert best_paths([[0.6, 0.25], [0.5, 0.2]], 4) == ((0,), (1,), (0, 0), (1, 0))
    assert best_paths([[0.9]], 10) == ((0,),)


# Shapes


@pytest.mark.parametrize(
    ("depth", "top_k", "nodes"),
    [(3, 1, None), (3, 2, 2), (3, 2, 11), (1, 4, 5)],
    ids=["one child", "fewer nodes than levels", "more nodes than candidates", "more than one level has"],
)
def test_impossible_shapes_are_refused(depth, top_k, nodes):
    with pytest.raises(UserError, match=rf"depth {depth}, top_k {top_k}.*from {depth} to"):
        TreeShape.of(ShapeConfig("dynamic", depth, top_k, nodes))


def test_shapes_of_a_config():
    assert TreeShape.of(ShapeConfig("chain", 5)) == TreeShape.chain(5) == TreeShape("chain", 5, 1, 5)
    assert TreeShape.of(ShapeConfig("dynamic", 3, 2, 10)) == TreeShape.dynamic(3, 2, 10)
    assert TreeShape.dynamic(3, 2).nodes == most_nodes(3, 2) == 2 + 2 * 4
    assert TreeShape.of(ShapeConfig("static", file="eagle-1")) == TreeShape.parse("eagle-1")


def test_shape_of_a_config_and_its_file():
    with pytest.raises(UserError, match="shape static: give its file: JSON, or one of eagle-1"):
        TreeShape.of(ShapeConfig("static"))
    for kind in ("chain", "dynamic"):
        with pytest.raises(UserError, match=f"shape {kind}: a file belongs to a static shape"):
            TreeShape.of(ShapeConfig(kind, 2, 2, file="eagle-1"))


def test_eagle_1():
    """As its paper draws it, level by level."""
    levels = [
        [[0], [1], [2], [3]],
        [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0]],
        [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0]],
        [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2]],
        [[0, 0, 0, 0, 0], [0, 0, 0, 0, 1]],
    ]
    shape = TreeShape.parse("eagle-1")
    assert (shape.name, shape.kind, shape.nodes, shape.depth, shape.top_k) == ("eagle-1", "static", 25, 5, 4)
    assert [list(path) for path in shape.paths] == [path for level in levels for path in level]
    assert set(BUILT_IN) == {"eagle-1"}


@pytest.mark.parametrize("name", ["chain-1", "chain-7", "tree-3x2-6", "tree-4x10-60", "eagle-1"])
def test_names_are_read_back(name):
    assert TreeShape.parse(name).name == name


def test_names_of_static_trees(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text("[[0], [1], [0, 0]]")
    shape = TreeShape.parse(str(file))
    assert shape == TreeShape.of(ShapeConfig("static", file=str(file)))
    assert (shape.name, shape.depth, shape.nodes, shape.top_k) == ("mine", 2, 3, 2)
    assert TreeShape.static([[0], [1], [0, 0]]).name == "static-2-3"
    assert TreeShape("plain", 0).name == "plain"


@pytest.mark.parametrize(
    "name",
    ["", "chain", "chain-", "chain-0", "chain-2-3", "chain-x", "tree-3x2", "tree-3x2-6-1", "tree-axb-c", "tree--3x2-6",
     "eagle", "eagle-2", "tree.yaml"],
)  # fmt: skip
def test_unknown_names_are_refused(name):
    with pytest.raises(
        UserError, match=f"shape {name!r}: give chain-K, tree-DEPTHxTOP_K-NODES, eagle-1, or a .json file"
    ):
        TreeShape.parse(name)


@pytest.mark.parametrize("name", ["tree-3x1-3", "tree-3x2-2", "tree-3x2-11", "tree-0x2-1", "tree-2x0-2"])
def test_numbers_that_do_not_fit_together_are_refused(name):
    with pytest.raises(UserError, match="top_k must be 2 or more, nodes from"):
        TreeShape.parse(name)


def test_no_nodes_are_refused():
    with pytest.raises(UserError, match="top_k must be 2 or more, nodes from"):
        TreeShape.parse("tree-3x2-0")


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [0, 1], [1], [0, 1]], r"entry 3: \[0, 1\] stands twice: siblings must differ"),
        ([[0], [1, 0]], r"\[1, 0\] has no parent: add \[1\]"),
        ([[0], [0, 0, 0]], r"\[0, 0, 0\] has no parent: add \[0, 0\]"),
        ([], r"expected a list of rank paths such as \[\[0\], \[1\], \[0, 0\]\]"),
        ({"paths": [[0]]}, "expected a list of rank paths"),
        (None, "expected a list of rank paths"),
        ("00", "expected a list of rank paths"),
        ([[0], 1], "entry 1: 1 is not a list of ranks from 0"),
        ([[]], r"entry 0: \[\] is not a list of ranks from 0"),
        ([[0], [-1]], r"entry 1: \[-1\] is not a list of ranks from 0"),
        ([[0.0]], r"entry 0: \[0.0\] is not a list of ranks from 0"),
        ([[True]], r"entry 0: \[True\] is not a list of ranks from 0"),
        (["0"], "entry 0: '0' is not a list of ranks from 0"),
    ],
)
def test_wrong_static_trees_are_refused(paths, message, tmp_path):
    """By name of their file, too."""
    with pytest.raises(UserError, match="^static tree: " + message):
        TreeShape.static(paths)
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(paths))
    with pytest.raises(UserError, match=r"^static tree .*wrong\.json: " + message):
        TreeShape.parse(str(file))


@pytest.mark.parametrize("content", [None, b"[[0]", b"\xff\xfe\xff"], ids=["missing", "cut off", "not text"])
def test_unreadable_static_trees_are_refused(content, tmp_path):
    file = tmp_path / "tree.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"static tree .*tree\.json: cannot be read: "):
        TreeShape.parse(str(file))
    with pytest.raises(UserError, match="cannot be read"):
        TreeShape.of(ShapeConfig("static", file=str(tmp_path)))


def test_paths_of_shapes():
    assert TreeShape.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert TreeShape("plain", 0).paths == ()
    assert TreeShape.static([[1, 0], [1], [0]]).paths == ((0,), (1,), (1, 0))
    shape = TreeShape.dynamic(4, 3, 20)
    assert shape.paths == best_paths([USUAL_RANKS[:3]] * 4, 20)


def test_rows_of_shapes():
    """Nodes that the head is run on: those with children, the root apart."""
    assert [TreeShape.chain(depth).rows for depth in (1, 2, 5)] == [0, 1, 4]
    assert TreeShape("plain", 0).rows == 0
    assert TreeShape.static([[0], [1], [2]]).rows == 0
    assert TreeShape.static([[0], [1], [1, 0], [1, 1], [1, 1, 0]]).rows == 2
    for shape in (
        TreeShape.dynamic(4, 3, 5),
        TreeShape.dynamic(4, 3),
    ):  # greedy, or as it is laid out for sampled children
        assert shape.rows == max(9, len({path[:-1] for path in shape.paths} - {()}))


# Contexts


def context_of(head, target, counts: list[int], seed: int = 0, policy=None, uniform=never, sampled=False) -> Context:
    """Random contexts of so many rows; padding is garbage. Texts begin with x_0."""
    generator = torch.Generator().manual_seed(seed)
    batch, most = len(counts), max(counts)
    tokens = torch.randint(head.spec.vocab_size, (batch, most), generator=generator)
    taps = torch.randn(batch, most, len(head.taps), 32, generator=generator)
    last = torch.randn(batch, most, 32, generator=generator)
    for row, count in enumerate(counts):
        taps[row, count:] = 300 * torch.randn(taps[row, count:].shape, generator=generator)
        last[row, count:] = torch.nan
    texts = [[7, *row[:count]] for row, count in zip(tokens.tolist(), counts)]
    return Context(target, tokens, taps, last, policy or Policy(), uniform, list(counts), sampled, texts)


class Small:
    """As much of a head as a context needs."""

    class spec:
        vocab_size = 50

    taps = (1, 2)


def same(left: Context, right: Context) -> None:
    """Two contexts mean the same rows; padding may differ."""
    assert left.counts == right.counts
    assert left.texts == right.texts
    assert left.choices == right.choices
    assert torch.equal(left.root_B, right.root_B)
    for name in ("tokens_BM", "taps_BMKD", "last_BMD"):
        for row, count in enumerate(left.counts):
            assert torch.equal(getattr(left, name)[row, :count], getattr(right, name)[row, :count])


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=4), data=st.data())
def test_contexts_apart_and_together(counts, data):
    """rows_of undoes together, then undoes part; the root is each text's last row."""
    whole = context_of(Small, None, counts)
    if data.draw(st.booleans()):
        whole.choices = [[row, 1] for row in range(len(counts))]
    apart = [whole.rows_of(row) for row in range(len(counts))]
    assert whole.root_B.tolist() == [text[-1] for text in whole.texts]
    for row, one in enumerate(apart):
        assert one.tokens_BM.shape == (1, counts[row])
        assert one.taps_BMKD.shape[:2] == one.last_BMD.shape[:2] == (1, counts[row])
        assert one.counts == [counts[row]]
        assert one.tokens_BM[0].tolist() == whole.texts[row][1:]
        assert torch.equal(whole.final(whole.taps_BMKD)[row], one.taps_BMKD[0, -1])
        cut = data.draw(st.integers(0, counts[row]))
        if 0 < cut < counts[row]:
            first, second = one.part(0, cut), one.part(cut, counts[row])
            assert first.texts == [whole.texts[row][: cut + 1]]  # x_0 goes with the first part
            assert second.texts == [whole.texts[row][cut + 1 :]]
            assert first.counts == [cut]
            same(first.then(second), one)
        same(one.part(0, counts[row]), one)
    same(together(apart), whole)


def test_context_of_one_is_itself():
    one = context_of(Small, None, [3])
    assert together([one]) is one


def test_parts_of_a_text_without_its_first_token():
    """Contexts after the first hold only the rows' own tokens."""
    whole = context_of(Small, None, [5])
    whole.texts = [whole.tokens_BM[0].tolist()]
    first, second = whole.part(0, 2), whole.part(2, 5)
    assert first.texts == [whole.tokens_BM[0, :2].tolist()]
    assert second.texts == [whole.tokens_BM[0, 2:].tolist()]
    assert first.root_B.tolist() == [int(whole.tokens_BM[0, 1])]


def test_counts_and_texts_of_a_full_batch_need_not_be_given():
    rows = torch.zeros(2, 3, 1)
    context = Context(None, torch.tensor([[1, 2, 3], [4, 5, 6]]), rows[..., None], rows, Policy(), never)
    assert context.counts == [3, 3]
    assert context.texts == [[1, 2, 3], [4, 5, 6]]


def test_choices_go_with_their_text():
    """They are of the last tree that was drafted, whatever rows follow; a text without any has none."""
    whole = context_of(Small, None, [2, 3])
    whole.choices = [[1, 2], [3]]
    assert whole.rows_of(1).choices == [[3]]
    later = whole.rows_of(0)
    later.choices = [[9]]
    assert whole.rows_of(0).then(later).choices == [[1, 2]]
    later.choices = None
    assert together([whole.rows_of(1), later]).choices == [[3], []]


# What a head proposes


@pytest.fixture(scope="module")
def qwen():
    return make_target("qwen3")


SHAPES = [
    TreeShape.chain(3),
    TreeShape.dynamic(3, 3, 9),
    TreeShape.static([[0], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0]]),
]


def path_logprob(head, target, context: Context, path: tuple[int, ...]) -> float:
    """log q of a path, token by token through `propose`, the drafted tokens forced by hand."""
    forced = iter(path)
    total = []

    def step_through(shape, context, logits, step, ids):
        row = logits
        for token in forced:
            total.append(float(row.log_softmax(-1)[0, ids.tolist().index(token)]))
            row = step(torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.long))[:, 0]
        return root_only(context.root_B)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwright.heads.recurrent.grow", step_through)
        head.propose(head.start(1, context.tokens_BM.shape[1] + len(path)), context, TreeShape.chain(1))
    return sum(total)


@pytest.mark.parametrize("size", [None, 50])
@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("shape", [SHAPES[2], TreeShape.dynamic(4, 3, 20)], ids=lambda shape: shape.name)
def test_node_scores_are_those_of_the_path_alone(qwen, size, count, shape):
    """Siblings and cousins in the same forward pass do not touch a node."""
    head = make_tiny_head(qwen, size)
    context = context_of(head, qwen, [count])
    tree = head.propose(head.start(1, count + shape.rows), context, shape)
    paths = paths_of(tree, 0)
    assert max(map(len, paths)) >= 3
    for place, path in enumerate(paths[1:], 1):
        assert float(tree.logprobs_BN[0, place]) == pytest.approx(path_logprob(head, qwen, context, path), abs=2e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_proposing_leaves_only_confirmed_rows_behind(qwen, shape):
    """Two drafts in a row, of which nothing was accepted, are those of one fresh prefill."""
    head = make_tiny_head(qwen, None)
    whole = context_of(head, qwen, [8])
    state = head.start(1, 8 + shape.rows)
    for start, stop in ((0, 5), (5, 6), (6, 8)):
        tree = head.propose(state, whole.part(start, stop), shape)
        assert state.lengths == [stop]
    same_tree(tree, head.propose(head.start(1, 8 + shape.rows), whole, shape))


def same_tree(left: Tree, right: Tree) -> None:
    """Equal trees, up to rounding of the scores."""
    assert torch.equal(left.tokens_BN, right.tokens_BN)
    assert torch.equal(left.parents_BN, right.parents_BN)
    assert torch.equal(left.depth_BN, right.depth_BN)
    torch.testing.assert_close(left.logprobs_BN, right.logprobs_BN, atol=2e-4, rtol=0)
    assert (left.proposal is None) == (right.proposal is None)
    if left.proposal is not None and right.proposal is not None:
        torch.testing.assert_close(left.proposal.q_BFW, right.proposal.q_BFW, atol=2e-4, rtol=0)
        assert (left.proposal.of, left.proposal.children) == (right.proposal.of, right.proposal.children)


def row_of(tree: Tree, row: int) -> Tree:
    """One row of a batch of trees."""
    rows = slice(row, row + 1)
    columns = (tree.tokens_BN, tree.parents_BN, tree.depth_BN, tree.logprobs_BN)
    one = Tree(*(column[rows] for column in columns), tree.proposal, tree.levels)
    if tree.proposal is not None:
        kept = tree.proposal
        one.proposal = type(kept)(kept.q_BFW[rows], kept.ids_W, kept.of, kept.children)
    return one


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_ragged_batch_drafts_what_each_text_drafts_alone(qwen, shape, sampled):
    """Three cycles in which the texts gain different numbers of rows; padding is garbage."""
    head, policy, seeds = make_tiny_head(qwen, 60), Policy(0.8 if sampled else 0.0), (3, 4, 5)
    cycles = ([4, 9, 1], [1, 3, 2], [2, 1, 5])
    slots = 20 + shape.rows
    draws, state = stream(*seeds) if sampled else never, head.start(3, slots)
    batches = [context_of(head, qwen, counts, 10 + n, policy, draws, sampled) for n, counts in enumerate(cycles)]
    trees = [head.propose(state, batch, shape) for batch in batches]
    assert state.lengths == [sum(column) for column in zip(*cycles)]
    for row, seed in enumerate(seeds):
        own, alone = stream(seed) if sampled else never, head.start(1, slots)
        for batch, tree in zip(batches, trees):
            context = batch.rows_of(row)
            context.uniform = own
            same_tree(row_of(tree, row), head.propose(alone, context, shape))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_texts_put_and_selected_draft_as_before(qwen, shape):
    """A text that takes another's place, and one that moves up, go on as they would alone."""
    head = make_tiny_head(qwen, 60)
    batch, guest = context_of(head, qwen, [4, 6, 2]), context_of(head, qwen, [7], 5)
    state, visitor = head.start(3, 40), head.start(1, 7)
    head.absorb(state, batch)
    head.absorb(visitor, guest)
    state.put(1, visitor)
    state.select([2, 1])
    later = context_of(head, qwen, [1, 3], 6)
    tree = head.propose(state, later, shape)
    assert state.lengths == [2 + 1, 7 + 3]
    for row, before in enumerate((batch.rows_of(2), guest)):
        alone = head.start(1, 40)
        head.absorb(alone, before)
        same_tree(row_of(tree, row), head.propose(alone, later.rows_of(row), shape))


def test_a_draft_of_a_shape_that_was_not_expected_finds_room(qwen):
    """A state that has slots for its text alone."""
    head, shape = make_tiny_head(qwen, None), TreeShape.dynamic(3, 3, 9)
    context = context_of(head, qwen, [5])
    same_tree(head.propose(head.start(1, 5), context, shape), head.propose(head.start(1, 50), context, shape))
    with torch.inference_mode():
        same_tree(head.propose(head.start(1, 1), context, shape), head.propose(head.start(1, 50), context, shape))
