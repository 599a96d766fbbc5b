"""Exports of EAGLE-1, Medusa and MTP heads: independent readers draft what the heads draft, and notice what is broken."""

import pytest
import torch
from conftest import make_target
from safetensors.torch import load_file, save_file

from headwright.configs import UserError
from headwright.configs.load import build
from headwright.data.vocab import DraftVocab
from headwright.heads import get_head
from headwright.heads.base import Case, make_head
from headwright.heads.export import filled, read_back, with_dtype, write_directory

RAW = {"norm": False, "feed": "raw"}
CASES = [
    ("eagle1", {}, "vllm"),
    ("eagle1", {"steps": 2}, "sglang"),
    ("eagle1", {"fc_bias": True}, "sglang"),
    ("medusa", {}, "vllm"),
    ("medusa", {"lm_head": "shared", "blocks": 2, "bias": False}, "vllm"),
    ("mtp", {}, "mimo"),
    ("mtp", RAW, "ernie"),
]


def exported(folder, kind, options, engine, family="llama"):
    """A random head, its target and the reader of its directory."""
    config = build(get_head(kind).Config, {"kind": kind, **options}, "test")
    target = make_target(family, config.choose_taps(8))
    vocab = DraftVocab(torch.arange(0, target.spec.vocab_size, 2), target.spec.vocab_size)
    head = make_head(config, target.spec, target.taps, vocab)
    head.attach(target)
    head.initialise(target)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    export = with_dtype(filled(head.export(engine), target), torch.float32)
    write_directory(folder, export)
    return head.eval(), target, export.reader


def cases(head, target):
    """Contexts of several lengths."""
    generator, found = torch.Generator().manual_seed(0), []
    for count in (1, 7, 30):
        ids = torch.randint(target.spec.vocab_size, (count,), generator=generator).tolist()
        taps = torch.randn(count, 1, target.spec.hidden_size, generator=generator)
        found.append(Case(ids, taps, target.last_of(taps)))
    return found


@pytest.mark.parametrize(("kind", "options", "engine"), CASES, ids=str)
def test_reader_drafts_what_the_head_drafts(tmp_path, kind, options, engine):
    head, target, reader = exported(tmp_path, kind, options, engine)
    proof = read_back(reader(tmp_path), head, target, cases(head, target), torch.float32)
    assert proof.equal == proof.drafted >= 12


@pytest.mark.parametrize(("kind", "options", "engine"), CASES, ids=str)
def test_a_broken_matrix_is_found_by_drafting(tmp_path, kind, options, engine):
    """The first matrix turned upside down: no engine would say so."""
    head, target, reader = exported(tmp_path, kind, options, engine)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name, tensor in sorted(tensors.items()) if tensor.ndim == 2)
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors | {name: tensors[name].flip(0).contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="do not serve this"):
        read_back(reader(tmp_path), head, target, cases(head, target), torch.float32)


@pytest.mark.parametrize(
    ("kind", "options", "engine", "words", "family"),
    [
        ("eagle1", {"fc_bias": True}, "vllm", "no bias in fc", "llama"),
        ("eagle1", {}, "portable", "vllm, sglang", "llama"),
        ("medusa", {}, "sglang", "no other engine", "llama"),
        ("mtp", {"modules": 3}, "mimo", "one module", "llama"),
        ("mtp", RAW, "mimo", r"head\.norm=true", "llama"),
        ("mtp", {}, "ernie", r"head\.norm=false", "llama"),
        ("mtp", {}, "mimo", r"head\.block=llama", "qwen3"),
        ("hydra", {}, "vllm", "no engine serves Hydra", "llama"),
    ],
)
def test_what_no_engine_computes_is_refused(tmp_path, kind, options, engine, words, family):
    with pytest.raises(UserError, match=words):
        exported(tmp_path, kind, options, engine, family)
