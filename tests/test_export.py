"""Exports: the golden list of names and shapes, the config of both engines, an independent reader, and refusals."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TAPS, make_target, make_tiny_head, tiny_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headwright.configs import UserError
from headwright.data.harvest import harvest, store_path
from headwright.data.store import FeatureReader
from headwright.data.target import Target
from headwright.heads.eagle3_plain import PlainEagle3
from headwright.heads.export import (
    Case,
    check_tensors,
    draft_cases,
    export_run,
    head_drafts,
    read_back,
    shared_tables,
    with_dtype,
    write_directory,
)
from headwright.heads.saved import load_head
from headwright.train.run import train

GOLDEN = {  # hidden 32, inner 64, 4 heads of 8, 2 key-value heads, 3 taps, 24 of 272 tokens
    "fc.weight": (32, 96),
    "fc_norm.0.weight": (32,),
    "fc_norm.1.weight": (32,),
    "fc_norm.2.weight": (32,),
    "midlayer.self_attn.q_proj.weight": (32, 64),
    "midlayer.self_attn.k_proj.weight": (16, 64),
    "midlayer.self_attn.v_proj.weight": (16, 64),
    "midlayer.self_attn.o_proj.weight": (32, 32),
    "midlayer.mlp.gate_proj.weight": (64, 32),
    "midlayer.mlp.up_proj.weight": (64, 32),
    "midlayer.mlp.down_proj.weight": (32, 64),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.post_attention_layernorm.weight": (32,),
    "norm.weight": (32,),
    "lm_head.weight": (24, 32),
    "d2t": (24,),
    "t2d": (272,),
}


@pytest.fixture(scope="module")
def run(model_dir, chats, tmp_path_factory):
    """A trained and exported run."""
    run = tiny_run(model_dir, chats, tmp_path_factory.mktemp("runs"))
    harvest(run)
    train(run)
    export_run(run)
    return run


@pytest.fixture(scope="module")
def folder(run) -> Path:
    return run.directory / "export" / "portable"


@pytest.fixture(scope="module")
def parts(run):
    """The target, the trained head and the prompts that exports are compared on."""
    target = Target.load(run.target, TAPS)
    head = load_head(run.directory / "head", target).float().eval()
    return target, head, draft_cases(FeatureReader(store_path(run, "held-out")), target, 3)


def test_tensors_are_exactly_the_golden_list(folder):
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == GOLDEN
    assert {str(t.dtype) for n, t in tensors.items() if n not in ("d2t", "t2d")} == {"torch.float32"}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert not [name for name in tensors if "embed" in name]
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_directory_holds_what_it_promises(folder, run):
    assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors", "SERVE.md", "headwright.json"}
    notes = (folder / "SERVE.md").read_text(encoding="utf-8")
    assert f"vllm serve {run.target.model} --speculative-config" in notes
    assert "--speculative-algorithm EAGLE3" in notes
    assert "No chain of this head is measured yet" in notes
    proof = json.loads((folder / "headwright.json").read_text(encoding="utf-8"))
    assert proof["read_back"].pop("logprob_difference") < 1e-4
    assert proof["read_back"] == {"drafted": 10, "equal": 10, "dtype": "float32"}
    assert proof["taps"] == list(TAPS)
    assert proof["target"]["fingerprint"]


def test_exported_weights_are_those_of_the_kept_head(folder, run):
    tensors, saved = load_file(folder / "model.safetensors"), load_file(run.directory / "head" / "model.safetensors")
    ids = saved.pop("vocab.ids")
    assert all(torch.equal(value, tensors[name]) for name, value in saved.items())
    assert torch.equal(torch.arange(24) + tensors["d2t"], ids)
    assert torch.nonzero(tensors["t2d"])[:, 0].tolist() == ids.tolist()


def test_config_is_what_both_engines_read(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "vocab_size": 272,
        "draft_vocab_size": 24,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "norm_before_residual": False,
        "fc_norm": True,
        "norm_output": False,
        "torch_dtype": "float32",
        "dtype": "float32",
    }
    assert {key: config.get(key) for key in wanted} == wanted
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]
    assert config["eagle_config"]["use_aux_hidden_state"] is True


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("rope", [None, LLAMA3, {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}])
def test_rotary_keys_stand_in_both_spellings(rope):
    target = make_target(**({"rope_parameters": rope} if rope else {}))
    config = make_tiny_head(target).export("portable").config
    rope = rope or {"rope_type": "default", "rope_theta": 10000.0}
    assert config["rope_parameters"] == rope
    assert config["rope_theta"] == rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert config["rope_scaling"] == (None if rope["rope_type"] == "default" else scaling)


def random_cases(head, seed: int = 0) -> list[Case]:
    """Contexts of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for count in (1, 2, 7, 40, 100):
        following = torch.randint(head.spec.vocab_size, (count,), generator=generator).tolist()
        cases.append(
            Case(following, torch.randn(count, len(head.taps), 32, generator=generator), torch.zeros(count, 32))
        )
    return cases


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize(
    ("config", "changes", "size"),
    [
        ({}, {}, 100),
        ({"fc_norm": False}, {}, 100),
        ({"intermediate_size": 48}, {}, None),
        ({}, {"rope_parameters": LLAMA3}, 100),
        ({"fc_norm": False}, {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}, None),
    ],
    ids=["plain", "no-fc-norm", "full-vocabulary", "llama3", "linear"],
)
def test_independent_reader_drafts_what_the_head_drafts(tmp_path, family, config, changes, size):
    """Random heads, contexts from 1 to 100 rows: every token is equal."""
    target = make_target(family, **changes)
    head = make_tiny_head(target, size, **config)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if "norm" in name:
                weight.add_(torch.rand_like(weight))
    write_directory(tmp_path, with_dtype(head.export("portable"), torch.float32))
    reader, shared = PlainEagle3.read(tmp_path), shared_tables(target)
    for case in random_cases(head):
        drafts, ours = reader.draft(shared, case, 5), head_drafts(head, target, case)
        assert drafts.tokens == ours.tokens
        assert drafts.logprobs == pytest.approx(ours.logprobs, abs=1e-4)
        assert len(drafts.tokens) == 5
    assert ("fc_norm.0.weight" in reader.w) == config.get("fc_norm", True)


def test_full_vocabulary_has_no_maps(tmp_path, tiny):
    export = make_tiny_head(tiny, None).export("portable")
    write_directory(tmp_path, with_dtype(export, torch.float32))
    tensors = load_file(tmp_path / "model.safetensors")
    assert not {"d2t", "t2d"} & tensors.keys()
    assert tensors["lm_head.weight"].shape == (272, 32)
    assert export.config["draft_vocab_size"] == export.config["vocab_size"] == 272


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_export_in_half_precision(run, name):
    """Both spellings of the dtype, and maps stay integers."""
    target = Target.load(run.target, TAPS)
    export = with_dtype(load_head(run.directory / "head", target).export("portable"), getattr(torch, name))
    assert export.config["dtype"] == export.config["torch_dtype"] == name
    kinds = {n: t.dtype for n, t in export.tensors.items()}
    assert kinds.pop("d2t") == torch.int64
    assert kinds.pop("t2d") == torch.bool
    assert set(kinds.values()) == {getattr(torch, name)}
    check_tensors(export)


def test_unknown_engine_is_refused(tiny):
    with pytest.raises(UserError, match="portable"):
        make_tiny_head(tiny).export("other")


def test_export_before_training_says_so(run, tmp_path):
    bare = replace(run, runs=str(tmp_path))
    with pytest.raises(UserError, match="run the harvest first"):
        export_run(bare)
    shutil.copytree(store_path(run, "held-out"), store_path(bare, "held-out"))
    with pytest.raises(UserError, match="train first"):
        export_run(bare)


def test_exporting_again_gives_the_same_files(run, folder):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    export_run(run)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


# Negative controls: what an engine would serve as τ = 1.0 without a word


def set_to(name, make):
    """A fault that replaces one tensor."""
    return lambda tensors: tensors | {name: make(tensors[name])}


def drop(name):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def poisoned(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[3] = value
        return tensor

    return change


FAULTS = {
    "missing norm": (drop("norm.weight"), r"missing \['norm.weight'\]"),
    "missing fc_norm": (drop("fc_norm.1.weight"), r"missing \['fc_norm.1.weight'\]"),
    "missing map": (drop("d2t"), r"missing \['d2t'\]"),
    "extra embedding": (lambda t: t | {"embed_tokens.weight": torch.ones(272, 32)}, r"not known .*embed_tokens.weight"),
    "prefixed name": (lambda t: drop("fc.weight")(t) | {"model.fc.weight": t["fc.weight"]}, "model.fc.weight"),
    "transposed": (set_to("midlayer.mlp.gate_proj.weight", lambda w: w.T), r"\(32, 64\).*\(64, 32\)"),
    "wrong shape": (set_to("lm_head.weight", lambda w: w[:-1]), r"lm_head.weight has shape \(23, 32\)"),
    "NaN": (set_to("fc.weight", poisoned(float("nan"))), "fc.weight holds NaN"),
    "infinite": (set_to("lm_head.weight", poisoned(float("inf"))), "lm_head.weight holds NaN or infinite"),
    "all zero": (set_to("midlayer.self_attn.v_proj.weight", torch.zeros_like), "v_proj.weight is all zero"),
    "absolute d2t": (lambda t: t | {"d2t": t["d2t"] + torch.arange(24)}, "holds target ids, not offsets"),
    "shifted d2t": (set_to("d2t", lambda d: d + 1), "disagree"),
    "d2t of another order": (set_to("d2t", lambda d: d.flip(0)), "disagree"),
    "d2t in int32": (set_to("d2t", lambda d: d.int()), "must be int64"),
    "t2d in uint8": (set_to("t2d", lambda t: t.to(torch.uint8)), "t2d bool"),
    "t2d with one more token": (lambda t: t | {"t2d": t["t2d"] | (torch.arange(272) == 5)}, "disagree"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_tensors_are_refused_before_anything_is_written(parts, tmp_path, fault):
    change, message = FAULTS[fault]
    export = with_dtype(parts[1].export("portable"), torch.float32)
    check_tensors(export)
    assert not export.tensors["t2d"][5]
    broken = replace(export, tensors=change(export.tensors))
    with pytest.raises(UserError, match=message):
        write_directory(tmp_path / "out", broken)
    assert not (tmp_path / "out").exists()


def swapped(width):
    """Exchange the first two blocks of columns."""
    return lambda w: torch.cat([w[:, width : 2 * width], w[:, :width], w[:, 2 * width :]], 1).contiguous()


SILENT = {  # right names and shapes, wrong head
    "taps in another order": set_to("fc.weight", swapped(32)),
    "feature before embedding in q": set_to("midlayer.self_attn.q_proj.weight", swapped(32)),
    "feature before embedding in v": set_to("midlayer.self_attn.v_proj.weight", swapped(32)),
    "o_proj transposed": set_to("midlayer.self_attn.o_proj.weight", lambda w: w.T.contiguous()),
    "gate and up exchanged": lambda t: (
        t
        | {
            "midlayer.mlp.gate_proj.weight": t["midlayer.mlp.up_proj.weight"],
            "midlayer.mlp.up_proj.weight": t["midlayer.mlp.gate_proj.weight"],
        }
    ),
    "another final norm": set_to("norm.weight", lambda w: w.flip(0).contiguous() * torch.linspace(-1, 2, 32)),
    "lm_head rows moved": set_to("lm_head.weight", lambda w: w.roll(1, 0)),
    "d2t of other tokens": set_to("d2t", lambda d: d + 1),
}


@pytest.mark.parametrize("fault", SILENT)
def test_silent_faults_are_found_by_drafting(tmp_path, tiny, fault):
    """With names and shapes as they should be, only drafts tell; the healthy directory passes the same check."""
    head = make_tiny_head(tiny)
    cases = random_cases(head)
    write_directory(tmp_path, with_dtype(head.export("portable"), torch.float32))
    proof = read_back(PlainEagle3.read(tmp_path), head, tiny, cases, torch.float32)
    assert proof.equal == proof.drafted == 25
    path = tmp_path / "model.safetensors"
    tensors = SILENT[fault](load_file(path))
    path.unlink()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match="do not serve this"):
        read_back(PlainEagle3.read(tmp_path), head, tiny, cases, torch.float32)


@pytest.mark.parametrize("fault", ["fc_norm off", "another rotary base", "llama3 factor"])
def test_faulty_configs_are_found_by_drafting(tmp_path, fault):
    target = make_target(rope_parameters=LLAMA3)
    head = make_tiny_head(target)
    with torch.no_grad():
        for norm in head.fc_norm:
            norm.weight.add_(torch.linspace(-2, 2, 32))
        for projection in (head.midlayer.self_attn.q_proj, head.midlayer.self_attn.k_proj):
            projection.weight.mul_(8)  # sharp attention, so that positions matter
    write_directory(tmp_path, with_dtype(head.export("portable"), torch.float32))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    read_back(PlainEagle3.read(tmp_path), head, target, random_cases(head), torch.float32)
    if fault == "fc_norm off":
        config["fc_norm"] = False
    elif fault == "another rotary base":
        config["rope_theta"] = 50.0
    else:
        config["rope_scaling"] = None
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match="do not serve this"):
        read_back(PlainEagle3.read(tmp_path), head, target, random_cases(head), torch.float32)


def test_a_run_whose_reader_disagrees_is_refused(run, parts, monkeypatch, tmp_path):
    """export_run itself compares: a reader that drafts otherwise stops it."""
    monkeypatch.setattr(PlainEagle3, "fuse", lambda self, taps: self.linear(taps.flip(1).flatten(1), "fc"))
    with pytest.raises(UserError, match="the written files draft"):
        export_run(run)
