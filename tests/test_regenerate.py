"""`headwright regenerate`, by servers and in process: the same chats, turn by turn, once each, whatever interrupts it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import xxhash
from conftest import TAPS, make_model, make_tiny_head, make_tokenizer, tiny_run
from fake_server import answer_to, assert_conditioned, dead_url, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.configs import UserError, dump
from headwright.data import server
from headwright.data.batch import runs_of
from headwright.data.corpus import read_corpus
from headwright.data.harvest import harvest, store_path
from headwright.data.jobs import seed_of
from headwright.data.regenerate import folder_of, main, mend, regenerate
from headwright.data.store import FeatureReader
from headwright.data.target import Target
from headwright.heads.saved import save_head

KEY = "sk-no-file-may-hold-this"


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Short pauses, and a key."""
    monkeypatch.setattr(server, "FIRST_PAUSE", 0.004)
    monkeypatch.setattr(server, "LONGEST_PAUSE", 0.03)
    monkeypatch.setenv("SOME_KEY", KEY)


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLED = [
    {"role": "user", "content": "what is f of 1"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "c1"},
]


@pytest.fixture(scope="module")
def talks(tmp_path_factory) -> Path:
    """Twelve chats of one to three turns, whose answers are to be replaced."""
    path = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    with path.open("w") as file:
        for i in range(12):
            turns = []
            for turn in range(i % 3 + 1):
                turns += [
                    {"role": "user", "content": f"q{i} {turn}"},
                    {"role": "assistant", "content": f"OLD {i} {turn}"},
                ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def run_of(folder, talks, runs, urls=(), samples=2, corpus=(), answers=(), **changes):
    """A run file that regenerates."""
    quick = {"urls": list(urls), "timeout": 5.0, "retries": 4, "concurrency": 4, "api_key_env": "SOME_KEY"}
    return tiny_run(
        folder,
        talks,
        runs,
        corpus={"sources": [{"path": str(talks), "samples": samples}], "held_out": 0.25, "max_length": 256}
        | dict(corpus),
        answers={"max_new_tokens": 12} | dict(answers),
        regenerate=(quick if urls else {}) | changes,
    )


def lines(run, name: str = "chats.jsonl") -> list[dict]:
    """All rows of an output file; every line is whole."""
    text = (folder_of(run) / name).read_bytes()
    assert text.endswith(b"\n") or not text
    return [json.loads(line) for line in text.splitlines()]


def by_name(run) -> dict:
    """Rows by (key, sample); each once."""
    rows = lines(run)
    found = {(row["key"], row["sample"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def wanted(run) -> set:
    """What is to be in the output."""
    return {(d.key, sample) for d in read_corpus(run.corpus, run.seed).everything for sample in range(d.samples)}


def assert_finished(run):
    rows = by_name(run)
    manifest = json.loads((folder_of(run) / "manifest.json").read_text())
    assert rows.keys() == wanted(run)
    assert (manifest["chats"], manifest["failed"], manifest["complete"]) == (len(rows), 0, True)
    assert manifest["xxh64"] == xxhash.xxh64((folder_of(run) / "chats.jsonl").read_bytes()).hexdigest()
    assert not lines(run, "failed.jsonl")
    return rows


# By servers


def test_every_chat_of_both_samples_is_rewritten_turn_by_turn(model_dir, talks, tmp_path):
    with serving(lambda number, body: "500" if number % 4 == 1 else None) as fake:
        run = run_of(model_dir, talks, tmp_path, [fake.url], retries=30)
        regenerate(run)
    rows = assert_finished(run)
    assert len(rows) == 24
    originals = {d.key: d for d in read_corpus(run.corpus, run.seed).everything}
    for (key, _), row in rows.items():
        original = originals[key]
        assert_conditioned(row["messages"], sum(turn["role"] == "assistant" for turn in original.messages))
        assert [t for t in row["messages"] if t["role"] == "user"] == [
            t for t in original.messages if t["role"] == "user"
        ]
        assert (row["source"], row["place"]) == (original.source, original.place)
        assert "tools" not in row


def test_sampling_and_seed_arrive(model_dir, talks, tmp_path):
    template = {"enable_thinking": False}
    with serving() as fake:
        run = run_of(
            model_dir,
            talks,
            tmp_path,
            [fake.url],
            corpus={"template": template, "system": "be kind"},
            answers={"temperature": 0.6, "top_p": 0.8, "top_k": 30},
            model="theirs",
        )
        regenerate(run)
    keys = {d.messages[1]["content"]: d.key for d in read_corpus(run.corpus, run.seed).everything}
    seeds = {seed_of(run, key, sample) >> 32: sample for key in keys.values() for sample in (0, 1)}
    assert len(seeds) == 24
    assert len(fake.bodies) == 2 * (4 * 1 + 4 * 2 + 4 * 3)
    for body in fake.bodies:
        key = keys[body["messages"][1]["content"]]
        sample = seeds[body["seed"]]
        assert body["seed"] == seed_of(run, key, sample) >> 32
        drawn = (0.6, 0.8, 30) if sample else (0.0, 1.0, None)
        assert (body["temperature"], body["top_p"], body.get("top_k")) == drawn
        assert (body["model"], body["max_tokens"], body["chat_template_kwargs"]) == ("theirs", 12, template)
        assert body["messages"][0] == {"role": "system", "content": "be kind"}


def test_only_so_many_turns(model_dir, talks, tmp_path):
    with serving() as fake:
        run = run_of(model_dir, talks, tmp_path, [fake.url], samples=1, answers={"turns": 2})
        regenerate(run)
    counts = [sum(t["role"] == "assistant" for t in row["messages"]) for row in assert_finished(run).values()]
    assert sorted(counts) == [1] * 4 + [2] * 8


def test_key_arrives_and_is_nowhere_else(model_dir, talks, tmp_path, capfd):
    with serving(lambda number, body: ("400", "500", None)[number % 3]) as fake:
        regenerate(run_of(model_dir, talks, tmp_path, [fake.url], retries=1))
    assert {headers["authorization"] for headers in fake.headers} == {f"Bearer {KEY}"}
    out, errors = capfd.readouterr()
    assert KEY not in out + errors
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"chats.jsonl", "failed.jsonl", "manifest.json"} <= {path.name for path in files}
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_key_that_a_server_repeats_is_not_written(model_dir, talks, tmp_path):
    with serving(lambda number, body: "400") as fake:
        fake.message = f"wrong key: {KEY}"
        run = run_of(model_dir, talks, tmp_path, [fake.url])
        with pytest.raises(UserError, match="none of 24 chats could be answered"):
            regenerate(run)
    assert lines(run, "failed.jsonl")
    assert KEY not in (folder_of(run) / "failed.jsonl").read_text()


def test_failed_chats_are_listed_and_tried_again(model_dir, talks, tmp_path):
    def fault(number, body):
        asked = body["messages"][-1]["content"]
        return {"q1 0": "400", "q2 1": "500", "q4 1": "400"}.get(asked) if ill else None

    ill = True
    with serving(fault) as fake:
        run = run_of(model_dir, talks, tmp_path, [fake.url], samples=1, retries=1)
        regenerate(run)
        failed = {row["place"].rpartition(":")[2]: row for row in lines(run, "failed.jsonl")}
        first = {name: row["messages"] for name, row in by_name(run).items()}
        manifest = json.loads((folder_of(run) / "manifest.json").read_text())
        assert set(failed) == {"2", "3"}  # lines of the corpus
        assert "no: 400" in failed["2"]["error"]
        assert "no: 500" in failed["3"]["error"]
        assert {"key", "source", "sample"} <= set(failed["2"])
        assert len(first) == 10
        assert (manifest["failed"], manifest["complete"]) == (2, False)
        cut = [m for m in first.values() if m[0]["content"] == "q4 0"]
        assert [len(m) for m in cut] == [2]  # refused later: it ends there with what it has
        ill, asked = False, len(fake.bodies)
        regenerate(run)
        rows = assert_finished(run)
        assert len(fake.bodies) == asked + 2 + 3
        assert {name: rows[name]["messages"] for name in first} == first
        regenerate(run)
        assert len(fake.bodies) == asked + 5  # nothing is left to do


def test_dead_servers_are_one_error(model_dir, talks, tmp_path, capsys):
    run = run_of(model_dir, talks, tmp_path, [dead_url()], retries=1)
    config = tmp_path / "run.yaml"
    config.write_text(dump(run))
    with pytest.raises(SystemExit) as caught:
        main(["--config", str(config)])
    errors = capsys.readouterr().err
    assert caught.value.code == 2
    assert errors.startswith("error: regenerate: 8 chats in a row got no answer")
    assert "Traceback" not in errors
    assert lines(run) == []
    with serving() as fake:  # and the same run goes on when a server is there
        run.regenerate.urls = [fake.url]
        regenerate(run)
    assert_finished(run)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"answers": {"temperature": 0.1}}, "answers"),
        ({"answers": {"max_new_tokens": 13}}, "answers"),
        ({"model": "another"}, "model"),
        ({"corpus": {"template": {"enable_thinking": True}}}, "template arguments"),
        ({"corpus": {"system": "be brief"}}, "system"),
        ({"urls": []}, "by"),
    ],
)
def test_changed_run_is_refused(model_dir, talks, tmp_path, change, key):
    with serving() as fake:
        run = run_of(model_dir, talks, tmp_path, [fake.url], samples=1)
        regenerate(run)
        before = {path: path.read_bytes() for path in folder_of(run).iterdir()}
        with pytest.raises(UserError, match=f"chats of another run: {key} was"):
            regenerate(run_of(model_dir, talks, tmp_path, **{"urls": [fake.url]} | change))
    assert {path: path.read_bytes() for path in folder_of(run).iterdir()} == before


def test_more_samples_and_other_patience_continue(model_dir, talks, tmp_path):
    with serving() as fake:
        regenerate(run_of(model_dir, talks, tmp_path, [fake.url], samples=1))
        asked = len(fake.bodies)
        run = run_of(model_dir, talks, tmp_path, [fake.url], samples=3, concurrency=2, timeout=9.0)
        regenerate(run)
    assert len(assert_finished(run)) == 36
    assert len(fake.bodies) == 3 * asked


def test_tools_and_tool_turns_go_along(model_dir, tmp_path):
    """The target's calls are kept as they are, since the replies belong to them; on the wire their arguments are text."""
    turns = [*CALLED, {"role": "assistant", "content": "OLD"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    path = tmp_path / "talks.jsonl"
    rows = [{"messages": turns, "tools": tools}, *({"prompt": f"p{i}", "response": "OLD"} for i in range(9))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving() as fake:
        run = run_of(model_dir, path, tmp_path, [fake.url], samples=1)
        regenerate(run)
    [row] = [row for row in assert_finished(run).values() if "tools" in row]
    assert row["tools"] == tools
    assert [turn["role"] for turn in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["messages"][-1]["content"] != "OLD"
    [body] = [body for body in fake.bodies if "tools" in body]
    assert body["tools"] == tools
    assert body["messages"][2] == turns[2]


def test_arguments_of_calls_are_text_on_the_wire(model_dir, tmp_path):
    path = tmp_path / "talks.jsonl"
    rows = [{"messages": CALLED}, *({"prompt": f"p{i}"} for i in range(9))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving() as fake:
        regenerate(run_of(model_dir, path, tmp_path, [fake.url], samples=1))
    [sent] = [turn for body in fake.bodies for turn in body["messages"] if "tool_calls" in turn]
    arguments = sent["tool_calls"][0]["function"]["arguments"]
    assert isinstance(arguments, str)
    assert json.loads(arguments) == {"x": 1}


def test_half_a_character_does_not_stop_the_run(model_dir, talks, tmp_path):
    def reply(body):
        bad = body["messages"][-1]["content"] == "q0 0"
        return {"message": {"role": "assistant", "content": "x\ud83d" if bad else answer_to(body["messages"])}}

    with serving(reply=reply) as fake:
        run = run_of(model_dir, talks, tmp_path, [fake.url], samples=1, retries=1)
        regenerate(run)
    assert len(by_name(run)) >= 11


# Interrupted


def test_killed_cut_and_continued(model_dir, talks, tmp_path):
    """A real process, killed in the middle, a second one beside it, and a last line that was cut in half."""
    config = tmp_path / "run.yaml"
    with serving(think=0.04) as fake:
        run = run_of(model_dir, talks, tmp_path, [fake.url], samples=4, concurrency=1)
        config.write_text(dump(run))
        path = folder_of(run) / "chats.jsonl"
        process = subprocess.Popen(
            [sys.executable, "-m", "headwright.train.cli", "regenerate", "--config", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        limit = time.monotonic() + 120
        while not (path.exists() and path.read_bytes().count(b"\n") >= 5):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < limit
            time.sleep(0.01)
        with pytest.raises(UserError, match="is at work there"):
            regenerate(run)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        whole = path.read_bytes().splitlines(keepends=True)
        assert 5 <= len(whole) < 48
        path.write_bytes(b"".join(whole[:-1]) + whole[-1][: len(whole[-1]) // 2])
        fake.think, asked = 0.0, len(fake.bodies)
        regenerate(run)
    assert path.read_bytes().startswith(b"".join(whole[:-1]))
    rows = assert_finished(run)
    assert len(rows) == 48
    for row in rows.values():
        assert_conditioned(row["messages"])
    assert len(fake.bodies) - asked < 2 * 48  # what was there was not asked for again


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=9), st.integers(0, 9)), max_size=6), st.data())
def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path_factory, rows, data):
    texts = [json.dumps({"key": key, "sample": n, "x": key}, ensure_ascii=False).encode() + b"\n" for key, n in rows]
    end = data.draw(st.integers(0, sum(map(len, texts))))
    path = tmp_path_factory.mktemp("mend") / "chats.jsonl"
    path.write_bytes(b"".join(texts)[:end])
    whole = [n for n in range(len(texts)) if sum(map(len, texts[: n + 1])) <= end]
    assert mend(path) == {f"{rows[n][0]}:{rows[n][1]}" for n in whole}
    assert path.read_bytes() == b"".join(texts[: len(whole)])


def test_broken_line_in_the_middle_is_one_message(model_dir, talks, tmp_path):
    with serving() as fake:
        run = run_of(model_dir, talks, tmp_path, [fake.url], samples=1)
        regenerate(run)
        path = folder_of(run) / "chats.jsonl"
        whole = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(whole[:3]) + whole[3][:20] + b"\n" + b"".join(whole[4:]))
        with pytest.raises(UserError, match=r"chats\.jsonl:4"):
            regenerate(run)


# As a corpus


def side_of_each(run) -> dict:
    """Whether a document is held out, by key."""
    corpus = read_corpus(run.corpus, run.seed)
    return {d.key: False for d in corpus.train} | {d.key: True for d in corpus.held_out}


@pytest.mark.parametrize("system", [None, "be kind"])
def test_output_is_a_corpus_whose_mask_is_the_assistants_words(model_dir, talks, tmp_path, system):
    with serving() as fake:
        run = run_of(model_dir, talks, tmp_path / "one", [fake.url], samples=1, corpus={"system": system})
        regenerate(run)
    rows = {key: row for (key, _), row in assert_finished(run).items()}
    path = folder_of(run) / "chats.jsonl"
    again = run_of(
        model_dir,
        path,
        tmp_path / "two",
        samples=1,
        corpus={"max_length": 500, "system": system},
        answers={"by": "corpus"},
    )
    assert side_of_each(again) == side_of_each(run)
    assert set(side_of_each(run).values()) == {True, False}
    harvest(again)
    tokenizer = make_tokenizer()
    reader = FeatureReader(store_path(again, "train"))
    assert {note["key"] for note in reader.notes} == {key for key, held in side_of_each(run).items() if not held}
    for note, document in zip(reader.notes, reader):
        messages = rows[note["key"]]["messages"]
        said = [turn["content"] + "<|im_end|>" for turn in messages if turn["role"] == "assistant"]
        spans = runs_of(document.mask_T)
        assert [tokenizer.decode(document.ids_T[start:end]) for start, end in spans] == said
        assert tokenizer.decode(document.ids_T) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_every_sample_of_the_output_is_used(model_dir, talks, tmp_path):
    with serving() as fake:
        run = run_of(model_dir, talks, tmp_path, [fake.url], samples=3)
        regenerate(run)
    again = run_of(model_dir, folder_of(run) / "chats.jsonl", tmp_path, samples=1, answers={"by": "corpus"})
    assert len(read_corpus(again.corpus, again.seed).everything) == len(assert_finished(run)) == 36


# In process


@pytest.fixture(scope="module")
def ending_dir(tmp_path_factory) -> Path:
    """A model whose answers end by themselves now and then, so that there are later turns."""
    folder = tmp_path_factory.mktemp("ending")
    make_model(eos_token_id=[258, *range(0, 256, 6)]).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(ending_dir, talks, tmp_path_factory):
    """A finished regeneration in process."""
    run = run_of(ending_dir, talks, tmp_path_factory.mktemp("plain"))
    regenerate(run)
    return run


def test_greedy_answers_are_transformers_own(ending_dir, plain):
    target = Target.load(plain.target, TAPS)
    rows = assert_finished(plain)
    originals = {d.key: d for d in read_corpus(plain.corpus, plain.seed).everything}
    lengths = []
    for key, document in originals.items():
        messages = []
        for turns in document.rounds:
            messages += turns
            prompt = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            if len(messages) > 1 and len(prompt) + 12 > 256:
                del messages[-len(turns) :]
                break
            new = target.generate_hf(torch.tensor([prompt]), 12)
            ended = new[-1] in target.spec.eos_token_ids
            said = target.tokenizer.decode(new[:-1] if ended else new)
            messages.append({"role": "assistant", "content": said})
            if not ended:
                break
        assert rows[key, 0]["messages"] == messages
        lengths.append(len(messages))
    assert max(lengths) >= 4  # there were later turns


def test_samples_are_reproducible_whatever_the_batch(ending_dir, talks, plain, tmp_path):
    run = run_of(ending_dir, talks, tmp_path, answers={"rows": 3})
    regenerate(run)
    first, second = by_name(plain), by_name(run)
    assert {n: r["messages"] for n, r in first.items()} == {n: r["messages"] for n, r in second.items()}
    assert any(first[key, 0]["messages"] != first[key, 1]["messages"] for key, _ in first)
    other = run_of(ending_dir, talks, tmp_path / "other")
    other.seed = 1
    regenerate(other)
    third = by_name(other)
    assert all(third[key, 0]["messages"] == first[key, 0]["messages"] for key, _ in first)
    assert any(third[key, 1]["messages"] != first[key, 1]["messages"] for key, _ in first)


def test_a_head_drafts_the_same_text(ending_dir, talks, plain, tmp_path):
    target = Target.load(plain.target, TAPS)
    save_head(make_tiny_head(target), tmp_path / "head")
    run = run_of(ending_dir, talks, tmp_path, samples=1, head=str(tmp_path / "head"))
    regenerate(run)
    rows, others = assert_finished(run), by_name(plain)
    assert {name: row["messages"] for name, row in rows.items()} == {
        name: row["messages"] for name, row in others.items() if name[1] == 0
    }


def test_interrupted_in_process_continues_to_the_same_chats(ending_dir, talks, plain, tmp_path):
    run = run_of(ending_dir, talks, tmp_path)
    folder_of(run).mkdir(parents=True)
    for name in ("chats.jsonl", "manifest.json"):
        (folder_of(run) / name).write_bytes((folder_of(plain) / name).read_bytes())
    path = folder_of(run) / "chats.jsonl"
    path.write_bytes(path.read_bytes()[:-700])
    regenerate(run)
    rows = assert_finished(run)
    assert {n: r["messages"] for n, r in rows.items()} == {n: r["messages"] for n, r in by_name(plain).items()}


def test_chats_that_do_not_fit_are_listed(ending_dir, tmp_path):
    path = tmp_path / "talks.jsonl"
    prompts = [*(f"p{i}" for i in range(12)), "long " * 60]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    run = run_of(ending_dir, path, tmp_path, samples=1)
    regenerate(run)
    [failed] = lines(run, "failed.jsonl")
    assert failed["place"].endswith(":13")
    assert "longer than 256" in failed["error"]
    assert len(by_name(run)) == 12


def test_dry_run_makes_nothing(model_dir, talks, tmp_path):
    regenerate(run_of(model_dir, talks, tmp_path), dry_run=True)
    regenerate(run_of(model_dir, talks, tmp_path, [dead_url()]), dry_run=True)
    assert list(tmp_path.iterdir()) == []
