"""The real vLLM on heads of every kind that it serves: it counts what our decoder counts, and says plain decoding's text; and
it does with broken directories what the doctor says that it does.

In an environment of its own: `scripts/verify_vllm.sh` makes it and runs this.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import tiny_run
from engine_cases import (
    CASES,
    NEW,
    answers_of,
    job_of,
    our_counters,
    own_texts,
    prompts,
    recorded,
    target_of,
    write_models,
)
from safetensors.torch import load_file, save_file

from headwright.data.harvest import harvest
from headwright.eval.prove import Counters, ask_engine, parser, prove
from headwright.heads.contract import serious
from headwright.heads.doctor import Question, diagnose
from headwright.heads.export import export_run
from headwright.train.run import train

PYTHON = os.environ.get("HEADWRIGHT_VLLM", "")
if not Path(PYTHON).is_file():
    reason = "HEADWRIGHT_VLLM names no Python with vLLM in it: run scripts/verify_vllm.sh"
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="session")
def answers(tmp_path_factory) -> dict[str, dict]:
    """What vLLM says of every case: engines one after another, each in a process of its own."""
    return answers_of(list(CASES), PYTHON, tmp_path_factory.mktemp("vllm"))


@pytest.mark.parametrize("name", CASES)
def test_vllm_counts_what_we_count(answers, name):
    answer = answers[name]
    assert "error" not in answer, answer["error"]
    found = Counters(answer["drafts"], answer["accepted_per_pos"])
    assert found == our_counters(name)
    assert {key: recorded(name)[key] for key in ("drafts", "accepted_per_pos")} == vars(found)


@pytest.mark.parametrize("name", CASES)
def test_vllm_says_what_plain_decoding_says(answers, name):
    wanted = [text[len(prompt) :] for text, prompt in zip(own_texts(target_of(name), NEW), prompts())]
    assert answers[name]["texts"] == wanted


# Negative controls: case, what is done to its tensors and its config, and what vLLM then does


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def plus(name, *shape):
    torch.manual_seed(3)
    extra = torch.randn(shape)
    return lambda tensors: tensors | {name: extra}


def absolute(tensors):
    return tensors | {"d2t": tensors["d2t"] + torch.arange(len(tensors["d2t"]))}


REFUSED = {  # vLLM stops
    "extra tensor": ("eagle3", plus("verifier_norm.weight", 64), {}),
    "EAGLE-1 with an lm_head": ("eagle1", plus("lm_head.weight", 272, 64), {}),
    "EAGLE-1 with a norm before": ("eagle1", plus("layers.0.input_layernorm.weight", 64), {}),
    "four states counted nowhere": ("eagle3-four-taps", dict, {"num_aux_hidden_states": None, "eagle_config": {}}),
    "no architectures": ("eagle3", dict, {"architectures": None}),
    "a module without a tensor": ("mtp-mimo", without("model.mtp_layers.0.input_proj.weight"), {}),
    "Medusa's map": ("medusa-shared", plus("token_map", 100), {"truncated_vocab_size": 100}),
}
SILENT = {  # it serves them, and other drafts stand or fall
    "no matrix": ("eagle1", without("layers.0.mlp.down_proj.weight"), {}),
    "a module's matrix": ("mtp-mimo", without("model.mtp_layers.0.mlp.down_proj.weight"), {}),
    "Medusa's lm_head": ("medusa", without("lm_heads.0.weight"), {}),
    "no map": ("eagle3", without("d2t", "t2d"), {}),
    "an embedding left over": ("eagle3", plus("embed_tokens.weight", 272, 64), {}),
    "other states": ("eagle3-on-qwen3", dict, {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}),
    "nested ids alone": ("eagle3-full-vocabulary", dict, {"eagle_aux_hidden_state_layer_ids": None}),
    "the window not switched on": ("eagle3-window", dict, {"use_sliding_window": False}),
}
DROPPED = {"EAGLE-1 with a bias": ("eagle1", plus("fc.bias", 64), {})}  # it drafts as if the tensor were not there
BROKEN = REFUSED | SILENT | DROPPED


@pytest.fixture(scope="session")
def broken(tmp_path_factory) -> dict[str, tuple[Path, dict]]:
    """Broken copies, and what vLLM says of them."""
    root = tmp_path_factory.mktemp("broken")
    write_models(root)
    jobs, folders = [], []
    for number, (case, change, keys) in enumerate(BROKEN.values()):
        place = root / str(number)
        place.mkdir()
        for model in ("llama", "qwen3"):
            (place / model).symlink_to(root / model)
        job = job_of(case, place)
        folders.append(place / "heads" / case)
        damage(folders[-1], change, keys)
        jobs.append(job)
    answers = ask_engine(PYTHON, jobs)["answers"]
    return {name: (folder, answer) for name, folder, answer in zip(BROKEN, folders, answers)}


def damage(folder: Path, change, keys: dict) -> None:
    """Other tensors and keys; None: no such key."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | keys
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = change(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("fault", REFUSED)
def test_vllm_stops_where_the_doctor_says_so(broken, fault):
    folder, answer = broken[fault]
    assert "error" in answer
    assert any("stops" in finding.so for finding in errors(folder))


@pytest.mark.parametrize("fault", SILENT)
def test_vllm_is_silent_where_the_doctor_is_not(broken, fault):
    """The text is the same, the drafts are not; the doctor names an error."""
    folder, answer = broken[fault]
    case = SILENT[fault][0]
    assert "error" not in answer, answer["error"]
    assert answer["texts"] == [text[len(prompt) :] for text, prompt in zip(own_texts(target_of(case), NEW), prompts())]
    assert Counters(answer["drafts"], answer["accepted_per_pos"]) != our_counters(case)
    if fault not in NEEDS_TARGET:
        assert errors(folder)


@pytest.mark.parametrize("fault", DROPPED)
def test_vllm_drops_what_the_doctor_says_that_it_drops(broken, fault):
    folder, answer = broken[fault]
    assert "error" not in answer
    assert Counters(answer["drafts"], answer["accepted_per_pos"]) == our_counters(DROPPED[fault][0])
    assert any("drops it without a word" in finding.so for finding in errors(folder))


NEEDS_TARGET = ("an embedding left over", "other states")  # what no directory says by itself: --target, --probe


def errors(folder: Path) -> list:
    """What the doctor has against a directory in vLLM."""
    return serious(diagnose(folder, Question(engines=("vllm",))).all())


def test_prove_compares_a_run_of_ones_own(chats, tmp_path_factory):
    """From harvest to the engine's counters, as `scripts/verify_vllm.sh --config FILE` does."""
    root = tmp_path_factory.mktemp("own")
    write_models(root)
    export = {"engines": ["portable", "speculators"], "prompts": 2}
    run = tiny_run(root / "llama", chats, root, harvest={"taps": [2, 4, 5], "dtype": "float32"}, export=export)
    for stage in (harvest, train, export_run):
        stage(run)
    args = parser().parse_args(["--config", "-", "--engine-python", PYTHON, "--prompts", "3", "--tokens", "12"])
    assert prove(run, args) == 0
    for engine in export["engines"]:
        found = json.loads((run.directory / "export" / engine / "vllm.json").read_text(encoding="utf-8"))
        assert found["theirs"] == found["ours"]
        assert found["same_texts"] == found["prompts"] == 3
        assert found["theirs"]["drafts"] > 3
