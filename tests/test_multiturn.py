"""Chats answered turn by turn: the target hears its own earlier answers, and the mask covers its answers exactly."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import CHATML, TAPS, make_model, make_tokenizer, tiny_run

from headwright.data.batch import last_rows
from headwright.data.corpus import read_corpus
from headwright.data.generate import read_documents
from headwright.data.harvest import harvest, store_path
from headwright.data.store import FeatureReader
from headwright.data.target import Target

LETTERS = "abcdefghijklmnopqrstuvwxyz .,"
# What is said of earlier turns changes when there are later ones, as in templates that cut earlier reasoning.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}(cut){% else %}{{ m['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m.tool_calls %}CALL {{ m.tool_calls[0].function.name }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_talker(folder: Path, template: str = CHATML, ends: float = 1.3) -> Path:
    """A tiny model that says letters and, the more often the larger `ends`, stops."""
    tokenizer = make_tokenizer(template)
    model = make_model(tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id)
    said = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(LETTERS))
    keep = torch.zeros(len(model.lm_head.weight), 1)
    keep[said] = 1.0
    keep[tokenizer.eos_token_id] = ends
    with torch.no_grad():
        model.lm_head.weight.mul_(keep)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_chats(path: Path, rows: list[dict]) -> Path:
    """Chats as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(*contents: str) -> dict:
    """User and assistant in turn."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


CHATS = [chat(f"count to {i}", "one two", f"and to {i * 7}", "never", "go on", "three") for i in range(14)]


def talk_run(model: Path, chats: Path, runs: Path, max_length: int = 256, samples: int = 1, **answers):
    """A run over chats of several turns."""
    return tiny_run(
        model,
        chats,
        runs,
        corpus={"sources": [{"path": str(chats), "samples": samples}], "held_out": 0.2, "max_length": max_length},
        answers={"max_new_tokens": 12} | answers,
    )


@pytest.fixture(scope="module")
def talker(tmp_path_factory) -> Path:
    """A model that ends many of its answers."""
    return save_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Path:
    """Chats of three rounds."""
    return write_chats(tmp_path_factory.mktemp("several") / "chats.jsonl", CHATS)


def plain(run, target: Target, rounds: list[list[dict]]) -> list[tuple[list[int], list[int]]]:
    """The loop as one would write it by hand: (prompt, answer) of each turn, by transformers' own generate."""
    messages, found = [], []
    for asked in rounds[: run.answers.turns]:
        messages += asked
        prompt = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        if len(prompt) + run.answers.max_new_tokens > run.corpus.max_length:
            break
        answer = target.generate_hf(torch.tensor([prompt]), run.answers.max_new_tokens)
        found.append((prompt, answer))
        if answer[-1] not in target.spec.eos_token_ids:
            break
        text = target.tokenizer.decode(answer, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
    return found


def masked(turns: list[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[bool]]]:
    """The documents that these turns make: one, as long as each prompt continues the text before it."""
    found: list[tuple[list[int], list[bool]]] = []
    for prompt, answer in turns:
        known, mask = found[-1] if found else ([], [])
        if found and prompt[: len(known)] == known:
            found.pop()
        else:
            mask = []
        mask = mask + [False] * (len(prompt) - len(mask))
        found.append((prompt + answer, mask + [True] * len(answer)))
    return found


def check_store(run, target: Target, side: str = "train") -> list[int]:
    """The store holds exactly what the plain loop says, with the states of a fresh pass. Turns of each chat."""
    corpus, reader = read_corpus(run.corpus, run.seed), FeatureReader(store_path(run, side))
    documents = corpus.train if side == "train" else corpus.held_out
    kept: dict[str, list[int]] = {}
    for number, entry in enumerate(reader.notes):
        if entry["sample"] == 0:
            kept.setdefault(entry["key"], []).append(number)
    counts = []
    for document in documents:
        turns = plain(run, target, document.rounds)
        mine = [reader[number] for number in kept.pop(document.key)]
        assert [(d.ids_T.tolist(), d.mask_T.tolist()) for d in mine] == masked(turns)
        counts.append(len(turns))
    assert not kept
    for number in range(0, len(reader), 3):
        check_states(target, reader[number])
    return counts


def check_states(target: Target, document) -> None:
    """Equal to a fresh pass over the whole text."""
    [fresh] = read_documents(target, [(document.ids_T.tolist(), document.mask_T.tolist())])
    assert len(document.last_RD) == len(last_rows(document.mask_T))
    assert torch.equal(document.argmax_R, fresh.argmax_R)
    for name in ("taps_TKD", "last_RD", "logz_R"):
        mine, reference = getattr(document, name), getattr(fresh, name)
        scale = float(reference.abs().max()) if reference.numel() else 0.0
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("rows", [1, 7])
def test_harvest_is_the_plain_loop(talker, several, tmp_path, rows):
    """Alone or in ragged batches; both sides; later turns hear the target's own answers."""
    run = talk_run(talker, several, tmp_path)
    run.answers.rows = rows
    harvest(run)
    target = Target.load(run.target, TAPS)
    counts = check_store(run, target)
    assert {1, 3} <= set(counts)  # some were cut off at once, some went to the end
    assert len(FeatureReader(store_path(run, "train"))) == len(counts)
    check_store(run, target, "held-out")


def test_sampled_chats_hear_their_own_answers(talker, several, tmp_path):
    """A second sample: every prompt in it is the chat with what that sample said before, and the mask is exact."""
    run = talk_run(talker, several, tmp_path, samples=2, temperature=0.5, top_k=2)
    harvest(run)
    target = Target.load(run.target, TAPS)
    check_store(run, target)
    rounds = {document.key: document.rounds for document in read_corpus(run.corpus, run.seed).train}
    reader, drawn, longest = FeatureReader(store_path(run, "train")), 0, 0
    greedy = {e["key"]: d.ids_T.tolist() for e, d in zip(reader.notes, reader) if e["sample"] == 0}
    alone = Counter(entry["key"] for entry in reader.notes if entry["sample"])
    for entry, document in zip(reader.notes, reader, strict=True):
        if entry["sample"] == 0 or alone[entry["key"]] > 1:  # it said a special token, which its text does not keep
            continue
        check_states(target, document)
        drawn += document.ids_T.tolist() != greedy[entry["key"]]
        ids, mask, messages, place, turns = document.ids_T.tolist(), document.mask_T.tolist(), [], 0, 0
        while place < len(ids):
            messages += rounds[entry["key"]][turns]
            prompt = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            assert ids[: len(prompt)] == prompt
            assert not any(mask[place : len(prompt)])
            end = next((i for i in range(len(prompt), len(ids)) if not mask[i]), len(ids))
            assert end > len(prompt)
            said = target.tokenizer.decode(ids[len(prompt) : end], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": said})
            place, turns = end, turns + 1
        longest = max(longest, turns)
    assert drawn
    assert longest > 1


def test_template_that_rewrites_earlier_turns_gives_a_document_per_answer(several, tmp_path):
    run = talk_run(save_talker(tmp_path / "model", FORGETFUL), several, tmp_path)
    harvest(run)
    target = Target.load(run.target, TAPS)
    counts = check_store(run, target)
    reader = FeatureReader(store_path(run, "train"))
    assert len(reader) > len(counts)
    turns = [entry.get("turn", 0) for entry in reader.notes]
    assert set(turns) == {0, 1, 2}
    for document in reader:  # one answer each, at its end
        assert document.mask_T.tolist() == sorted(document.mask_T.tolist())


@pytest.mark.parametrize("turns", [1, 2, None])
def test_only_so_many_turns_are_answered(talker, several, tmp_path, turns):
    run = talk_run(talker, several, tmp_path, turns=turns)
    harvest(run)
    counts = check_store(run, Target.load(run.target, TAPS))
    assert max(counts) == (turns or 3)


def test_answer_that_is_cut_off_ends_its_chat(several, tmp_path):
    run = talk_run(save_talker(tmp_path / "model", ends=0.0), several, tmp_path)
    harvest(run)
    assert set(check_store(run, Target.load(run.target, TAPS))) == {1}
    assert all(int(document.mask_T.sum()) == 12 for document in FeatureReader(store_path(run, "train")))


def test_chat_that_grows_too_long_stops_early(talker, several, tmp_path):
    run, free = (talk_run(talker, several, tmp_path / str(n), max_length=n) for n in (95, 256))
    for each in (run, free):
        harvest(each)
    target = Target.load(run.target, TAPS)
    stopped, whole = check_store(run, target), check_store(free, target)
    assert sum(stopped) < sum(whole)
    assert all(a <= b for a, b in zip(stopped, whole))
    assert max(FeatureReader(store_path(run, "train")).lengths()) <= 95


def test_tool_calls_are_context_and_not_learned(tmp_path):
    call = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"count to {i}"},
                {"role": "assistant", "content": "", "tool_calls": call},
                {"role": "tool", "content": "42"},
                {"role": "assistant", "content": "never said"},
                {"role": "user", "content": "thanks"},
                {"role": "assistant", "content": "nor this"},
            ]
        }
        for i in range(24)
    ]
    path = write_chats(tmp_path / "chats.jsonl", rows)
    run = talk_run(save_talker(tmp_path / "model", TOOLS), path, tmp_path)
    harvest(run)
    target = Target.load(run.target, TAPS)
    assert max(check_store(run, target)) == 2
    for document in FeatureReader(store_path(run, "train")):
        told = target.tokenizer.decode(document.ids_T)
        assert "CALL look" in told
        assert "never said" not in told
        learned = target.tokenizer.decode(document.ids_T[document.mask_T])
        assert "CALL" not in learned
        assert "42" not in learned


def test_system_turns_and_chats_that_end_with_a_question(talker, tmp_path):
    rows = [
        {"messages": [{"role": "system", "content": "Be brief"}, *chat(f"count to {i}", "x", "go on")["messages"]]}
        for i in range(24)
    ]
    run = talk_run(talker, write_chats(tmp_path / "chats.jsonl", rows), tmp_path)
    harvest(run)
    assert max(check_store(run, Target.load(run.target, TAPS))) == 2
