"""SGLang's own config, loader, classes and EAGLE worker on our exports: what it fills, what it drafts, what it captures.

On a CPU, in an environment of its own: `scripts/verify_sglang.sh` makes it and runs this.
"""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TAPS, make_model, make_target, tiny_run
from safetensors.torch import load_file, save_file
from test_adapter import make_any
from test_export import LLAMA3, drop, set_to, swapped

from headwright.data.harvest import harvest
from headwright.eval.prove import parser, prove
from headwright.heads.base import Case, DraftHead, Drafts
from headwright.heads.export import export_run, filled, shared_tables, with_dtype, write_directory
from headwright.train.run import train

PYTHON = os.environ.get("HEADWRIGHT_SGLANG", "")
if not Path(PYTHON).is_file():
    reason = "HEADWRIGHT_SGLANG names no Python with SGLang in it: run scripts/verify_sglang.sh"
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.sglang

COUNT, CONTEXT = 5, 512
IDS = torch.randint(256, (24,), generator=torch.Generator().manual_seed(5))
SERVED = {"eagle3": ("EAGLE3", "portable"), "eagle1": ("EAGLE", "sglang"), "mtp": ("NEXTN", "mimo")}
EMBEDDING, BOTH = ["model.embed_tokens.weight"], ["lm_head.weight", "model.embed_tokens.weight"]
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
UNSCALED = {"rope_parameters": PLAIN, "rope_scaling": None}  # the older key counts where it is not null
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LAST = (8,)

# kind, options, size of the draft vocabulary, the target's taps, family and changes, and what SGLang has from the target
HEADS: dict[str, tuple] = {
    "eagle3": ("eagle3", {}, 100, TAPS, "llama", {}, EMBEDDING),
    "no-fc-norm": ("eagle3", {"fc_norm": False}, 100, TAPS, "llama", {}, EMBEDDING),
    "norm-output": ("eagle3", {"norm_output": True}, 100, TAPS, "llama", {}, EMBEDDING),
    "norm-before-fc": ("eagle3", {"fc_norm": False, "norm_before_fc": True}, 100, TAPS, "llama", {}, EMBEDDING),
    "full-vocabulary": ("eagle3", {}, None, TAPS, "llama", {}, EMBEDDING),
    "shared-lm-head": ("eagle3", {"lm_head": "shared"}, None, TAPS, "llama", {}, BOTH),
    "two-layers": ("eagle3", {"layers": 2}, 100, TAPS, "llama", {}, EMBEDDING),
    "four-taps": ("eagle3", {}, 100, (1, 2, 5, 7), "llama", {}, EMBEDDING),
    "narrow": ("eagle3", {"hidden_size": 16}, 100, TAPS, "llama", {}, []),
    "llama3": ("eagle3", {}, 100, TAPS, "llama", {"rope_parameters": LLAMA3}, EMBEDDING),
    "linear": ("eagle3", {}, None, TAPS, "llama", {"rope_parameters": LINEAR}, EMBEDDING),
    "yarn": ("eagle3", {}, 100, TAPS, "llama", {"rope_parameters": YARN}, EMBEDDING),
    "eagle1": ("eagle1", {}, None, LAST, "llama", {}, BOTH),
    "eagle1-bias": ("eagle1", {"fc_bias": True}, None, LAST, "llama", {}, BOTH),
    "eagle1-token-map": ("eagle1", {}, 100, LAST, "llama", {}, BOTH),
    "eagle1-llama3": ("eagle1", {}, None, LAST, "llama", {"rope_parameters": LLAMA3}, BOTH),
    "mimo": ("mtp", {}, None, LAST, "llama", {}, BOTH),
    "mimo-biases": ("mtp", {}, None, LAST, "qwen2", {}, BOTH),
    "mimo-token-map": ("mtp", {}, 100, LAST, "llama", {}, BOTH),
}


@dataclass
class Made:
    """A head in a directory, what our reader drafts from it, and what SGLang is asked to."""

    folder: Path
    ours: Drafts
    asked: dict


def stir(head: DraftHead) -> DraftHead:
    """Norms away from one and sharp attention, so that everything shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            noise = torch.rand(weight.shape, generator=generator) if "norm" in name else 0.0
            weight.add_(noise + torch.randn(weight.shape, generator=generator) * 0.15)
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(2)
    return head.eval()


@torch.no_grad()
def make(name: str, root: Path) -> Made:
    """The inputs lie beside the directory: SGLang loads every safetensors file in it."""
    kind, options, size, taps, family, changes, _ = HEADS[name]
    (algorithm, engine), target = SERVED[kind], make_target(family, taps, **changes)
    head, folder, inputs = stir(make_any(kind, target, size, **options)), root / name, root / f"{name}.inputs"
    export = with_dtype(filled(head.export(engine), target), torch.float32)
    write_directory(folder, export)
    found, tables = target.features(IDS[None]), shared_tables(target)
    taps_TKD, last_TD = found.taps_BNKD[0, :-1], found.last_BND[0, :-1]
    hidden = taps_TKD.flatten(1) if kind == "eagle3" else last_TD
    shared = {"embedding": tables.embedding_VD, "lm_head": tables.lm_head_VD}
    save_file({key: t.clone() for key, t in {"tokens": IDS[1:], "hidden": hidden, **shared}.items()}, inputs)
    asked = {"folder": str(folder), "algorithm": algorithm, "inputs": str(inputs), "count": COUNT}
    if size and kind != "eagle3":
        asked["token_map"] = str(root / f"{name}.pt")
        torch.save(head.vocab.ids_W, asked["token_map"])
    ours = export.reader(folder).draft(tables, Case(IDS[1:].tolist(), taps_TKD, last_TD), COUNT)
    return Made(folder, ours, asked)


# Negative controls

UNFILLED = {  # a tensor left out, and the parameter that SGLang then serves as random memory, without a word
    "no bias in EAGLE-1's fc": ("eagle1", "fc.bias", "model.fc.bias"),
    "no lm_head": ("eagle3", "lm_head.weight", "lm_head.weight"),
    "half a matrix": ("eagle3", "midlayer.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"),
    "vLLM's norm only": ("two-layers", "layers.1.hidden_norm.weight", "model.layers.1.hidden_norm.weight"),
    "no bias in MiMo's q": (
        "mimo",
        "model.mtp_layers.0.self_attn.q_proj.bias",
        "model.mtp_block.self_attn.qkv_proj.bias",
    ),
}
REFUSED = {  # changed keys of config.json, and what SGLang says
    "no draft_vocab_size": ("eagle3", {"draft_vocab_size": ...}, "AttributeError.*draft_vocab_size"),
    "the training's length": ("eagle3", {"max_position_embeddings": 256}, "ValueError.*greater than the derived"),
    "target_hidden_size null": ("eagle3", {"target_hidden_size": None}, "TypeError"),
}
SILENT = {  # changed keys and tensors that SGLang takes without a word
    "tied": ("eagle3", {"tie_word_embeddings": True}, dict),
    "norm_output off": ("norm-output", {"norm_output": False}, dict),
    "fc_norm off": ("eagle3", {"fc_norm": False}, dict),
    "norm_before_fc off where it is nested": (
        "norm-before-fc",
        {"eagle_config": {"use_aux_hidden_state": True, "norm_before_fc": False}},
        dict,
    ),
    "another rotary base": ("eagle3", {"rope_parameters": PLAIN | {"rope_theta": 50.0}}, dict),
    "llama3 off": ("llama3", UNSCALED, dict),
    "linear off": ("linear", UNSCALED, dict),
    "yarn off": ("yarn", UNSCALED, dict),
    "no d2t": ("eagle3", {}, drop("d2t")),
    "taps in another order": ("no-fc-norm", {}, set_to("fc.weight", swapped(32))),
    "feature before embedding in q": ("eagle3", {}, set_to("midlayer.self_attn.q_proj.weight", swapped(32))),
    "EAGLE-1's halves exchanged": ("eagle1", {}, set_to("fc.weight", swapped(32))),
    "a prefix in EAGLE-1": ("eagle1", {}, lambda tensors: {f"model.{name}": t for name, t in tensors.items()}),
}
DTYPES = {"float32": "torch.float16", "bfloat16": "torch.bfloat16", "float16": "torch.float16"}  # of --dtype auto
CAPTURES = {  # ids in a head's config, and our taps
    "of a head": ([tap - 1 for tap in TAPS], TAPS),
    "counted as vLLM counts": (list(TAPS), tuple(tap + 1 for tap in TAPS)),
    "none": (None, (2, 4, 5)),
}


def break_copy(made: Made, name: str, keys: dict, change) -> dict:
    """The job of a copy with other keys (`...`: none) and other tensors."""
    folder = made.folder.with_name(f"broken {name}")
    shutil.copytree(made.folder, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | keys
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = change(load_file(made.folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return made.asked | {"folder": str(folder)}


def in_dtype(made: Made, dtype: str) -> dict:
    """The job of a copy in another dtype, which is only loaded."""

    def change(tensors):
        return {n: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for n, t in tensors.items()}

    job = break_copy(made, dtype, {"dtype": dtype, "torch_dtype": dtype}, change)
    return job | {"dtype": "auto", "inputs": None}


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> dict[str, Made]:
    """Every head, written."""
    root = tmp_path_factory.mktemp("sglang")
    return {name: make(name, root) for name in HEADS}


@pytest.fixture(scope="session")
def answers(made, tmp_path_factory) -> dict[str, dict]:
    """What SGLang's side says of every directory and every target: one process."""
    root = tmp_path_factory.mktemp("targets")
    make_model().save_pretrained(root / "target")
    jobs = {name: one.asked for name, one in made.items()}
    jobs |= {name: break_copy(made[head], name, {}, drop(lost)) for name, (head, lost, _) in UNFILLED.items()}
    jobs |= {name: break_copy(made[head], name, keys, dict) for name, (head, keys, _) in REFUSED.items()}
    jobs |= {name: break_copy(made[head], name, *change) for name, (head, *change) in SILENT.items()}
    jobs |= {dtype: in_dtype(made["eagle3"], dtype) for dtype in DTYPES}
    asked = {"folder": str(root / "target"), "tokens": IDS.tolist()}
    targets = {name: asked | {"captures": ids, "last": False} for name, (ids, _) in CAPTURES.items()}
    targets["last"] = asked | {"captures": None, "last": True}
    targets = {name: target | {"out": str(root / name)} for name, target in targets.items()}
    said = ask(list(jobs.values()), list(targets.values()))
    return dict(zip(jobs, said["heads"])) | {name: load_file(root / name) for name in targets}


def ask(heads: list[dict], targets: list[dict]) -> dict:
    """SGLang's side, once."""
    job = {"heads": heads, "targets": targets, "context_length": CONTEXT, "dtype": "float32"}
    side = ROOT / "eval" / "sglang_side.py"
    done = subprocess.run([PYTHON, side], input=json.dumps(job), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", HEADS)
def test_nothing_is_left_but_what_the_target_gives(answers, name):
    classes = {"eagle3": "LlamaForCausalLMEagle3", "eagle1": "LlamaForCausalLMEagle", "mtp": "MiMoMTP"}
    assert answers[name]["error"] is None
    assert answers[name]["class"] == classes[HEADS[name][0]]
    assert answers[name]["left"] == HEADS[name][-1]


@pytest.mark.parametrize("name", HEADS)
def test_sglang_drafts_what_our_reader_drafts(made, answers, name):
    ours = made[name].ours
    assert answers[name]["tokens"] == ours.tokens
    assert answers[name]["logprobs"] == pytest.approx(ours.logprobs, abs=1e-4)
    assert len(set(map(tuple, answers[name]["states"]))) == COUNT


@pytest.mark.parametrize("fault", UNFILLED)
def test_a_tensor_left_out_leaves_a_parameter_unfilled(answers, fault):
    head, _, parameter = UNFILLED[fault]
    assert answers[fault]["error"] is None
    assert answers[fault]["left"] == sorted({*HEADS[head][-1], parameter})


@pytest.mark.parametrize("fault", REFUSED)
def test_keys_that_sglang_cannot_read_end_with_its_error(answers, fault):
    assert re.match(REFUSED[fault][-1], answers[fault]["error"] or "")


@pytest.mark.parametrize("fault", SILENT)
def test_other_faults_are_silent_and_show_in_the_drafts(made, answers, fault):
    ours = made[SILENT[fault][0]].ours
    assert answers[fault]["error"] is None
    assert answers[fault]["logprobs"] != pytest.approx(ours.logprobs, abs=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_auto_is_that_of_the_directory_but_for_float32(answers, dtype):
    """float32 becomes float16, so the launch line says --dtype."""
    assert answers[dtype]["error"] is None
    assert answers[dtype]["dtype"] == DTYPES[dtype]


@pytest.mark.parametrize("name", CAPTURES)
def test_sglang_captures_the_states_that_we_harvest(answers, name):
    """Its own Llama, over the ids in a head's config."""
    ours = make_target(taps=CAPTURES[name][1]).features(IDS[None]).taps_BNKD[0]
    torch.testing.assert_close(answers[name]["hidden"], ours.flatten(1), atol=1e-4, rtol=1e-4)


def test_sglang_hands_on_the_state_after_the_final_norm(answers):
    ours = make_target().features(IDS[None]).last_BND[0]
    torch.testing.assert_close(answers["last"]["hidden"], ours, atol=1e-4, rtol=1e-4)


def test_prove_compares_a_run_of_ones_own(model_dir, chats, tmp_path_factory):
    """From harvest to SGLang's drafts, as `scripts/verify_sglang.sh --config FILE` does."""
    run = tiny_run(model_dir, chats, tmp_path_factory.mktemp("own"))
    for stage in (harvest, train, export_run):
        stage(run)
    args = parser().parse_args(["--config", "-", "--engine", "sglang", "--engine-python", PYTHON, "--prompts", "2"])
    assert prove(run, args) == 0
    found = json.loads((run.directory / "export" / "portable" / "sglang.json").read_text(encoding="utf-8"))
    assert found["unfilled"] == []
    assert found["drafted"] == found["equal"] == 6
