"""Draft trees: how they grow, against EAGLE-2 written out plainly; and what a head proposes, against its own chains."""

import itertools

import pytest
import torch
from conftest import make_target, make_tiny_head
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.configs import UserError
from headwright.configs.schema import ShapeConfig
from headwright.data.sampling import Policy
from headwright.eval.decode import uniform_source
from headwright.heads.base import Context
from headwright.heads.draft_tree import Tree, TreeShape, grow, root_only

W = 6
IDS = torch.tensor([1, 4, 5, 9, 12, 30])  # target ids of the draft ids
ROOT = 77


def table(seed: int) -> dict[tuple[int, ...], torch.Tensor]:
    """Draft logits as a function of the path of target ids below the root."""
    generator = torch.Generator().manual_seed(seed)
    paths = [p for depth in range(4) for p in itertools.product(IDS.tolist(), repeat=depth)]
    return {path: 2 * torch.randn(W, generator=generator) for path in paths}


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


def grown(shape: TreeShape, seeds, policy=None, uniform=None):
    """A tree over tables, and the step function that fed it."""
    tables = [table(seed) for seed in seeds]
    steps = Steps(tables)
    first = torch.stack([t[()] for t in tables])
    root = torch.full((len(tables),), ROOT)
    return grow(shape, root, first, steps, IDS, policy or Policy(), uniform or (lambda: None)), tables, steps


def paths_of(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """The tokens below the root that lead to each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens_BN[row].tolist(), tree.parents_BN[row].tolist()):
        paths.append(() if parent < 0 else (*paths[parent], token))
    return paths


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
    tree, tables, steps = grown(TreeShape.of(ShapeConfig("dynamic", depth, top_k, nodes)), seeds)
    assert tree.proposal_BNV is None
    assert steps.widths == [top_k] * (depth - 1)
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
    most = top_k + (depth - 1) * top_k**2
    tree, _, _ = grown(TreeShape("dynamic", depth, top_k, min(most, depth + extra)), [seed, seed + 1])
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
    flat = {path: torch.zeros(W) for path in table(0)}
    steps = Steps([flat])
    tree = grow(TreeShape("dynamic", 3, 3, 9), torch.tensor([ROOT]), flat[()][None], steps, IDS, Policy(), lambda: None)
    parents = tree.parents_BN[0].tolist()
    assert all(parent < node for node, parent in enumerate(parents))
    assert len(set(paths_of(tree, 0))) == 10


def test_top_k_wider_than_the_draft_vocabulary_is_cut():
    tree, _, steps = grown(TreeShape("dynamic", 2, 10, 20), [3])
    assert steps.widths == [W]
    assert tree.tokens_BN.shape == (1, 21)
    assert len(set(paths_of(tree, 0))) == 21


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_greedy_chain_takes_the_best_token_at_each_level(depth):
    tree, tables, steps = grown(TreeShape("chain", depth, 1, depth), [1, 2, 3])
    assert steps.widths == [1] * (depth - 1)
    assert tree.proposal_BNV is None
    for row, logits in enumerate(tables):
        path, score = (), 0.0
        for place in range(1, depth + 1):
            logp = logits[path].log_softmax(-1)
            path, score = (*path, int(IDS[logp.argmax()])), score + float(logp.max())
            assert paths_of(tree, row)[place] == path
            assert float(tree.logprobs_BN[row, place]) == pytest.approx(score, abs=1e-5)
    assert tree.parents_BN[0].tolist() == list(range(-1, depth))
    assert tree.depth_BN[0].tolist() == list(range(depth + 1))


def test_sampled_chain_keeps_the_distribution_that_it_drew_from():
    """Under the policy, not the raw logits: probabilities of target ids, and none outside the draft vocabulary."""
    policy, depth = Policy(0.7, top_k=3), 3
    seen = set()
    for seed in range(20):
        tree, [logits], _ = grown(TreeShape("chain", depth, 1, depth), [8], policy, uniform_source(seed))
        path = ()
        for place in range(1, depth + 1):
            wanted = policy.probs(logits[path])
            token = int(tree.tokens_BN[0, place])
            kept = tree.proposal_BNV[0, place]
            assert float(kept[token]) == pytest.approx(float(wanted[IDS.tolist().index(token)]), abs=1e-6)
            assert torch.allclose(kept[IDS], wanted)
            assert float(kept.sum()) == pytest.approx(1.0, abs=1e-6)
            assert float(kept[token]) > 0
            path = (*path, token)
        seen.add(path)
    assert len(seen) > 3


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
@given(st.lists(st.lists(st.integers(0, 99), min_size=6, max_size=6), min_size=1, max_size=3))
def test_ancestors(picks):
    """Any trees of seven nodes."""
    rows = [[-1] + [pick % (node + 1) for node, pick in enumerate(row)] for row in picks]
    depth = [[0] * 7 for _ in rows]
    for row, parents in enumerate(rows):
        for node in range(1, 7):
            depth[row][node] = depth[row][parents[node]] + 1
    zeros = torch.zeros(len(rows), 7)
    tree = Tree(zeros.long(), torch.tensor(rows), torch.tensor(depth), zeros)
    assert tree.ancestors().tolist() == [naive_ancestors(parents) for parents in rows]


def test_ancestors_of_a_root_alone():
    assert root_only(torch.tensor([3, 4])).ancestors().tolist() == [[[True]], [[True]]]


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
    assert TreeShape.of(ShapeConfig("chain", 5)) == TreeShape("chain", 5, 1, 5)
    assert TreeShape.of(ShapeConfig("dynamic", 3, 2, 10)) == TreeShape("dynamic", 3, 2, 10)
    assert TreeShape.of(ShapeConfig("dynamic", 3, 2)).nodes == 2 + 2 * 4
    assert TreeShape.of(ShapeConfig("chain", 5)).name == "chain-5"
    assert TreeShape.of(ShapeConfig("dynamic", 3, 2, 6)).name == "tree-3x2-6"


# What a head proposes


@pytest.fixture(scope="module")
def qwen():
    return make_target("qwen3")


def context_of(head, target, count: int, seed: int = 0) -> Context:
    """A random context of `count` rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(head.spec.vocab_size, (1, count), generator=generator)
    taps = torch.randn(1, count, len(head.taps), 32, generator=generator)
    return Context(target, tokens, taps, torch.zeros(1, count, 32), Policy(), lambda: None)


def path_logprob(head, target, context: Context, path: tuple[int, ...]) -> float:
    """log q of a path, token by token through `propose`, the drafted tokens forced by hand."""
    forced = iter(path)
    total = []

    def step_through(shape, root, logits, step, ids, policy, uniform, *_):
        row = logits
        for token in forced:
            total.append(float(row.log_softmax(-1)[0, ids.tolist().index(token)]))
            row = step(torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.long))[:, 0]
        return root_only(root)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwright.heads.eagle3.grow", step_through)
        head.propose(head.start(1, context.tokens_BM.shape[1] + len(path)), context, TreeShape("chain", 1, 1, 1))
    return sum(total)


@pytest.mark.parametrize("size", [None, 50])
@pytest.mark.parametrize("count", [1, 9])
def test_node_scores_are_those_of_the_path_alone(qwen, size, count):
    """Siblings and cousins in the same forward pass do not touch a node."""
    head = make_tiny_head(qwen, size)
    context, shape = context_of(head, qwen, count), TreeShape("dynamic", 4, 3, 20)
    tree = head.propose(head.start(1, count + shape.depth * shape.top_k), context, shape)
    paths = paths_of(tree, 0)
    assert max(map(len, paths)) >= 3
    for place, path in enumerate(paths[1:], 1):
        assert float(tree.logprobs_BN[0, place]) == pytest.approx(path_logprob(head, qwen, context, path), abs=2e-4)


def test_proposing_leaves_only_confirmed_rows_behind(qwen):
    """Two drafts in a row, of which nothing was accepted, are those of one fresh prefill."""
    head = make_tiny_head(qwen, None)
    whole, shape = context_of(head, qwen, 8), TreeShape("dynamic", 3, 3, 9)
    parts = [
        Context(qwen, whole.tokens_BM[:, a:b], whole.taps_BMKD[:, a:b], whole.last_BMD[:, a:b], Policy(), None)
        for a, b in ((0, 5), (5, 6), (6, 8))
    ]
    state = head.start(1, 8 + shape.depth * shape.top_k)
    for part in parts:
        tree = head.propose(state, part, shape)
    fresh = head.propose(head.start(1, 8 + shape.depth * shape.top_k), whole, shape)
    assert state.lengths == [8]
    assert torch.equal(tree.tokens_BN, fresh.tokens_BN)
    assert torch.equal(tree.parents_BN, fresh.parents_BN)
    assert torch.allclose(tree.logprobs_BN, fresh.logprobs_BN, atol=1e-4)
