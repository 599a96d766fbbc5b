"""The harvest: what it stores, what it refuses to mix, and that a killed one continues to the same store."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import CHATML, TAPS, broken, make_model, make_tokenizer, tiny_run

from headwright.configs import UserError, dump
from headwright.configs.load import load_run
from headwright.data.chat import Renderer
from headwright.data.corpus import read_corpus
from headwright.data.generate import read_documents
from headwright.data.harvest import harvest, harvest_side, main, open_side, store_path
from headwright.data.store import FeatureReader, read_manifest
from headwright.data.target import Target

FIELDS = ("ids_T", "mask_T", "taps_TKD", "last_RD", "argmax_R", "logz_R")
SIDES = ("train", "held-out")


def assert_same_store(one: Path, two: Path) -> None:
    """The same documents bit for bit, in the same shards."""
    a, b = FeatureReader(one), FeatureReader(two)
    assert a.notes == b.notes
    assert torch.equal(a.places, b.places)
    for mine, theirs in zip(a, b, strict=True):
        assert all(torch.equal(getattr(mine, name), getattr(theirs, name)) for name in FIELDS)
    timeless = [
        {k: v for k, v in vars(m).items() if k not in ("seconds", "shards", "bytes")} for m in (a.manifest, b.manifest)
    ]
    assert timeless[0] == timeless[1]


def same_shards(one: Path, two: Path) -> None:
    """Shard files equal byte for byte behind their headers, and headers equal but for the time."""
    for name in sorted(path.name for path in one.glob("shard-*")):
        heads, bodies = [], []
        for folder in (one, two):
            blob = (folder / name).read_bytes()
            end = 8 + int.from_bytes(blob[:8], "little")
            head = json.loads(blob[8:end])
            head["__metadata__"] = json.loads(head["__metadata__"]["headwright"]) | {"seconds": None}
            heads.append(head)
            bodies.append(blob[end:])
        assert heads[0] == heads[1]
        assert bodies[0] == bodies[1]


def times(run) -> dict[str, int]:
    """When each shard was written."""
    paths = [path for side in SIDES for path in store_path(run, side).glob("shard-*")]
    return {str(path): path.stat().st_mtime_ns for path in paths}


@pytest.fixture
def run(model_dir, chats, tmp_path):
    """A run of its own."""
    return tiny_run(model_dir, chats, tmp_path)


def test_store_holds_each_prompt_answered(done):
    corpus = read_corpus(done.corpus, done.seed)
    target = Target.load(done.target, TAPS)
    for side, documents, samples in (("train", corpus.train, 2), ("held-out", corpus.held_out, 1)):
        reader = FeatureReader(store_path(done, side))
        assert Counter(note["key"] for note in reader.notes) == {d.key: samples for d in documents}
        assert len({(note["key"], note["sample"]) for note in reader.notes}) == len(reader)
        prompts = {d.key: target.tokenizer.apply_chat_template(d.prompt, add_generation_prompt=True) for d in documents}
        for note, document in zip(reader.notes, reader, strict=True):
            prompt = prompts[note["key"]]["input_ids"]
            assert document.ids_T[~document.mask_T].tolist() == prompt
            answer = document.ids_T[document.mask_T].tolist()
            assert len(answer) == 12 or answer[-1] in target.spec.eos_token_ids
            if note["sample"] == 0:
                assert answer == target.generate_hf(torch.tensor([prompt]), 12)
        manifest = reader.manifest
        assert (manifest.taps, manifest.dtype, manifest.documents) == (list(TAPS), "float32", len(reader))
        assert broken(reader.root) == []
    assert not {n["key"] for n in FeatureReader(store_path(done, "train")).notes} & {d.key for d in corpus.held_out}


def test_states_are_the_targets(done):
    target = Target.load(done.target, TAPS)
    for document in list(FeatureReader(store_path(done, "train")))[::7]:
        fresh = read_documents(target, [(document.ids_T.tolist(), document.mask_T.tolist())])[0]
        for name in ("taps_TKD", "last_RD", "logz_R"):
            mine, reference = getattr(document, name), getattr(fresh, name)
            scale = float(reference.abs().max()) if reference.numel() else 0.0
            torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4 * scale)


def test_resolved_config_lies_beside_the_store(run):
    harvest(run)
    assert load_run(run.directory / "config.yaml") == run


def test_second_harvest_does_nothing(done, run):
    harvest(run)
    before = times(run)
    assert before
    harvest(run)
    assert times(run) == before
    for side in SIDES:
        assert_same_store(store_path(done, side), store_path(run, side))


def test_missing_shard_is_made_again(done, run):
    harvest(run)
    before = times(run)
    victim = store_path(run, "train") / "shard-00003.safetensors"
    victim.unlink()
    harvest(run)
    assert {k: v for k, v in times(run).items() if k != str(victim)} == {
        k: v for k, v in before.items() if k != str(victim)
    }
    same_shards(store_path(done, "train"), store_path(run, "train"))
    assert broken(store_path(run, "train")) == []


def test_dry_run_makes_nothing(run, tmp_path):
    harvest(run, dry_run=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("answers.max_new_tokens=13", "answers"),
        ("answers.temperature=0.5", "answers"),
        ("harvest.dtype=bfloat16", "dtype"),
        ("harvest.taps=[1, 3, 5]", "taps"),
        ("harvest.shard_mib=7", "shard_mib"),
        ("corpus.system=Be brief", "corpus"),
        ("corpus.sources.0.limit=20", "corpus"),
        ("seed=1", "corpus|seed"),
    ],
)
def test_changed_run_is_refused(done, tmp_path, override, key):
    before = times(done)
    with pytest.raises(UserError, match=rf"features of another run: ({key}) was"):
        harvest(changed(done, tmp_path, override))
    assert times(done) == before


def test_refused_run_does_not_replace_the_config(run, tmp_path):
    """The config that lies beside the features is the one that they were made with."""
    harvest(run)
    with pytest.raises(UserError, match="features of another run"):
        harvest(changed(run, tmp_path, "answers.max_new_tokens=13"))
    assert load_run(run.directory / "config.yaml") == run


def changed(run, folder: Path, override: str):
    """The run with one key changed."""
    path = folder / "changed.yaml"
    path.write_text(dump(run))
    return load_run(path, [override])


@pytest.mark.parametrize("change", ["weights", "template"])
def test_changed_target_is_refused(done, tmp_path, change):
    make_model(seed=int(change == "weights")).save_pretrained(tmp_path)
    template = CHATML + " " if change == "template" else CHATML
    make_tokenizer(template).save_pretrained(tmp_path)
    key = "target" if change == "weights" else "template"
    with pytest.raises(UserError, match=f"features of another run: {key} was"):
        harvest(changed(done, tmp_path, f"target.model={tmp_path}"))


def test_unrelated_keys_do_not_matter(model_dir, chats, tmp_path):
    harvest(tiny_run(model_dir, chats, tmp_path))
    other = tiny_run(model_dir, chats, tmp_path, train={"lr": 0.5}, vocab={"size": 9}, eval={"prompts": 1})
    before = times(other)
    harvest(other)
    assert times(other) == before


def test_answers_of_the_corpus(model_dir, chats, tmp_path):
    run = tiny_run(model_dir, chats, tmp_path, answers={"by": "corpus"})
    harvest(run)
    corpus = read_corpus(run.corpus, run.seed)
    reader = FeatureReader(store_path(run, "train"))
    assert len(reader) == len(corpus.train)  # one each: there is nothing to sample
    encoded = {d.key: Renderer(make_tokenizer()).encode(d.messages) for d in corpus.train}
    for note, document in zip(reader.notes, reader, strict=True):
        assert document.ids_T.tolist() == encoded[note["key"]].ids
        assert document.mask_T.tolist() == encoded[note["key"]].mask


def test_held_out_prompts_are_answered_by_the_target_whoever_wrote_the_rest(model_dir, chats, tmp_path):
    """τ is about the target's own text: both ways of training are measured on the same documents."""
    by_target, by_corpus = (
        tiny_run(model_dir, chats, tmp_path / by, answers={"by": by, "max_new_tokens": 12})
        for by in ("target", "corpus")
    )
    for run in (by_target, by_corpus):
        harvest(run)
    one, two = (FeatureReader(store_path(run, "held-out")) for run in (by_target, by_corpus))
    assert one.notes == two.notes
    assert all(torch.equal(a.ids_T, b.ids_T) and torch.equal(a.mask_T, b.mask_T) for a, b in zip(one, two, strict=True))


def test_documents_that_do_not_fit_are_counted(model_dir, chats, tmp_path, capsys):
    rows = [json.loads(line) for line in chats.read_text().splitlines()]
    rows[3]["messages"][0]["content"] = "long " * 100
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    run = tiny_run(model_dir, path, tmp_path, corpus={"sources": [{"path": str(path)}], "held_out": 0.25})
    harvest(run)
    assert "left out: 1 prompt and answer are longer than 512" in " ".join(capsys.readouterr().out.split())
    assert sum(len(FeatureReader(store_path(run, side))) for side in SIDES) == 39


def test_nothing_fits(model_dir, chats, tmp_path):
    run = tiny_run(model_dir, chats, tmp_path, answers={"max_new_tokens": 1000})
    with pytest.raises(UserError, match="no usable training document"):
        harvest(run)


@pytest.mark.parametrize("by", ["target", "corpus"])
def test_documents_that_the_template_or_tokenizer_refuses_are_skipped(model_dir, tmp_path, by):
    """One chat whose roles the template refuses, one with half a surrogate pair: the other chats are harvested."""
    folder = tmp_path / "model"
    make_model().save_pretrained(folder)
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    make_tokenizer(refusing).save_pretrained(folder)
    rows = [{"prompt": f"count to {i}", "response": "one two"} for i in range(20)]
    rows.append({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]})
    rows[-1]["messages"].append({"role": "assistant", "content": "a"})
    rows.append({"prompt": "half \ud83d", "response": "x"})
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    run = tiny_run(
        folder,
        path,
        tmp_path,
        answers={"by": by, "max_new_tokens": 4},
        corpus={"sources": [{"path": str(path)}], "held_out": 0.25, "max_length": 256},
    )
    harvest(run)
    assert sum(len(FeatureReader(store_path(run, side))) for side in SIDES) == 20


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [2, 0, 1]])
def test_processes_share_the_work_however_they_are_timed(done, run, order):
    """A process that begins when another has already finished units still does its own, and together they do all."""
    corpus = read_corpus(run.corpus, run.seed)
    target = Target.load(run.target, run.harvest.taps)
    for rank in order:
        state = SimpleNamespace(is_main_process=rank == 0, process_index=rank, num_processes=len(order))
        harvest_side(run, target, open_side(run, target, "train", corpus.train), state)
    assert_same_store(store_path(done, "train"), store_path(run, "train"))


def test_main_process_does_not_sweep_what_others_are_writing(run):
    """The scratch file of a process that is alive is its own business."""
    corpus = read_corpus(run.corpus, run.seed)
    target, another = (Target.load(run.target, run.harvest.taps) for _ in range(2))
    import headwright.data.store as store

    original = store.save_file
    main_state = SimpleNamespace(is_main_process=True, process_index=0, num_processes=2)
    entered = []

    def slow_save(tensors, path, metadata):
        original(tensors, path, metadata)
        if not entered:  # while this process writes its first shard, the main process arrives
            entered.append(path)
            harvest_side(run, another, open_side(run, another, "train", corpus.train), main_state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "save_file", slow_save)
        other = SimpleNamespace(is_main_process=False, process_index=1, num_processes=2)
        harvest_side(run, target, open_side(run, target, "train", corpus.train), other)
    assert entered


# A real process


def start(run, folder: Path) -> subprocess.Popen:
    """`headwright harvest` as a user starts it."""
    config = folder / "run.yaml"
    config.write_text(dump(run))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "headwright.data.harvest", "--config", str(config)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder
    )


def wait_for_shards(process: subprocess.Popen, root: Path, count: int) -> None:
    """Until `count` shards exist. A process that ends before is a failure of the test."""
    limit = time.monotonic() + 120
    while len(list(root.glob("shard-*"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.002)


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """Enough short chats that a process can be stopped in the middle."""
    path = tmp_path_factory.mktemp("many") / "chats.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"count to {i}"}) + "\n" for i in range(120)))
    return path


def slow_run(model_dir: Path, many: Path, runs: Path):
    """Small shards, so that there are many."""
    return tiny_run(
        model_dir,
        many,
        runs,
        corpus={"sources": [{"path": str(many)}], "held_out": 0.1, "max_length": 256},
        answers={"max_new_tokens": 12, "rows": 2},
        harvest={"taps": list(TAPS), "shard_mib": 0.001, "dtype": "bfloat16"},
    )


def test_killed_harvest_continues_to_the_same_store(model_dir, many, tmp_path):
    straight = slow_run(model_dir, many, tmp_path / "straight")
    killed = slow_run(model_dir, many, tmp_path / "killed")
    for run in (straight, killed):
        run.directory.mkdir(parents=True)
    harvest(straight)
    root = store_path(killed, "train")
    process = start(killed, tmp_path)
    wait_for_shards(process, root, 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not read_manifest(root).complete
    with pytest.raises(UserError, match="not finished"):
        FeatureReader(root)
    kept = {path.name: path.stat().st_mtime_ns for path in root.glob("shard-*")}
    process = start(killed, tmp_path)
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert "features in" in out
    assert {name: (root / name).stat().st_mtime_ns for name in kept} == kept
    assert not list(root.glob(".*.tmp"))
    for side in SIDES:
        assert_same_store(store_path(straight, side), store_path(killed, side))
        same_shards(store_path(straight, side), store_path(killed, side))


def test_interrupted_harvest_says_so_and_continues(model_dir, many, tmp_path):
    run = slow_run(model_dir, many, tmp_path)
    process = start(run, tmp_path)
    wait_for_shards(process, store_path(run, "train"), 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "Traceback" not in errors
    message = [line for line in errors.splitlines() if "interrupted" in line]
    assert message == ["interrupted: finished work is kept; the same command continues where it stopped"]
    assert not list(store_path(run, "train").glob(".*.tmp"))
    harvest(run)
    assert broken(store_path(run, "train")) == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("target.model=./nowhere", "no such model directory"),
        ("corpus.sources.0.path=nowhere.jsonl", "no such file"),
        ("answers.max_new_token=3", "did you mean answers.max_new_tokens?"),
        ("harvest.taps=[9]", "harvest.taps [9]"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(run, tmp_path, capsys, override, words):
    config = tmp_path / "run.yaml"
    config.write_text(dump(run))
    with pytest.raises(SystemExit) as caught:
        main(["--config", str(config), override])
    errors = capsys.readouterr().err
    assert caught.value.code == 2
    assert words in errors
    assert "Traceback" not in errors


def test_help_explains_every_key(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for key in ("target.model", "corpus.held_out", "answers.max_new_tokens", "harvest.shard_mib"):
        assert f"{key} = " in out


@pytest.mark.slow
def test_two_real_processes_fill_one_store(done, run, tmp_path):
    """torchrun starts two; they share the units, and together they do what one does."""
    config = tmp_path / "run.yaml"
    config.write_text(dump(run))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "headwright.data.harvest", "--config", str(config)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stderr
    for side in SIDES:
        assert_same_store(store_path(done, side), store_path(run, side))
