"""A warm start takes over what fits of another head, token by token, names what it leaves, and refuses what is no kin."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import TAPS, make_model, make_target, make_tiny_head, tiny_run
from safetensors.torch import load_file
from test_adapter import Interrupted, make_any

from headwright.configs import UserError
from headwright.data.harvest import harvest
from headwright.data.target import Target
from headwright.heads.base import DraftHead
from headwright.heads.saved import matching_rows, save_head, warm_start
from headwright.train import loop
from headwright.train.run import train


@pytest.fixture(scope="module")
def target() -> Target:
    """A target that no test changes."""
    return make_target()


def stirred(head: DraftHead, seed: int) -> DraftHead:
    """Weights that no other head has."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return head


def copied(head: DraftHead) -> dict[str, torch.Tensor]:
    """Its weights now."""
    return {name: value.clone() for name, value in head.state_dict().items()}


def start(folder: Path, old: DraftHead, new: DraftHead) -> tuple[str, dict, dict, dict]:
    """Save one head, start the other from it: what is said; weights of the old, of the new before and after."""
    save_head(stirred(old, 1), folder)
    before = copied(stirred(new, 2))
    return warm_start(new, folder), copied(old), before, copied(new)


def test_an_equal_head_is_taken_whole(target, tmp_path):
    said, old, before, after = start(tmp_path, make_tiny_head(target), make_tiny_head(target))
    assert f"{len(old)} of {len(old)} tensors; 100 of 100 draft tokens were known" in said
    assert str(tmp_path) in said
    assert all(torch.equal(after[name], old[name]) for name in old)
    assert not any(torch.equal(before[name], old[name]) for name in old)


@pytest.mark.parametrize(("before_size", "after_size"), [(100, 60), (60, 100), (100, None), (None, 100)])
def test_another_vocabulary_is_taken_token_by_token(target, tmp_path, before_size, after_size):
    one, two = make_tiny_head(target, before_size, seed=1), make_tiny_head(target, after_size, seed=2)
    said, old, before, after = start(tmp_path, one, two)
    theirs, ours = one.vocab.ids_W.tolist(), two.vocab.ids_W.tolist()
    shared = set(theirs) & set(ours)
    assert len(shared) > 0
    assert f"{len(old)} of {len(old)} tensors; {len(shared)} of {len(ours)} draft tokens were known" in said
    for row, token in enumerate(ours):
        wanted = old["lm_head.weight"][theirs.index(token)] if token in shared else before["lm_head.weight"][row]
        assert torch.equal(after["lm_head.weight"][row], wanted)
    assert all(torch.equal(after[name], old[name]) for name in old if name != "lm_head.weight")


def test_a_vocabulary_as_large_as_the_width(target, tmp_path):
    """A Qwen3-4B is 2560 wide, and vocab.size 2560 is in the shipped configs: only the lm_head has a row per token."""
    one, two = make_tiny_head(target, 32, seed=1), make_tiny_head(target, 32, seed=2)
    _, old, _, after = start(tmp_path, one, two)
    assert one.vocab.ids_W.tolist() != two.vocab.ids_W.tolist()
    assert not [name for name in old if name != "lm_head.weight" and not torch.equal(after[name], old[name])]


def test_medusa_s_own_projections_go_by_token(target, tmp_path):
    """Every lm_head of several."""
    last = make_target(taps=(8,))
    one, two = (make_any("medusa", last, size, seed, steps=2) for size, seed in ((90, 1), (70, 2)))
    said, old, _, after = start(tmp_path, one, two)
    here, there = matching_rows(two.vocab.ids_W, one.vocab.ids_W)
    assert len(here) > 5
    for i in range(2):
        name = f"lm_heads.{i}.weight"
        assert torch.equal(after[name][here], old[name][there])
    assert "new:" not in said


@pytest.mark.parametrize(
    ("old", "new", "left"),
    [
        ({}, {"taps": (1, 3)}, {"fc.weight"}),
        ({"taps": (1, 3)}, {}, {"fc.weight", "fc_norm.2.weight"}),
        ({}, {"norm_before_fc": True, "fc_norm": False}, {"input_norm.weight"}),
        ({"lm_head": "shared"}, {}, {"lm_head.weight"}),
        ({}, {"intermediate_size": 48}, {f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}),
        ({"layers": 1}, {"layers": 2}, "layers.0."),
        ({"steps": 3}, {"steps": 2, "window": 8}, set()),
    ],
    ids=["fewer taps", "more taps", "other norm", "own lm_head", "other MLP", "one layer more", "no tensor"],
)
def test_what_does_not_fit_is_left_and_named(tmp_path, old, new, left):
    """All else is taken; what is left keeps its own start."""
    heads = []
    for options in (old, new):
        taps = options.pop("taps", TAPS) if "taps" in options else TAPS
        heads.append(make_any("eagle3", make_target(taps=taps), 100, **options))
        options["taps"] = taps
    said, theirs, before, after = start(tmp_path, *heads)
    wanted = {name for name in after if name.startswith(left)} if isinstance(left, str) else left
    named = set(said.split("(new: ")[1].split(")")[0].split(", ")) if "(new: " in said else set()
    assert named == wanted
    assert f"{len(after) - len(wanted)} of {len(after)} tensors" in said
    for name in after:
        assert torch.equal(after[name], before[name] if name in wanted else theirs[name])


def test_another_width_takes_little(target, tmp_path):
    """The target's side: norms of its states; all that has the head's own width is new."""
    one, two = make_tiny_head(target), make_tiny_head(target, hidden_size=16)
    said, old, before, after = start(tmp_path, one, two)
    taken = {name for name in after if not torch.equal(after[name], before[name])}
    assert taken == {f"fc_norm.{k}.weight" for k in range(3)}
    assert f"3 of {len(after)} tensors" in said
    assert all(torch.equal(after[name], old[name]) for name in taken)


def test_medusa_2_starts_from_medusa_1(tmp_path):
    """As in the paper: the heads are taken, the adapter is new."""
    one = make_any("medusa", make_target(taps=(8,)), 50, steps=2)
    two = make_any("medusa", make_target(taps=(8,)), 50, steps=2, adapter={"rank": 2})
    said, old, _, after = start(tmp_path, one, two)
    assert all(torch.equal(after[name], old[name]) for name in old)
    assert "new: adapter.parts." in said
    assert f"{len(old)} of {len(after)} tensors" in said


@pytest.mark.parametrize("changes", [{"vocab": 288}, {"hidden_size": 48, "head_dim": 12}], ids=["vocabulary", "width"])
def test_a_head_of_another_target_is_refused(target, tmp_path, changes):
    vocab = changes.pop("vocab", 272)
    other = Target(make_model(vocab=vocab, **changes), target.tokenizer, "tiny-other", TAPS)
    save_head(make_tiny_head(other), tmp_path)
    head = make_tiny_head(target)
    before = copied(head)
    with pytest.raises(UserError, match=rf"train\.warm_start {tmp_path}: a head for tiny-other .*, not for tiny-llama"):
        warm_start(head, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


def test_a_fine_tuned_target_is_near_enough(target, tmp_path):
    """Equal sizes and other weights: that is what a warm start is for."""
    other = Target(make_model(seed=7), target.tokenizer, "tiny-tuned", TAPS)
    assert other.spec.fingerprint != target.spec.fingerprint
    said, old, _, after = start(tmp_path, make_tiny_head(other), make_tiny_head(target))
    assert all(torch.equal(after[name], old[name]) for name in old)
    assert f"{len(old)} of {len(old)}" in said


@pytest.mark.parametrize("kind", ["medusa", "hydra", "draft_model"])
def test_a_head_of_another_kind_is_refused(target, tmp_path, kind):
    save_head(make_any(kind, make_target(taps=(8,)), 100), tmp_path)
    with pytest.raises(UserError, match=rf"no tensor of that {kind} head fits this eagle3 head"):
        warm_start(make_tiny_head(target), tmp_path)


def test_nothing_there_is_refused(target, tmp_path):
    with pytest.raises(UserError, match=r"no head there \(head\.json is missing\)"):
        warm_start(make_tiny_head(target), tmp_path / "none")


# In a training


@pytest.fixture(scope="module")
def done(model_dir, chats, tmp_path_factory):
    """A trained run over a short corpus."""
    run = short_run(model_dir, chats, tmp_path_factory.mktemp("runs"), "first")
    harvest(run)
    train(run)
    return run


def short_run(model_dir, chats, runs, name: str, warm: str | None = None, **head):
    """A run of few steps."""
    run = tiny_run(
        model_dir,
        chats,
        runs,
        corpus={"sources": [{"path": str(chats), "limit": 16}], "held_out": 0.25, "max_length": 256},
        answers={"by": "corpus"},
        vocab={"size": 16, "pin_bytes": False, "least": 0.0},
        head={"kind": "eagle3", "steps": 2, **head},
        train={
            "epochs": 2,
            "tokens_per_batch": 256,
            "lr": 1e-2,
            "log_every": 1,
            "evals": 1,
            "saves": 9,
            "warm_start": warm,
        },
    )
    run.name, run.features = name, None if name == "first" else "first"
    return run


def test_training_starts_from_it_and_says_so(monkeypatch, capsys, model_dir, chats, done):
    """The first step sees the kept head's weights."""
    folder, found = done.directory / "head", {}
    run = short_run(model_dir, chats, done.runs, "warm", str(folder), norm_output=True)

    def look(strategy, *_):
        found.update(copied(strategy.head))
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(loop, "one_step", look)
        with pytest.raises(Interrupted):
            train(run)
    kept = load_file(folder / "model.safetensors")
    assert kept.pop("vocab.ids").tolist() == sorted(kept_ids(folder))
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    assert f"warm start from {folder}: {len(kept)} of {len(kept)} tensors" in " ".join(capsys.readouterr().out.split())


def kept_ids(folder: Path) -> list[int]:
    """The draft vocabulary of a saved head."""
    return load_file(folder / "model.safetensors")["vocab.ids"].tolist()


def test_a_resumed_warm_run_equals_a_straight_one(monkeypatch, capsys, model_dir, chats, done):
    """The checkpoint goes before the warm start, which is said once."""
    folder = str(done.directory / "head")
    straight = short_run(model_dir, chats, done.runs, "warm-straight", folder)
    train(straight)
    run, real, count = short_run(model_dir, chats, done.runs, "warm-killed", folder), loop.one_step, iter(range(10**6))

    def dying(*arguments):
        if next(count) == 2:
            raise Interrupted
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "one_step", dying)
        with pytest.raises(Interrupted):
            train(run)
    capsys.readouterr()
    train(run)
    assert "warm start" not in capsys.readouterr().out
    ours, theirs = (load_file(next(r.directory.glob("checkpoints/step-*/model.safetensors"))) for r in (run, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_start_is_another_run(model_dir, chats, done, tmp_path):
    """A checkpoint of a run with another warm start is not continued."""
    shutil.copytree(done.directory / "head", tmp_path / "head")
    run = short_run(model_dir, chats, done.runs, "first", str(tmp_path / "head"))
    with pytest.raises(UserError, match="what changed"):
        train(run)
