"""`headwright prove`: what engines are asked, and errors that a user can mend. test_vllm and test_sglang run the engines."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import tiny_run
from engine_cases import CASES, GOLDEN

from headwright.configs import UserError
from headwright.data.harvest import harvest
from headwright.eval.prove import arguments_of, ask, engine_job, exports_of, main, parser, prove
from headwright.heads.export import export_run
from headwright.train.run import train


@pytest.fixture(scope="module")
def run(model_dir, chats, tmp_path_factory):
    """A trained and exported run."""
    run = tiny_run(model_dir, chats, tmp_path_factory.mktemp("runs"))
    run = replace(run, export=replace(run.export, engines=["portable", "speculators"]))
    harvest(run)
    train(run)
    export_run(run)
    return run


def given(*more: str):
    """A command line, read."""
    return parser().parse_args(["--config", "any.yaml", "--engine-python", sys.executable, *more])


METHODS = {"eagle1": "eagle", "eagle3": "eagle3", "medusa": "medusa", "mtp": "mtp"}


@pytest.mark.parametrize("name", CASES)
def test_vllm_is_given_the_method_the_directory_and_what_the_target_must_be_told(name):
    found = arguments_of(GOLDEN / name, "vllm", "some/target", 3)
    if CASES[name][4] == "speculators":
        assert found == {"model": str(GOLDEN / name)}
        return
    speculative = {"method": METHODS[CASES[name][3]["kind"]], "model": str(GOLDEN / name), "num_speculative_tokens": 3}
    told = {"hf_overrides": {"num_nextn_predict_layers": 1}} if name.startswith("mtp") else {}
    assert found == {"model": "some/target", "speculative_config": speculative} | told


def test_medusa_is_asked_for_no_more_tokens_than_it_has_heads():
    assert arguments_of(GOLDEN / "medusa", "vllm", "t", 9)["speculative_config"]["num_speculative_tokens"] == 3


def test_an_engine_that_does_not_serve_a_kind_is_refused():
    with pytest.raises(UserError, match="sglang does not serve medusa heads"):
        arguments_of(GOLDEN / "medusa", "sglang", "t", 3)


def test_a_job_is_json_with_all_that_is_compared():
    job = engine_job(GOLDEN / "eagle3", "t", [[1, 2], [3]], 24, 3, dtype="float32", context=64)
    assert json.loads(json.dumps(job)) == job
    assert {key: job[key] for key in ("name", "prompts", "max_tokens", "dtype", "context")} == {
        "name": "eagle3",
        "prompts": [[1, 2], [3]],
        "max_tokens": 24,
        "dtype": "float32",
        "context": 64,
    }


def test_directories_are_chosen_by_the_engine(run):
    assert [path.name for path in exports_of(run, "vllm")] == ["portable", "speculators"]
    assert [path.name for path in exports_of(run, "sglang")] == ["portable"]


def test_a_run_without_exports_says_what_to_do(run, tmp_path):
    with pytest.raises(UserError, match="run `headwright export` first"):
        exports_of(replace(run, runs=str(tmp_path)), "vllm")
    only = replace(run, export=replace(run.export, engines=["speculators"]))
    with pytest.raises(UserError, match="none that sglang serves"):
        exports_of(only, "sglang")


def test_a_python_that_is_not_there(run, tmp_path):
    args = given("--prompts", "1", "--tokens", "4")
    args.engine_python = str(tmp_path / "no-python")
    with pytest.raises(UserError, match=r"--engine-python .*no-python: cannot be run: No such file"):
        prove(run, args)


@pytest.mark.parametrize("side", ["vllm_side.py", "sglang_side.py"])
def test_a_python_without_the_engine(side):
    """This one has neither."""
    with pytest.raises(UserError, match=rf"{side}: ended with code 1; its messages are above"):
        ask(sys.executable, side, {"jobs": [], "heads": [], "context_length": 8, "dtype": "auto"})


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "verify_vllm.sh" in text
    assert "--engine-python" in text


def test_sides_hide_no_library_and_import_nothing_of_ours():
    for side in ("vllm_side.py", "sglang_side.py"):
        text = (Path(__file__).parents[1] / "eval" / side).read_text(encoding="utf-8")
        assert "headwright" not in "".join(line for line in text.splitlines() if line.startswith(("import", "from")))
