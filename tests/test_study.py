"""Studies: a table, a plot and a sentence each; they count what the decoder does, and go on where they stopped."""

import contextlib
import html
import io
import json
import math
import shutil
import statistics
import warnings
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Interrupted, make_model, make_tiny_head, make_tokenizer, tiny_run

from headwright.configs import RunConfig, UserError, dump
from headwright.data.harvest import harvest, open_store
from headwright.data.sampling import Policy
from headwright.data.small_model import random_target
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab
from headwright.eval import costs, forecast, plots, proofs, report, sides, study, sweeps, verify
from headwright.eval.acceptance import evaluate
from headwright.eval.baselines import training_texts
from headwright.eval.calculator import expected_tokens
from headwright.eval.clock import PHASES
from headwright.eval.decode import decode_plain, speculate
from headwright.eval.forecast import Calibration
from headwright.eval.metrics import acceptance_length
from headwright.eval.prompts import HELD_OUT, Prompt
from headwright.eval.scene import Costs, Scene, middle, seconds_per_cycle
from headwright.eval.settings import Generation
from headwright.eval.sides import WARM, Spoken
from headwright.eval.studies import STUDIES
from headwright.eval.study import conduct
from headwright.heads.base import make_head
from headwright.heads.draft_tree import TreeShape
from headwright.heads.saved import save_head
from headwright.train.run import train

STUDY = {
    "prompts": 3,
    "max_new_tokens": 8,
    "depths": [1, 2, 3],
    "width": 2,
    "nodes": 4,
    "widths": [2, 3],
    "node_counts": [4, 6],
    "depth": 3,
    "contexts": [64, 96, 600],
    "batches": [1, 2],
    "passes": [1, 4, 2],
    "sizes": ["32x4x4x2x64x300", "64x4x4x2x64x300"],
    "samples": 100,
    "temperatures": [0.0, 1.0],
}
QUESTIONS = {"baseline", "batch_size", "stack", "data", "tree_shape"}
TIMES = {"speedup", "speedup_ci95", "decode_speedup", "cycle_in_steps", "verify_share", "tokens_per_second"}
CYRILLIC = "сколько будет два и два"
CHAIN, TREE = TreeShape.chain(3), TreeShape.dynamic(3, 2, 4)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """A target of four layers: studies decode a lot."""
    folder = tmp_path_factory.mktemp("model")
    make_model(num_hidden_layers=4).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def home(model_dir, chats, tmp_path_factory) -> Path:
    """Where the module's files lie: runs of a trained head, and a set of Cyrillic prompts."""
    folder = tmp_path_factory.mktemp("study")
    learns = {"epochs": 6, "tokens_per_batch": 256, "lr": 1e-2, "log_every": 9, "evals": 1, "saves": 1}
    run = run_of(model_dir, chats, folder / "runs", train=learns)
    harvest(run)
    train(run)
    rows = [json.dumps({"prompt": f"{CYRILLIC} {number}"}) for number in range(2)]
    (folder / "other.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def run_of(model_dir: Path, chats: Path, runs: Path, **sections) -> RunConfig:
    """A run over that target."""
    usual = {
        "harvest": {"taps": [1, 2, 3], "tokens_per_batch": 512, "dtype": "float32"},
        "head": {"kind": "eagle3", "steps": 2, "taps": [1, 2, 3]},
        "vocab": {"size": 100, "pin_bytes": False},
    }
    return tiny_run(model_dir, chats, runs, **usual | sections)


def sets_of(home: Path) -> list[dict]:
    """The held-out prompts and the others."""
    return [{"set": HELD_OUT}, {"path": str(home / "other.jsonl")}]


@pytest.fixture(scope="module")
def everything(home, model_dir, chats) -> SimpleNamespace:
    """An evaluation and all studies: the run, its studies by name, and what was printed."""
    wanted = {"prompts": 3, "max_new_tokens": 4, "timed_prompts": 3, "sets": sets_of(home)}
    wanted["shapes"] = [{"kind": "chain", "depth": 2}]
    run = run_of(model_dir, chats, home / "runs", study=STUDY, eval=wanted)
    shutil.copytree(run.directory, home / "all" / run.name)
    run.runs = str(home / "all")
    path = home / "run.yaml"
    path.write_text(dump(run), encoding="utf-8")
    printed, drawn = io.StringIO(), {}
    draw = plots.study
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(report, "figures", lambda *_: {})  # other tests' matter
        patch.setattr(
            plots, "study", lambda found: drawn.get(found["study"]) or drawn.setdefault(found["study"], draw(found))
        )
        evaluate(replace(run, eval=replace(run.eval, sets=run.eval.sets[:1])))
        study.main(["all", "--config", str(path)])
    found = {name: json.loads(file_of(run, f"{name}.json").read_text(encoding="utf-8")) for name in STUDIES}
    return SimpleNamespace(run=run, config=path, found=found, printed=printed.getvalue())


@pytest.fixture(scope="module")
def scene(everything) -> Scene:
    """The same run, opened; not to be changed."""
    return Scene.open(everything.run)


@pytest.fixture
def make_scene(home, model_dir, chats, tmp_path, monkeypatch):
    """Scenes over a run that no study has been made of; each again over what the one before has left."""

    def make(sets: list[dict] | None = None, **changes) -> Scene:
        if not (tmp_path / "runs").exists():
            shutil.copytree(home / "runs", tmp_path / "runs")
        wanted = {"sets": sets_of(home) if sets is None else sets}
        monkeypatch.setattr(plots, "study", lambda _: "<svg/>")  # a third of the time
        return Scene.open(run_of(model_dir, chats, tmp_path / "runs", study=STUDY | changes, eval=wanted))

    return make


def watch_sides(monkeypatch, most: int | None = None) -> list:
    """Note (side, prompt) of each text that a side decodes; with `most`, interrupt the one after so many."""
    seen: list = []
    for kind in (sides.Side, sides.TransformersSide):
        real = kind.decode

        def decode(self, target, ids, limit, seed, real=real):
            if limit != WARM:
                if len(seen) == most:
                    raise Interrupted
                seen.append((self.key, tuple(ids)))
            return real(self, target, ids, limit, seed)

        monkeypatch.setattr(kind, "decode", decode)
    return seen


def file_of(run, name: str) -> Path:
    """A file of a run's studies."""
    return run.directory / "studies" / name


def kept_names(scene: Scene, name: str) -> list[str]:
    """What a study's file of finished measurements holds."""
    lines = file_of(scene.run, f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["name"] for line in lines[1:]]


def timeless(rows: list[dict]) -> list[dict]:
    """Rows without what a clock has measured."""
    return [{k: v for k, v in row.items() if k not in TIMES and not k.endswith("_ms")} for row in rows]


def by_hand(
    scene: Scene, shape: TreeShape, prompts: list[Prompt] | None = None, limit: int = STUDY["max_new_tokens"]
) -> list[Generation]:
    """The decoder alone."""
    asked = scene.prompts if prompts is None else prompts
    return [speculate(scene.target, scene.head, prompt.ids, shape, limit) for prompt in asked]


# All of them


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_keeps_its_contract(everything, name):
    found = everything.found[name]
    assert (found["schema"], found["study"], found["about"]) == ("headwright.study/1", name, STUDIES[name].about)
    assert set(found["answers"]) == QUESTIONS
    assert all(found["answers"].values())
    assert found["rows"]
    assert found["says"].strip()
    assert found["seconds"] > 0
    assert found["columns"] == STUDIES[name].columns
    for row in found["rows"]:
        missing = set(found["columns"]) - set(row)
        assert not missing
    plot = found["plot"]
    assert plot["kind"] in ("lines", "diagonal", "map")
    for key in (plot["x"], *plot["y"], *([plot["by"]] if plot["by"] else [])):
        assert key in found["rows"][0], key


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_drawn_and_printed(everything, name):
    root = ET.parse(file_of(everything.run, f"{name}.svg")).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert f"study {name}: {STUDIES[name].about}" in everything.printed
    assert everything.found[name]["says"] in everything.printed
    assert f"{name}.json, .svg" in everything.printed


def test_tables_hold_the_rows(everything):
    printed = everything.printed
    for row in everything.found["depth"]["rows"]:
        assert f"│ {row['shape']} " in printed
        assert study.cell(row["tau"]) in printed
    assert "depth \\" in printed or "α \\ depth" in printed  # the map has a column for each depth


def test_the_report_shows_all_studies(everything):
    page = html.unescape((everything.run.directory / "report.html").read_text(encoding="utf-8"))
    for found in everything.found.values():
        assert found["says"] in page
        assert found["about"] in page


def test_without_a_report_no_page_is_made(make_scene):
    scene = make_scene()
    study.render_again(scene.run.directory)
    assert not (scene.run.directory / "report.html").exists()


def test_study_files_are_json_that_all_can_read(everything):
    for name in STUDIES:
        text = file_of(everything.run, f"{name}.json").read_text(encoding="utf-8")
        json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_answers_that_end_at_once_leave_no_nan(make_scene, tmp_path):
    scene = make_scene(prompts=1, depths=[2])
    scene.target.spec = replace(scene.target.spec, eos_token_ids=tuple(range(scene.target.spec.vocab_size)))
    conduct(scene, "depth")
    text = file_of(scene.run, "depth.json").read_text(encoding="utf-8")
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_cells_are_short():
    given = [123.4, 1.234, 0.0, 0.01234, -2.0, None, 3, "chain-3", [1.0, 2.5]]
    assert list(map(study.cell, given)) == ["123", "1.23", "0.00", "0.012", "-2.00", "–", "3", "chain-3", "1.00–2.50"]


def test_a_map_has_a_column_across(capsys):
    wanted = STUDIES["break-even"]
    rows = [{"depth": d, "alpha": a, "speedup": 10.0 * d + a} for d in (2, 1) for a in (0.5, 0.25)]
    study.show_map(wanted, rows[:-1])
    table = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line] for line in table] == [["0.25", "–", "20.25"], ["0.50", "10.50", "20.50"]]


# Going on


def test_an_interrupted_study_goes_on_where_it_stopped(everything, make_scene, monkeypatch):
    scene = make_scene()
    with monkeypatch.context() as patch:
        before = watch_sides(patch, 7)
        with pytest.raises(Interrupted):
            conduct(scene, "depth")
    finished = kept_names(scene, "depth")
    assert len(finished) == len(before) == 7
    assert not file_of(scene.run, "depth.json").exists()
    with monkeypatch.context() as patch:
        after = watch_sides(patch)
        found = conduct(make_scene(), "depth")
    assert len(before) + len(after) == 5 * 3  # two baselines and three trees, three prompts
    assert not set(before) & set(after)
    assert timeless(found["rows"]) == timeless(everything.found["depth"]["rows"])
    assert kept_names(scene, "depth")[:7] == finished
    with monkeypatch.context() as patch:
        again = watch_sides(patch, 0)
        assert conduct(make_scene(), "depth")["rows"] == found["rows"]
    assert again == []


def test_a_torn_line_is_measured_again(make_scene, monkeypatch):
    scene = make_scene(depths=[1])
    conduct(scene, "depth")
    path = file_of(scene.run, "depth.jsonl")
    path.write_text(path.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    again = watch_sides(monkeypatch)
    conduct(make_scene(depths=[1]), "depth")
    assert len(again) == 1


@pytest.mark.parametrize("change", ["head", "max_new_tokens", "seed"])
def test_what_belongs_to_something_else_is_measured_anew(make_scene, monkeypatch, change):
    small = {"depths": [2], "prompts": 2}
    scene = make_scene(**small)
    conduct(scene, "depth")
    other = make_scene(**small, **({"max_new_tokens": 7} if change == "max_new_tokens" else {}))
    if change == "head":
        with torch.no_grad():
            next(scene.head.parameters()).add_(0.01)
        save_head(scene.head, scene.run.directory / "head")
    if change == "seed":
        other.run.seed += 1
    again = watch_sides(monkeypatch)
    conduct(other, "depth")
    assert len(again) == 3 * 2


def test_one_more_depth_costs_one_more_side(make_scene, monkeypatch):
    conduct(make_scene(depths=[2], prompts=2), "depth")
    again = watch_sides(monkeypatch)
    conduct(make_scene(depths=[2, 3], prompts=2), "depth")
    assert [key for key, _ in again] == ["eagle3 tree-3x2-4 T=0"] * 2


def test_a_study_gives_the_same_twice(everything, make_scene):
    found = conduct(make_scene(), "temperature")  # in another directory: nothing is kept there
    assert timeless(found["rows"]) == timeless(everything.found["temperature"]["rows"])


def test_more_rounds_give_the_same_text(everything, make_scene, monkeypatch):
    seen = watch_sides(monkeypatch)
    found = conduct(make_scene(rounds=2, depths=[3]), "depth")
    assert len(seen) == 2 * 3 * 3
    assert timeless(found["rows"]) == timeless(everything.found["depth"]["rows"][2:])


def test_sizes_are_measured_anew_in_another_shape(make_scene):
    only = {"sizes": STUDY["sizes"][:1]}
    conduct(make_scene(**only), "size")
    [row] = conduct(make_scene(**only, depth=2, width=3, nodes=5), "size")["rows"]
    assert (row["chain"], row["tree"]) == ("chain-2", "tree-2x3-5")


def test_a_changed_set_is_asked_anew(make_scene, tmp_path, monkeypatch):
    path, small = tmp_path / "mine.jsonl", {"depths": [2], "prompts": 1}
    path.write_text('{"prompt": "one"}\n')
    conduct(make_scene([{"path": str(path)}], **small), "domain")
    path.write_text('{"prompt": "quite another"}\n')
    again = watch_sides(monkeypatch)
    conduct(make_scene([{"path": str(path)}], **small), "domain")
    assert len(again) == 4


def test_a_longer_context_leaves_shorter_prompts_as_they_were(make_scene, monkeypatch):
    small = {"context_prompts": 1, "width": 2}
    with monkeypatch.context() as patch:
        first = watch_sides(patch)
        conduct(make_scene(**small, contexts=[64], depth=2), "context")
    second = watch_sides(monkeypatch)
    rows = conduct(make_scene(**small, contexts=[64, 150], depth=3), "context")["rows"]
    assert [row["same_text"] for row in rows] == ["1/1"] * 4
    said = {ids for key, ids in [*first, *second] if len(ids) == 64}
    drafted = {ids for key, ids in second if len(ids) == 64 and key.startswith("eagle3")}
    plain = {ids for key, ids in [*first, *second] if len(ids) == 64 and key.startswith("plain")}
    assert drafted
    assert drafted <= plain <= said  # what is compared has answered the same prompt


def test_a_larger_batch_measures_the_smaller_ones_on_the_same_texts(make_scene):
    conduct(make_scene(prompts=1, batches=[1]), "batch")
    rows = conduct(make_scene(prompts=1, batches=[1, 3]), "batch")["rows"]
    assert {row["same_text"] for row in rows} == {"3/3"}


# Shapes


def test_trees_hold_what_their_depth_and_width_allow(scene):
    assert scene.tree(3, 2, 4) == TreeShape.dynamic(3, 2, 4)
    assert scene.tree(3, 2, 99) == TreeShape.dynamic(3, 2, 10)  # 2 + 2 · 2²
    assert scene.tree(1, 4, 99) == TreeShape.dynamic(1, 4, 4)
    assert scene.tree(5, 2, 3) == TreeShape.dynamic(5, 2, 5)
    assert scene.trees([1, 1, 2], 2, 2) == [TreeShape.dynamic(1, 2, 2), TreeShape.dynamic(2, 2, 2)]


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("depth", ["tree-1x2-2", "tree-2x2-4", "tree-3x2-4"]),
        ("width", ["tree-3x2-4", "tree-3x2-6", "tree-3x3-4", "tree-3x3-6"]),
        ("chain-tree", ["chain-2", "tree-2x2-4", "chain-3", "tree-3x2-4"]),
        ("temperature", ["chain-3", "tree-3x2-4"] * 2),
        ("context", ["chain-3", "tree-3x2-4"] * 2),
        ("batch", ["plain", "chain-3", "tree-3x2-3"] * 2),
        ("forecast", ["chain-1", "chain-2", "chain-3", "tree-3x2-4", "tree-3x2-6"]),
    ],
)
def test_shapes_are_those_asked_for(everything, name, shapes):
    assert [row["shape"] for row in everything.found[name]["rows"]] == shapes


@pytest.mark.parametrize("name", ["depth", "width", "chain-tree"])
def test_tau_is_the_decoders(everything, scene, name):
    for row in everything.found[name]["rows"]:
        shape = TreeShape.parse(row["shape"])
        assert (row["kind"], row["depth"], row["top_k"], row["nodes"]) == (
            "chain" if shape.kind == "chain" else "tree",
            shape.depth,
            shape.top_k,
            shape.nodes,
        )
        assert row["tau"] == acceptance_length(by_hand(scene, shape)), row["shape"]
        assert row["same_text"] == "3/3"
        low, high = row["tau_ci95"]
        assert 1 <= low <= row["tau"] <= high <= shape.depth + 1
    assert max(row["tau"] for row in everything.found[name]["rows"]) > 1.1  # else there is little to compare


def test_numbers_of_a_row_fit_each_other(everything):
    for name in ("depth", "width", "chain-tree", "context", "domain", "forecast"):
        for row in everything.found[name]["rows"]:
            parts = [row[f"{phase}_ms"] / row["plain_ms"] for phase in ("draft", "verify", "rest")]
            assert row["cycle_in_steps"] == pytest.approx(sum(parts))
            assert row["decode_speedup"] == pytest.approx(row["tau"] / row["cycle_in_steps"])
            assert row["verify_share"] == pytest.approx(parts[1] / sum(parts))
            assert row["tokens_per_second"] > 0


def test_equal_passes_by_hand():
    one = SimpleNamespace(wholes=[Generation(emitted=[1, 2, 1, 3]), Generation(emitted=[2])])
    other = SimpleNamespace(wholes=[Generation(emitted=[4, 3]), Generation(emitted=[1, 1])])
    assert sweeps.equal_passes(one, other) == (1 + 2 + 2, 4 + 3 + 1)


def test_tokens_in_equal_passes_are_the_decoders(everything, scene):
    rows = everything.found["chain-tree"]["rows"]
    for chain, tree in zip(rows[::2], rows[1::2]):
        assert (chain["kind"], tree["kind"], chain["depth"]) == ("chain", "tree", tree["depth"])
        pairs = list(zip(*(by_hand(scene, TreeShape.parse(row["shape"])) for row in (chain, tree))))
        passes = [min(len(a.emitted), len(b.emitted)) for a, b in pairs]
        assert chain["tokens_in_equal_passes"] == sum(sum(a.emitted[:n]) for (a, _), n in zip(pairs, passes))
        assert tree["tokens_in_equal_passes"] == sum(sum(b.emitted[:n]) for (_, b), n in zip(pairs, passes))


def test_temperatures_are_those_asked_for(everything):
    rows = everything.found["temperature"]["rows"]
    assert [row["temperature"] for row in rows] == [0, 0, 1, 1]
    assert [row["same_text"] for row in rows] == ["3/3", "3/3", None, None]
    deep = {row["shape"]: row["tau"] for row in everything.found["chain-tree"]["rows"]}
    assert [row["tau"] for row in rows[:2]] == [deep["chain-3"], deep["tree-3x2-4"]]


def test_sampled_tau_is_the_decoders(everything, scene):
    for row in everything.found["temperature"]["rows"][2:]:
        seeds = range(everything.run.seed, everything.run.seed + 3)
        shape, limit = TreeShape.parse(row["shape"]), STUDY["max_new_tokens"]
        runs = [
            speculate(scene.target, scene.head, prompt.ids, shape, limit, Policy(1.0), seed)
            for prompt, seed in zip(scene.prompts, seeds)
        ]
        assert row["tau"] == acceptance_length(runs), row["shape"]


# Heads that guess a few tokens ahead


@pytest.fixture(scope="module")
def shallow(model_dir, chats, tmp_path_factory):
    """A run of a Medusa head that guesses two ahead."""
    run = tiny_run(
        model_dir,
        chats,
        tmp_path_factory.mktemp("shallow"),
        head={"kind": "medusa", "steps": 2},
        harvest={"taps": [4], "tokens_per_batch": 512, "dtype": "float32"},
        study=STUDY | {"prompts": 2, "depths": [1, 2, 7], "depth": 5, "contexts": [64], "batches": [1]},
    )
    harvest(run)
    target = Target.load(run.target, open_store(run, "held-out").manifest.taps)
    vocab = DraftVocab(torch.arange(target.spec.vocab_size), target.spec.vocab_size)
    head = make_head(run.head, target.spec, target.taps, vocab)
    head.attach(target)
    head.initialise(target)
    save_head(head, run.directory / "head")
    return run


@pytest.mark.parametrize(
    "name",
    [
        "depth",
        "temperature",
        "context",
        "chain-tree",
        "batch",
        "lossless",
    ],
)
def test_a_shallow_head_gets_no_deeper_shapes(shallow, name):
    scene = Scene.open(shallow)
    assert scene.head.deepest == 2
    with contextlib.suppress(UserError):  # that there is nothing to measure is an answer as well
        rows = conduct(scene, name)["rows"]
        assert max(row.get("depth", 0) for row in rows) <= 2
        if name == "depth":
            assert [row["depth"] for row in rows] == [1, 2]


def test_nothing_to_measure_is_said(shallow):
    with pytest.raises(UserError, match="study width: nothing to measure with these settings"):
        conduct(Scene.open(shallow), "width")


def test_sizes_of_a_shallow_head(shallow):
    rows = conduct(Scene.open(shallow), "size")["rows"]
    assert {row["chain"] for row in rows} == {"chain-2"}


# Costs


def spoken(cycles: int, rate: float, **phases: float) -> Spoken:
    """A text of so many cycles, each of which took `rate` times so long in each phase."""
    lasted = dict.fromkeys(PHASES, 0.0) | {name: cycles * rate * value for name, value in phases.items()}
    return Spoken([Generation(tokens=[1] * cycles, emitted=[1] * cycles, phases=lasted | {"prefill": 99.0})])


def race(ours: list[Spoken], said: list[Spoken]) -> SimpleNamespace:
    """As much of a part as costs read."""
    return SimpleNamespace(plain=SimpleNamespace(ours=ours), said=said)


DRAFTED = {"draft": 0.02, "verify": 0.05, "select": 0.01, "commit": 0.004, "other": 0.001}


def test_costs_are_interquartile_means_over_prompts():
    plain = [spoken(10, 1.0, verify=0.03, other=0.01), spoken(4, 2.0, verify=0.03, other=0.01)]
    said = [spoken(3, 1.0, **DRAFTED), spoken(5, 2.0, **DRAFTED)]
    found = Costs.of(race(plain, said))
    assert (found.draft, found.verify, found.rest) == pytest.approx((0.5, 1.25, 0.375))
    assert found.cycle == pytest.approx(2.125)
    assert found.plain_ms == pytest.approx(60)  # between 40 and 80


def test_a_quarter_at_each_end_is_left_out():
    assert middle([1.0, 2.0, 6.0]) == 3.0
    assert middle([100.0, 2.0, 4.0, -50.0]) == 3.0
    assert middle([2.0, 3.0, 4.0, 5.0, 9.0, 0.0, 6.0, 1000.0]) == 4.5


def test_a_stalled_prompt_changes_no_cost():
    plain = [spoken(10, 1.0, verify=0.04) for _ in range(5)]
    said = [spoken(3, 1.0, **DRAFTED) for _ in range(5)]
    calm = Costs.of(race(plain, said))
    said[2] = spoken(3, 50.0, **DRAFTED)
    plain[4] = spoken(3, 50.0, verify=0.04)
    assert Costs.of(race(plain, said)) == calm


def test_prompts_without_cycles_have_no_costs():
    plain, said = spoken(10, 1.0, verify=0.04), spoken(3, 1.0, **DRAFTED)
    assert Costs.of(race([spoken(0, 1.0), plain], [said, said])) == Costs.of(race([plain], [said]))
    assert math.isnan(Costs.of(race([plain], [spoken(0, 1.0)])).cycle)


def test_capturing_is_no_cost():
    run = replace(spoken(4, 1.0, **DRAFTED).whole, warmup=0.004)
    assert seconds_per_cycle(run) == pytest.approx(0.085 - 0.001)
    assert seconds_per_cycle(run, ["other"]) == pytest.approx(0.0)
    assert seconds_per_cycle(run, ["verify"]) == pytest.approx(0.05)


# Forecast


def test_tau_is_foretold_exactly(everything):
    for row in everything.found["forecast"]["rows"]:
        assert row["tau_foretold"] == row["tau"], row["shape"]
        assert row["same_text"] == "3/3"


def test_forecasts_are_of_other_answers_than_the_calibration(everything, scene):
    lines = file_of(everything.run, "forecast.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    places: dict[str, set[str]] = {}
    for name in (json.loads(line)["name"] for line in lines):
        if " | " in name:
            side, place = name.split(" | ")
            places.setdefault(side, set()).add(" ".join(place.split()[:3]))
    calibrated, foretold = {f"held-out answer {n}" for n in (0, 2, 4)}, {f"held-out answer {n}" for n in (1, 3, 5)}
    assert places["eagle3 chain-1 T=0"] == calibrated | foretold
    assert places["eagle3 tree-2x2-4 T=0"] == calibrated
    assert places["eagle3 tree-3x2-4 T=0"] == foretold | calibrated


def test_off_is_of_the_columns(everything):
    rows = everything.found["forecast"]["rows"]
    for row in rows:
        assert row["off"] == pytest.approx(row["foretold"] / row["decode_speedup"] - 1)
        assert row["foretold"] > 0
    assert {row["calibrated"] for row in rows} <= {"yes", "no"}
    assert rows[0]["calibrated"] == "yes"
    within = sum(abs(row["off"]) <= 0.1 for row in rows)
    assert everything.found["forecast"]["says"].startswith(f"{within} of {len(rows)} shapes within 10 %")


def test_a_calibration_interpolates():
    found = Calibration({1: 1.0, 4: 1.2, 8: 2.0}, {1: {1: 0.1, 3: 0.5}, 4: {2: 0.4, 4: 0.8}}, 0.05)
    device = torch.device("cpu")
    assert found.cycle(TreeShape.chain(2), device) == pytest.approx(0.3 + 1.2 + 0.05)  # three nodes are padded to four
    assert found.cycle(TreeShape.dynamic(3, 4, 5), device) == pytest.approx(0.6 + 2.0 + 0.05)
    assert found.cycle(TreeShape.dynamic(2, 3, 4), device) == pytest.approx(0.4 + 1.4 + 0.05)  # the nearest width


# Break-even


def test_break_even_is_where_the_gain_is_one(everything):
    rows = everything.found["break-even"]["rows"]
    assert {row["depth"] for row in rows} == {1, 2, 3}
    for depth in (1, 2, 3):
        mine = [row for row in rows if row["depth"] == depth]
        assert [row["alpha"] for row in mine] == pytest.approx([place / 20 for place in range(4, 20)])
        gains = [row["speedup"] for row in mine]
        assert gains == sorted(gains)
        assert len(set(gains)) == len(gains)
        for row in mine:
            assert row["tau"] == pytest.approx(expected_tokens(row["alpha"], depth))
            assert row["speedup"] == pytest.approx(row["tau"] / row["break_even_tau"])
            even = row["break_even_alpha"]
            if row["break_even_tau"] <= depth + 1:
                assert expected_tokens(even, depth) == pytest.approx(max(1, row["break_even_tau"]))
            else:
                assert even == 1
            assert (row["speedup"] > 1) == (row["alpha"] > even)


def test_the_map_by_hand(everything, scene, monkeypatch):
    known = Calibration({1: 1.0, 8: 1.0}, {1: {1: 0.25, 3: 0.75}}, 0.0)
    monkeypatch.setattr(forecast, "calibrate", lambda *_: (known, []))
    rows = {(row["depth"], row["alpha"]): row for row in forecast.break_even_rows(scene)}
    assert rows[2, 0.5]["speedup"] == pytest.approx(1.75 / 1.5)
    assert rows[1, 0.5]["break_even_alpha"] == pytest.approx(0.25)
    assert rows[2, 0.5]["break_even_alpha"] == pytest.approx((math.sqrt(3) - 1) / 2)  # α² + α = ½
    assert "τ 1.50 (α 0.37) at depth 2" in forecast.break_even_says(list(rows.values()))


# Batches


def test_batches_say_what_single_texts_say(everything, scene):
    rows = everything.found["batch"]["rows"]
    assert [row["batch"] for row in rows] == [1, 1, 1, 2, 2, 2]
    for row in rows:
        assert row["same_text"] == "3/3"
        assert row["tokens_per_second"] > 0
        plain = next(r for r in rows if r["batch"] == row["batch"] and r["shape"] == "plain")
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"])
        if row["shape"] == "plain":
            assert (row["speedup"], row["tau"]) == (1, 1)
        else:
            assert row["tau"] == acceptance_length(by_hand(scene, TreeShape.parse(row["shape"])))


def test_what_a_batch_has_said_is_kept(everything, scene):
    lines = file_of(everything.run, "batch.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    alone = [decode_plain(scene.target, prompt.ids, STUDY["max_new_tokens"]).tokens for prompt in scene.prompts]
    for found in map(json.loads, lines):
        assert found["value"]["texts"] == alone, found["name"]


def test_few_prompts_are_asked_again_to_fill_a_batch(make_scene):
    rows = conduct(make_scene(prompts=1, batches=[3]), "batch")["rows"]
    assert [row["same_text"] for row in rows] == ["3/3"] * 3


def test_sides_take_turns_at_being_first():
    assert [sweeps.turned(["a", "b", "c"], by) for by in range(4)] == [
        list(order) for order in ("abc", "bca", "cab", "abc")
    ]


def test_a_difference_in_a_batch_is_seen():
    found = {"plain": {"texts": [[1], [2]], "tau": 1.0, "tokens_per_second": 5.0}}
    found["chain-3"] = {"texts": [[1], [3]], "tau": 2.0, "tokens_per_second": 10.0}
    row = sweeps.batch_row("chain-3", 2, found, found["plain"]["texts"])
    assert (row["same_text"], row["speedup"]) == ("1/2", 2)


# Contexts


def test_prompts_have_the_length_asked_for(everything, scene, make_scene, monkeypatch):
    seen = watch_sides(monkeypatch)
    conduct(make_scene(), "context")
    said = {ids for _, ids in seen}
    assert sorted(map(len, said)) == [64, 64, 96, 96]
    flat = " ".join(str(token) for ids in training_texts(everything.run) for token in ids)
    for ids in said:
        prompt = max((p.ids for p in scene.prompts if list(ids[-len(p.ids) :]) == p.ids), key=len)
        before = ids[: -len(prompt)]
        assert len(before) > 8
        assert f" {' '.join(map(str, before))} " in f" {flat} "


def test_too_long_contexts_are_left_out_by_name(everything):
    assert [row["context"] for row in everything.found["context"]["rows"]] == [64, 64, 96, 96]
    assert "context 600: left out: the target reads 512" in everything.printed
    assert all(row["plain_ttft_ms"] > 0 for row in everything.found["context"]["rows"])


def test_a_prompt_longer_than_the_context_loses_its_beginning():
    prompt = Prompt([1, 2, 3, 4], "chats", "chats 1", domain="chats")
    assert sweeps.lengthened(prompt, [7, 8, 9], 3).ids == [2, 3, 4]
    assert sweeps.lengthened(prompt, [7, 8, 9], 4).ids == [1, 2, 3, 4]
    longer = sweeps.lengthened(prompt, [7, 8, 9], 6)
    assert (longer.ids, longer.domain, longer.place) == ([8, 9, 1, 2, 3, 4], "chats", "chats 1, 6 tokens")
    assert prompt.ids == [1, 2, 3, 4]


def test_without_a_training_store_held_out_text_stands_before(make_scene):
    scene = make_scene()
    shutil.rmtree(scene.run.directory / "features")
    mine = [token for document in scene.reader for token in document.ids_T.tolist()]
    found = sweeps.long_text(scene, 80)
    assert len(found) >= 80
    assert found == mine[: len(found)]


# Passes and sizes


def test_passes_are_sorted_and_take_time(everything):
    rows = everything.found["pass"]["rows"]
    assert [row["tokens"] for row in rows] == [1, 2, 4]
    assert rows[0]["steps"] == 1
    for row in rows:
        assert row["ms"] > 0
        assert row["steps"] == pytest.approx(row["ms"] / rows[0]["ms"])
        assert row["ms_per_token"] == pytest.approx(row["ms"] / row["tokens"])


def test_passes_are_not_padded_and_no_longer_than_the_bench_has_room_for(make_scene, monkeypatch):
    asked = []
    monkeypatch.setattr(
        costs.Bench, "verify", lambda bench, nodes, pad=True: asked.append((nodes, pad)) or (lambda: None)
    )
    conduct(make_scene(passes=[3, 128, 129]), "pass")
    assert asked == [(1, False), (3, False), (128, False)]


def test_what_a_pass_says_by_hand():
    rows = [{"tokens": tokens, "steps": steps} for tokens, steps in ((1, 1.0), (4, 1.25), (8, 1.3))]
    assert costs.pass_says(rows) == "A pass over 4 tokens still costs at most 1.25 plain steps; one over 8 costs 1.3."
    assert "over 1 token still" in costs.pass_says([rows[0], rows[2]])


def test_sizes_count_and_add_up(everything):
    rows = everything.found["size"]["rows"]
    assert [row["size"] for row in rows] == STUDY["sizes"]
    assert [row["parameters"] for row in rows] == [parameters(32, 4, 4, 2, 64, 300), parameters(64, 4, 4, 2, 64, 300)]
    for row in rows:
        assert (row["chain"], row["tree"]) == ("chain-3", "tree-3x2-4")
        for name in ("chain", "tree"):
            assert min(row["plain_ms"], row[f"draft_{name}_steps"], row[f"verify_{name}_steps"]) > 0
            both = row[f"draft_{name}_steps"] + row[f"verify_{name}_steps"]
            assert row[f"break_even_{name}"] == pytest.approx(both)


def parameters(hidden: int, layers: int, heads: int, groups: int, inner: int, words: int) -> int:
    """Of a Llama with an lm_head of its own."""
    shared = hidden * hidden // heads * groups
    return layers * (2 * hidden * hidden + 2 * shared + 3 * hidden * inner + 2 * hidden) + hidden + 2 * words * hidden


def test_a_random_target_has_the_size_asked_for():
    before = torch.get_default_dtype()
    target = random_target((32, 3, 4, 2, 48, 300), torch.bfloat16, "cpu", (1, 3))
    assert sum(p.numel() for p in target.model.parameters()) == parameters(32, 3, 4, 2, 48, 300)
    assert (target.spec.num_layers, target.spec.hidden_size, target.spec.vocab_size) == (3, 32, 300)
    assert (target.dtype, target.taps, torch.get_default_dtype()) == (torch.bfloat16, (1, 3), before)


def test_a_size_is_six_numbers():
    assert costs.parse_size("576x30x9x3x1536x49152") == (576, 30, 9, 3, 1536, 49152)


@pytest.mark.parametrize("size", ["", "32x8", "32x8x4x2x64", "32x8x4x2x64x300x1", "0x8x4x2x64x300", "ax8x4x2x64x300"])
def test_a_wrong_size_is_named(size):
    with pytest.raises(UserError, match=f"study.sizes: '{size}': give HIDDENxLAYERS"):
        costs.parse_size(size)


@pytest.mark.parametrize("size", ["30x8x4x2x64x300", "32x8x4x3x64x300", "12x8x4x2x64x300"])
def test_a_size_that_no_model_has_is_named(size):
    with pytest.raises(UserError, match=f"study.sizes: '{size}': heads must share the width"):
        costs.parse_size(size)


# Domains


def test_domains_and_languages_have_rows(everything):
    rows = everything.found["domain"]["rows"]
    names = [("chats (Latin)", "yes", 3), ("other (Cyrillic)", "no", 2)]
    assert [(row["domain"], row["trained_on"], row["prompts"]) for row in rows] == names * 4
    assert [row["shape"] for row in rows[::2]] == ["chain-2", "chain-3", "tree-2x2-4", "tree-3x2-4"]
    deep = {row["shape"]: row["tau"] for row in everything.found["chain-tree"]["rows"]}
    for row in rows[::2]:
        assert row["tau"] == deep[row["shape"]]
        assert row["same_text"] == "3/3"
    assert "Only the run's own domains" not in everything.found["domain"]["says"]


def test_the_other_domain_is_decoded_too(everything, scene):
    asked = [scene.target.tokenizer.encode(f"{CYRILLIC} {number}") for number in range(2)]
    prompts = [p for p in sweeps.read_sets(everything.run, scene.target, scene.reader) if p.set == "other"]
    assert all(" ".join(map(str, ids)) in " ".join(map(str, p.ids)) for ids, p in zip(asked, prompts))
    rows = {row["shape"]: row for row in everything.found["domain"]["rows"] if row["trained_on"] == "no"}
    for shape in (CHAIN, TREE):
        assert rows[shape.name]["tau"] == acceptance_length(by_hand(scene, shape, prompts))
        assert rows[shape.name]["same_text"] == "2/2"


def test_a_lone_domain_says_so(make_scene):
    found = conduct(make_scene([{"set": HELD_OUT}], depths=[2], prompts=2), "domain")
    assert found["says"].endswith("Only the run's own domains: name others in eval.sets")


def test_held_out_prompts_by_another_name_are_trained_on(make_scene):
    rows = conduct(make_scene([{"set": HELD_OUT, "name": "mine"}], depths=[2], prompts=2), "domain")["rows"]
    assert {row["trained_on"] for row in rows} == {"yes"}


def test_another_set_of_the_same_domain_is_not_trained_on(make_scene, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "count to nine"}\n')
    both = [{"set": HELD_OUT}, {"path": str(tmp_path / "mine.jsonl"), "domain": "chats"}]
    rows = conduct(make_scene(both, depths=[2], prompts=2), "domain")["rows"]
    assert {(row["trained_on"], row["prompts"]) for row in rows} == {("yes", 2), ("no", 1)}


# Lossless


def test_greedy_text_is_the_targets(everything):
    rows = [row for row in everything.found["lossless"]["rows"] if row["check"] == "greedy text"]
    assert [row["side"] for row in rows] == ["eagle3 chain-3", "eagle3 tree-3x2-4", "prompt-lookup chain-3"]
    for row in rows:
        wanted = (3, "3/3 identical", 0, 0)
        assert (row["cases"], row["result"], row["per_1000_tokens"], row["largest_gap"]) == wanted


def test_sampled_text_is_the_targets(everything):
    rows = [row for row in everything.found["lossless"]["rows"] if row["check"] != "greedy text"]
    assert [row["check"].split(",")[0] for row in rows] == ["first token", "token 1", "token 2", "token 3"] * (
        len(rows) // 4
    )
    assert all(row["result"] == "64/64 equal" for row in rows[::4])
    assert all(row["p"] > 1e-3 for row in rows if row["p"] is not None)


def test_chains_are_sampled_too(everything):
    rows = [row for row in everything.found["lossless"]["rows"] if row["p"] is not None]
    assert {row["side"] for row in rows} == {"eagle3 chain-3 T=1, top-k 8", "eagle3 tree-3x2-4 T=1, top-k 8"}


@pytest.fixture(scope="module")
def toy() -> SimpleNamespace:
    """As much of a scene as sampling reads: a target over twelve tokens and a head that knows nothing of it."""
    none = {"eos_token_id": None, "pad_token_id": None}
    model = make_model("llama", seed=3, vocab=12, num_hidden_layers=1, initializer_range=0.35, **none)
    target = Target(model, make_tokenizer(), "toy", (0, 1))
    run = SimpleNamespace(study=SimpleNamespace(samples=480), head=SimpleNamespace(kind="eagle3"))
    prompts = [Prompt([1, 5, 2, 4], "toy", "long"), Prompt([1, 5], "toy", "short")]
    return SimpleNamespace(run=run, target=target, head=make_tiny_head(target, None, steps=2), prompts=prompts)


def ps(toy: SimpleNamespace, shape: TreeShape) -> list[float]:
    """p of each of its tests, which all have something to test."""
    first, *tests = proofs.sampled_rows(toy, shape)
    assert (first["check"], first["result"]) == ("first token, draw for draw", "64/64 equal")
    assert [row["check"] for row in tests] == [
        f"token {k}, χ² after {n} beginnings" for k, n in ((1, 1), (2, 6), (3, 6))
    ]
    assert tests[0]["cases"] == 480
    assert not any(" 0 degrees" in row["result"] for row in tests)
    return [row["p"] for row in tests]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=lambda shape: shape.name)
def test_a_true_verifier_passes(toy, shape):
    assert min(ps(toy, shape)) > 1e-3


def accept_all(rule, node_B, most):
    """A verifier that takes the first child, whatever the target thinks of it."""
    child_B = rule.layout.children_NC[node_B, 0]
    p_BV = rule.policy.probs(verify.at(rule.logits_BNV, node_B)).double()
    return child_B >= 0, child_B.clamp_min(0), p_BV


@pytest.mark.parametrize("broken", ["accepts all", "wrong q", "no residual"])
def test_a_broken_verifier_is_found(toy, monkeypatch, broken):
    if broken == "accepts all":
        monkeypatch.setattr(verify.Rejection, "children", accept_all)
    elif broken == "wrong q":
        real = verify.Rejection.__init__

        def init(self, tree, proposal, *rest):
            flat_BFW = torch.full_like(proposal.q_BFW, 1 / proposal.q_BFW.shape[-1])
            real(self, tree, replace(proposal, q_BFW=flat_BFW), *rest)

        monkeypatch.setattr(verify.Rejection, "__init__", init)
    else:
        monkeypatch.setattr(verify, "residual", lambda p_BV, q_BW, ids_W: p_BV)
    first, *drafted = ps(toy, CHAIN)
    assert first > 1e-3  # the first token is plain decoding's
    assert min(drafted) < 1e-4


def test_the_commonest_beginning():
    texts = [[1, 2, 3], [1, 2, 4], [1, 5, 6], [7, 8, 9]]
    assert proofs.commonest(texts, 0) == [([], [1, 1, 1, 7])]
    assert proofs.commonest(texts, 1) == [([1], [2, 2, 5]), ([7], [8])]
    assert proofs.commonest(texts, 2)[0] == ([1, 2], [3, 4])


def test_next_probs_are_the_targets(scene):
    ids = scene.prompts[0].ids
    with torch.inference_mode():
        logits_V = scene.target.model(torch.tensor([ids])).logits[0, -1].double()
    found_V = proofs.next_probs(scene, ids, Policy(0.5))
    assert torch.allclose(found_V, (logits_V / 0.5).softmax(-1), atol=1e-5)
    assert float(found_V.sum()) == pytest.approx(1)


def test_a_text_that_parts_is_counted_with_its_gap():
    found = {"prompts": 4, "identical": 2, "divergences_per_1000_tokens": 20.0}
    found["divergences"] = [{"logit_gap": None}, {"logit_gap": 0.25}]
    part = SimpleNamespace(losslessness=lambda: found, side=SimpleNamespace(name="eagle3", settings=SimpleNamespace()))
    part.side.settings.shape = CHAIN
    row = proofs.identity_row(part)
    assert (row["result"], row["per_1000_tokens"], row["largest_gap"]) == ("2/4 identical", 20, 0.25)


# The command line


def refused(capsys, *arguments: str) -> str:
    """The one line of a refusal."""
    with pytest.raises(SystemExit) as stop:
        study.main(list(arguments))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: ")
    assert len(error.strip().splitlines()) == 1
    return error


def test_help_names_every_study(capsys):
    with pytest.raises(SystemExit) as stop:
        study.main(["--help"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0
    for name, about in ((name, found.about) for name, found in STUDIES.items()):
        assert f"  {name:12} {about}" in printed
    assert "study.max_new_tokens = 64" in printed


@pytest.mark.parametrize(
    ("name", "words"),
    [("dept", "no study 'dept'; did you mean depth?"), ("zzz", "no study 'zzz'; there are: depth, width")],
)
def test_unknown_studies_are_named(everything, capsys, name, words):
    assert words in refused(capsys, name, "--config", str(everything.config))


def test_a_missing_config(capsys, tmp_path):
    assert "none.yaml: no such file" in refused(capsys, "depth", "--config", str(tmp_path / "none.yaml"))


def test_a_dry_run_measures_nothing(everything, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(Scene, "open", lambda run: pytest.fail("opened"))
    study.main(["depth", "--config", str(everything.config), "--dry-run", "study.depths=[1]"])
    assert capsys.readouterr().out.startswith(f"dry run: {everything.config} is sound")


@pytest.mark.parametrize("order", ["behind", "before"])
def test_overrides_stand_anywhere(everything, capsys, monkeypatch, order):
    runs = []
    monkeypatch.setattr(Scene, "open", runs.append)
    monkeypatch.setattr(study, "conduct", lambda *_: None)
    monkeypatch.setattr(study, "render_again", lambda _: None)
    words = ["study.depths=[4,5]", "study.nodes=9"]
    config = ["--config", str(everything.config)]
    study.main(["depth", *config, *words] if order == "behind" else ["depth", *words, *config])
    assert (runs[0].study.depths, runs[0].study.nodes) == ([4, 5], 9)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("study.depth=0", "study.depth"),
        ("study.dephts=[1]", "did you mean study.depths?"),
        ("study.depths=[]", "study.depths"),
        ("study.samples=5", "study.samples"),
    ],
)
def test_wrong_settings_are_named(everything, capsys, override, words):
    assert words in refused(capsys, "depth", "--config", str(everything.config), override)


def test_a_missing_head(everything, home, capsys, tmp_path):
    shutil.copytree(home / "runs", tmp_path / "runs", ignore=shutil.ignore_patterns("head", "checkpoints"))
    error = refused(capsys, "depth", "--config", str(everything.config), f"runs={tmp_path / 'runs'}")
    assert "train first" in error


def test_a_missing_harvest(everything, capsys, tmp_path):
    error = refused(capsys, "depth", "--config", str(everything.config), f"runs={tmp_path}")
    assert "run the harvest first" in error


@pytest.mark.parametrize("override", ["study.sizes=[32x8]", "eval.sets=[{set: mt-bensch}]"])
def test_a_dry_run_checks_what_costs_nothing(everything, capsys, override):
    refused(capsys, "all", "--config", str(everything.config), "--dry-run", override)


# Plots


def picture(kind: str, rows: list[dict], **plot) -> ET.Element:
    """A study's plot, without a warning."""
    described = {"kind": kind, "x": "x", "y": ["y"], "by": None} | plot
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        made = plots.study({"study": "some", "plot": described, "rows": rows})
    return ET.fromstring(plots.standalone(made).encode())


def words_in(root: ET.Element) -> str:
    """Comments, in which matplotlib tells what its glyphs say, are not parsed: the labels by their ids."""
    return " ".join(element.get("id", "") for element in root.iter())


@pytest.mark.parametrize("kind", ["lines", "diagonal", "map"])
def test_one_row_is_drawn(kind):
    assert picture(kind, [{"x": 1, "y": 1.5, "a": 0.5}], by="a").tag.endswith("svg")


@pytest.mark.parametrize(
    "kind",
    [
        "lines",
        pytest.param("diagonal"),
        pytest.param("map"),
    ],
)
def test_values_that_are_missing_are_not_drawn(kind):
    rows = [{"x": 1, "y": None, "a": 0.5}, {"x": 2, "y": 2.0, "a": 0.5}, {"x": 2, "y": 2.0, "a": 0.75}]
    assert picture(kind, rows, by="a").tag.endswith("svg")


def test_names_may_stand_across():
    rows = [{"x": "chain-3", "y": 1.0}, {"x": "tree", "y": 2.0}, {"x": "third", "y": None}]
    assert "line2d" in words_in(picture("lines", rows, break_even=True))


def test_a_column_without_values_is_an_empty_plot():
    assert picture("lines", [{"x": 1, "y": None}]).tag.endswith("svg")


def test_a_line_for_each_group_and_column():
    rows = [{"x": x, "y": 1.0, "z": 2.0, "a": a} for x in (1, 2) for a in ("one", "two")]
    axis = plots.plt.figure().add_subplot()
    plots.lines(axis, {"x": "x", "y": ["y", "z"], "by": "a", "break_even": True}, rows)
    assert [line.get_label() for line in axis.lines][:4] == ["one y", "one z", "two y", "two z"]
    assert len(axis.lines) == 5
    assert [list(line.get_xdata()) for line in axis.lines[:4]] == [[1, 2]] * 4
    plots.plt.close(axis.figure)


def test_a_map_shows_each_cell_in_its_place():
    rows = [{"x": d, "a": a, "y": 10 * d + a} for d in (2, 1) for a in (3, 4)][:-1]
    axis = plots.plt.figure().add_subplot()
    plots.grid(axis, {"x": "x", "y": ["y"], "by": "a"}, rows)
    shown = axis.images[0].get_array()
    assert shown.tolist()[0] == [13, 23]
    assert shown.mask.tolist() == [[False, False], [True, False]]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "2"]
    plots.plt.close(axis.figure)


def test_sentences_by_hand():
    rows = [
        {"depth": 1, "shape": "a", "tau": 1.5, "speedup": 1.2, "verify_share": 0.5},
        {"depth": 2, "shape": "b", "tau": 2.5, "speedup": 1.1, "verify_share": 0.25},
    ]
    assert sweeps.depth_says(rows) == (
        "From depth 1 to 2 τ goes from 1.50 to 2.50, the speed-up from 1.20× to 1.10×; the best is 1.20× at depth 1. "
        "Verification takes 25% to 50% of a cycle."
    )
    assert sweeps.width_says(rows) == "Fastest: a, 1.20× at τ 1.50; longest: b, τ 2.50 at 1.10×."
    offs = [{"off": 0.05, "shape": "a"}, {"off": -0.3, "shape": "b"}]
    middle = statistics.median([0.05, 0.3])
    assert forecast.forecast_says(offs) == f"1 of 2 shapes within 10 %; median {middle:.1%}, largest -30.0% (b)."
