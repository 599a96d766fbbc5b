"""Features of another run, and some of their taps, are those that a run would have harvested itself: for every kind of head."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import tiny_run
from safetensors.torch import load_file
from test_store import same

from headwright.configs import RunConfig, UserError, dump
from headwright.configs.load import load_run
from headwright.data.batch import pack
from headwright.data.harvest import harvest, open_store, store_path
from headwright.data.store import FeatureReader, read_manifest
from headwright.data.target import Target
from headwright.data.vocab import full_vocab
from headwright.eval.acceptance import evaluate
from headwright.heads.base import make_head
from headwright.heads.saved import load_head
from headwright.train.plan import plan
from headwright.train.run import main as train_main
from headwright.train.run import open_features, train

WIDE = [1, 2, 3, 4, 5, 6, 8]
KINDS = {
    "eagle3": {"kind": "eagle3", "steps": 2, "taps": [1, 3, 6]},
    "eagle1": {"kind": "eagle1", "steps": 2},
    "medusa": {"kind": "medusa", "steps": 2},
    "medusa2": {"kind": "medusa", "steps": 2, "adapter": {"rank": 2, "rate": 1.0, "dropout": 0.0, "joint_from": 0.25}},
    "hydra": {"kind": "hydra", "steps": 2, "prefix": True},
    "mtp": {"kind": "mtp", "steps": 2},
    "mtp-chain": {"kind": "mtp", "steps": 2, "modules": 2},
    "draft_model": {"kind": "draft_model"},
}
READ = {"eagle3": [1, 3, 6], "draft_model": [1]}  # which taps each kind reads of these; the others: the last


def every_kind(but: str = ""):
    """Parametrised over kinds."""
    return pytest.mark.parametrize("name", [name for name in KINDS if name != but])


@pytest.fixture(scope="module")
def make_run(model_dir, chats, tmp_path_factory):
    """Runs in one directory; a short corpus, whose texts are given."""
    runs = tmp_path_factory.mktemp("runs")

    def make(name: str, head: dict, features: str | None = None, **harvesting) -> RunConfig:
        run = tiny_run(
            model_dir,
            chats,
            runs,
            corpus={"sources": [{"path": str(chats), "limit": 16}], "held_out": 0.25, "max_length": 256},
            answers={"by": "corpus"},
            harvest={"taps": WIDE, "tokens_per_batch": 512, "dtype": "float32"} | harvesting,
            head=head,
            vocab={"size": None},
            train={"epochs": 2, "tokens_per_batch": 192, "lr": 1e-2, "log_every": 1, "evals": 1, "saves": 1},
            eval={
                "prompts": 4,
                "max_new_tokens": 4,
                "timed_prompts": 4,
                "shapes": [{"kind": "chain", "depth": 2}],
                "baselines": [],
            },
            plan={"seconds": 0.01},
        )
        run.name, run.features = name, features
        return run

    return make


@pytest.fixture(scope="module")
def wide(make_run) -> RunConfig:
    """A store with many taps."""
    run = make_run("wide", KINDS["eagle3"])
    harvest(run)
    return run


@pytest.fixture(scope="module")
def trained(make_run, wide):
    """A training of each kind on the wide store, made once."""
    made: dict[str, RunConfig] = {}

    def get(name: str) -> RunConfig:
        if name not in made:
            made[name] = make_run(f"shared-{name}", KINDS[name], "wide")
            train(made[name])
        return made[name]

    return get


def weights(run: RunConfig) -> dict[str, torch.Tensor]:
    """The last checkpoint."""
    [path] = run.directory.glob("checkpoints/step-*/model.safetensors")
    return load_file(path)


def assert_same_weights(one: RunConfig, two: RunConfig) -> None:
    """Bit for bit."""
    ours, theirs = weights(one), weights(two)
    assert ours.keys() == theirs.keys()
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def stored(run: RunConfig) -> dict[Path, tuple[bytes, int]]:
    """Every file of a run's stores."""
    files = [p for side in ("train", "held-out") for p in store_path(run, side).rglob("*") if p.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@every_kind()
def test_a_run_reads_the_stores_of_another(make_run, wide, trained, name):
    """And leaves them as they are; it has none of its own."""
    before = stored(wide)
    run = trained(name)
    assert [store_path(run, side) for side in ("train", "held-out")] == [
        wide.directory / "features",
        wide.directory / "features-held-out",
    ]
    assert not list(run.directory.glob("features*"))
    assert (run.directory / "head" / "model.safetensors").is_file()
    assert len(before) >= 6
    assert stored(wide) == before


@every_kind()
def test_some_taps_of_a_store_are_those_of_a_narrow_harvest(make_run, wide, name):
    """Every document, bit for bit, both sides."""
    taps = READ.get(name, [8])
    narrow = make_run(f"narrow-{'-'.join(map(str, taps))}", KINDS[name], taps=taps)
    harvest(narrow)
    assert read_manifest(store_path(narrow, "train")).taps == taps
    for side in ("train", "held-out"):
        ours = open_store(make_run("any", KINDS[name], "wide"), side)
        theirs = FeatureReader(store_path(narrow, side))
        assert ours.manifest.taps == theirs.manifest.taps == taps
        assert len(ours) == len(theirs) > 3
        assert all(same(a, b) for a, b in zip(ours, theirs))
        assert all(same(a, b) for a, b in zip(ours.read([2, 0]), theirs.read([2, 0])))


@pytest.mark.parametrize("name", ["eagle3", "eagle1", "draft_model"])
def test_training_on_some_taps_is_training_on_a_narrow_harvest(make_run, wide, trained, name):
    run = make_run(f"own-{name}", KINDS[name], taps=READ.get(name, [8]))
    harvest(run)
    train(run)
    assert_same_weights(trained(name), run)


def test_auto_taps_of_a_store(make_run, wide):
    """(2, L//2, L-3) where the store has them; all that it has, where it does not."""
    head = {"kind": "eagle3", "steps": 2}
    assert open_store(make_run("any", head, "wide"), "train").manifest.taps == [2, 4, 5]
    run = make_run("two", head, taps=[1, 7])
    harvest(run)
    assert open_store(run, "train").manifest.taps == [1, 7]


def test_evaluation_reads_them_too(trained):
    """Speculation with a head that was trained on some taps of a store."""
    run = trained("eagle3")
    evaluate(run)
    report = json.loads((run.directory / "report.json").read_text(encoding="utf-8"))
    assert report["entries"][0]["lossless"]["greedy_identity"] == 1.0
    assert load_head(run.directory / "head", Target.load(run.target, [1, 3, 6])).taps == (1, 3, 6)


@every_kind()
def test_a_batch_that_teaches_nothing(make_run, wide, name):
    """What a rank gets that has no batch left in a step, and a text whose choices all lie outside the draft vocabulary."""
    run = make_run("nothing", KINDS[name], "wide")
    reader = open_store(run, "train")
    target = Target.load(run.target, reader.manifest.taps)
    head = make_head(run.head, target.spec, target.taps, full_vocab(272))
    head.attach(target)
    head.initialise(target)
    out = head.train().loss(pack([reader[0], reader[1]]).without_loss(), target)
    out.total.backward()
    assert out.total.item() == 0
    assert not any(weight.grad.any() for weight in head.parameters() if weight.grad is not None)


# Mistakes


@pytest.mark.parametrize(
    ("taps", "named"), [([1, 3, 7], "[1, 2, 3, 4, 5, 6, 7, 8]"), ([0, 4], "[0, 1, 2, 3, 4, 5, 6, 8]")]
)
def test_a_missing_tap_names_store_config_and_remedy(make_run, wide, taps, named):
    run = make_run("missing", {"kind": "eagle3", "taps": taps}, "wide")
    for stage in (train, evaluate):
        with pytest.raises(UserError) as caught:
            stage(run)
        message = str(caught.value)
        for part in (wide.directory / "features", wide.directory / "config.yaml", WIDE, taps, f"harvest.taps={named}"):
            assert str(part) in message
    assert not run.directory.exists()


def test_a_store_without_the_last_tap_is_refused(make_run):
    run = make_run("low", KINDS["medusa"], taps=[1, 3])
    harvest(run)
    with pytest.raises(
        UserError, match=r"holds taps \[1, 3\] .* the medusa head reads \[8\].*harvest\.taps=\[1, 3, 8\]"
    ):
        train(run)


def test_a_tap_beyond_the_last_layer_is_said_to_be(make_run, wide):
    with pytest.raises(UserError) as caught:
        train(make_run("beyond", {"kind": "eagle3", "taps": [1, 99]}, "wide"))
    assert "99" in str(caught.value)
    assert "harvest.taps=" not in str(caught.value)


@pytest.mark.parametrize("taps", [[6, 3, 1], [1, 1, 3], [-1, 3], []])
def test_taps_that_are_no_ascending_numbers_are_refused(make_run, taps):
    with pytest.raises(UserError, match=r"head\.taps .*: give ascending, distinct numbers"):
        make_run("odd", {"kind": "eagle3", "taps": taps}, "wide")


def test_a_borrowed_store_is_not_harvested(make_run, wide):
    run = make_run("borrower", KINDS["eagle3"], "wide")
    for dry_run in (False, True):
        with pytest.raises(UserError, match=r"uses the features of wide: harvest that run, or set features to null"):
            harvest(run, dry_run)
    assert not run.directory.exists()


def test_a_run_that_is_not_there(make_run, wide):
    run = make_run("lost", KINDS["eagle3"], "nowhere")
    with pytest.raises(UserError, match=r"nowhere/features-held-out: no feature store there: run the harvest first"):
        train(run)


@pytest.mark.parametrize("name", ["../wide", "", "a/b"])
def test_features_is_the_name_of_a_run(make_run, tmp_path, name):
    path = tmp_path / "run.yaml"
    path.write_text(dump(make_run("named", KINDS["eagle3"])), encoding="utf-8")
    with pytest.raises(UserError, match=r"features is .*: give the name of a run in"):
        load_run(path, [f"features='{name}'"])


# Live and hybrid


@every_kind(but="medusa2")  # see below
def test_live_training_equals_stored(make_run, trained, name):
    """The held-out side is harvested; the training side is made on the way, from the target as it was."""
    run = live_run(make_run, f"live-{name}", name, "live")
    assert_same_weights(run, trained(name))
    assert not (run.directory / "features").exists()


@every_kind(but="medusa2")
def test_hybrid_training_equals_stored(make_run, trained, name):
    """And leaves a store that is read as any other."""
    run = live_run(make_run, f"hybrid-{name}", name, "hybrid")
    assert_same_weights(run, trained(name))
    assert read_manifest(run.directory / "features").complete
    kept, made = open_store(run, "train"), open_store(trained(name), "train")
    assert kept.manifest.taps == made.manifest.taps
    assert sorted(len(d.taps_TKD) for d in kept) == sorted(len(d.taps_TKD) for d in made)


def live_run(make_run, label: str, name: str, mode: str) -> RunConfig:
    """Harvest of one side, and training."""
    run = make_run(label, KINDS[name])
    run.harvest.features = mode
    harvest(run)
    assert not (run.directory / "features").exists()
    train(run)
    return run


@pytest.mark.parametrize("mode", ["live", "hybrid"])
def test_a_head_that_changes_its_target_wants_stored_features(make_run, wide, mode):
    """A moved adapter must not teach itself: Medusa-2 is held to what the target said before."""
    run = make_run(f"moved-{mode}", KINDS["medusa2"])
    store = Path(run.runs) / "wide" / "features-held-out"
    shutil.copytree(store, run.directory / "features-held-out")
    run.harvest.features, run.features, run.answers.by = mode, None, "corpus"
    with pytest.raises(UserError, match=r"harvest\.features=stored"):
        train(run)


def test_live_features_have_the_head_s_taps(make_run, wide):
    """Not all that the held-out store holds."""
    run = make_run("wide", KINDS["eagle3"])
    run.harvest.features = "live"
    target = Target.load(run.target, open_store(run, "held-out").manifest.taps)
    assert [d.taps_TKD.shape[1] for d in open_features(run, target).read([0, 1])] == [3, 3]


# The plan


@every_kind()
def test_plan_works_for_every_kind(make_run, name):
    """With the taps of a wide store, before anything is harvested."""
    run = make_run(f"plan-{name}", KINDS[name])
    plan(run)
    found = json.loads((run.directory / "plan.json").read_text(encoding="utf-8"))
    assert min(found[f"{stage}_seconds"] for stage in ("harvest", "train", "eval")) > 0
    assert found["head_parameters"] > 0


def test_plan_probes_with_the_head_s_taps(make_run):
    """Without a norm for each tap, fc would meet all seven."""
    plan(make_run("plan-plain", KINDS["eagle3"] | {"fc_norm": False}))


@pytest.mark.parametrize("name", ["eagle3", "hydra"])
def test_plan_counts_the_parameters_that_training_trains(make_run, trained, name):
    """The probed head is that of the run, taps and all."""
    run = make_run(f"count-{name}", KINDS[name])
    plan(run)
    found = json.loads((run.directory / "plan.json").read_text(encoding="utf-8"))
    assert found["head_parameters"] == sum(weight.numel() for weight in weights(trained(name)).values())


def test_plan_says_that_a_tap_is_missing(make_run):
    with pytest.raises(UserError, match=r"harvest\.taps"):
        plan(make_run("plan-low", KINDS["medusa"], taps=[1, 3]))


# What stands in a head's section


def test_a_section_without_a_kind_shows_one(capsys, make_run, tmp_path):
    """The one message of several lines: an example."""
    path = tmp_path / "run.yaml"
    path.write_text(dump(make_run("bad", {"kind": "eagle3"})), encoding="utf-8")
    with pytest.raises(SystemExit):
        train_main(["--config", str(path), "head={steps: 2}"])
    assert "head.kind is missing, for example\n  head:\n    kind: eagle3" in capsys.readouterr().err


def refused(capsys, make_run, tmp_path, head: str, *more: str) -> str:
    """One line and exit code 2."""
    path = tmp_path / "run.yaml"
    path.write_text(dump(make_run("bad", {"kind": "eagle3"}, "wide")), encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        train_main(["--config", str(path), head, *more])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: ")
    assert len(error.strip().splitlines()) == 1
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{kind: eagel3}", "head.kind 'eagel3': did you mean eagle3?"),
        ("{kind: meduza}", "did you mean medusa?"),
        ("{kind: zzz}", "there are: draft_model, eagle1, eagle3, hydra, medusa, mtp"),
        ("{kind: eagle3, windw: 9}", "unknown key windw; did you mean window?"),
        ("{kind: medusa, adapter: {rnak: 2}}", "unknown key adapter.rnak; did you mean adapter.rank?"),
        ("{kind: medusa, adapter: {rank: 0}}", "adapter.rank = 0"),
        ("{kind: medusa, adapter: {joint_from: 1.0}}", "adapter.joint_from = 1.0"),
        ("{kind: medusa, adapter: {ramp: linear}}", "adapter.ramp = 'linear'"),
        ("{kind: eagle3, taps: [3, 1]}", "head.taps [3, 1]: give ascending"),
        ("{kind: eagle3, taps: [1, 7]}", "holds taps [1, 2, 3, 4, 5, 6, 8]"),
        ("{kind: eagle3, window: 3}", "head.window 3: must be larger than the rollout (head.steps 3)"),
        ("{kind: eagle3, window: 1}", "window = 1"),
        ("{kind: eagle3, hidden_size: 16, lm_head: shared}", "cannot share the target's lm_head: head.lm_head=own"),
        ("{kind: eagle3, fc_norm: true, norm_before_fc: true}", "set head.fc_norm=false"),
        ("{kind: eagle3, layers: 0}", "layers = 0"),
        ("{kind: draft_model, steps: 2}", "head.steps: a draft model learns one step"),
        ("{kind: draft_model, layers: 8}", "head.layers 8: the target has 8"),
        ("{kind: draft_model, model: /nowhere}", "/nowhere: no such model directory"),
        ("{kind: mtp, steps: 3, modules: 2}", "head.modules 2: 1, or as many as head.steps (3)"),
        ("{kind: mtp, block: llama, start: native}", "head.start native"),
        ("{kind: eagle3, loss: {kl: 0}}", "head.loss: give at least one loss"),
    ],
)
def test_bad_head_sections_are_one_clear_message(capsys, make_run, wide, tmp_path, section, message):
    assert message in refused(capsys, make_run, tmp_path, f"head={section}")


@pytest.mark.parametrize("size", [300, 200])
def test_a_vocabulary_larger_than_the_target_s_is_refused(capsys, make_run, wide, tmp_path, size):
    error = refused(
        capsys, make_run, tmp_path, "head={kind: eagle3, taps: [1, 3]}", f"vocab.size={size}", "vocab.pin_bytes=false"
    )
    assert f"vocab.size {size}: the training text uses only" in error
    assert "(vocabulary 272)" in error


def test_a_width_that_is_no_multiple_of_a_head_works(make_run, wide):
    """Widths are free: as many heads as fit."""
    run = make_run("width", {"kind": "eagle3", "steps": 1, "taps": [1, 3], "hidden_size": 20}, "wide")
    train(run)
    assert weights(run)["midlayer.self_attn.q_proj.weight"].shape == (16, 40)
