"""Our decoder counts what the real vLLM counted: golden heads of every kind that it serves, without the engine.

tests/test_vllm.py asks the engine itself; tests/engine_cases.py makes heads and records what it says.
"""

import json
from dataclasses import asdict

import pytest
import torch
from engine_cases import CASES, GOLDEN, NEW, K, our_counters, own_texts, prompts, recorded, target_of

from headwright.eval.decode import generate
from headwright.eval.prove import Counters, counted
from headwright.eval.settings import Generation, Settings
from headwright.heads.base import Case
from headwright.heads.doctor import Question, diagnose
from headwright.heads.draft_tree import TreeShape
from headwright.heads.export import head_drafts, shared_tables
from headwright.heads.foreign import open_plain
from headwright.heads.saved import load_head


@pytest.mark.parametrize("name", CASES)
def test_our_counters_are_the_engines(name):
    found = asdict(our_counters(name))
    assert {key: recorded(name)[key] for key in found} == found


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_plain_decodings(name):
    target = target_of(name)
    head = load_head(GOLDEN / name, target, torch.float32).eval()
    settings = Settings(TreeShape.chain(K), NEW, ignore_eos=True, batch=4)
    texts = [out.tokens for out in generate(target, head, prompts(), settings).generations]
    assert texts == [text[len(prompt) :] for text, prompt in zip(own_texts(target, NEW), prompts())]


@pytest.mark.parametrize("name", CASES)
def test_the_independent_reader_drafts_the_same(name):
    """From the files alone, with tensors and equations."""
    target, plain = target_of(name), open_plain(GOLDEN / name)
    head = load_head(GOLDEN / name, target, torch.float32).eval()
    reader, tables = plain.method.reader(plain.config, plain.tensors), shared_tables(target)
    for prompt in prompts():
        found = target.features(torch.tensor([prompt]))
        case = Case(prompt[1:], found.taps_BNKD[0, :-1], found.last_BND[0, :-1])
        assert reader.draft(tables, case, K).tokens == head_drafts(head, target, case).tokens[:K]


@pytest.mark.parametrize("name", CASES)
def test_the_doctor_has_nothing_against_it(name):
    diagnosis = diagnose(GOLDEN / name, Question(engines=("vllm",)))
    assert not [finding for finding in diagnosis.all() if finding.level != "note"]


def test_cases_are_no_trivial_ones():
    """Some drafts stand at every position, and none always does: a fault in what is handed on would show."""
    for name in CASES:
        drafts, accepted = recorded(name)["drafts"], recorded(name)["accepted_per_pos"]
        assert drafts > accepted[0] > accepted[-1] > 0 or accepted[0] > 0.9 * drafts


def test_the_golden_folder_holds_these_cases_alone():
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(CASES)
    for name in CASES:
        assert {path.name for path in (GOLDEN / name).iterdir()} == {
            "config.json",
            "model.safetensors",
            "counters.json",
        }


# vLLM's way of counting


def made(*cycles: tuple[int, int]) -> Generation:
    """A text of cycles (accepted, emitted)."""
    return Generation(accepted=[a for a, _ in cycles], emitted=[e for _, e in cycles])


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (1, Counters(0, [0, 0, 0])),  # the prefill's token is all that is wanted
        (2, Counters(1, [1, 1, 0])),  # a cycle that runs over the end counts in full
        (4, Counters(1, [1, 1, 0])),
        (5, Counters(2, [1, 1, 0])),
        (6, Counters(3, [2, 2, 1])),
        (10, Counters(4, [3, 2, 1])),
    ],
)
def test_cycles_that_begin_before_the_end_count_in_full(tokens, wanted):
    text = made((2, 3), (0, 1), (3, 4), (1, 2), (3, 4))
    assert counted([text], tokens, 3) == wanted
    assert counted([text, text], tokens, 3) == Counters(2 * wanted.drafts, [2 * n for n in wanted.accepted_per_pos])


def test_tau_counts_the_bonus_token():
    assert Counters(4, [3, 2, 1]).acceptance_length == 2.5
    assert json.dumps(Counters(0, []).acceptance_length) == "NaN"
