"""Metrics arrive where they should, trackers never stop a training, and no secret leaves with them."""

import contextlib
import importlib.util
import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Interrupted, crash_at, tiny_run
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.configs import dump
from headwright.eval.metrics import read_metrics
from headwright.train import track
from headwright.train.provenance import clean, cleaned, command
from headwright.train.run import train
from headwright.train.track import Meter, Tracker, flat, wandb_id, wandb_mode

TRAIN = {
    "epochs": 0.7,
    "tokens_per_batch": 256,
    "lr": 3e-3,
    "log_every": 1,
    "evals": 2,
    "saves": 3,
    "decode": {"evals": 1, "prompts": 2, "max_new_tokens": 4},
}


@pytest.fixture
def stranger(monkeypatch, tmp_path) -> Path:
    """A user without any key, whose home is empty."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_", "NETRC")):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(home / name.lower()))
    yield home
    os.environ.pop("WANDB_SILENT", None)


def records_of(run) -> list[dict]:
    return read_metrics(run.directory / "metrics.jsonl")


# Means


class Plain:
    """The same as a Meter, number by number."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def add(self, metrics: dict[str, tuple[float, float]]) -> None:
        """Add one batch, or nothing of it."""
        if all(math.isfinite(value) for pair in metrics.values() for value in pair):
            for name, (top, bottom) in metrics.items():
                sums = self.sums.setdefault(name, [0.0, 0.0])
                sums[0], sums[1] = sums[0] + top, sums[1] + bottom

    def read(self, ranks: int) -> dict[str, float]:
        sums, self.sums = self.sums, {}
        return {name: ranks * top / (ranks * bottom) for name, (top, bottom) in sums.items() if bottom}


# whole numbers: their sums are exact in whatever order
TOPS = st.one_of(st.integers(-50, 50).map(float), st.sampled_from([math.nan, math.inf, -math.inf]))
WHOLE = st.integers(-50, 50).map(float)
SETS = st.sampled_from([(), ("loss_0",), ("loss_0", "agree_0"), ("agree_0", "loss_0"), ("other",), ("loss_0", "other")])


@st.composite
def measurements(draw) -> dict[str, tuple[float, float]]:
    """A batch's metrics; now and then one is not finite."""
    tops = draw(st.sampled_from([WHOLE, WHOLE, TOPS]))
    return {name: (draw(tops), draw(st.integers(0, 5).map(float))) for name in draw(SETS)}


@given(st.lists(st.one_of(st.none(), measurements()), max_size=20), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_meter_is_a_plain_mean(events, ranks):
    """Over several sets of names, batches that are not finite, and readings in between (None); over all ranks."""
    meter, plain = Meter(), Plain()
    for event in [*events, None]:
        if event is None:
            assert meter.read(lambda sums: ranks * sums) == pytest.approx(plain.read(ranks))
        else:
            meter.add({name: (torch.tensor(a), torch.tensor(b)) for name, (a, b) in event.items()})
            plain.add(event)
    assert meter.read(lambda sums: sums) == {}


def test_a_meter_asks_once_for_each_set_of_names():
    """Every rank sends as many messages as the others, also where its batches were left out."""
    good, bad, sent = Meter(), Meter(), []
    good.add({"a": (torch.tensor(1.0), torch.tensor(2.0))})
    bad.add({"a": (torch.tensor(math.nan), torch.tensor(2.0))})
    for meter in (good, bad):
        meter.read(lambda sums: sent.append(sums.shape) or sums)
    assert sent == [(1, 2), (1, 2)]


# metrics.jsonl, and trackers that fail


class Listener:
    """A tracker that remembers, and fails when it is asked to."""

    def __init__(self, name: str, fails: str = ""):
        self.name, self.fails, self.heard = name, fails, []

    def hear(self, what: str, *values) -> None:
        self.heard.append((what, *values))
        if what == self.fails:
            raise ConnectionError("lost\nsecond line")

    def log(self, record) -> None:
        self.hear("log", record)

    def artifact(self, name, kind, *paths) -> None:
        self.hear("artifact", name, kind, *paths)

    def finish(self) -> None:
        self.hear("finish")


@pytest.mark.parametrize("fails", ["log", "artifact", "finish"])
def test_a_tracker_that_fails_is_dropped_and_the_rest_goes_on(make_run, monkeypatch, capsys, fails):
    """Said once; it is asked for nothing more; the others get all there is."""
    first, broken, last = Listener("first"), Listener("broken", fails), Listener("last")
    monkeypatch.setattr(track, "open_sinks", lambda run, facts: [first, broken, last])
    run = make_run()
    train(run)
    said = capsys.readouterr()
    assert [line for line in said.out.splitlines() if "broken" in line] == [
        "broken is off from here on: ConnectionError: lost"
    ]
    assert "Traceback" not in said.out + said.err
    records = records_of(run)
    assert {"lr", "loss_0"} < records[0].keys()
    assert any("tau" in record for record in records)
    whole = [
        *(("log", record) for record in records),
        ("artifact", "tiny-head", "model", run.directory / "head"),
        ("finish",),
    ]
    assert first.heard == last.heard == whole
    assert broken.heard == whole[: [event[0] for event in whole].index(fails) + 1]
    assert (run.directory / "training.json").is_file()


def test_trackers_are_ended_when_a_run_breaks(make_run, monkeypatch):
    """What they have is not lost; a head that is not done is not handed on."""
    run, listener = make_run(), Listener("listener")
    monkeypatch.setattr(track, "open_sinks", lambda run, facts: [listener])
    with monkeypatch.context() as patch:
        crash_at(patch, 3)
        with pytest.raises(Interrupted):
            train(run)
    assert listener.heard == [*(("log", record) for record in records_of(run)), ("finish",)]
    assert len(listener.heard) > 3


@given(steps=st.lists(st.integers(1, 9), max_size=12).map(sorted), since=st.integers(0, 10))
@settings(max_examples=30, deadline=None)
def test_what_came_after_the_checkpoint_is_dropped(steps, since, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    run = tiny_run(runs, runs, runs, train=TRAIN | {"track": {"wandb": "off"}})
    run.directory.mkdir()
    path = run.directory / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in steps) + '{"step": 1', encoding="utf-8")
    tracker = Tracker(run, True, since)
    tracker.log({"step": since + 1})
    tracker.close()
    assert [record["step"] for record in read_metrics(path)] == [*(step for step in steps if step <= since), since + 1]
    assert path.read_text(encoding="utf-8").endswith("\n")


def test_only_the_main_rank_tracks(make_run, monkeypatch):
    monkeypatch.setattr(track, "open_sinks", lambda *_: pytest.fail("a tracker was opened"))
    run = make_run()
    tracker = Tracker(run, active=False, since=0)
    tracker.log({"step": 1})
    tracker.artifact("head", "model", run.directory)
    tracker.close()
    assert not (run.directory / "metrics.jsonl").exists()


# Weights & Biases


@pytest.mark.parametrize(
    ("asked", "said", "mode"),
    [
        ("auto", None, "online"),
        ("auto", "online", "online"),
        ("auto", "offline", "offline"),
        ("auto", "disabled", "off"),
        ("auto", "dryrun", "off"),
        ("auto", "", "off"),
        ("off", "online", "off"),
        ("online", "disabled", "online"),
        ("offline", "online", "offline"),
    ],
)
def test_what_a_run_says_goes_before_the_environment(monkeypatch, asked, said, mode):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if said is not None:
        monkeypatch.setenv("WANDB_MODE", said)
    assert wandb_mode(asked) == mode


def wandb_records(folder: Path) -> Iterator:
    """What an offline run holds, by W&B's own messages. The file is a log of LevelDB's kind behind seven bytes."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    [path] = folder.glob("*.wandb")
    data, place, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place < len(data):
        room = 32768 - place % 32768
        if room < 7:  # no header begins at the end of a block
            place += room
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # all of a record, or its last part
            record = pb.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def offline_runs(run) -> list[Path]:
    """The directories that W&B left, oldest first."""
    return sorted((run.directory / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime_ns)


def values(items) -> dict:
    """Keys and values of a message."""
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def test_an_offline_run_holds_all_that_a_user_looks_for(stranger, make_run):
    """Config and provenance, every number of metrics.jsonl, and the head."""
    pytest.importorskip("wandb")
    run = make_run(track={"wandb": "offline", "project": "heads"})
    train(run)
    [folder] = offline_runs(run)
    assert (run.directory / "wandb").is_dir()
    [started, config, history, artifacts] = [{}, {}, {}, {}]
    for record in wandb_records(folder):
        kind = record.WhichOneof("record_type")
        if kind == "run" and not started:
            started = {"id": record.run.run_id, "project": record.run.project, "name": record.run.display_name}
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            row = values(record.history.item)
            history.setdefault(row["_step"], {}).update(row)
        elif kind == "artifact":
            contents = {item.path: item.size for item in record.artifact.manifest.contents}
            artifacts[record.artifact.name] = (record.artifact.type, contents)
    assert started == {"id": wandb_id(run), "project": "heads", "name": "tiny"}
    assert config["train"]["lr"] == 3e-3
    assert config["head"]["kind"] == "eagle3"
    facts = json.loads((run.directory / "provenance.json").read_text(encoding="utf-8"))
    assert {key: config["provenance"][key] for key in facts} == facts
    assert facts["revision"] is None or len(facts["revision"].removesuffix("+changes")) == 40
    assert {"torch", "transformers", "headwright"} <= facts["versions"].keys()
    expected: dict[int, dict] = {}
    for record in records_of(run):
        expected.setdefault(record["step"], {}).update(record)
    assert {key for row in expected.values() for key in row} >= {"loss_0", "agree_0", "lr", "tau", "tau_decoded"}
    assert history.keys() == expected.keys()
    for step, row in expected.items():
        assert {key: history[step][key] for key in row} == pytest.approx(row)
    head = {path.name: path.stat().st_size for path in (run.directory / "head").iterdir()}
    assert artifacts == {"tiny-head": ("model", head)}


def test_a_continued_run_is_the_same_run_and_a_new_one_is_not(stranger, make_run, monkeypatch):
    """Whatever the names of runs are: the run directory decides."""
    pytest.importorskip("wandb")
    run, other = (make_run(track={"wandb": "offline"}) for _ in range(2))
    with monkeypatch.context() as patch:
        crash_at(patch, 4)
        with pytest.raises(Interrupted):
            train(run)
    told = (run.directory / "wandb.json").read_bytes()
    train(run)
    assert (run.directory / "wandb.json").read_bytes() == told
    parts, ids = offline_runs(run), set()
    assert len(parts) == 2
    for folder in parts:
        ids |= {record.run.run_id for record in wandb_records(folder) if record.WhichOneof("record_type") == "run"}
    assert ids == {json.loads(told)["id"]}
    assert wandb_id(other) != wandb_id(run)
    assert wandb_id(other) == wandb_id(other)
    assert run.name == other.name
    assert wandb_id(run).endswith(f"-{run.name}")


@pytest.mark.parametrize("torn", ["", "{", '{"name": 1}'])
def test_a_torn_id_is_made_anew(make_run, torn):
    run = make_run()
    (run.directory / "wandb.json").write_text(torn, encoding="utf-8")
    assert wandb_id(run) == wandb_id(run)


def wandb_lines(capsys) -> list[str]:
    """What the user is told of W&B; no traceback is among it."""
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    return [line for line in (said.out + said.err).splitlines() if "w&b" in line.lower() or "wandb" in line.lower()]


def test_without_a_key_a_run_trains_and_says_so_once(stranger, make_run, capsys):
    pytest.importorskip("wandb")
    run = make_run()
    train(run)
    [line] = wandb_lines(capsys)
    assert line.startswith("W&B is off: no key")
    assert (run.directory / "head" / "head.json").is_file()
    assert not (run.directory / "wandb").exists()
    assert not (run.directory / "wandb.json").exists()


def test_without_its_package_a_run_trains_and_says_so_once(stranger, make_run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = make_run()
    train(run)
    [line] = wandb_lines(capsys)
    assert line.startswith("W&B is off: ")
    assert (run.directory / "head" / "head.json").is_file()


@pytest.mark.parametrize("how", ["off", "disabled"])
def test_who_wants_none_hears_nothing_of_it(stranger, make_run, capsys, monkeypatch, how):
    monkeypatch.setitem(sys.modules, "wandb", None)
    if how == "disabled":
        monkeypatch.setenv("WANDB_MODE", "disabled")
    train(make_run(track={"wandb": "off" if how == "off" else "auto"}))
    assert wandb_lines(capsys) == []


def test_trackers_that_are_not_installed_are_named_once_each(stranger, make_run, capsys, monkeypatch):
    """And the run trains."""
    for name in ("torch.utils.tensorboard", "tensorboardX", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
    run = make_run(track={"wandb": "off", "also": ["tensorboard", "mlflow", "trackio"]})
    train(run)
    said = capsys.readouterr()
    assert [line.split(" is off")[0] for line in said.out.splitlines() if " is off: " in line] == [
        "TensorBoard",
        "MLflow",
        "trackio",
    ]
    assert "Traceback" not in said.out + said.err
    assert (run.directory / "head" / "head.json").is_file()


# TensorBoard, MLflow, trackio


def test_sections_become_dotted_keys():
    config = {"a": 1, "b": {"c": True, "d": {"e": "x"}}, "f": [1, {"g": 2}], "h": None, "i": {}}
    assert flat(config) == {"a": 1, "b.c": True, "b.d.e": "x", "f": '[1, {"g": 2}]', "h": "null"}


@pytest.fixture
def tracked(stranger, make_run, tmp_path, request):
    """A run with one more tracker, as a user starts it from an empty directory."""
    name = request.param
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    run = make_run(track={"wandb": "off", "also": [name]})
    config, here = tmp_path / "run.yaml", tmp_path / "here"
    config.write_text(dump(run), encoding="utf-8")
    here.mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-m", "headwright.train.cli", "train", "--config", str(config)]
    result = subprocess.run(
        command, cwd=here, capture_output=True, text=True, env=environment, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert " is off" not in result.stdout
    assert list(here.iterdir()) == [], "nothing is left where the user stands"
    return run


def curves(run) -> dict[str, list[tuple[int, float]]]:
    """Every number of metrics.jsonl, by its name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records_of(run):
        for key, value in record.items():
            if key != "step":
                found.setdefault(key, []).append((record["step"], value))
    return found


@pytest.mark.parametrize("tracked", ["tensorboard"], indirect=True)
def test_tensorboard_has_every_number(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tracked.directory / "tensorboard" / tracked.name))
    reader.Reload()
    expected = curves(tracked)
    assert set(reader.Tags()["scalars"]) == expected.keys()
    for name, curve in expected.items():
        found = [(event.step, event.value) for event in reader.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in curve], name
        assert [value for _, value in found] == pytest.approx([value for _, value in curve], rel=1e-6), name


@pytest.mark.parametrize("tracked", ["mlflow"], indirect=True)
def test_mlflow_has_every_number_and_the_config(tracked):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tracked.directory / 'mlflow.db'}")
    [experiment] = [found for found in client.search_experiments() if found.name == "headwright"]
    [found] = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("tiny", "FINISHED")
    assert found.data.params["train.lr"] == "0.003"
    assert "provenance.revision" in found.data.params
    for name, curve in curves(tracked).items():
        history = sorted((m.step, m.value) for m in client.get_metric_history(found.info.run_id, name))
        assert history == sorted(curve), name


@pytest.mark.parametrize("tracked", ["trackio"], indirect=True)
def test_trackio_has_every_number(tracked, tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "headwright.db")) as store:
        rows = store.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in rows} == {"tiny"}
    found: dict[str, list[tuple[int, float]]] = {}
    for _, step, metrics in rows:
        for key, value in json.loads(metrics).items():
            found.setdefault(key, []).append((step, value))
    expected = {name: sorted(curve) for name, curve in curves(tracked).items()}
    assert {name: sorted(curve) for name, curve in found.items()} == expected


def test_two_runs_of_one_process_have_their_own_mlflow(stranger, make_run, monkeypatch):
    """Each under its own directory, and a run that goes on in the same MLflow run."""
    seen, given = [], []

    class Recorder:
        """Stands for Accelerate's class."""

        def __init__(self, *_, run_id, **__):
            given.append(run_id)
            self.active_run = SimpleNamespace(info=SimpleNamespace(run_id=run_id or f"run-{len(given)}"))

        start = store_init_configuration = log = finish = lambda self, *_, **__: None

    from accelerate import tracking

    monkeypatch.setattr(tracking, "MLflowTracker", Recorder)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(set_tracking_uri=seen.append))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    runs = [make_run(track={"wandb": "off", "also": ["mlflow"]}) for _ in range(2)]
    for run in (*runs, runs[0]):
        Tracker(run, True, 0).close()
    places = [f"sqlite:///{run.directory.resolve() / 'mlflow.db'}" for run in runs]
    assert seen == [*places, places[0]]
    assert given == [None, None, "run-1"]


# Secrets


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("https://me:pa55@host:8000/v1", "pa55"),
        ("see http://me:pa55@host/x and https://you:0ther@host/y", "0ther"),
        ("https://t0ken@github.com/a/b", "t0ken"),
        ("HF_TOKEN=xyz123 headwright train", "xyz123"),
        ("env HF_TOKEN='hf_xyz123' x", "xyz123"),
        ("WANDB_API_KEY=0123456789abcdef", "0123456789abcdef"),
        ("AWS_SECRET_ACCESS_KEY=aBc/12", "aBc/12"),
        ("hf_abcdefghijklmnopqrstuvwxyzABCDEFGH", "abcdefghijklm"),
        ("--key hf_abcdefghijklmnopqrstuvwxyzABCDEFGH", "abcdefghijklm"),
        ("sk-abcdefghijklmnopqrstuvwxyz0123456789", "abcdefghijklm"),
        ("sk-proj-abcdefghijklmnopqrstuvwxyz0123", "abcdefghijklm"),
        ("api_key: xyz123", "xyz123"),
        ("apikey=xyz123", "xyz123"),
        ("password=xyz123", "xyz123"),
        ("--password=xyz123", "xyz123"),
        ("https://host/v1?api_key=xyz123", "xyz123"),
        ("--password xyz123", "xyz123"),
        ("--api-key xyz123 --other 1", "xyz123"),
        ("--api-key=xyz123", "xyz123"),
        ("{'api_key': 'xyz123'}", "xyz123"),
    ],
)
def test_secrets_are_taken_out(text, secret):
    assert secret not in clean(text)
    assert "…" in clean(text)


@pytest.mark.parametrize(
    "text",
    [
        "headwright train --config configs/quickstart.yaml train.lr=1e-4 train.epochs=2",
        "/data/tokens/x.jsonl",
        "runs/token-study/features",
        "http://localhost:8000/v1",
        "s3://bucket/key/x",
        "git@github.com:me/repo.git",
        "disk-full at task-1",
        "{enable_thinking: false}",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        ("train.tokens_per_batch=256"),
        ("headwright train --config a.yaml harvest.tokens_per_batch=4096"),
        ("tokens_per_batch: 2048"),
        ("answers.max_new_tokens=12"),
        ("eval.max_new_tokens: 96"),
        ("target.tokenizer=meta-llama/Llama-3.1-8B"),
        ("tokenizer: x"),
        ("api_key_env: OPENAI_API_KEY"),
        ("regenerate.api_key_env=OPENAI_API_KEY"),
        ("/data/hf_models/llama"),
        ("target.model=models/sk-small"),
    ],
)
def test_ordinary_texts_stay_as_they_are(text):
    assert clean(text) == text


def test_the_command_can_be_typed_again(monkeypatch):
    """It is what a stopped run tells its user."""
    words = ["train/eagle3.py", "--config", "a.yaml", "train.tokens_per_batch=4096", "train.lr=1e-4"]
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", words)
    assert command() == f"python {' '.join(words)}"


def test_configs_are_cleaned_all_the_way_down():
    config = {
        "urls": ["https://me:pa55@host/v1", "http://host"],
        "deep": {"er": ["hf_abcdefghijklmnopqrstuvwxyzABCDEFGH", 1, None, True, 2.5]},
        "name": "tiny",
    }
    found = cleaned(config)
    assert found["urls"] == ["https://…@host/v1", "http://host"]
    assert found["deep"]["er"][1:] == [1, None, True, 2.5]
    assert "abcdef" not in json.dumps(found)
    assert found["name"] == "tiny"
    assert config["urls"][0] == "https://me:pa55@host/v1", "the run's own is as it was"


def test_no_secret_of_a_run_reaches_its_trackers_or_files(make_run, monkeypatch):
    """Of the config and of the command line."""
    handed = []

    def listen(run, config):
        handed.append(config)
        return Listener("W&B")

    monkeypatch.setattr(track, "start_wandb", listen)
    monkeypatch.setattr(sys, "argv", ["headwright", "train", "HF_TOKEN=pa55word1"])
    run = make_run()
    run.regenerate.urls = ["https://me:pa55word2@host/v1"]
    train(run)
    [config] = handed
    assert config["provenance"]["command"].startswith("headwright train HF_TOKEN=")
    assert "pa55word" not in json.dumps(config)
    for path in run.directory.rglob("*.json"):
        assert "pa55word" not in path.read_text(encoding="utf-8"), path
    assert run.regenerate.urls == ["https://me:pa55word2@host/v1"]
