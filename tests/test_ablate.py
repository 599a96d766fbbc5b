"""scripts/ablate.py: a grid of settings on the same features, resumable, with paired differences."""

import argparse
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, tiny_run

from headwright.configs import UserError, dump
from headwright.data.harvest import harvest

spec = importlib.util.spec_from_file_location("ablate", ROOT / "scripts" / "ablate.py")
ablate = importlib.util.module_from_spec(spec)
sys.modules["ablate"] = ablate
spec.loader.exec_module(ablate)


# The grid


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("head.loss=kl,tv", ['head.loss="kl"', 'head.loss="tv"']),
        ("train.lr=1e-4,0.5", ["train.lr=0.0001", "train.lr=0.5"]),
        ("head.taps=[2,15,27],[27]", ["head.taps=[2, 15, 27]", "head.taps=[27]"]),
        ("vocab.size=null,24", ["vocab.size=null", "vocab.size=24"]),
        ("head.fc_norm=true,false", ["head.fc_norm=true", "head.fc_norm=false"]),
        ("head.loss={kl: 0.1, topk: 1},kl", ['head.loss={"kl": 0.1, "topk": 1}', 'head.loss="kl"']),
        ("seed=3", ["seed=3"]),
    ],
)
def test_values_of_a_key(sweep, values):
    assert ablate.values_of(sweep) == values


@pytest.mark.parametrize("sweep", ["head.loss", "=kl", "head.loss=", "head.loss kl"])
def test_a_sweep_without_values_is_refused(sweep):
    with pytest.raises(UserError, match=r"write key=value,value"):
        ablate.values_of(sweep)


def test_a_sweep_that_is_no_yaml_is_refused():
    with pytest.raises(UserError, match=r"write key=value,value"):
        ablate.values_of("head.taps=[1,2")


def test_grid_is_every_combination():
    found = ablate.grid(["a=1,2", "b=x,y,z"], False)
    assert found == [(f"a={a}", f'b="{b}"') for a in (1, 2) for b in "xyz"]


def test_each_changes_one_key_at_a_time():
    found = ablate.grid(["a=1,2", "b=x,y,z"], True)
    assert found == [("a=1", 'b="x"'), ("a=2", 'b="x"'), ("a=1", 'b="y"'), ("a=1", 'b="z"')]
    assert ablate.grid(["a=1"], True) == [("a=1",)]


def test_labels_say_what_is_changed():
    first = ("a=1", 'b="x"')
    assert ablate.label(("a=2", 'b="x"'), first) == "a=2"
    assert ablate.label(("a=2", 'b="y"'), first) == "a=2, b=y"
    assert ablate.label(first, first) == "compared with: a=1, b=x"
    assert ablate.label(("a=2",), first) == "a=2, b as in the run file"
    assert ablate.label((), ()) == "compared with: the run file as it is"


# The table


def result(answers, seconds=1.0) -> dict:
    """A training's kept result."""
    return {"answers": answers, "cpu_seconds": seconds, "steps": 3}


FIRST, SECOND = [(6, 3), (4, 4), (9, 3)], [(10, 2), (8, 4), (8, 4)]  # τ 19/10 and 26/10


def table_of(kept, settings, seeds=1) -> list[list[str]]:
    """The rows of a table."""
    return list(ablate.rows_of(settings, {ablate.key_of(s, seed): found for (s, seed), found in kept.items()}, seeds))


def percentiles(values) -> str:
    """An interval as the table writes it."""
    low, high = np.percentile(values, [2.5, 97.5])
    return f"[{low:+.3f}, {high:+.3f}]"


def test_differences_are_paired_by_answer():
    """τ pools cycles: 1.9 and 2.6. The same answers are drawn on both sides."""
    settings = [("a=1",), ("a=2",)]
    rows = table_of({(settings[0], 0): result(FIRST, 2.0), (settings[1], 0): result(SECOND, 3.0)}, settings)
    assert [row[0] for row in rows] == ["compared with: a=1", "a=2"]
    assert rows[0][1].startswith("1.900 [")
    assert rows[1][1].startswith("2.600 [")
    assert [row[3] for row in rows] == ["2", "3"]
    assert rows[0][2] == "–"
    picks = np.random.default_rng(0).integers(3, size=(1000, 3))
    (before, after) = (np.array(x)[picks].sum(1) for x in (FIRST, SECOND))
    apart = after[:, 0] / after[:, 1] - before[:, 0] / before[:, 1]
    assert rows[1][2] == f"+0.700 {percentiles(apart)}"


def test_an_even_gain_has_no_spread():
    """Every answer twice as fast: unpaired, the interval would be wide."""
    settings = [("a=1",), ("a=2",)]
    base = [(2 * n, 2 * n) for n in (1, 5, 20)]
    rows = table_of(
        {(settings[0], 0): result(base), (settings[1], 0): result([(t, c // 2) for t, c in base])}, settings
    )
    assert rows[1][2] == "+1.000 [+1.000, +1.000]"


def test_seeds_are_pooled_and_shown():
    settings = [("a=1",), ("a=2",)]
    kept = {
        (s, seed): result(a, 4.0 * seed)
        for s, pair in zip(settings, ((FIRST, SECOND), (SECOND, SECOND)))
        for seed, a in enumerate(pair)
    }
    rows = table_of(kept, settings, seeds=2)
    assert rows[0][1].startswith(f"{45 / 20:.3f} [")
    assert rows[0][4] == "1.900, 2.600"
    assert rows[1][2].startswith(f"{26 / 10 - 45 / 20:+.3f} [")
    assert rows[1][3] == "2"


def test_only_finished_settings_are_shown():
    settings = [("a=1",), ("a=2",), ("a=3",)]
    kept = {(settings[0], 0): result(FIRST), (settings[2], 0): result(SECOND)}
    assert [row[0] for row in table_of(kept, settings)] == ["compared with: a=1", "a=3"]
    assert table_of({(settings[2], 0): result(SECOND)}, settings) == []
    assert table_of(kept, settings, seeds=2) == []


def test_markdown(tmp_path, capsys):
    settings = [("head.loss=kl",), ("head.loss=tv",)]
    kept = {ablate.key_of(s, 0): result(FIRST) for s in settings}
    ablate.show(settings, kept, 1, tmp_path / "table.md")
    lines = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["| setting | τ [95 %] | against the first | CPU s |", "| --- | --- | --- | --- |"]
    assert lines[3].startswith("| head.loss=tv | 1.900 [")
    assert lines[3].endswith("| +0.000 [+0.000, +0.000] | 1 |")
    assert len(lines) == 4
    assert "held-out τ of a greedy chain" in capsys.readouterr().out


# The runs


@pytest.fixture(scope="module")
def harvested(model_dir, chats, tmp_path_factory) -> Path:
    """A run file whose features are there."""
    folder = tmp_path_factory.mktemp("ablate")
    run = tiny_run(
        model_dir,
        chats,
        folder / "runs",
        corpus={"sources": [{"path": str(chats), "limit": 16}], "held_out": 0.25, "max_length": 256},
        answers={"by": "corpus"},
        vocab={"size": 16, "pin_bytes": False, "least": 0.0},
        train={"epochs": 1, "tokens_per_batch": 256, "lr": 1e-2, "log_every": 1, "evals": 1, "saves": 1},
    )
    harvest(run)
    (folder / "run.yaml").write_text(dump(run), encoding="utf-8")
    return folder / "run.yaml"


@pytest.fixture
def config(harvested) -> Path:
    """The run file, without the results of other tests."""
    (harvested.parent / "runs" / "tiny" / "ablations.json").unlink(missing_ok=True)
    return harvested


def call(monkeypatch, config: Path, *arguments: str) -> int:
    """The script as a user starts it: its exit code."""
    monkeypatch.setattr(sys, "argv", ["ablate.py", "--config", str(config), *arguments])
    try:
        ablate.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def kept(config: Path) -> dict:
    """What ablations.json holds, by context."""
    path = config.parent / "runs" / "tiny" / "ablations.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def directories(config: Path) -> set[str]:
    """Run directories."""
    return {path.name for path in (config.parent / "runs").iterdir()}


class Counted:
    """`trained` with a count, and an interruption where asked."""

    def __init__(self, monkeypatch, stop_at: int | None = None, real: bool = False):
        self.settings, self.stop_at, self.real, self.train = [], stop_at, real, ablate.trained
        monkeypatch.setattr(ablate, "trained", self)

    def __call__(self, arguments, setting, seed):
        if len(self.settings) == self.stop_at:
            raise KeyboardInterrupt
        self.settings.append((setting, seed))
        return self.train(arguments, setting, seed) if self.real else result([(4 + len(self.settings), 2), (3, 2)])


def test_settings_are_trained_on_the_base_s_features(monkeypatch, config, capsys, tmp_path):
    """Two real trainings: other heads, the same answers, and no directory left behind."""
    seen = []
    real = ablate.train
    monkeypatch.setattr(ablate, "train", lambda run: (seen.append(run), real(run))[1])
    sweep = ["--sweep", "head.taps=[1,3,6],[1,3]", "--set", "train.lr=0.02", "--out", str(tmp_path / "t.md")]
    assert call(monkeypatch, config, *sweep) == 0
    assert directories(config) == {"tiny"}
    assert [run.head.taps for run in seen] == [[1, 3, 6], [1, 3]]
    assert {run.features for run in seen} == {"tiny"}
    assert {run.train.lr for run in seen} == {0.02}
    assert len({run.name for run in seen}) == 2
    [(context, found)] = kept(config).items()
    assert context.startswith(f"{config} train.lr=0.02 ")
    assert list(found) == ["head.taps=[1, 3, 6] seed=0", "head.taps=[1, 3] seed=0"]
    counts = {len(entry["answers"]) for entry in found.values()}
    assert len(counts) == 1
    assert counts.pop() > 2
    assert all(entry["steps"] > 1 and entry["cpu_seconds"] > 0 for entry in found.values())
    assert "head.taps=[1, 3]" in (tmp_path / "t.md").read_text(encoding="utf-8")


def test_a_training_of_the_script_is_that_of_the_run_file(monkeypatch, config):
    """τ of a setting equals what the same training measures by itself; --keep leaves its directory."""
    assert call(monkeypatch, config, "--sweep", "head.steps=2", "--keep") == 0
    [name] = directories(config) - {"tiny"}
    folder = config.parent / "runs" / name
    [[found]] = [part.values() for part in kept(config).values()]
    progress = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    assert ablate.tau([tuple(answer) for answer in found["answers"]]) == pytest.approx(progress["best_tau"])
    assert found["steps"] == progress["total"]
    shutil.rmtree(folder)


def test_an_interrupted_grid_continues(monkeypatch, config, capsys):
    """What is done is not done again, and nothing is missing."""
    sweep = ("--sweep", "head.loss=kl,tv", "train.lr=0.01,0.02")
    first = Counted(monkeypatch, stop_at=2)
    assert call(monkeypatch, config, *sweep) == 130
    assert [len(part) for part in kept(config).values()] == [2]
    second = Counted(monkeypatch)
    assert call(monkeypatch, config, *sweep) == 0
    lr, tv = "train.lr=0.02", 'head.loss="tv"'
    assert [setting for setting, _ in first.settings + second.settings] == [(), (lr,), (tv,), (tv, lr)]
    third = Counted(monkeypatch)
    assert call(monkeypatch, config, *sweep) == 0
    assert third.settings == []


def test_a_larger_grid_and_more_seeds_add_to_it(monkeypatch, config):
    Counted(monkeypatch)
    call(monkeypatch, config, "--sweep", "head.loss=kl,tv")
    more = Counted(monkeypatch)
    call(monkeypatch, config, "--sweep", "head.loss=kl,tv,lk", "--seeds", "2")
    lk, tv = ('head.loss="lk"',), ('head.loss="tv"',)
    assert more.settings == [(lk, 0), ((), 1), (tv, 1), (lk, 1)]
    again = Counted(monkeypatch)
    call(monkeypatch, config, "--sweep", "head.steps=2,3", "--each")
    assert [setting for setting, _ in again.settings] == [("head.steps=3",)], "what changes nothing is trained already"
    other = Counted(monkeypatch)
    call(monkeypatch, config, "--sweep", "head.loss=kl", "--set", "train.lr=0.5")
    assert len(other.settings) == 1, "other overrides are another ablation"
    assert len(kept(config)) == 2


def test_table_trains_nothing(monkeypatch, config, capsys):
    Counted(monkeypatch)
    call(monkeypatch, config, "--sweep", "head.loss=kl,tv")
    before = kept(config)
    nothing = Counted(monkeypatch)
    capsys.readouterr()
    assert call(monkeypatch, config, "--sweep", "head.loss=kl,tv,lk", "--table") == 0
    assert nothing.settings == []
    assert kept(config) == before
    out = capsys.readouterr().out
    assert "head.loss=tv" in out
    assert "head.loss=lk" not in out


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (["head.loss=kl,tv", "head.lss=a,b"], "unknown key lss; did you mean loss?"),
        (["head.loss=kl,nonsense"], "nonsense"),
        (["train.lr=0.1,-1"], "train.lr = -1"),
        (["head.kind=eagle3,medus"], "did you mean medusa?"),
        (["head.window=2"], "head.window 2: must be larger"),
        (["head.loss"], "write key=value,value"),
    ],
)
def test_a_bad_setting_is_refused_before_anything_is_trained(monkeypatch, config, capsys, sweep, message):
    counted = Counted(monkeypatch)
    assert call(monkeypatch, config, "--sweep", *sweep) == 2
    assert counted.settings == []
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert kept(config) == {}


def test_values_that_need_each_other(monkeypatch, config):
    """head.norm_before_fc is refused beside head.fc_norm, which is on by itself."""
    counted = Counted(monkeypatch)
    assert call(monkeypatch, config, "--sweep", "head.fc_norm=false", "head.norm_before_fc=true,false") == 0
    assert len(counted.settings) == 2


def test_features_that_are_not_there(monkeypatch, config, capsys, tmp_path):
    assert call(monkeypatch, config, "--sweep", "head.loss=kl", "--set", f"runs={tmp_path}") == 2
    assert "run the harvest first" in capsys.readouterr().err


def test_no_seeds_is_refused(monkeypatch, config):
    Counted(monkeypatch)
    assert call(monkeypatch, config, "--sweep", "head.loss=kl", "--seeds", "0") == 2


def test_run_names_tell_settings_apart(monkeypatch, config):
    """Another setting, another directory; the same one, the same: so a killed training continues."""
    seen = []
    monkeypatch.setattr(ablate, "train", lambda run: seen.append((run.name, run.seed)))
    monkeypatch.setattr(ablate, "answers_of", lambda run: [(1, 1)])
    monkeypatch.setattr(ablate, "steps_of", lambda run: 1)
    arguments = argparse.Namespace(config=str(config), overrides=[], keep=True)
    for setting, seed in (
        (("head.steps=1",), 0),
        (("head.steps=2",), 0),
        (("head.steps=1",), 1),
        (("head.steps=1",), 0),
    ):
        ablate.trained(arguments, setting, seed)
    assert len(set(seen)) == 3
    assert seen[0] == seen[3]
    assert [seed for _, seed in seen] == [0, 0, 1, 0]
    assert all(name.startswith("tiny-ablate-") for name, _ in seen)
