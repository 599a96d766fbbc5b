"""Answers in ragged batches: the target's own text, and the states of a fresh pass over it."""

import pytest
import torch
from conftest import TAPS, VOCAB, make_target
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.data.batch import last_rows
from headwright.data.generate import Question, answer, read_documents
from headwright.data.sampling import Policy

FAMILIES = ("llama", "qwen3", "gemma2", "mistral")
TARGETS = {family: make_target(family) for family in FAMILIES}
SAMPLED = Policy(1.3, top_p=0.95)


def prompts(lengths, seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]


def greedy(rows: list[list[int]]) -> list[Question]:
    """Greedy questions."""
    return [Question(row, Policy()) for row in rows]


def answer_of(document) -> list[int]:
    """The response tokens."""
    return document.ids_T[document.mask_T].tolist()


def ending(target, rows: list[list[int]], max_new_tokens: int, monkeypatch) -> None:
    """Make a token that some answer says in its middle the end of text, so that rows end at different times."""
    said = [answer_of(d) for d in answer(target, greedy(rows), max_new_tokens)]
    token = next(token for token in said[0][2:] if token not in said[0][:2])
    spec = target.spec
    monkeypatch.setattr(target, "spec", type(spec)(**{**vars(spec), "eos_token_ids": (token,)}))


def close(mine: torch.Tensor, reference: torch.Tensor) -> None:
    """Equal in fp32, relative to the size of the states."""
    scale = float(reference.abs().max()) if reference.numel() else 0.0
    torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4 * scale)


def assert_states(target, document) -> None:
    """The kept states are those of one pass over the whole text."""
    features = target.features(document.ids_T[None])
    rows = last_rows(document.mask_T)
    close(document.taps_TKD, features.taps_BNKD[0])
    assert document.taps_TKD.shape == (len(document.ids_T), len(TAPS), 32)
    assert len(document.last_RD) == len(document.argmax_R) == len(document.logz_R) == len(rows)
    if len(rows):
        close(document.last_RD, features.last_BND[0, rows])
        logits = target.logits(features.last_BND[0, rows])
        close(document.logz_R, logits.logsumexp(-1))
        top = logits.topk(2, dim=-1)
        sure = top.values[:, 0] - top.values[:, 1] > 1e-3
        assert torch.equal(document.argmax_R[sure], top.indices[sure, 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_hugging_faces(family):
    """Prompts of 1 to 25 tokens in one batch, each as `generate` continues it alone; windows are 9 wide."""
    target, rows = TARGETS[family], prompts([1, 25, 4, 13])
    documents = answer(target, greedy(rows), 20)
    for row, document in zip(rows, documents):
        assert answer_of(document) == target.generate_hf(torch.tensor([row]), 20)
        assert document.ids_T[: len(row)].tolist() == row
        assert document.mask_T.tolist() == [False] * len(row) + [True] * (len(document.ids_T) - len(row))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", [Policy(), SAMPLED], ids=["greedy", "sampled"])
def test_kept_states_are_those_of_a_fresh_pass(family, policy):
    target = TARGETS[family]
    for document in answer(target, [Question(row, policy, 5 + i) for i, row in enumerate(prompts([3, 17, 8]))], 12):
        assert_states(target, document)


def test_greedy_argmax_is_the_next_token():
    for document in answer(TARGETS["llama"], greedy(prompts([5, 9])), 12):
        assert document.argmax_R.tolist() == answer_of(document)[1:]


@settings(max_examples=8, deadline=None)
@given(
    mates=st.lists(st.integers(1, 20), max_size=3),
    place=st.integers(0, 3),
    seed=st.integers(0, 2**63 - 1),
    policy=st.sampled_from([SAMPLED, Policy(0.7, top_k=20)]),
)
def test_sampled_row_does_not_depend_on_its_batch(mates, place, seed, policy):
    target, row = TARGETS["llama"], prompts([7], seed=9)[0]
    alone = answer(target, [Question(row, policy, seed)], 10)[0]
    others = [
        Question(ids, (Policy(), SAMPLED, Policy(0.5))[i % 3], seed + 1 if seed < 100 else 3)
        for i, ids in enumerate(prompts(mates, seed=4))
    ]
    others.insert(min(place, len(others)), Question(row, policy, seed))
    together = answer(target, others, 10)[min(place, len(others) - 1)]
    assert together.ids_T.tolist() == alone.ids_T.tolist()
    close(together.taps_TKD, alone.taps_TKD)


def test_seed_makes_the_draw():
    row = prompts([7])[0]
    texts = [answer_of(answer(TARGETS["llama"], [Question(row, SAMPLED, seed)], 12)[0]) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts}) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_end_at_their_own_time(family, monkeypatch):
    target, rows = TARGETS[family], prompts([6, 1, 19, 12, 9, 3], seed=2)
    ending(target, rows, 30, monkeypatch)
    end = target.spec.eos_token_ids[0]
    documents = answer(target, greedy(rows), 30)
    counts = set()
    for row, document in zip(rows, documents):
        said = answer_of(document)
        assert said == target.generate_hf(torch.tensor([row]), 30)
        assert end not in said[:-1]
        assert said[-1] == end or len(said) == 30
        assert_states(target, document)
        counts.add(len(said))
    assert len(counts) > 1


def test_ended_rows_leave_the_batch(monkeypatch):
    """The target is not run on rows whose answer has ended."""
    target, rows = TARGETS["llama"], prompts([6, 1, 19, 12], seed=2)
    ending(target, rows, 30, monkeypatch)
    widths = []
    extend = target.extend

    def watched(ids_BN, *args, **kwargs):
        widths.append(len(ids_BN))
        return extend(ids_BN, *args, **kwargs)

    monkeypatch.setattr(target, "extend", watched)
    documents = answer(target, greedy(rows), 30)
    lengths = [len(answer_of(d)) for d in documents]
    # one prefill, then one pass per token for each row that says at least that many
    assert widths == [4] + [sum(length > place for length in lengths) for place in range(max(lengths))]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_to_one_prompt_are_each_alone(family):
    """Several answers to one prompt among others: the same texts and states as one at a time."""
    target, (one, two) = TARGETS[family], prompts([11, 4], seed=8)
    asked = [Question(one, SAMPLED, 1), Question(two, Policy()), Question(one, Policy()), Question(one, SAMPLED, 2)]
    asked.append(Question(two, SAMPLED, 1))
    for question, document in zip(asked, answer(target, asked, 10), strict=True):
        alone = answer(target, [question], 10)[0]
        assert document.ids_T.tolist() == alone.ids_T.tolist()
        assert document.mask_T.tolist() == alone.mask_T.tolist()
        for name in ("taps_TKD", "last_RD", "logz_R"):
            close(getattr(document, name), getattr(alone, name))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_max_new_tokens(count):
    for document in answer(TARGETS["llama"], greedy(prompts([3, 8])), count):
        assert len(answer_of(document)) == count
        assert_states(TARGETS["llama"], document)


def test_stored_dtype():
    full = answer(TARGETS["llama"], greedy(prompts([4, 9])), 6)
    half = answer(TARGETS["llama"], greedy(prompts([4, 9])), 6, torch.bfloat16)
    for a, b in zip(full, half):
        assert torch.equal(a.ids_T, b.ids_T)
        assert torch.equal(a.taps_TKD.bfloat16(), b.taps_TKD)
        assert torch.equal(a.last_RD.bfloat16(), b.last_RD)
        assert torch.equal(a.logz_R, b.logz_R)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_read_again_are_the_same_documents(family):
    target = TARGETS[family]
    answered = answer(target, [Question(row, SAMPLED, i) for i, row in enumerate(prompts([3, 17, 8, 1]))], 12)
    read = read_documents(target, [(d.ids_T.tolist(), d.mask_T.tolist()) for d in answered])
    for a, b in zip(answered, read, strict=True):
        assert torch.equal(a.ids_T, b.ids_T)
        assert torch.equal(a.mask_T, b.mask_T)
        for name in ("taps_TKD", "last_RD", "logz_R"):
            close(getattr(b, name), getattr(a, name))
        assert_states(target, b)


@settings(max_examples=10, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=4), seed=st.integers(0, 99)
)
def test_reading_any_masks(masks, seed):
    """Several turns, no turn, a turn at the very beginning or end."""
    target = TARGETS["mistral"]
    generator = torch.Generator().manual_seed(seed)
    texts = [(torch.randint(VOCAB, (len(mask),), generator=generator).tolist(), mask) for mask in masks]
    for (ids, mask), document in zip(texts, read_documents(target, texts), strict=True):
        assert document.ids_T.tolist() == ids
        assert document.mask_T.tolist() == mask
        assert_states(target, document)


def test_empty_prompt_is_refused_or_right():
    """A row without a prompt must not take the states of its padding for its own."""
    target = TARGETS["llama"]
    try:
        documents = answer(target, greedy([[], *prompts([5])]), 4)
    except ValueError:
        return
    for document in documents:
        assert_states(target, document)
