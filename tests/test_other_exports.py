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


@pytest.mark.parametrize("options", [{}, {"lm_head": "shared"}])
def test_tokens_that_medusa_heads_did_not_learn_are_never_drafted(tmp_path, options):
    """Their rows are there, since vLLM wants them; even where every learned logit is negative none of them is the highest."""
    head, target, reader = exported(tmp_path, "medusa", options, "vllm")
    plain, learned = reader(tmp_path), set(head.vocab.ids_W.tolist())
    assert plain.known_W.tolist() == sorted(learned)
    torch.manual_seed(0)
    for number in range(head.config.steps):
        weight_VD = plain.lm_head(number)
        assert len(weight_VD) == target.spec.vocab_size > len(learned)
        for x_D in torch.randn(50, weight_VD.shape[1]):
            assert int((weight_VD @ x_D).argmax()) in learned
        down_VD = weight_VD - 2 * weight_VD.norm(dim=1).max()  # every logit of a positive x is negative
        for x_D in torch.rand(50, weight_VD.shape[1]) + 0.1:
            logits_V = down_VD @ x_D
            assert logits_V.max() < 0
            assert int(logits_V.argmax()) in learned
