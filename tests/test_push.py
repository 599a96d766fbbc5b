"""What leaves a run: a folder with a model card that says what was measured, and curves."""

import argparse
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from conftest import tiny_run
from safetensors.torch import load_file

from headwright.configs import UserError
from headwright.data.harvest import harvest
from headwright.data.target import Target
from headwright.eval.acceptance import evaluate
from headwright.heads.export import export_run
from headwright.heads.saved import load_head
from headwright.train.cli import main as cli
from headwright.train.plot import plot
from headwright.train.push import parser, push
from headwright.train.run import train


@pytest.fixture(scope="module")
def finished(model_dir, chats, tmp_path_factory):
    """A run that was trained, evaluated and exported."""
    run = tiny_run(model_dir, chats, tmp_path_factory.mktemp("finished"))
    for stage in (harvest, train, evaluate, export_run):
        stage(run)
    return run


def pushed(run, *words: str) -> Path:
    """The folder that the command makes."""
    args = parser().parse_args([str(run.directory), *words])
    push(args)
    return args.output or run.directory / "push"


def front_matter(card: str) -> dict:
    """What the Hub reads."""
    _, head, _ = card.split("---\n", 2)
    return yaml.safe_load(head)


def test_the_folder_is_a_head_that_can_be_served_and_loaded(finished, tmp_path):
    """The export's files bit for bit; and whoever downloads it gets the same head."""
    folder = pushed(finished, "--output", str(tmp_path / "mine"), "--license", "apache-2.0")
    export = finished.directory / "export" / "portable"
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (export / name).read_bytes()
    target = Target.load(finished.target, load_head(finished.directory / "head").taps)
    ours, theirs = load_head(folder, target), load_head(finished.directory / "head", target)
    assert ours.vocab.ids_W.tolist() == theirs.vocab.ids_W.tolist()
    assert load_file(folder / "model.safetensors").keys() == load_file(export / "model.safetensors").keys()


def test_the_card_says_what_was_measured_and_under_which_conditions(finished, tmp_path):
    folder = pushed(finished, "--output", str(tmp_path / "mine"), "--license", "apache-2.0")
    card = (folder / "README.md").read_text(encoding="utf-8")
    report = json.loads((finished.directory / "report.json").read_text(encoding="utf-8"))
    described = front_matter(card)
    assert described["license"] == "apache-2.0"
    assert {"speculative-decoding", "draft-head", "eagle3"} <= set(described["tags"])
    for entry in report["entries"]:
        low, high = entry["acceptance_length_ci95"]
        assert f"| {entry['drafter']} {entry['shape']['name']} |" in card
        assert f"{entry['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]" in card
    for answer in report["answers"].values():
        assert str(answer) in card
    assert "vllm serve" in card
    assert "revision" in card or "made by | Headwright" in card


def test_no_place_of_this_machine_is_told(finished, tmp_path):
    """Directories of corpus, target and runs are the maker's own business."""
    folder = pushed(finished, "--output", str(tmp_path / "mine"))
    private = {str(finished.directory), finished.target.model, finished.corpus.sources[0].path, finished.runs}
    for path in folder.iterdir():
        content = path.read_bytes()
        assert not [place for place in private if place.encode() in content], path.name
        if path.suffix == ".json":
            json.loads(content)
    told = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    assert told["corpus"]["sources"][0]["path"] == "chats.jsonl"


def test_pushing_again_replaces_what_was_pushed_and_nothing_else(finished, tmp_path):
    folder = pushed(finished, "--output", str(tmp_path / "mine"))
    (folder / "left.txt").write_text("old", encoding="utf-8")
    pushed(finished, "--output", str(folder))
    assert not (folder / "left.txt").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(UserError, match="is there already, and is not a pushed head"):
        pushed(finished, "--output", str(other))
    assert (other / "thesis.tex").read_text(encoding="utf-8") == "years of work"


@pytest.fixture
def copied(finished, tmp_path):
    """A run of its own, to be spoilt."""
    shutil.copytree(finished.runs, tmp_path / "runs")
    return argparse.Namespace(directory=tmp_path / "runs" / finished.name)


def touch_head(folder: Path) -> None:
    """Another head."""
    path = folder / "head" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [
        (lambda folder: (folder / "report.json").unlink(), "report.json is missing"),
        (lambda folder: shutil.rmtree(folder / "export"), "headwright.json is missing"),
        (touch_head, "of another head than"),
        (lambda folder: (folder / "config.yaml").unlink(), "no run there"),
    ],
)
def test_what_was_not_measured_is_not_pushed(copied, spoil, wrong):
    spoil(copied.directory)
    with pytest.raises(UserError, match=wrong):
        pushed(copied)
    assert not (copied.directory / "push").exists()


def test_an_export_of_an_earlier_head_is_not_pushed(copied):
    """The report is of the new head, the export is not."""
    path = copied.directory / "export" / "portable" / "headwright.json"
    made = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(made | {"head_file": "0" * 16}), encoding="utf-8")
    with pytest.raises(UserError, match="headwright export again"):
        pushed(copied)


def test_the_hub_is_given_the_folder(finished, tmp_path, monkeypatch):
    """Repository, privacy and files; the launch lines name the repository."""
    calls = {}

    class Api:
        def create_repo(self, repository, private, exist_ok):
            calls["made"] = (repository, private, exist_ok)

        def upload_folder(self, repo_id, folder_path, commit_message):
            calls["sent"] = (repo_id, sorted(path.name for path in Path(folder_path).iterdir()))
            return f"https://hub/{repo_id}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    folder = pushed(finished, "--output", str(tmp_path / "mine"), "--to", "me/my-head", "--private")
    assert calls["made"] == ("me/my-head", True, True)
    assert calls["sent"][0] == "me/my-head"
    assert {"README.md", "config.json", "model.safetensors", "report.html", "run.yaml"} <= set(calls["sent"][1])
    assert '"model": "me/my-head"' in (folder / "README.md").read_text(encoding="utf-8")


def test_where_the_hub_is_out_of_reach_the_folder_stays(finished, tmp_path, monkeypatch):
    class Api:
        def create_repo(self, *_, **__):
            raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(UserError, match=r"cannot be pushed: Name or service not known\. Everything is in"):
        pushed(finished, "--output", str(tmp_path / "mine"), "--to", "me/my-head")
    assert (tmp_path / "mine" / "README.md").is_file()
    with pytest.raises(UserError, match="give owner/name"):
        pushed(finished, "--to", "me")


# Curves


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_curves_are_drawn_for_one_run_and_for_several(finished, tmp_path, ending):
    path = tmp_path / f"curves.{ending}"
    assert plot([finished.directory], path) == path
    alone = path.stat().st_size
    plot([finished.directory, finished.directory], path)
    begins = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
    assert path.read_bytes().startswith(begins[ending])
    assert alone > 1000


def test_curves_lie_in_the_run_by_default_and_say_so(finished, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["headwright", "plot", str(finished.directory)])
    cli()
    assert (finished.directory / "curves.svg").is_file()
    assert "curves.svg" in capsys.readouterr().out.replace("\n", "")
    text = (finished.directory / "curves.svg").read_text(encoding="utf-8")
    assert text.count("<!-- ") > 20  # titles and labels are text
    assert "τ on held-out text" in text


def test_what_cannot_be_drawn_is_refused(finished, tmp_path):
    with pytest.raises(UserError, match="give the directory of a run that was trained"):
        plot([tmp_path], None)
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="holds no record yet"):
        plot([tmp_path], None)
    with pytest.raises(UserError, match=r"ends in \.svg, \.png, \.pdf"):
        plot([finished.directory], tmp_path / "curves.txt")
