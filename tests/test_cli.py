"""The command line: fast help, every key explained, one clear line for a mistake, and the whole pipeline."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
from conftest import tiny_run

from headwright.configs import RunConfig, dump
from headwright.configs.load import strip_annotation
from headwright.data import embedded
from headwright.train.cli import STAGES

ROOT = Path(__file__).resolve().parents[1]
PIPELINE = ("harvest", "train", "eval", "export")
SECTIONS = {
    "harvest": ("target", "corpus", "answers", "harvest"),
    "train": ("vocab", "train"),
    "eval": ("eval",),
    "export": ("export",),
}


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """`headwright …` as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "headwright.train.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment,
    )


def invoke(stage: str, *arguments: str) -> int:
    """The same in this process: the exit code."""
    try:
        importlib.import_module(STAGES[stage][0]).main(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture(scope="module")
def config(model_dir, chats, tmp_path_factory) -> Path:
    """A run file over the tiny model."""
    folder = tmp_path_factory.mktemp("cli")
    path = folder / "run.yaml"
    path.write_text(dump(tiny_run(model_dir, chats, folder / "runs")), encoding="utf-8")
    return path


# Help


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_is_printed_without_importing_torch(arguments):
    code = f"""
import sys
sys.argv = ["headwright", *{arguments!r}]
from headwright.train.cli import main
main()
heavy = sorted({{"torch", "transformers", "accelerate", "pydantic", "yaml"}} & set(sys.modules))
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for stage, (_, about) in STAGES.items():
        assert f"{stage:10} {about}" in done.stdout


def test_installed_command_is_this_one():
    done = subprocess.run([Path(sys.executable).with_name("headwright"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "usage: headwright STAGE --config FILE" in done.stdout


@pytest.mark.parametrize(("typed", "hint"), [("exprot", "did you mean export?"), ("xyzzy", "stages: plan, preview")])
def test_unknown_stage_suggests(typed, hint):
    done = command(typed)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: no stage '{typed}'; {hint}")
    assert len(done.stderr.splitlines()) == 1


def keys_of(prefix: str, kind) -> list[tuple[str, str]]:
    """(full key, its help) of a section and of every section inside it."""
    found = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        words = " ".join(note for note in getattr(hint, "__metadata__", ()) if isinstance(note, str))
        inner = strip_annotation(hint)
        if typing.get_origin(inner) is list:
            inner = strip_annotation(typing.get_args(inner)[0])
        found.append((f"{prefix}.{name}", words))
        if dataclasses.is_dataclass(inner):
            found += keys_of(f"{prefix}.{name}", inner)
    return found


def help_of(stage: str, capsys) -> str:
    assert invoke(stage, "--help") == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("stage", PIPELINE)
def test_help_of_a_stage_explains_the_keys_of_its_sections(stage, capsys):
    """Name, default and words of every key one level below the section."""
    text = help_of(stage, capsys)
    flat = " ".join(text.split())
    hints = typing.get_type_hints(RunConfig, include_extras=True)
    for section in SECTIONS[stage]:
        for key, words in keys_of(section, strip_annotation(hints[section])):
            if key.count(".") > 1:
                continue
            assert f"{key} = " in text
            assert words
            assert " ".join(words.split()) in flat
    assert "--config FILE" in text
    assert "--dry-run" in text


@pytest.mark.parametrize("stage", PIPELINE)
def test_help_of_a_stage_explains_nested_keys(stage, capsys):
    """Sources, trackers and shapes have keys of their own; they are explained, too."""
    flat = " ".join(help_of(stage, capsys).split())
    hints = typing.get_type_hints(RunConfig, include_extras=True)
    missing = [
        key
        for section in SECTIONS[stage]
        for key, words in keys_of(section, strip_annotation(hints[section]))
        if " ".join(words.split()) not in flat or key.split(".")[-1] not in flat
    ]
    assert not missing


def test_help_of_train_explains_the_keys_of_heads(capsys):
    """What may stand under `head:` is explained where heads are trained."""
    heads = importlib.import_module("headwright.heads")
    flat = " ".join(help_of("train", capsys).split())
    missing = []
    for kind in heads.kinds():
        for name, hint in typing.get_type_hints(heads.get_head(kind).Config, include_extras=True).items():
            words = " ".join(note for note in getattr(hint, "__metadata__", ()) if isinstance(note, str))
            if name not in flat or " ".join(words.split()) not in flat:
                missing.append(f"{kind}: {name}")
    assert not missing


# Mistakes


def refusal(capsys, stage: str, *arguments: str) -> str:
    """What a user sees of a mistake: exit code 2 and one line."""
    code = invoke(stage, *arguments)
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("error: ")
    assert len(error.strip().splitlines()) == 1
    assert "Traceback" not in error
    return error


# Whose command lines are their own
OTHERS = ("adapt", "compare", "study", "speedup", "watch", "chat", "import", "doctor", "prove", "plot", "push", "terms")


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage not in OTHERS])
def test_missing_config_file(stage, tmp_path, capsys):
    path = tmp_path / "none.yaml"
    assert refusal(capsys, stage, "--config", str(path)) == f"error: config {path}: no such file\n"


def test_missing_config_file_of_a_study(tmp_path, capsys):
    path = tmp_path / "none.yaml"
    assert refusal(capsys, "study", "all", "--config", str(path)) == f"error: config {path}: no such file\n"


@pytest.mark.parametrize("stage", OTHERS)
def test_help_of_the_other_commands(stage, capsys):
    assert f"usage: headwright {stage}" in " ".join(help_of(stage, capsys).split())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", "unknown key train.lrr; did you mean train.lr?"),
        ("trian.lr=1", "unknown key trian; did you mean train?"),
        ("head.step=2", "unknown key step; did you mean steps?"),
        ("head.kind=eagel3", "head.kind 'eagel3': did you mean eagle3?"),
        ("head.loss=mse", "mse"),
        ("train.lr=fast", "train.lr = 'fast'"),
        ("train.accumulate=0", "train.accumulate = 0"),
        ("train.lr", "override 'train.lr': write section.key=value"),
        ("corpus.sources.7.limit=2", "'7' is not an index below 1"),
    ],
)
def test_mistakes_in_keys_and_values(config, capsys, override, message):
    assert message in refusal(capsys, "train", "--config", str(config), "--dry-run", override)


def test_missing_model_directory(config, tmp_path, capsys):
    where = tmp_path / "no-model"
    error = refusal(capsys, "harvest", "--config", str(config), f"target.model={where}", f"runs={tmp_path}")
    assert f"target.model {where}: no such model directory" in error


def test_missing_corpus_file(config, tmp_path, capsys):
    error = refusal(capsys, "harvest", "--config", str(config), f"corpus.sources=[{{path: {tmp_path}/no.jsonl}}]")
    assert f"corpus path {tmp_path}/no.jsonl: no such file" in error


@pytest.mark.parametrize("stage", ["train", "eval", "export"])
def test_stages_before_the_harvest(config, tmp_path, capsys, stage):
    assert "run the harvest first" in refusal(capsys, stage, "--config", str(config), f"runs={tmp_path}")


def test_impossible_shape(config, capsys):
    shape = "eval.shapes=[{kind: dynamic, depth: 3, top_k: 1}]"
    assert "top_k must be 2 or more" in refusal(capsys, "eval", "--config", str(config), "--dry-run", shape)


def test_a_mistake_as_a_user_sees_it(config):
    """A real process: exit code 2, one line on stderr, nothing on stdout."""
    done = command("train", "--config", str(config), "train.lrr=1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"error: {config}: unknown key train.lrr; did you mean train.lr?\n"


def test_command_without_config_shows_its_usage(capsys):
    assert invoke("train") == 2
    assert "--config" in capsys.readouterr().err


# The pipeline


@pytest.fixture(scope="module")
def pipeline(config):
    """All four stages as processes."""
    return {stage: command(stage, "--config", str(config)) for stage in PIPELINE}


def test_pipeline_works(pipeline, config):
    for stage, done in pipeline.items():
        assert done.returncode == 0, (stage, done.stderr)
        assert "Traceback" not in done.stderr, stage
    folder = config.parent / "runs" / "tiny"
    for path in ("config.yaml", "metrics.jsonl", "head/model.safetensors", "report.json", "report.html"):
        assert (folder / path).is_file(), path
    export = json.loads((folder / "export/portable/headwright.json").read_text(encoding="utf-8"))
    assert export["read_back"]["equal"] == export["read_back"]["drafted"] == 10
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert export["measured"]["chain"]["acceptance_length"] == report["entries"][0]["acceptance_length"]


def test_pipeline_run_again_is_harmless(pipeline, config, capsys):
    """Nothing that was learned or measured changes; features are not even written."""
    folder = config.parent / "runs" / "tiny"
    kept = [p for part in ("features", "features-held-out", "head", "export") for p in (folder / part).rglob("*")]
    before = {path: path.read_bytes() for path in kept if path.is_file()}
    shards = {path: path.stat().st_mtime_ns for path in before if path.name.startswith("shard")}
    taus = [e["acceptance_length"] for e in json.loads((folder / "report.json").read_text())["entries"]]
    for stage in PIPELINE:
        assert invoke(stage, "--config", str(config)) == 0, stage
    assert {path: path.read_bytes() for path in before} == before
    assert shards
    assert {path: path.stat().st_mtime_ns for path in shards} == shards
    assert [e["acceptance_length"] for e in json.loads((folder / "report.json").read_text())["entries"]] == taus


def test_plan_and_summary_of_the_run(pipeline, config, capsys):
    for stage in ("plan", "summary"):
        assert invoke(stage, "--config", str(config)) == 0
        assert "tiny" in capsys.readouterr().out


def test_thin_training_script_checks_its_kind(config, monkeypatch):
    """train/eagle3.py trains eagle3 heads only."""
    script = importlib.import_module("headwright.train.run")
    monkeypatch.setattr(script, "train", lambda run, dry_run: None)
    script.main(["--config", str(config), "--dry-run"], kind="eagle3")
    with pytest.raises(SystemExit) as stop:
        script.main(["--config", str(config), "--dry-run"], kind="medusa")
    assert stop.value.code == 2


RUN_FILES = sorted(p for p in (ROOT / "configs").glob("*.yaml") if not p.name.startswith("accelerate-"))


@pytest.mark.parametrize("stage", PIPELINE)
@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_dry_run_of_the_shipped_configs_needs_no_network(path, stage, tmp_path, monkeypatch, capsys):
    """No connection is tried, no model is loaded, and nothing is written."""
    import socket

    def refuse(*_, **__):
        raise AssertionError("a dry run opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setenv("HEADWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.nn.Module, "__init__", refuse)
    monkeypatch.setattr(embedded, "acceptance", lambda name: path)  # terms are accepted
    assert invoke(stage, "--config", str(path), "--dry-run", f"runs={tmp_path / 'runs'}") == 0
    assert "dry run" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
