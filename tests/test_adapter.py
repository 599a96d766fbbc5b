"""Medusa-2: LoRA lies in the target's layers, starts as nothing, learns as the config says, and travels with the head."""

import copy
import json
import math
from pathlib import Path

import peft
import pytest
import torch
from conftest import VOCAB, make_model, make_target, tiny_run
from safetensors.torch import load_file
from torch import Tensor, nn

import headwright.heads
from headwright.configs import UserError
from headwright.configs.load import build
from headwright.configs.schema import TrainConfig
from headwright.data.batch import DocumentFeatures, pack
from headwright.data.generate import read_documents
from headwright.data.harvest import harvest, open_store
from headwright.data.sampling import Policy
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab
from headwright.eval.acceptance import evaluate, sides_of, target_shift
from headwright.eval.decode import decode_plain, speculate
from headwright.heads.adapter import Adapter, AdapterConfig
from headwright.heads.base import DraftHead, Engine, make_head
from headwright.heads.draft_tree import TreeShape
from headwright.heads.saved import load_head, save_head
from headwright.train import loop
from headwright.train.launch import Launch
from headwright.train.loop import one_step
from headwright.train.optim import make_optimizers, set_learning_rate
from headwright.train.run import train
from headwright.train.strategy import Strategy
from headwright.train.track import Meter

LAST = (8,)
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CHAIN = TreeShape("chain", 2, 1, 2)


def make_any(kind: str, target: Target, size: int | None = None, seed: int = 1, **config) -> DraftHead:
    """A new head of any kind, attached and initialised."""
    torch.manual_seed(seed)
    ids = torch.arange(VOCAB) if size is None else torch.randperm(VOCAB)[:size].sort().values
    settings = build(headwright.heads.get_head(kind).Config, {"kind": kind, **config}, "test")
    head = make_head(settings, target.spec, target.taps, DraftVocab(ids, VOCAB))
    head.attach(target)
    head.initialise(target)
    return head


def medusa2(target: Target, size: int | None = None, lm_head: str = "own", **adapter) -> DraftHead:
    """Two heads and a small adapter without dropout."""
    section = {"rank": 2, "dropout": 0.0, **adapter}
    return make_any("medusa", target, size, steps=2, lm_head=lm_head, adapter=section).eval()


def stir(head: DraftHead, scale: float = 0.1, seed: int = 5) -> DraftHead:
    """An adapter and heads that have moved from where they started."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name.endswith(".B.weight") or name.startswith("heads."):
                weight.add_(torch.randn(weight.shape, generator=generator) * scale)
    return head


def texts(target: Target, count: int = 2) -> list[DocumentFeatures]:
    """Documents with the features of the target as it is now: two turns each."""
    generator = torch.Generator().manual_seed(3)
    lines = [torch.randint(256, (16 + 5 * i,), generator=generator).tolist() for i in range(count)]
    masks = [[3 <= place < 9 or place >= 12 for place in range(len(line))] for line in lines]
    return read_documents(target, list(zip(lines, masks)), torch.float32)


IDS = torch.randint(256, (1, 14), generator=torch.Generator().manual_seed(8))


def logits(target: Target) -> Tensor:
    """What the target says of a text."""
    return target.logits(target.features(IDS).last_BND)


def merged(head: DraftHead, seed: int = 0) -> nn.Module:
    """The target's model with the adapter added to its weights, by hand."""
    model, config = make_model(seed=seed), head.config.adapter
    for name, part in head.adapter.parts.named_children():
        layer = model.get_submodule(name.replace("/", "."))
        with torch.no_grad():
            layer.weight += part["B"].weight @ part["A"].weight * (config.alpha / config.rank)
    return model


# The adapter in the target


@pytest.mark.parametrize("modules", [MODULES, ["v_proj", "down_proj"]])
def test_lora_lies_in_the_targets_layers(modules):
    target = make_target(taps=LAST)
    shapes = {name: part.weight.shape for name, part in target.model.named_modules() if isinstance(part, nn.Linear)}
    wanted = {name: shape for name, shape in shapes.items() if name.split(".")[-1] in modules}
    head = medusa2(target, modules=modules)
    assert {name.replace("/", ".") for name in head.adapter.parts} == set(wanted)
    assert len(wanted) == 8 * len(modules)
    held = {id(weight) for weight in target.model.parameters()}
    for name, part in head.adapter.parts.items():
        outputs, inputs = wanted[name.replace("/", ".")]
        assert (part["A"].weight.shape, part["B"].weight.shape) == ((2, inputs), (outputs, 2))
        assert {id(part["A"].weight), id(part["B"].weight)} <= held
    assert {id(weight) for weight in target.model.parameters() if weight.requires_grad} == {
        id(weight) for weight in head.adapter.parameters()
    }


@pytest.mark.parametrize("training", [False, True])
def test_at_the_start_the_target_says_what_it_said(training):
    """Bit for bit: states, logits, with a cache and without, whatever mode the head is in."""
    target = make_target(taps=(0, 3, 8))
    before, says = target.features(IDS), logits(target)
    fingerprint = target.spec.fingerprint
    head = medusa2(target, dropout=0.5).train(training)
    after, cache = target.features(IDS), target.new_cache(1, 14)
    assert torch.equal(after.taps_BNKD, before.taps_BNKD)
    assert torch.equal(after.last_BND, before.last_BND)
    assert torch.equal(logits(target), says)
    assert target.extend(IDS, cache).last_BND == pytest.approx(before.last_BND, abs=1e-4)
    assert target.spec.fingerprint == fingerprint
    assert any(weight.abs().sum() > 0 for weight in head.adapter.parameters())
    assert not any(part["B"].weight.any() for part in head.adapter.parts.values())


def test_a_moved_adapter_is_the_merged_weights():
    """Computed by transformers alone, from a copy of the model."""
    target = make_target(taps=LAST)
    before = logits(target)
    head = stir(medusa2(target))
    with torch.no_grad():
        wanted = merged(head)(IDS).logits
    assert (logits(target) - before).abs().max() > 0.1
    assert torch.allclose(logits(target), wanted, atol=1e-4)


@pytest.mark.parametrize(
    "kind",
    [
        "eagle3",
        "medusa",
        "eagle1",
        "hydra",
        pytest.param("mtp"),
        pytest.param("draft_model"),
    ],
)
def test_another_head_gets_the_target_as_it_was(kind):
    """Whatever is attached next, bit for bit; and what it makes of the target is what it makes of a fresh one."""
    target, fresh = make_target(taps=LAST), make_target(taps=LAST)
    before = logits(target)
    stir(medusa2(target))
    assert not torch.equal(logits(target), before)
    heads = [make_any(kind, each).eval() for each in (target, fresh)]
    assert torch.equal(logits(target), before)
    ours, theirs = (head.state_dict() for head in heads)
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
    batch = pack(texts(fresh))
    assert torch.equal(heads[0].loss(batch, target).total, heads[1].loss(batch, fresh).total)


def test_a_second_adapter_takes_the_place_of_the_first():
    """Each computes alone, also where they lie in different layers."""
    target = make_target(taps=LAST)
    first = stir(medusa2(target, modules=["q_proj", "v_proj"]))
    one = logits(target)
    second = stir(medusa2(target, modules=["v_proj", "up_proj"]), seed=6)
    both = (one, logits(target))
    for head, says in zip((first, second), both):
        with torch.no_grad():
            assert torch.allclose(says, merged(head)(IDS).logits, atol=1e-4)
    assert not torch.allclose(*both, atol=1e-2)
    before = make_target(taps=LAST)
    target.as_it_was()
    assert torch.equal(logits(target), logits(before))


@pytest.mark.parametrize(
    "modules",
    [
        ["nonsense"],
        ["input_layernorm"],
        [],
        ["q_proj", "qproj"],
        ["embed_tokens"],
        ["lm_head"],
    ],
    ids=lambda names: "+".join(names) or "none",
)
def test_modules_that_cannot_be_adapted_are_refused(modules):
    with pytest.raises(UserError, match=r"head\.adapter\.modules") as caught:
        medusa2(make_target(taps=LAST), modules=modules)
    assert len(str(caught.value).splitlines()) == 1


# The loss


@pytest.mark.parametrize(
    ("ramp", "wanted"),
    [
        ("sine", {0.4: 0.0, 0.55: math.sin(math.pi / 8), 0.7: math.sqrt(0.5), 1.0: 1.0}),
        ("constant", {0.4: 1.0, 1.0: 1.0}),
    ],
)
def test_ramp(ramp, wanted):
    head = medusa2(make_target(taps=LAST), joint_from=0.4, heads_weight=0.3, ramp=ramp)
    for progress, share in wanted.items():
        assert head.adapter.strength(progress) == pytest.approx(0.3 * share, abs=1e-12)
        assert head.adapter.joint(progress)
    assert not head.adapter.joint(0.399)


@pytest.mark.parametrize("joint_from", [0.0, 0.5])
def test_joint_phase_begins_at_its_share(joint_from):
    """Before it: Medusa-1's loss, and zeros for the adapter, as data-parallel training wants."""
    target = make_target(taps=LAST)
    documents = texts(target)
    plain = make_any("medusa", target, steps=2)
    head = medusa2(target, joint_from=joint_from, ramp="constant")
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.copy_(head.get_parameter(name))
    for progress in (0.0, 0.499, 0.5, 0.9):
        head.zero_grad()
        head.train().engine = Engine(progress=progress)
        out = head.loss(pack(documents), target)
        out.total.backward()
        grads = {name: weight.grad for name, weight in head.named_parameters()}
        assert all(grad is not None for grad in grads.values())
        joint = progress >= joint_from
        assert ("target_loss" in out.metrics) == joint
        moved = any(grad.any() for name, grad in grads.items() if name.startswith("adapter."))
        assert moved == joint
        if not joint:
            assert torch.equal(out.total, plain.loss(pack(documents), target).total)


def rows_of(document: DocumentFeatures, steps: int) -> list[tuple[int, int]]:
    """(row, step) pairs that bear loss: x_{t+1} … x_{t+2+i} are response tokens of one turn."""
    mask = document.mask_T.tolist()
    return [
        (t, i) for t in range(len(mask)) for i in range(steps) if len(mask) > t + 2 + i and all(mask[t + 1 : t + 3 + i])
    ]


def log_ratio(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) of two rows of logits."""
    return (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum()


@pytest.mark.parametrize("size", [None, 100])
def test_distance_is_that_of_the_merged_model(size):
    """λ = 0 leaves KL over the whole vocabulary, and the text's cross-entropy, of every position that bears loss."""
    target = make_target(taps=LAST)
    documents = texts(target)
    head = stir(medusa2(target, size, joint_from=0.5, distil=0.7, text=0.25))
    head.engine = Engine(progress=0.5)
    out = head.loss(pack(documents), target)
    before, after = make_model(), merged(head)
    wanted, ce, same, count = 0.0, 0.0, 0, 0
    with torch.no_grad():
        for document in documents:
            p, q = (model(document.ids_T[None]).logits[0] for model in (before, after))
            for place in (t + 1 for t, _ in rows_of(document, 1)):
                wanted += float(log_ratio(p[place], q[place]))
                ce -= float(q[place].log_softmax(-1)[p[place].argmax()])
                same += int(q[place].argmax() == p[place].argmax())
                count += 1
    assert count == sum(len(document.last_RD) for document in documents) > 15
    assert out.total.item() == pytest.approx(0.7 * wanted + 0.25 * ce, rel=1e-4)
    assert float(out.metrics["target_agree"][0]) == same
    assert float(out.metrics["target_agree"][1]) == count
    assert wanted > 1


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_heads_learn_from_the_adapted_states(lm_head):
    """λ times the heads' loss: what they read of the merged model, against what the target said before. Heads count from 1."""
    target = make_target(taps=LAST)
    documents = texts(target)
    head = stir(medusa2(target, lm_head=lm_head, joint_from=0.0, ramp="constant", heads_weight=0.6, distil=1.0))
    head.engine = Engine(progress=0.2)
    out = head.loss(pack(documents), target)
    before, after = make_model(), merged(head)
    wanted, kept = 0.0, 0.0
    with torch.no_grad():
        for document in documents:
            p, q = (model(document.ids_T[None]).logits[0] for model in (before, after))
            last = after.model(document.ids_T[None]).last_hidden_state[0]
            kept += sum(float(log_ratio(p[t + 1], q[t + 1])) for t, _ in rows_of(document, 1))
            for t, i in rows_of(document, 2):
                linear = head.heads[i][0].linear
                read = last[t] + torch.nn.functional.silu(linear.weight @ last[t] + linear.bias)
                weight = before.lm_head.weight if lm_head == "shared" else head.lm_heads[i].weight
                wanted += 0.8 ** (i + 1) * float(log_ratio(p[t + 1 + i], weight @ read))
    assert out.total.item() == pytest.approx(kept + 0.6 * wanted, rel=1e-4)
    assert set(out.metrics) >= {"loss_0", "loss_1", "alpha_1", "target_loss"}


def test_only_adapter_and_heads_are_trained():
    """A step moves both, and not a bit of the target."""
    target = make_target(taps=LAST)
    batch = pack(texts(target))
    frozen = {name: weight.clone() for name, weight in target.model.named_parameters()}
    head = stir(medusa2(target)).train()
    head.engine = Engine(progress=0.75)
    before = {name: weight.detach().clone() for name, weight in head.named_parameters()}
    one_step(Strategy(head, TrainConfig(), Launch()), [batch], target, Meter())
    assert all(not torch.equal(before[name], weight) for name, weight in head.named_parameters())
    ours = {id(weight) for weight in head.parameters()}
    left = {name: weight for name, weight in target.model.named_parameters() if id(weight) not in ours}
    assert len(left) == len(frozen)
    for name, weight in left.items():
        assert weight.grad is None
        assert not weight.requires_grad
        assert torch.equal(weight, frozen[name.replace("base_layer.", "")])


# Rates


def test_rate_of_scales_learning_rates():
    target = make_target(taps=LAST)
    head = medusa2(target, rate=0.125)
    config = TrainConfig(lr=8e-3, weight_decay=0.1)
    [optimizer] = make_optimizers(head, config)
    names = {id(weight): name for name, weight in head.named_parameters()}
    set_learning_rate(optimizer.param_groups, 8e-3)
    seen = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            seen[names[id(weight)]] = (group["lr"], group["weight_decay"])
    assert seen.keys() == set(names.values())
    for name, (rate, decay) in seen.items():
        assert rate == pytest.approx(1e-3 if name.startswith("adapter.") else 8e-3)
        assert decay == (0.0 if name.endswith("bias") else 0.1)
    [plain] = make_optimizers(make_any("medusa", target, steps=2), config)
    set_learning_rate(plain.param_groups, 2e-3)
    assert {group["lr"] for group in plain.param_groups} == {2e-3}


def test_a_step_is_as_long_as_its_rate():
    """AdamW's first step is the learning rate itself, whatever the gradient."""
    target = make_target(taps=LAST)
    head = stir(medusa2(target, rate=0.5))
    head.engine = Engine(progress=0.75)
    config = TrainConfig(lr=1e-3)
    [optimizer] = make_optimizers(head, config)
    set_learning_rate(optimizer.param_groups, config.lr)
    before = {name: weight.detach().clone() for name, weight in head.named_parameters()}
    head.loss(pack(texts(target)), target).total.backward()
    optimizer.step()
    for name, weight in head.named_parameters():
        step = (weight.detach() - before[name]).abs().max().item()
        assert step == pytest.approx(5e-4 if name.startswith("adapter.") else 1e-3, rel=2e-2), name


# Saved and loaded


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A moved head on disk, the target that it changed, and the base model's directory."""
    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("saved")
    make_model().save_pretrained(base)
    target = make_target(taps=LAST)
    head = stir(medusa2(target, alpha=3, modules=["q_proj", "o_proj", "down_proj"]))
    save_head(head, folder)
    return base, folder, target, head


def test_adapter_directory_is_peft_s(saved):
    base, folder, target, _ = saved
    fresh = make_model().from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(fresh, folder / "adapter").eval()
    with torch.no_grad():
        assert torch.allclose(loaded(IDS).logits, logits(target), atol=1e-4)
        assert not torch.allclose(loaded(IDS).logits, make_model()(IDS).logits, atol=1e-2)
        unloaded = loaded.merge_and_unload()
        assert torch.allclose(unloaded(IDS).logits, logits(target), atol=1e-4)


def test_adapter_directory_is_complete(saved):
    """Every matrix once, under peft's names; the config is plain JSON."""
    _, folder, _, head = saved
    assert {path.name for path in (folder / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 3 * 8
    weight = head.adapter.parts["model/layers/4/mlp/down_proj"]["A"].weight
    assert torch.equal(tensors["base_model.model.model.layers.4.mlp.down_proj.lora_A.weight"], weight)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    wanted = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "inference_mode": True}
    assert {key: config[key] for key in wanted} == wanted
    assert config["target_modules"] == ["down_proj", "o_proj", "q_proj"]


def test_saving_again_writes_the_same_files(saved, tmp_path):
    _, folder, _, head = saved
    save_head(head, tmp_path)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert len(files) == 4
    for path in files:
        assert (tmp_path / path).read_bytes() == (folder / path).read_bytes()


def test_loaded_on_a_fresh_target_it_is_the_same_head(saved):
    """Same drafts, and the same adapted target; without a target only the files are read."""
    _, folder, target, head = saved
    fresh = make_target(taps=LAST)
    again = load_head(folder, fresh).eval()
    assert torch.equal(logits(fresh), logits(target))
    assert again.changes_target() == head.changes_target()
    prompt = IDS[0, :9].tolist()
    ours, theirs = (speculate(t, h, prompt, CHAIN, 20) for t, h in ((target, head), (fresh, again)))
    assert (ours.tokens, ours.accepted) == (theirs.tokens, theirs.accepted)
    assert ours.tokens == decode_plain(target, prompt, 20).tokens
    assert ours.tokens != decode_plain(make_target(taps=LAST), prompt, 20).tokens


def test_guesses_are_of_the_adapted_target(saved):
    """Teacher-forced guesses are read from the states that decoding will see, not from stored ones."""
    _, _, target, head = saved
    [document] = texts(make_target(taps=LAST), 1)
    batch, model = pack([document]), merged(head)
    right, ranks = head.agreement(batch, target, 2), head.ranks(batch, target, 2)
    with torch.no_grad():
        last = model.model(document.ids_T[None]).last_hidden_state[0]
        said = [head.heads[i](last) @ head.lm_heads[i].weight.T for i in range(2)]
    for t, i in rows_of(document, 2):
        token = int(document.ids_T[t + 2 + i])
        assert bool(right[t, i]) == (int(said[i][t].argmax()) == token)
        assert int(ranks[t, i]) == int((said[i][t] > said[i][t, token]).sum())


# The whole run


@pytest.fixture(scope="module")
def make_run(model_dir, chats, tmp_path_factory):
    """Runs over one harvest; the adapter is trained hard, so that it changes the text."""
    runs = tmp_path_factory.mktemp("runs")

    def make(name: str, dropout: float = 0.0):
        run = tiny_run(
            model_dir,
            chats,
            runs,
            corpus={"sources": [{"path": str(chats), "samples": 1}], "held_out": 0.25, "max_length": 256},
            answers={"by": "corpus"},
            harvest={"tokens_per_batch": 512, "dtype": "float32"},
            vocab={"size": None},
            head={
                "kind": "medusa",
                "steps": 2,
                "adapter": {"rank": 4, "rate": 1.0, "dropout": dropout, "joint_from": 0.3, "heads_weight": 2.0},
            },
            train={"epochs": 2, "tokens_per_batch": 256, "lr": 3e-2, "log_every": 1, "evals": 4, "saves": 40},
            eval={
                "prompts": 3,
                "max_new_tokens": 10,
                "timed_prompts": 2,
                "shapes": [{"kind": "chain", "depth": 2}],
                "baselines": [],
            },
        )
        run.name, run.features = name, None if name == "first" else "first"
        return run

    harvest(make("first"))
    return make


@pytest.fixture(scope="module")
def straight(make_run):
    """A finished training."""
    run = make_run("first")
    train(run)
    return run


def last(run) -> Path:
    """The last checkpoint."""
    [folder] = (run.directory / "checkpoints").glob("step-*")
    return folder


class Interrupted(Exception):
    """Stands for a crash."""


def killed_and_resumed(monkeypatch, run, step: int) -> None:
    """Die inside a step; then train again."""
    real, count = loop.one_step, iter(range(10**6))

    def dying(*arguments):
        if next(count) == step:
            raise Interrupted
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "one_step", dying)
        with pytest.raises(Interrupted):
            train(run)
    train(run)


def same_bits(one, two) -> bool:
    """Weights and optimizer of two runs."""
    pairs = [
        (load_file(last(one) / name), load_file(last(two) / name))
        for name in ("model.safetensors", "optimizer.safetensors")
    ]
    return all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs)


@pytest.mark.parametrize("step", [1, 5])
def test_killed_and_resumed_equals_straight(monkeypatch, make_run, straight, step):
    """While the heads learn alone, and in the joint phase."""
    run = make_run(f"killed-{step}")
    killed_and_resumed(monkeypatch, run, step)
    total = json.loads((run.directory / "training.json").read_text())["total"]
    assert 1 < 0.3 * total < 5 < total
    assert same_bits(run, straight)


def test_killed_and_resumed_with_dropout_equals_straight(monkeypatch, make_run):
    """The default config has dropout."""
    run, other = make_run("drop", dropout=0.3), make_run("drop-killed", dropout=0.3)
    train(run)
    killed_and_resumed(monkeypatch, other, 5)
    assert same_bits(run, other)


def test_dropout_is_on_from_the_first_step(monkeypatch, make_run):
    """A module that the loop trains is in training mode."""
    modes = []

    def look(strategy, *_):
        modes.extend(part.training for part in strategy.head.modules() if isinstance(part, nn.Dropout))
        raise Interrupted

    monkeypatch.setattr(loop, "one_step", look)
    with pytest.raises(Interrupted):
        train(make_run("modes", dropout=0.3))
    assert len(modes) == 7 * 8
    assert all(modes)


@pytest.fixture(scope="module")
def report(straight) -> dict:
    """The evaluation of the trained head."""
    evaluate(straight)
    return json.loads((straight.directory / "report.json").read_text(encoding="utf-8"))


def test_evaluation_names_what_has_changed(straight, report):
    """Counts and KL by hand, with the merged weights."""
    reader = open_store(straight, "held-out")
    target = Target.load(straight.target, reader.manifest.taps)
    head = load_head(straight.directory / "head", target)
    model, same, distance, rows = merged(head), 0, 0.0, 0
    with torch.no_grad():
        for document in list(reader)[:24]:
            now, then = model(document.ids_T[None]).logits[0], make_model()(document.ids_T[None]).logits[0]
            for place in (t + 1 for t, _ in rows_of(document, 1)):
                same += int(now[place].argmax() == then[place].argmax())
                distance += float(log_ratio(then[place], now[place]))
                rows += 1
    found = report["target_changed"]
    assert found["next_tokens"] == rows > 20
    assert found["same_choice"] == pytest.approx(same / rows)
    assert found["kl"] == pytest.approx(distance / rows, rel=1e-3)
    assert 0 < found["same_choice"] < 1
    assert found["adapter"]["rank"] == 4
    assert f"{same / rows:.1%} as before" in found["text"]
    assert target_shift(head, target, reader)["kl"] == pytest.approx(found["kl"], rel=1e-6)


def test_page_says_that_the_text_may_change(straight, report):
    """Whoever reads the report, in either form, is told."""
    assert "changes the target" in report["target_changed"]["text"]


def test_losslessness_is_of_the_adapted_target(straight, report):
    """Speculation says what the adapted target says plainly, which is not what the target said."""
    lines = (straight.directory / "eval.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    parts = {line["name"]: line["value"] for line in map(json.loads, lines)}
    kept = [said["turns"][0]["tokens"] for name, said in parts.items() if name.startswith("plain plain ")]
    kept += [text for [text] in parts["plain texts"]]
    assert report["entries"][0]["lossless"]["greedy_identity"] == 1.0
    reader = open_store(straight, "held-out")
    prompts = [d.ids_T[: int(d.mask_T.int().argmax())].tolist() for d in reader]
    adapted = Target.load(straight.target, LAST)
    load_head(straight.directory / "head", adapted)
    plain = Target.load(straight.target, LAST)
    said = [[decode_plain(target, prompt, 10).tokens for prompt in prompts] for target in (adapted, plain)]
    assert len(kept) == report["entries"][0]["lossless"]["prompts"]
    assert all(text in said[0] for text in kept)
    assert not all(text in said[1] for text in kept)


@pytest.mark.parametrize("adapted", [False, True])
def test_further_heads_leave_the_target_to_the_runs_own(straight, tmp_path, monkeypatch, adapted):
    """Or are refused: one target cannot be adapted for one side alone."""
    target, other = (Target.load(straight.target, LAST) for _ in range(2))
    head = load_head(straight.directory / "head", target)
    save_head(stir(medusa2(other)) if adapted else make_any("medusa", other, steps=2), tmp_path)
    ids = torch.tensor([[65, 66, 67]])
    before = target.features(ids).last_BND
    monkeypatch.setattr(straight.eval, "heads", [str(tmp_path)])
    try:
        list(sides_of(straight, target, head, [CHAIN], [Policy()]))
    except UserError:
        return
    assert torch.equal(target.features(ids).last_BND, before)


def test_a_head_without_adapter_changes_nothing():
    target = make_target(taps=LAST)
    assert make_any("medusa", target).changes_target() is None
    assert make_any("eagle3", target).changes_target() is None


def test_default_adapter_is_the_documented_one():
    """The keys of the shipped config build; a copy of a head's config is a section again."""
    assert AdapterConfig().modules == MODULES
    head = medusa2(make_target(taps=LAST))
    again = build(
        type(head.config), json.loads(json.dumps(copy.deepcopy(head.changes_target() | {"kind": "medusa"}))), "x"
    )
    assert again.adapter == head.config.adapter
    assert isinstance(head.adapter, Adapter)
