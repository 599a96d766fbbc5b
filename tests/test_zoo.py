"""The contract of a head, for every kind and its options: what it learns, what it drafts and what it remembers are one thing.

Each case is a head with every weight random, trained for a moment on greedy texts of a tiny target in fp64.
"""

import math
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from conftest import make_model, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwright.configs.load import build
from headwright.data.batch import DocumentFeatures, FeatureBatch, last_rows, pack
from headwright.data.cache import KVCache
from headwright.data.rows import plan_rows
from headwright.data.sampling import Policy
from headwright.data.target import Features, Target
from headwright.data.vocab import DraftVocab
from headwright.eval.decode import generate
from headwright.eval.settings import PLAIN, Generation, Settings
from headwright.heads import get_head, kinds
from headwright.heads.base import Context, DraftHead, make_head, together
from headwright.heads.draft_tree import Tree, TreeShape
from headwright.heads.grow import grow
from headwright.heads.saved import load_head, save_head

EAGLE3 = {"kind": "eagle3", "taps": [1, 2, 3]}
CASES = {
    "eagle3": EAGLE3,
    "eagle3-3.1": EAGLE3 | {"norm_output": True, "steps": 4, "step_weight": 0.7},
    "eagle3-deep": EAGLE3 | {"layers": 2, "norm_before_residual": True, "qk_norm": True},
    "eagle3-window": EAGLE3 | {"layers": 2, "qk_norm": True, "window": 6},
    "eagle3-narrow": EAGLE3 | {"hidden_size": 16, "norm_before_fc": True, "fc_norm": False},
    "eagle3-shared": EAGLE3 | {"lm_head": "shared"},
    "eagle1": {"kind": "eagle1"},
    "hass": {"kind": "eagle1", "steps": 3, "detach": True, "fc_bias": True, "loss": {"kl": 0.1, "topk": 1.0}},
    "medusa": {"kind": "medusa"},
    "medusa-shared": {"kind": "medusa", "lm_head": "shared", "blocks": 2},
    "medusa-2": {"kind": "medusa", "steps": 3, "adapter": {"rank": 4, "dropout": 0.0}},
    "hydra": {"kind": "hydra"},
    "hydra++": {"kind": "hydra", "prefix": True, "layers": 3, "lm_head": "shared", "steps": 3},
    "mtp": {"kind": "mtp"},
    "mtp-raw": {"kind": "mtp", "feed": "raw", "mask_first": False},
    "mtp-llama": {"kind": "mtp", "block": "llama", "norm": False, "feed": "raw", "start": "random"},
    "mtp-chain": {"kind": "mtp", "modules": 3, "steps": 3},
    "mtp-chain-raw": {"kind": "mtp", "modules": 4, "steps": 4, "feed": "raw", "block": "llama", "start": "random"},
    "draft-model": {"kind": "draft_model"},
}
FAMILIES = [
    *((name, "qwen3") for name in ("eagle3", "hydra++", "mtp")),
    *((name, "gemma3") for name in ("eagle1", "mtp", "draft-model")),
]
PROMPTS = (5, 9, 2)  # their lengths
ANSWER = 18
WARM = Policy(temperature=0.8)
STATIC = ((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1))
JOINT = 0.75  # of the training: an adapter is trained too


def test_every_kind_has_a_case():
    assert {options["kind"] for options in CASES.values()} == set(kinds())


# What is tested


@dataclass
class Subject:
    """A head, its target, prompts, and documents of the target's own greedy text."""

    name: str
    head: DraftHead = field(repr=False)
    target: Target = field(repr=False)
    prompts: list[list[int]] = field(repr=False)
    documents: list[DocumentFeatures] = field(repr=False)
    before: float = 0.0  # loss per row, untrained
    after: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict, repr=False)  # the target's, before the training
    plain: list[list[int]] = field(default_factory=list, repr=False)
    led: dict[tuple[int, ...], dict[tuple[int, int], Tensor]] = field(default_factory=dict, repr=False)  # by `along`

    @property
    def depth(self) -> int:
        """How deep it is looked at."""
        return self.head.deepest or 4

    @property
    def adapted(self) -> bool:
        return self.head.changes_target() is not None

    def said(self, count: int) -> list[list[int]]:
        """The target's own text after each prompt."""
        if not self.plain:
            self.plain = greedy(self.target, self.prompts, 12)
        return [text[:count] for text in self.plain]

    def shapes(self) -> list[TreeShape]:
        """A chain, a static and a dynamic tree, no deeper than the head."""
        depth = min(3, self.depth)
        static = TreeShape.static([path for path in STATIC if len(path) <= depth])
        deep = [TreeShape.parse("eagle-1")] if self.head.deepest is None else []
        return [TreeShape.chain(self.depth), static, TreeShape.dynamic(depth, 3, 6), *deep]


def make_target(family: str, taps: tuple[int, ...], dtype: torch.dtype) -> Target:
    """A tiny target; Gemma 3 has full attention in its sixth layer only."""
    changes = {"num_hidden_layers": 6 if family == "gemma3" else 4}
    return Target(make_model(family, **changes).to(dtype), make_tokenizer(), f"tiny-{family}", taps)


def greedy(target: Target, prompts: list[list[int]], count: int = ANSWER) -> list[list[int]]:
    """The target's own text."""
    outcome = generate(target, None, prompts, Settings(PLAIN, count, ignore_eos=True, batch=len(prompts)))
    return [generation.tokens for generation in outcome.generations]


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def document(target: Target, ids: list[int], mask: list[bool], learn: Tensor | None = None) -> DocumentFeatures:
    """A text with the target's states."""
    ids_T, mask_T = torch.tensor(ids), torch.tensor(mask)
    found = target.features(ids_T[None])
    taps, last = found.taps_BNKD[0].clone(), found.last_BND[0, last_rows(mask_T)].clone()
    logits = target.logits(last)
    return DocumentFeatures(ids_T, mask_T, taps, last, logits.argmax(-1), logits.logsumexp(-1), learn)


twin = cache(make_target)  # the same model, loaded again


@cache
def known(
    family: str, taps: tuple[int, ...], dtype: torch.dtype
) -> tuple[Target, list[list[int]], list[DocumentFeatures]]:
    """A target that all cases share, prompts, and its documents."""
    target, prompts = make_target(family, taps, dtype), [random_ids(length, length) for length in PROMPTS]
    return target, prompts, chats(target, prompts)


def chats(target: Target, prompts: list[list[int]]) -> list[DocumentFeatures]:
    """Three documents of the target's greedy text; the first has two turns."""
    texts = [prompt + text for prompt, text in zip(prompts, greedy(target, prompts))]
    masks = [[False] * len(prompt) + [True] * (len(text) - len(prompt)) for prompt, text in zip(prompts, texts)]
    first, between = texts[0][: len(prompts[0]) + 9], random_ids(3, 77)
    texts[0] = first + between + greedy(target, [first + between], 12)[0]
    masks[0] = masks[0][: len(first)] + [False] * 3 + [True] * 12
    return [document(target, *pair) for pair in zip(texts, masks)]


def make_vocab(documents: list[DocumentFeatures], size: int) -> DraftVocab:
    """Half of the tokens. One that the target says in its first answers is missing, so that some rows cannot be said."""
    answers = torch.cat([chat.ids_T[chat.mask_T] for chat in documents[1:]]).unique()
    only = [int(token) for token in documents[0].argmax_R.unique() if token not in answers]
    kept = torch.rand(size, generator=torch.Generator().manual_seed(4)) < 0.4
    kept[answers] = True
    kept[documents[0].ids_T] = True
    kept[only[0]] = False
    return DraftVocab(torch.nonzero(kept)[:, 0], size)


def make_subject(name: str, family: str = "llama", dtype: torch.dtype = torch.float64) -> Subject:
    """An untrained head, no weight of which is as it begins."""
    config = build(get_head(CASES[name]["kind"]).Config, dict(CASES[name]), "test")
    taps = config.choose_taps(6 if family == "gemma3" else 4)
    target, prompts, documents = known(family, taps, dtype)
    if "adapter" in CASES[name]:  # it changes its target
        target = make_target(family, taps, dtype)
    torch.manual_seed(1)
    head = make_head(config, target.spec, target.taps, make_vocab(documents, target.spec.vocab_size))
    with casting(NARROW, MOVE):  # heads are made in fp32
        head.attach(target)
        head.initialise(target)
        head.to(dtype)
    with torch.no_grad():
        for parameter, weight in head.named_parameters():
            weight.add_(torch.randn_like(weight) * (0.02 if "adapter" in parameter else 0.1))
    return Subject(name, head.eval(), target, prompts, documents)


def loss_per_row(subject: Subject, batch: FeatureBatch) -> float:
    with torch.no_grad():
        return float(subject.head.loss(batch, subject.target).total) / batch.loss_rows()


def train(subject: Subject, steps: int = 20) -> None:
    """A moment of training, with the loss before and after it. An adapter joins in halfway."""
    head, batch = subject.head, pack(subject.documents)
    head.engine.progress = JOINT
    subject.before = loss_per_row(subject, batch)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    head.train()
    for step in range(steps):
        head.engine.progress = step / steps
        optimizer.zero_grad()
        head.loss(batch, subject.target).total.backward()
        optimizer.step()
    optimizer.zero_grad()
    head.eval().engine.progress = JOINT
    subject.after = loss_per_row(subject, batch)


@pytest.fixture(scope="module", params=CASES)
def one(request) -> Subject:
    """A case, trained for a moment."""
    subject = make_subject(request.param)
    subject.weights = {name: value.clone() for name, value in subject.target.model.state_dict().items()}
    train(subject)
    return subject


NARROW, MOVE = Tensor.float, Tensor.to


@contextmanager
def casting(narrow: Callable[..., Tensor], move: Callable[..., Tensor]):
    """Tensors are cast by these for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", narrow)
        patch.setattr(Tensor, "to", move)
        yield


@pytest.fixture(scope="module", autouse=True)
def exact():
    """fp64 stays fp64: heads would round their logits to fp32, and Hugging Face its norms."""

    def move(self: Tensor, *args, **options):
        rounds = self.dtype is torch.float64 and any(kind is torch.float32 for kind in (*args, *options.values()))
        return self if rounds else MOVE(self, *args, **options)

    with casting(lambda self: self if self.dtype is torch.float64 else NARROW(self), move):
        yield


# Ways to look at a head


@contextmanager
def growing(replacement: Callable[..., Tree]):
    """Every head grows its drafts by `replacement`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("headwright.heads.") and getattr(module, "grow", None) is grow:
                patch.setattr(module, "grow", replacement)
        yield


def rows_of(
    subject: Subject, ids: list[int], begin: int, end: int, states: Features | None = None, **options
) -> Context:
    """Rows `begin` to `end` of a text, as the decoder tells them; `seed` makes the numbers, `policy` has the children drawn."""
    states = states or subject.target.features(torch.tensor([ids]))
    generator = torch.Generator().manual_seed(options.pop("seed", 0))
    policy = options.pop("policy", Policy())
    return Context(
        subject.target,
        torch.tensor([ids[begin + 1 : end + 1]]),
        states.taps_BNKD[:, begin:end],
        states.last_BND[:, begin:end],
        policy,
        lambda: torch.rand(1, generator=generator, dtype=torch.float64),
        sampled=not policy.greedy,
        texts=[ids[begin + 1 if begin else 0 : end + 1]],
    )


def along(subject: Subject, ids: list[int]) -> dict[tuple[int, int], Tensor]:
    """Logits [W] at (row, step): a draft with the cache at every row of a text, one after the other, led along the text."""
    if tuple(ids) in subject.led:
        return subject.led[tuple(ids)]
    head, states = subject.head, subject.target.features(torch.tensor([ids]))
    found = subject.led[tuple(ids)] = {}
    state = head.start(1, len(ids) + subject.depth)

    def lead(shape: TreeShape, context: Context, logits_BW: Tensor, step, ids_W: Tensor) -> None:
        found[row, 0] = logits_BW[0]
        for i in range(1, shape.depth):
            token = ids[row + 1 + i]
            found[row, i] = step(torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.long))[0, 0]

    with growing(lead):
        for row in range(len(ids) - 1):
            depth = min(subject.depth, len(ids) - 1 - row)
            head.propose(state, rows_of(subject, ids, row, row + 1, states), TreeShape.chain(depth))
    return found


@torch.no_grad()
def rolled(subject: Subject, batch: FeatureBatch, steps: int) -> dict[tuple[int, int], Tensor]:
    """Logits [W] at (row of the batch, step), as the loss has them."""
    plan, found = plan_rows(batch, steps), {}
    weights = subject.head.projections(subject.target)
    for i, output in enumerate(subject.head.outputs(batch, subject.target, plan)):
        logits_NW = output @ weights[min(i, len(weights) - 1)].T
        found |= {(row, i): logits for row, logits in zip(plan.rows_P.tolist(), logits_NW)}
    return found


def after_paths(subject: Subject, ids: list[int], paths: list[list[int]]) -> list[Tensor]:
    """The head's logits after a text and some guesses of its own, one packed document for each path."""
    row, documents = len(ids) - 2, []
    for path in paths:
        text = [*ids, *path, 0, 0]
        learn = torch.arange(len(text)) == row
        documents.append(document(subject.target, text, [place > row for place in range(len(text))], learn))
    batch = pack(documents)
    found = rolled(subject, batch, 1 + max(map(len, paths)))
    starts = [int((batch.segment_T < number).sum()) for number in range(len(paths))]
    return [found[start + row, len(path)] for start, path in zip(starts, paths)]


def paths_of(tree: Tree, row: int = 0) -> list[list[int]]:
    """The guesses on the way to each node, its own included; the root has none."""
    paths: list[list[int]] = [[]]
    for token, parent in list(zip(tree.tokens_BN[row].tolist(), tree.parents_BN[row].tolist()))[1:]:
        paths.append([*paths[parent], token])
    return paths


def same_trees(mine: Tree, other: Tree, tolerance: float = 1e-5) -> bool:
    """Equal guesses, layouts and scores."""
    scores = (mine.logprobs_BN - other.logprobs_BN).abs().max() <= tolerance
    columns = zip((mine.tokens_BN, mine.parents_BN, mine.depth_BN), (other.tokens_BN, other.parents_BN, other.depth_BN))
    return bool(scores) and all(torch.equal(a, b) for a, b in columns)


def starts_of(batch: FeatureBatch) -> list[int]:
    return [int((batch.segment_T < number).sum()) for number in batch.segment_T.unique()]


# 1. What is learned is what is drafted


def check_rollout(subject: Subject, documents: list[DocumentFeatures], tolerance: float) -> int:
    """Rollout step i at every computed row ≡ i draft steps with the cache. Returns how many were compared."""
    batch, compared = pack(documents), 0
    found = rolled(subject, batch, subject.depth)
    for start, chat in zip(starts_of(batch), documents):
        for (row, i), logits in along(subject, chat.ids_T.tolist()).items():
            if (start + row, i) in found:
                assert torch.allclose(found[start + row, i], logits, rtol=0, atol=tolerance), (row, i)
                compared += 1
    assert compared >= int(batch.loss_masks(subject.depth).sum())
    return compared


def test_rollout_equals_sequential_drafts(one):
    """In documents of several turns, packed: first, middle and last rows of every answer."""
    assert check_rollout(one, one.documents, 1e-9) > 100


@settings(max_examples=2, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=2, max_size=10), min_size=1, max_size=3), seed=st.integers(0, 99)
)
def test_rollout_equals_sequential_drafts_on_any_text(one, masks, seed):
    """Any turns, answers from the first token on, documents without any."""
    texts = [random_ids(len(mask), seed + place) for place, mask in enumerate(masks)]
    documents = [document(one.target, text, mask) for text, mask in zip(texts, masks)]
    documents.append(document(one.target, random_ids(8, 5), [place > 1 for place in range(8)]))  # rows at every step
    check_rollout(one, documents, 1e-9)


@pytest.mark.parametrize("length", [0, 2])
def test_answers_that_do_not_reach_the_last_step(one, length):
    """No row at later steps, or none at all (a rank without a batch): the loss of what there is, and all gradients."""
    head, mask = one.head, [2 < place < 3 + length for place in range(9)]
    head.zero_grad()
    total = head.loss(pack([document(one.target, random_ids(9, 1), mask)]), one.target).total
    total.backward()
    gradients = [weight.grad for weight in head.parameters()]
    head.zero_grad()
    assert (float(total.detach()) > 0) == (length > 1)
    assert all(grad is not None and grad.isfinite().all() and (length > 1 or not grad.any()) for grad in gradients)


def test_agreement_of_a_text_without_an_answer(one):
    """Nothing agrees, and nothing has a rank."""
    batch = pack([document(one.target, random_ids(5, 1), [False] * 5)])
    assert not one.head.agreement(batch, one.target, 2).any()
    assert (one.head.ranks(batch, one.target, 2) == -1).all()


@pytest.mark.parametrize(
    ("name", "option"), [("eagle3", {"norm_output": True}), ("mtp", {"feed": "raw"}), ("mtp-chain", {"feed": "raw"})]
)
def test_what_the_next_step_reads_is_an_option(name, option):
    """The same weights: step 0 is the same, and every later step is another."""
    subject = make_subject(name)
    batch = pack(subject.documents)
    before = rolled(subject, batch, 3)
    vars(subject.head.config).update(option)
    after = rolled(subject, batch, 3)
    for (row, i), logits_W in before.items():
        assert torch.equal(after[row, i], logits_W) == (i == 0), (row, i)


# 2. Speculative text is the target's


def check_text(subject: Subject, shapes: list[TreeShape], count: int = 9) -> list[Generation]:
    """Alone, and in a ragged batch whose places are taken by further prompts."""
    plain = subject.said(count)
    found = []
    for shape in shapes:
        alone, batch = (
            generate(
                subject.target, subject.head, prompts, Settings(shape, count, ignore_eos=True, batch=2)
            ).generations
            for prompts in (subject.prompts[:1], subject.prompts)
        )
        assert [out.tokens for out in batch] == plain, shape.name
        assert alone[0].tokens == plain[0], shape.name
        assert (alone[0].accepted, alone[0].emitted) == (batch[0].accepted, batch[0].emitted), shape.name
        found += batch
    return found


def test_greedy_text_is_the_targets(one):
    """Speculative ≡ plain, and the head's drafts are accepted now and then: they are no dead weight."""
    found = check_text(one, one.shapes())
    assert sum(sum(out.accepted) for out in found) > 5


@pytest.mark.parametrize(("name", "family"), FAMILIES)
def test_greedy_text_of_other_families(name, family):
    """Rollout ≡ drafts and speculative ≡ plain, for heads that have learned a little."""
    subject = make_subject(name, family)
    train(subject, 8)
    check_rollout(subject, subject.documents[2:], 1e-9)
    check_text(subject, subject.shapes()[:3:2], 8)


# 3. A tree holds the head's own distributions


def test_sampled_trees_are_drawn_from_the_head(one):
    """The same numbers, the same tree; each proposal is softmax(logits / temperature) after the node's path."""
    ids = one.documents[0].ids_T.tolist()[:17]
    for shape in one.shapes():
        trees = []
        for seed in (7, 7, 8):
            context = rows_of(one, ids, 0, len(ids) - 1, policy=WARM, seed=seed)
            trees.append(one.head.propose(one.head.start(1, 20), context, shape))
        first, again, other = trees
        assert same_trees(first, again, 0.0)
        assert torch.equal(first.proposal.q_BFW, again.proposal.q_BFW)
        assert not torch.equal(first.tokens_BN, other.tokens_BN)
        assert torch.equal(first.parents_BN, other.parents_BN)
        q_FW, paths = first.proposal.q_BFW[0], paths_of(first)
        nodes = [node for node, place in enumerate(first.proposal.of) if place >= 0]
        assert len(nodes) == len(q_FW)
        assert torch.allclose(q_FW.sum(-1), torch.ones(len(q_FW), dtype=q_FW.dtype), atol=1e-5)
        for node, logits_W in zip(nodes, after_paths(one, ids, [paths[node] for node in nodes])):
            expected_W = (logits_W / 0.8).softmax(-1).to(q_FW.dtype)
            assert torch.allclose(q_FW[first.proposal.of[node]], expected_W, rtol=1e-4, atol=1e-6), (shape.name, node)


def test_greedy_trees_are_the_heads_first_choices(one):
    """Each node's score is the sum of log-softmax along its path; its token is of the rank that the shape asks for."""
    ids = one.documents[1].ids_T.tolist()[:15]
    for shape in one.shapes():
        tree = one.head.propose(one.head.start(1, 20), rows_of(one, ids, 0, len(ids) - 1), shape)
        assert tree.proposal is None
        paths, parents = paths_of(tree), tree.parents_BN[0].tolist()
        inner = sorted(set(parents) - {-1})
        logits = dict(zip(inner, after_paths(one, ids, [paths[node] for node in inner])))
        for node in range(1, len(paths)):
            logp_W = logits[parents[node]].log_softmax(-1)
            place = int(one.head.choices_V[paths[node][-1]])
            above = float(tree.logprobs_BN[0, parents[node]])
            assert float(tree.logprobs_BN[0, node]) == pytest.approx(above + float(logp_W[place]), abs=1e-4)
            rank = int((logp_W > logp_W[place]).sum())
            assert rank == shape.paths[node - 1][-1] if shape.kind != "dynamic" else rank < shape.top_k, shape.name


# 4. Oracles


def oracle(texts: list[list[int]], prompts: list[list[int]], shift: int, vocabulary: int) -> Callable[..., Tree]:
    """`grow` with the logits replaced by what the target will say (or, shifted, never says). The head runs all the same."""
    places = [len(prompt) - 1 for prompt in prompts]
    whole = [prompt + text for prompt, text in zip(prompts, texts)]

    def known(depth: int, like: Tensor) -> Tensor:
        logits = torch.zeros(*like.shape[:-1], vocabulary)
        for row, (text, place) in enumerate(zip(whole, places)):
            logits[row, ..., (text[place + 1 + depth] + shift) % vocabulary] = 50.0
        return logits

    def replacement(shape: TreeShape, context: Context, logits_BW: Tensor, step, ids_W: Tensor) -> Tree:
        depth = 0
        for row, new in enumerate(context.texts):
            places[row] += len(new)
            assert whole[row][places[row]] == new[-1] == int(context.root_B[row])

        def guess(tokens_Bk: Tensor, parents_Bk: Tensor) -> Tensor:
            nonlocal depth
            depth += 1
            return known(depth, step(tokens_Bk, parents_Bk))

        return grow(shape, context, known(0, logits_BW), guess, torch.arange(vocabulary))

    return replacement


@pytest.mark.parametrize("shift", [0, 1], ids=["right", "wrong"])
def test_an_oracle_is_accepted_whole_and_its_opposite_never(one, shift):
    """Chains of the target's text: τ = K + 1 in every cycle; of anything else: τ = 1. Neither changes the text."""
    depth, prompts = one.depth, [*one.prompts[:2], one.prompts[1][:4]]
    cycles = 2
    texts = greedy(one.target, prompts, 1 + (cycles + 1) * (depth + 1))
    count = 1 + cycles * (depth + 1)
    ways = Settings(TreeShape.chain(depth), count, ignore_eos=True, batch=3)
    with growing(oracle(texts, prompts, shift, one.target.spec.vocab_size)):
        found = generate(one.target, one.head, prompts, ways).generations
    for out, text in zip(found, texts):
        assert out.tokens == text[:count]
        assert out.emitted == ([1] * (count - 1) if shift else [depth + 1] * cycles)
        assert out.acceptance_length == (1 if shift else depth + 1)


def test_a_random_head_gets_little(one):
    """And costs no token. A random head is one whose states have nothing to do with what it guesses."""
    generator = torch.Generator().manual_seed(3)

    def noise(shape: TreeShape, context: Context, logits_BW: Tensor, step, ids_W: Tensor) -> Tree:
        def guess(*frontier: Tensor) -> Tensor:
            return torch.randn(step(*frontier).shape, generator=generator)

        return grow(shape, context, torch.randn(logits_BW.shape, generator=generator), guess, ids_W)

    with growing(noise):
        found = check_random(one)
    assert sum(sum(out.accepted) for out in found) <= 0.1 * sum(sum(out.drafted) for out in found)


def check_random(subject: Subject) -> list[Generation]:
    plain = subject.said(10)
    ways = Settings(TreeShape.chain(min(3, subject.depth)), 10, ignore_eos=True, batch=3)
    found = generate(subject.target, subject.head, subject.prompts, ways).generations
    assert [out.tokens for out in found] == plain
    return found


# 5. Gradients


@pytest.fixture
def gradients(one):
    """One training step's gradients, at a point of the training."""

    def run(progress: float) -> dict[str, Tensor | None]:
        one.head.engine.progress = progress
        one.head.zero_grad()
        one.head.train()
        one.head.loss(pack(one.documents), one.target).total.backward()
        return {name: weight.grad for name, weight in one.head.named_parameters()}

    yield run
    one.head.eval().zero_grad()
    one.head.engine.progress = JOINT


def test_every_parameter_learns_and_nothing_else(one, gradients):
    """All of the head gets a gradient. The target's own weights get none, and the training has not moved them."""
    own = {id(weight) for weight in one.head.parameters()}
    for name, grad in gradients(JOINT).items():
        assert grad is not None, name
        assert torch.isfinite(grad).all(), name
        assert grad.abs().max() > 0, name
    for name, weight in one.target.model.named_parameters():
        assert ("lora_" in name) == (id(weight) in own), name
        assert weight.requires_grad == (id(weight) in own), name
        assert id(weight) in own or weight.grad is None, name
    after = one.target.model.state_dict()
    assert after.keys() == one.weights.keys()
    changed = [name for name, value in after.items() if not torch.equal(value, one.weights[name])]
    assert all("lora_" in name for name in changed)
    assert bool(changed) == one.adapted


def test_what_is_shared_is_no_parameter(one):
    """A shared lm_head is the target's rows themselves, an own one is none of them."""
    options, own = CASES[one.name], {weight.data_ptr() for weight in one.head.parameters()}
    shared = options.get("lm_head") == "shared" or options["kind"] in ("eagle1", "mtp")
    rows = one.target.lm_head.weight[one.head.ids_W]
    for weight in one.head.projections(one.target):
        assert shared == torch.equal(weight, rows)
        assert shared != weight.requires_grad
    assert one.target.lm_head.weight.data_ptr() not in own
    assert one.target.model.get_input_embeddings().weight.data_ptr() not in own


def test_an_adapter_learns_in_its_joint_phase_only(one, gradients):
    """Before it the heads learn alone; then both do."""
    early = gradients(0.2)
    moved = {name for name, grad in early.items() if grad is not None and grad.abs().max() > 0}
    assert moved == {name for name in early if not name.startswith("adapter.")}
    assert any(name.startswith("adapter.") for name in early) == one.adapted
    late = gradients(JOINT)
    assert all(grad is not None and grad.abs().max() > 0 for grad in late.values())


def test_gradients_are_the_slope_of_the_loss(one):
    """Along a random direction ≡ differences of the loss. HASS cuts its gradients on purpose."""
    batch, weights, generator = pack(one.documents), list(one.head.parameters()), torch.Generator().manual_seed(2)
    one.head.zero_grad()
    one.head.loss(batch, one.target).total.backward()
    before = [weight.detach().clone() for weight in weights]
    ways = [torch.randn(weight.shape, generator=generator, dtype=weight.dtype) for weight in weights]
    slope = float(sum((weight.grad * way).sum() for weight, way in zip(weights, ways)))
    one.head.zero_grad()
    found = []
    with torch.no_grad():
        for step in (1e-6, -1e-6, 0.0):
            for weight, start, way in zip(weights, before, ways):
                weight.copy_(start + step * way)
            found.append(float(one.head.loss(batch, one.target).total))
    assert (slope == pytest.approx((found[0] - found[1]) / 2e-6, rel=1e-5, abs=1e-4)) == (one.name != "hass")


@pytest.mark.parametrize("name", ["eagle1", "hass"])
def test_a_detached_step_does_not_teach_the_one_before(name):
    """HASS: no gradient from step 1 into what it read of step 0; EAGLE-1's rollout has one."""
    subject = make_subject(name)
    batch = pack(subject.documents)
    outputs = subject.head.outputs(batch, subject.target, plan_rows(batch, 2))
    (through,) = torch.autograd.grad(outputs[1].sum(), outputs[0], allow_unused=True)
    assert (through is None) == (name == "hass")


# 6. Saved and loaded


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_head_drafts_the_same_bit_for_bit(name, tmp_path):
    """On a target that another process would have loaded: trees, proposals and texts."""
    subject = make_subject(name, dtype=torch.float32)
    ids = subject.documents[0].ids_T.tolist()[:15]

    def drafts(subject: Subject) -> list[Tree]:
        return [
            subject.head.propose(
                subject.head.start(1, 20), rows_of(subject, ids, 0, len(ids) - 1, policy=policy), shape
            )
            for shape in subject.shapes()[:3:2]
            for policy in (Policy(), WARM)
        ]

    def text(subject: Subject) -> tuple[list[int], list[int]]:
        ways = Settings(subject.shapes()[0], 6, ignore_eos=True)
        [out] = generate(subject.target, subject.head, subject.prompts[:1], ways).generations
        return out.tokens, out.accepted

    before, said = drafts(subject), text(subject)
    save_head(subject.head, tmp_path)
    target = (make_target if subject.adapted else twin)("llama", subject.target.taps, torch.float32)
    loaded = Subject(name, load_head(tmp_path, target).eval(), target, subject.prompts, [])
    assert loaded.head.state_dict().keys() == subject.head.state_dict().keys()
    for mine, other in zip(before, drafts(loaded)):
        assert same_trees(mine, other, 0.0)
        assert torch.equal(mine.logprobs_BN, other.logprobs_BN)
        assert mine.proposal is None or torch.equal(mine.proposal.q_BFW, other.proposal.q_BFW)
    assert text(loaded) == said


# 7. What a head remembers


def memory(state) -> list[Tensor]:
    """All that a state holds of the confirmed rows, text by text."""
    kept = getattr(state, "cache", state)
    found = [value for value in vars(state).values() if isinstance(value, Tensor)] if kept is not state else []
    if isinstance(kept, KVCache):
        stores = [store for store in (*kept.keys, *kept.values) if store is not None]
        found += [store[row, :, :length] for store in stores for row, length in enumerate(kept.lengths)]
    return found


def same_memory(mine, other, tolerance: float = 1e-9) -> bool:
    pairs = list(zip(memory(mine), memory(other), strict=True))
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in pairs)


@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_memory_after_drafting_equals_a_fresh_prefill(one, data):
    """Rows taken in by any parts, drafts of any shape between them ≡ all at once. So nothing speculative has stayed."""
    ids = one.documents[0].ids_T.tolist()
    rows, states, done = len(ids) - 1, one.target.features(torch.tensor([ids])), 0
    state = one.head.start(1, data.draw(st.sampled_from([1, len(ids)]), "slots"))  # too few is no error
    while done < rows:
        part = data.draw(st.integers(1, min(6, rows - done)), "rows")
        policy = data.draw(st.sampled_from([Policy(), WARM]), "policy")
        context = rows_of(one, ids, done, done + part, states, policy=policy)
        if data.draw(st.booleans(), "draft"):
            one.head.propose(state, context, data.draw(st.sampled_from(one.shapes()), "shape"))
        else:
            one.head.absorb(state, context)
        done += part
        fresh = one.head.start(1, len(ids))
        one.head.absorb(fresh, rows_of(one, ids, 0, done, states))
        assert same_memory(state, fresh)
    shape = one.shapes()[2]
    # one more row is confirmed: the next draft is that of a head that saw everything at once
    longer = [*ids, 7]
    states = one.target.features(torch.tensor([longer]))
    here = one.head.propose(state, rows_of(one, longer, rows, rows + 1, states), shape)
    there = one.head.propose(one.head.start(1, 40), rows_of(one, longer, 0, rows + 1, states), shape)
    assert same_trees(here, there)


@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_texts_of_a_batch_do_not_know_of_each_other(one, data):
    """put, drafts, select and put again in a ragged batch ≡ each text alone."""
    head, shape = one.head, data.draw(st.sampled_from(one.shapes()), "shape")
    texts = [chat.ids_T.tolist() for chat in one.documents]
    states = [one.target.features(torch.tensor([text])) for text in texts]
    done = data.draw(st.permutations([1, 5, 7]), "begin")

    def alone(text: int):
        state = head.start(1, 40)
        head.absorb(state, rows_of(one, texts[text], 0, done[text], states[text]))
        return state

    def advance(batch, seats: list[int]) -> None:
        """Some rows of each seat are confirmed; its draft is that of its text alone."""
        new = data.draw(st.permutations([1, 2, 4]), "rows")
        parts = [
            rows_of(one, texts[text], done[text], done[text] + count, states[text]) for text, count in zip(seats, new)
        ]
        tree = head.propose(batch, together(parts), shape)
        for row, (text, part) in enumerate(zip(seats, parts)):
            single = head.propose(alone(text), part, shape)
            columns = (tree.tokens_BN, tree.parents_BN, tree.depth_BN, tree.logprobs_BN)
            assert same_trees(Tree(*(column[row : row + 1] for column in columns)), single), (row, text)
            done[text] += part.counts[0]

    batch = head.start(len(texts), 40)
    for row in range(len(texts)):
        batch.put(row, alone(row))
    seats = [0, 1, 2]
    advance(batch, seats)
    order = data.draw(st.sampled_from([[2, 0], [1, 2], [2, 1]]), "stay")
    batch.select(order)
    seats = [seats[place] for place in order]
    advance(batch, seats)
    newcomer = ({0, 1, 2} - set(seats)).pop()
    batch.put(1, alone(newcomer))
    advance(batch, [seats[0], newcomer])


# 8. Agreement and ranks


def test_agreement_and_ranks_are_those_of_drafts(one):
    """At each row and step: agreement ≡ the greedy draft along the text guesses its token ≡ rank 0. Ranks are the draft's."""
    steps = one.depth + 1  # one more than a head of fixed depth has
    batch = pack(one.documents)
    agreement_TI, ranks_TI = (look(batch, one.target, steps) for look in (one.head.agreement, one.head.ranks))
    assert agreement_TI.shape == ranks_TI.shape == (len(batch.ids_T), steps)
    asked, right, unsayable = 0, 0, 0
    bears_TI = batch.loss_masks(steps)
    for start, chat in zip(starts_of(batch), one.documents):
        drafts = along(one, chat.ids_T.tolist())
        for row in range(len(chat.ids_T)):
            for i in range(steps):
                agrees, rank = bool(agreement_TI[start + row, i]), int(ranks_TI[start + row, i])
                if not bears_TI[start + row, i] or i >= one.depth:
                    if i < one.depth or one.head.deepest:
                        assert (agrees, rank) == (False, -1)
                    continue
                token, logits_W = int(chat.ids_T[row + 2 + i]), drafts[row, i]
                place = int(one.head.choices_V[token])
                assert rank == (-1 if place < 0 else int((logits_W > logits_W[place]).sum())), (row, i)
                assert agrees == (int(one.head.ids_W[logits_W.argmax()]) == token) == (rank == 0), (row, i)
                asked, right, unsayable = asked + 1, right + agrees, unsayable + (place < 0)
    assert 0 < right < asked
    assert asked > 100


def test_agreement_is_what_a_greedy_chain_gets_accepted(one):
    """On text that the target wrote greedily: the decoder accepts the run of agreeing steps at the row it drafts from."""
    target, depth, prompt = one.target, one.depth, one.prompts[1]
    text = greedy(target, [prompt], 16 + depth)[0]
    ids = prompt + text
    batch = pack([document(target, ids, [False] * len(prompt) + [True] * len(text))])
    right_TI = one.head.agreement(batch, target, depth)
    out = generate(target, one.head, [prompt], Settings(TreeShape.chain(depth), 16, ignore_eos=True)).generations[0]
    row, accepted = len(prompt) - 1, []
    while sum(accepted) + len(accepted) < 15:
        accepted.append(int(right_TI[row].int().cumprod(0).sum()))
        row += accepted[-1] + 1
    assert [count + 1 for count in accepted][: len(out.emitted) - 1] == out.emitted[:-1]
    assert out.accepted[:-1] == accepted[: len(out.accepted) - 1]


# 9. The loss


def test_the_loss_falls(one):
    assert one.after < 0.8 * one.before


@settings(max_examples=2, deadline=None)
@given(order=st.permutations(range(3)))
def test_the_loss_does_not_depend_on_packing(one, order):
    """Documents together, in any order ≡ each alone: the loss, its metrics and all gradients."""

    def measure(batches: list[FeatureBatch]) -> tuple[float, dict[str, list[float]], list[Tensor]]:
        one.head.zero_grad()
        total, metrics = 0.0, {}
        for batch in batches:
            out = one.head.loss(batch, one.target)
            out.total.backward()
            total += float(out.total.detach())
            for name, pair in out.metrics.items():
                metrics[name] = [a + float(b) for a, b in zip(metrics.get(name, [0.0, 0.0]), pair)]
        return total, metrics, [weight.grad.clone() for weight in one.head.parameters()]

    together_, alone = (
        measure([pack([one.documents[k] for k in order])]),
        measure([pack([chat]) for chat in one.documents]),
    )
    one.head.zero_grad()
    assert together_[0] == pytest.approx(alone[0], rel=1e-8)
    assert together_[1].keys() == alone[1].keys()
    for name, pair in together_[1].items():
        assert pair == pytest.approx(alone[1][name], rel=1e-6, abs=1e-8), name
    for mine, other in zip(together_[2], alone[2]):
        assert torch.allclose(mine, other, rtol=1e-6, atol=1e-8)


def token_loss(name: str, p_W: Tensor, logq_W: Tensor) -> float:
    """Two of the losses, of one row."""
    if name == "kl":
        return float((p_W * (p_W.log() - logq_W)).sum())
    assert name == "topk"
    best = p_W.argsort(descending=True)[:10]
    return float(-(p_W[best] * logq_W[best]).sum())


def dense_loss(subject: Subject) -> float:
    """Σ_i weight^i Σ_rows loss(p, q), row by row from drafts along the text; EAGLE-1 also regresses features."""
    config, kept, total = subject.head.config, subject.head.ids_W, 0.0
    mix = config.loss if isinstance(config.loss, dict) else {config.loss: 1.0}
    features = {}
    if config.kind == "eagle1":
        batch = pack(subject.documents)
        plan = plan_rows(batch, config.steps)
        with torch.no_grad():
            outputs = subject.head.outputs(batch, subject.target, plan)
        features = {(row, i): out for i, part in enumerate(outputs) for row, out in zip(plan.rows_P.tolist(), part)}
    start = 0
    for chat in subject.documents:
        drafts, mask, positions = along(subject, chat.ids_T.tolist()), chat.mask_T.tolist(), last_rows(chat.mask_T)
        for row in range(len(mask)):
            for i in range(config.steps):
                if row + 2 + i >= len(mask) or not all(mask[row + 1 : row + 3 + i]):
                    continue
                last_D = chat.last_RD[positions.tolist().index(row + 1 + i)]
                logits_V = subject.target.lm_head.weight @ last_D
                if config.out_of_vocab == "drop" and int(logits_V.argmax()) not in kept:
                    continue
                p_W, logq_W = logits_V[kept].softmax(-1), drafts[row, i].log_softmax(-1)
                value = sum(share * token_loss(name, p_W, logq_W) for name, share in mix.items())
                if features:
                    value += float(F.smooth_l1_loss(features[start + row, i], last_D))
                total += config.step_weight**i * value
        start += len(mask)
    return total


def test_the_loss_is_the_dense_sum(one):
    """By its equations: the rows that bear loss, each with what a draft there says."""
    batch = pack(one.documents)
    first_R = one.head.choices_V[batch.argmax_R]
    assert (first_R < 0).any(), "some rows should be dropped"
    expected, kept = dense_loss(one), 0.0
    if one.adapted:  # the distance of the adapted target from what it was, and a ramp for the heads
        expected *= 0.2 * math.sin(math.pi / 2 * (JOINT - 0.5) / 0.5) * one.head.config.step_weight
        for chat in one.documents:
            rows = torch.nonzero(pack([chat]).loss_masks(1)[:, 0])[:, 0]
            places = [last_rows(chat.mask_T).tolist().index(row + 1) for row in rows.tolist()]
            p = one.target.logits(chat.last_RD[places]).softmax(-1)
            now = one.target.features(chat.ids_T[None]).last_BND[0, rows + 1]
            kept += float((p * (p.log() - one.target.logits(now).log_softmax(-1))).sum())
        assert kept > 0
    with torch.no_grad():
        total = float(one.head.loss(batch, one.target).total)
    assert total == pytest.approx(expected + kept, rel=1e-6)
