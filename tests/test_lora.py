"""Low-rank updates of a head: seen by every reader of a weight, merged exactly, kept as peft's files, switched at run time."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Interrupted, crash_at, make_tiny_head, tiny_run
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize

from headwright.configs import UserError
from headwright.configs.schema import LoraConfig
from headwright.data.batch import pack
from headwright.data.store import FeatureReader
from headwright.data.vocab import DraftVocab
from headwright.heads.lora import Adapters, adapt, fingerprint, matrices, merged, save_adapter, updates
from headwright.heads.saved import load_head, read_head, save_head
from headwright.train.run import new_tokens, train

MATRICES = {"fc", "lm_head", *(f"midlayer.self_attn.{part}_proj" for part in "qkvo")} | {
    f"midlayer.mlp.{part}_proj" for part in ("gate", "up", "down")
}


@pytest.fixture(scope="module")
def batch(done):
    """Some of the harvest's documents."""
    reader = FeatureReader(done.directory / "features")
    return pack([reader[document] for document in range(4)])


@pytest.fixture
def target(tiny):
    return tiny


def stirred(head: nn.Module, seed: int = 0) -> nn.Module:
    """Updates that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    for update in updates(head).values():
        update.B.data = 0.05 * torch.randn(update.B.shape, generator=generator)
    return head


def test_every_matrix_of_the_head_can_be_adapted(target):
    assert set(matrices(make_tiny_head(target), ["*"])) == MATRICES
    assert matrices(make_tiny_head(target), ["*.mlp.up_proj", "fc"]) == ["fc", "midlayer.mlp.up_proj"]
    assert set(matrices(make_tiny_head(target), ["[qk]_proj"])) == {f"midlayer.self_attn.{part}_proj" for part in "qk"}


def test_an_update_of_nothing_changes_nothing(target, batch):
    plain, head = make_tiny_head(target), make_tiny_head(target)
    adapt(head, LoraConfig(rank=3))
    assert torch.equal(head.loss(batch, target).total, plain.loss(batch, target).total)


@pytest.mark.parametrize("cached", [False, True])
def test_a_rollout_sees_every_update_and_its_gradient(target, batch, cached):
    """The adapted head computes what a plain head with the sums computes; and dL/dB = scale · dL/dW Aᵀ, dL/dA likewise."""
    head = make_tiny_head(target, steps=3)
    adapt(head, LoraConfig(rank=3, alpha=12))
    stirred(head)
    plain = make_tiny_head(target, steps=3)
    plain.load_state_dict(merged(head, head.state_dict()))
    wanted = plain.loss(batch, target).total
    wanted.backward()
    if cached:
        with parametrize.cached():
            found = head.loss(batch, target).total
    else:
        found = head.loss(batch, target).total
    found.backward()
    assert torch.allclose(found, wanted, rtol=1e-6)
    assert set(updates(head)) == MATRICES
    for name, update in updates(head).items():
        slope = plain.get_submodule(name).weight.grad
        assert slope.abs().max() > 0, name
        torch.testing.assert_close(update.B.grad, 4 * slope @ update.A.detach().T, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(update.A.grad, 4 * update.B.detach().T @ slope, rtol=1e-3, atol=1e-5)
    trained = {name for name, weight in head.named_parameters() if weight.requires_grad}
    assert trained == {f"{name}.parametrizations.weight.0.{side}" for name in MATRICES for side in "AB"}


def test_an_adapted_head_drafts_as_the_merged_one(target, batch, tmp_path):
    head = make_tiny_head(target)
    adapt(head, LoraConfig(rank=2))
    stirred(head)
    save_head(head, tmp_path / "head", merged(head, head.state_dict()))
    again = load_head(tmp_path / "head", target)
    assert torch.equal(head.agreement(batch, target, 3), again.agreement(batch, target, 3))
    assert set(read_head(tmp_path / "head").tensors) == set(make_tiny_head(target).state_dict())


def test_peft_reads_an_adapter_and_computes_the_same(target, tmp_path):
    """peft's own layers on a copy of the head's matrices."""
    peft = pytest.importorskip("peft")
    head, plain = make_tiny_head(target), make_tiny_head(target)
    config = LoraConfig(rank=2, alpha=3)
    adapt(head, config)
    stirred(head)
    save_adapter(head, tmp_path, head.state_dict(), config, "")
    described = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert (described["r"], described["lora_alpha"], set(described["target_modules"])) == (2, 3, MATRICES)
    theirs = nn.Module()
    theirs.fc = plain.fc
    loaded = peft.LoraConfig.from_pretrained(tmp_path)
    loaded.target_modules = {"fc"}
    wrapped = peft.inject_adapter_in_model(loaded, theirs, "default")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    wrapped.fc.lora_A["default"].weight.data = tensors["base_model.model.fc.lora_A.weight"]
    wrapped.fc.lora_B["default"].weight.data = tensors["base_model.model.fc.lora_B.weight"]
    x = torch.randn(5, head.fc.in_features)
    torch.testing.assert_close(wrapped.fc(x), head.fc(x))


# Run time


@pytest.fixture
def two(target, tmp_path):
    """A head and two adapters of it."""
    head, config = make_tiny_head(target), LoraConfig(rank=2)
    base = fingerprint(head.state_dict())
    for seed, name in enumerate(("ru", "code"), 1):
        other = make_tiny_head(target)
        adapt(other, config)
        stirred(other, seed)
        save_adapter(other, tmp_path / name, other.state_dict(), config, base)
        save_head(other, tmp_path / f"{name}-merged", merged(other, other.state_dict()))
    return head, {name: tmp_path / name for name in ("ru", "code")}


def test_adapters_are_switched_and_taken_off_exactly(two, target):
    head, folders = two
    before = {name: value.clone() for name, value in head.state_dict().items()}
    adapters = Adapters(head, fingerprint(head.state_dict()), folders)
    for name in ("ru", "code", "ru", "", "code", ""):
        adapters.use(name)
        wanted = read_head(folders[name].parent / f"{name}-merged").tensors if name else before
        for place, value in head.state_dict().items():
            assert torch.equal(value, wanted[place]), (name, place)


def test_adapters_that_do_not_belong(two, target, tmp_path):
    head, folders = two
    with pytest.raises(UserError, match="an adapter for another head"):
        Adapters(head, "0123", folders)
    adapters = Adapters(head, fingerprint(head.state_dict()), folders)
    with pytest.raises(UserError, match="no adapter 'de'; there are ru, code"):
        adapters.use("de")
    with pytest.raises(UserError, match="no adapter that can be read"):
        Adapters(head, "", {"none": tmp_path / "none"})
    shutil.copytree(folders["ru"], tmp_path / "foreign")
    (tmp_path / "foreign" / "headwright.json").unlink()
    with pytest.raises(UserError, match="lm_head does not fit this eagle3 head"):
        Adapters(make_tiny_head(target, size=90), "", {"foreign": tmp_path / "foreign"})


def test_what_cannot_be_adapted(target):
    with pytest.raises(
        UserError, match=r"train\.lora\.modules: 'w_proj' is no matrix of this head; there are .*up_proj"
    ):
        adapt(make_tiny_head(target), LoraConfig(modules=["w_proj"]))
    with pytest.raises(UserError, match=r"train\.lora\.rank 33: .* is a matrix of rank 32 at most"):
        adapt(make_tiny_head(target), LoraConfig(rank=33))


# Training


def lora_run(done, tmp_path: Path, model_dir, chats, **changes):
    """A training of updates on a head and features that are there."""
    run = tiny_run(model_dir, chats, tmp_path, adapt={"head": str(done / "head"), "vocab": "keep", "replay": 0.0})
    for name in ("features", "features-held-out"):
        shutil.copytree(done / name, run.directory / name)
    run.train = replace(run.train, lora=LoraConfig(rank=2), **changes)
    return run


@pytest.fixture(scope="module")
def base(done, model_dir, chats, tmp_path_factory):
    """A trained head."""
    run = tiny_run(model_dir, chats, tmp_path_factory.mktemp("base"))
    shutil.copytree(done.directory, run.directory)
    train(run)
    return run.directory


def test_a_training_of_updates_resumes_in_the_same_bits(base, model_dir, chats, tmp_path, monkeypatch):
    straight = lora_run(base, tmp_path / "a", model_dir, chats)
    train(straight)
    broken = lora_run(base, tmp_path / "b", model_dir, chats)
    with monkeypatch.context() as patch:
        crash_at(patch, 3)
        with pytest.raises(Interrupted):
            train(broken)
    train(broken)
    a, b = (load_file(run.directory / "head" / "model.safetensors") for run in (straight, broken))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_updates_need_a_head_to_start_from(base, model_dir, chats, tmp_path):
    run = lora_run(base, tmp_path, model_dir, chats)
    run.adapt.head = None
    with pytest.raises(UserError, match=r"train\.lora: low-rank updates are of a head that is there"):
        train(run)


def test_new_rows_are_trained_in_full_and_merged(target, batch):
    """Beside the updates: at the start they change nothing; later the head is the merged one; old rows move by rank alone."""
    plain, head = make_tiny_head(target), make_tiny_head(target)
    head.load_state_dict(plain.state_dict())
    new = torch.tensor([1, 4, 6])
    adapt(head, LoraConfig(rank=1), new)
    sizes = {name: weight.shape for name, weight in head.named_parameters() if name.endswith(".C")}
    assert list(sizes) == ["lm_head.parametrizations.weight.0.C"]
    assert sizes["lm_head.parametrizations.weight.0.C"] == (3, head.lm_head.weight.shape[1])
    assert torch.equal(head.lm_head.weight, plain.lm_head.weight)
    head.loss(batch, target).total.backward()
    part = head.lm_head.parametrizations.weight[0]
    assert part.C.grad.abs().sum() > 0
    with torch.no_grad():
        for weight in (part.A, part.B, part.C):
            weight.normal_(generator=torch.Generator().manual_seed(0))
    found = merged(head, head.state_dict())
    assert found.keys() == plain.state_dict().keys()
    torch.testing.assert_close(found["lm_head.weight"], head.lm_head.weight.detach())
    change = found["lm_head.weight"] - plain.lm_head.weight.detach()
    old = [row for row in range(len(change)) if row not in new.tolist()]
    assert torch.linalg.matrix_rank(change[old], tol=1e-4) == 1
    expected = 2 * part.B[new] @ part.A + part.C
    torch.testing.assert_close(change[new], expected.detach(), rtol=1e-4, atol=1e-5)


def test_which_rows_are_new(base, model_dir, chats, tmp_path):
    """Those of draft tokens that the head which is adapted does not have; none where its vocabulary is kept."""
    saved = read_head(base / "head")
    head = SimpleNamespace(spec=saved.spec, vocab=DraftVocab(torch.arange(100, 160), 272))
    known = set(saved.vocab.ids_W.tolist())
    run = tiny_run(model_dir, chats, tmp_path, adapt={"head": str(base / "head")})
    assert new_tokens(run, head) is None
    run.train.lora = LoraConfig()
    assert new_tokens(run, head).tolist() == [place for place in range(60) if 100 + place not in known]
    head.vocab = DraftVocab(torch.tensor(sorted(known)), 272)
    assert new_tokens(run, head) is None
    head.vocab = DraftVocab(torch.arange(100, 160), 272)
    run.train.lora.new_rows = False
    assert new_tokens(run, head) is None
