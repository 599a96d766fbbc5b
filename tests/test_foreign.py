"""Heads that other projects' own classes wrote (tests/foreign), as heads of ours: they compute what those projects compute."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_model, make_tokenizer
from safetensors.torch import load_file

from headwright.configs import UserError
from headwright.data.target import Target
from headwright.heads.base import Case
from headwright.heads.doctor import Question, diagnose
from headwright.heads.export import filled, head_drafts, shared_tables, with_dtype, write_directory
from headwright.heads.foreign import adopt, open_plain, taps_in
from headwright.heads.saved import load_head, save_head

FOREIGN = Path(__file__).parent / "foreign"
EXPECTED = "expected.safetensors"
READABLE = sorted(
    path.name
    for path in FOREIGN.iterdir()
    if path.is_dir() and any(file.name != EXPECTED for file in path.glob("*.safetensors"))
)
PICKLED = sorted(path.name for path in FOREIGN.iterdir() if path.is_dir() and path.name not in READABLE)
# SpecForge reads norm_output otherwise than every engine does; we read it as engines do.
OTHERWISE = {"specforge-fc_norm": {"norm_output": False}, "specforge-no_norm_output": None}
FAITHFUL = [name for name in READABLE if name not in OTHERWISE]


def head_of(name: str, folder: Path, **changes) -> Path:
    """A copy of a fixture without the answers."""
    shutil.copytree(FOREIGN / name, folder, ignore=shutil.ignore_patterns(EXPECTED))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def target_of(expected: dict, taps) -> Target:
    """A target with the embedding and the lm_head of a fixture."""
    model = make_model()
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(expected["embedding"])
        model.lm_head.weight.copy_(expected["lm_head"])
    return Target(model, make_tokenizer(), "tiny", taps)


def case_of(expected: dict) -> Case:
    """The states of a fixture. Heads that read fused states never look at the last one."""
    rows = len(expected["following"])
    taps = expected.get("taps", torch.zeros(rows, 1, 32))
    return Case(expected["following"].tolist(), taps, expected.get("last", torch.zeros(rows, 32)))


@pytest.fixture(params=FAITHFUL)
def world(request, tmp_path):
    """A fixture's directory, its target and its answers."""
    expected = load_file(FOREIGN / request.param / EXPECTED)
    folder = head_of(request.param, tmp_path / "head")
    return folder, target_of(expected, taps_in(folder, 8)), expected


def test_every_project_is_here():
    """Otherwise the tests below would say nothing about it."""
    assert {name.split("-")[0] for name in READABLE} == {
        "angelslim",
        "eagle",
        "eagle3",
        "medusa",
        "specforge",
        "speculators",
    }


def test_the_head_drafts_what_its_project_drafts(world):
    folder, target, expected = world
    head = load_head(folder, target, torch.float32).eval()
    count = len(expected["drafts"])
    drafts = head_drafts(head, target, case_of(expected))
    assert drafts.tokens[:count] == expected["drafts"].tolist()
    first = expected["logits"][0] if expected["logits"].ndim == 2 else expected["logits"]
    assert drafts.logprobs[0] == pytest.approx(float(first.log_softmax(-1).max()), abs=2e-5)


def test_the_independent_reader_does_too(world):
    """Of the directory as it is: what `doctor` and conversions rest on."""
    folder, target, expected = world
    plain = open_plain(folder)
    reader = plain.method.reader(plain.config, plain.tensors)
    found = reader.draft(shared_tables(target), case_of(expected), len(expected["drafts"]))
    assert found.tokens == expected["drafts"].tolist()


def test_saved_as_ours_it_is_the_same_head(world, tmp_path):
    folder, target, expected = world
    head = load_head(folder, target, torch.float32).eval()
    save_head(head, tmp_path / "ours")
    again = load_head(tmp_path / "ours", target, torch.float32).eval()
    assert again.config == head.config
    assert head_drafts(again, target, case_of(expected)) == head_drafts(head, target, case_of(expected))


ENGINES = {
    "eagle1": ["vllm", "sglang"],
    "eagle3": ["portable", "vllm", "speculators"],
    "medusa": ["vllm"],
}


def test_converted_for_another_engine_it_still_drafts_the_same(world, tmp_path):
    """Through our head into every layout that serves it, and back by the independent reader."""
    folder, target, expected = world
    head = load_head(folder, target, torch.float32).eval()
    written = 0
    for engine in ENGINES[head.config.kind]:
        try:
            export = head.export(engine)
        except UserError:
            continue  # the engine does not compute it, and says so
        out = tmp_path / engine
        write_directory(out, with_dtype(filled(export, target), torch.float32))
        found = export.reader(out).draft(shared_tables(target), case_of(expected), len(expected["drafts"]))
        assert found.tokens == expected["drafts"].tolist()
        assert diagnose(out, Question()).method.kind == head.config.kind
        written += 1
    assert written


def test_specforge_recycles_the_state_before_the_norm(tmp_path):
    """Its norm_output says otherwise to engines; read as engines read it, drafts after the first part."""
    expected = load_file(FOREIGN / "specforge-fc_norm" / EXPECTED)
    wanted, found = expected["drafts"].tolist(), {}
    for value in (True, False):
        folder = head_of("specforge-fc_norm", tmp_path / str(value), norm_output=value)
        target = target_of(expected, taps_in(folder, 8))
        found[value] = head_drafts(load_head(folder, target, torch.float32).eval(), target, case_of(expected)).tokens
    assert found[False][: len(wanted)] == wanted
    assert found[True][0] == wanted[0]
    assert found[True][: len(wanted)] != wanted


@pytest.mark.parametrize("name", PICKLED)
def test_pickles_are_refused_with_the_way_out(name, tmp_path):
    folder = head_of(name, tmp_path / "head")
    with pytest.raises(UserError, match=r"never unpickled here.*torch\.load\(.*weights_only=True\)"):
        load_head(folder, target_of(load_file(FOREIGN / name / EXPECTED), (8,)), torch.float32)


@pytest.mark.parametrize(
    ("name", "vocab", "words"), [("specforge", 280, "the target has 280 tokens"), ("eagle", 280, "280 tokens")]
)
def test_a_head_of_another_target_is_refused(tmp_path, name, vocab, words):
    folder = head_of(name, tmp_path / "head")
    model = make_model(vocab=vocab)
    with pytest.raises(UserError, match=words):
        adopt(folder, Target(model, make_tokenizer(), "other", taps_in(folder, 8)))


def test_taps_are_read_in_each_layouts_counting(tmp_path):
    """Top-level ids count layers before, nested ones layers' outputs; without either the usual ones."""
    nested = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 3, 6]}
    for number, (changes, wanted) in enumerate(
        (
            ({}, (2, 4, 5)),
            ({"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, (1, 2, 7)),
            ({"eagle_config": nested}, (1, 4, 7)),
            ({"eagle_config": nested, "eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, (2, 3, 4)),
        )
    ):
        assert taps_in(head_of("specforge", tmp_path / str(number), **changes), 8) == wanted
