"""Live features are the stored ones without a disk; hybrid ones are made once. Workers change nothing but the waiting."""

import gc
import threading
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import TAPS, tiny_run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import fill, make_documents, same

import headwright.data.live as live
import headwright.data.store as store
from headwright.configs import UserError, dump
from headwright.data.batch import pack
from headwright.data.damage import main as verify
from headwright.data.harvest import harvest, main, store_path
from headwright.data.live import HybridDocuments
from headwright.data.store import FeatureReader
from headwright.data.stream import FeatureStream, ahead
from headwright.data.target import Target
from headwright.train.run import main as train_main
from headwright.train.run import open_features, train
from headwright.train.track import read_metrics

# Workers


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> FeatureReader:
    """A store of 31 documents in shards of four."""
    root = tmp_path_factory.mktemp("stream")
    fill(root, make_documents(31, seed=5), per_unit=4).finish()
    return FeatureReader(root)


def alike(one, two) -> bool:
    """Two batches, bit for bit."""
    return all(torch.equal(getattr(one, field.name), getattr(two, field.name)) for field in fields(one))


def threads() -> set[str]:
    """Reader threads that are alive."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("headwright-reader")}


@settings(max_examples=40, deadline=None)
@given(
    workers=st.integers(0, 4),
    world=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    tokens=st.sampled_from([1, 30, 80]),
    stop=st.integers(0, 20),
    data=st.data(),
)
def test_workers_change_nothing(reader, workers, world, accumulate, tokens, stop, data):
    """Resumed anywhere, on any rank, over several epochs, with shards that are opened by any thread."""
    start = data.draw(st.integers(0, stop))
    for rank in range(world):
        plain = FeatureStream(reader, tokens, accumulate, rank, world, seed=3)
        straight = list(plain.steps(0, stop))[start:]
        other = FeatureStream(FeatureReader(reader.root), tokens, accumulate, rank, world, 3, workers)
        resumed = list(other.steps(start, stop))
        assert [len(step) for step in resumed] == [len(step) for step in straight]
        assert all(alike(a, b) for x, y in zip(resumed, straight) for a, b in zip(x, y))
    assert not threads()


def bearing(batch) -> torch.Tensor:
    """Tokens of the rows that bear loss."""
    return batch.ids_T[batch.loss_masks(1)[:, 0]]


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 1), (3, 2)])
def test_every_row_once_per_epoch(reader, workers, world, accumulate):
    wanted = torch.cat([bearing(pack([document])) for document in reader]).sort().values
    found = []
    for rank in range(world):
        stream = FeatureStream(reader, 40, accumulate, rank, world, 1, workers)
        found += [bearing(b) for step in stream.steps(0, stream.steps_per_epoch()) for b in step]
    assert torch.equal(torch.cat(found).sort().values, wanted)


class Wrong(Exception):
    """Something a worker meets."""


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("place", [0, 3, 11])
def test_an_error_in_a_worker_reaches_the_caller_in_its_turn(workers, place):
    def call(number: int):
        def make() -> int:
            if number == place:
                raise Wrong(number)
            return number

        return make

    results = ahead((call(number) for number in range(12)), workers)
    assert [next(results) for _ in range(place)] == list(range(place))
    with pytest.raises(Wrong, match=str(place)):
        next(results)
    assert not threads()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_leaving_early_stops_the_threads(workers, taken):
    started = []
    results = ahead((lambda number=number: started.append(number) for number in range(1000)), workers)
    for _ in range(taken):
        next(results)
    results.close()
    gc.collect()
    assert not threads()
    assert len(started) <= (taken + 2 * workers if taken else 0)


def test_no_more_than_asked_is_made_ahead():
    """However long the caller takes."""
    submitted = []

    def calls():
        for number in range(100):
            submitted.append(number)
            yield lambda number=number: number

    for number, result in enumerate(ahead(calls(), 2)):
        assert result == number
        assert len(submitted) <= number + 4


def test_damage_reaches_the_training_step(tmp_path):
    fill(tmp_path, make_documents(12)).finish()
    path = tmp_path / "shard-00002.safetensors"
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)
    with pytest.raises(UserError, match="shard-00002"):
        list(FeatureStream(FeatureReader(tmp_path), 40, workers=2).steps(0, 20))


# Live and hybrid


@pytest.fixture(scope="module")
def target(model_dir) -> Target:
    """The tiny target, as a run loads it."""
    return Target.load(tiny_run(model_dir, Path("c"), Path("r")).target, TAPS)


def make_run(model_dir: Path, chats: Path, runs: Path, features: str, dtype: str = "float32", **changes):
    """A run on the corpus's own answers."""
    settings = {"epochs": 2, "tokens_per_batch": 256, "lr": 1e-3, "log_every": 1, "evals": 1, "saves": 2}
    return tiny_run(
        model_dir,
        chats,
        runs,
        answers={"by": "corpus", "max_new_tokens": 12},
        harvest={"taps": list(TAPS), "tokens_per_batch": 512, "dtype": dtype, "features": features},
        train=settings | changes,
        vocab={"size": None, "pin_bytes": False},
    )


@pytest.fixture(scope="module")
def stored(model_dir, chats, tmp_path_factory):
    """A finished harvest."""
    run = make_run(model_dir, chats, tmp_path_factory.mktemp("stored"), "stored")
    harvest(run)
    return run


def close(one, two) -> None:
    """The same document: tokens exactly, states up to the rounding of another padding."""
    assert torch.equal(one.ids_T, two.ids_T)
    assert torch.equal(one.mask_T, two.mask_T)
    for name in ("taps_TKD", "last_RD", "logz_R"):
        mine, reference = getattr(one, name), getattr(two, name)
        assert mine.dtype == reference.dtype
        scale = float(reference.abs().max()) if reference.numel() else 0.0
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("features", ["live", "hybrid"])
def test_live_features_are_the_stored_ones(model_dir, chats, stored, target, tmp_path, features):
    reader = FeatureReader(store_path(stored, "train"))
    documents = open_features(make_run(model_dir, chats, tmp_path, features), target)
    assert len(documents) == len(reader)
    assert documents.manifest.response_tokens == reader.manifest.response_tokens
    made = documents.read(range(len(documents)))
    assert documents.lengths() == [len(document.ids_T) for document in made]
    key = lambda document: document.ids_T.tolist()  # noqa: E731
    for mine, theirs in zip(sorted(made, key=key), sorted(reader, key=key), strict=True):
        close(mine, theirs)
    ids = [torch.cat(list(side.response_tokens())).sort().values for side in (documents, reader)]
    assert torch.equal(*ids)


@pytest.mark.parametrize("features", ["live", "hybrid"])
def test_live_documents_stand_in_the_order_of_the_store(model_dir, chats, stored, target, tmp_path, features):
    reader = FeatureReader(store_path(stored, "train"))
    documents = open_features(make_run(model_dir, chats, tmp_path, features), target)
    ids = [[document.ids_T.tolist() for document in side.read(range(len(side)))] for side in (documents, reader)]
    assert ids[0] == ids[1]


def losses(run) -> list[float]:
    """The curve of a run."""
    return [record["loss_0"] for record in read_metrics(run.directory / "metrics.jsonl") if "loss_0" in record]


@pytest.fixture(scope="module")
def curves(model_dir, chats, tmp_path_factory):
    """Trained with each kind of features."""
    found = {}
    for features in ("stored", "live", "hybrid"):
        run = make_run(model_dir, chats, tmp_path_factory.mktemp(features), features)
        harvest(run)
        train(run)
        found[features] = losses(run)
    return found


def test_training_on_hybrid_features_is_training_on_live_ones(curves):
    assert len(curves["live"]) > 4
    assert curves["hybrid"] == pytest.approx(curves["live"], rel=1e-3)


def test_training_on_live_features_is_training_on_stored_ones(curves):
    assert curves["live"] == pytest.approx(curves["stored"], rel=1e-3)


def test_live_harvest_leaves_the_training_side_alone(model_dir, chats, tmp_path):
    run = make_run(model_dir, chats, tmp_path, "live")
    harvest(run)
    assert not store_path(run, "train").exists()
    train(run)
    assert not store_path(run, "train").exists()


def counted(monkeypatch) -> list[int]:
    """How many documents the target reads, pass by pass."""
    passes, original = [], live.read_documents
    monkeypatch.setattr(
        live, "read_documents", lambda target, texts, store: passes.append(len(texts)) or original(target, texts, store)
    )
    return passes


def stream_of(run, documents, epochs: int = 1, workers: int = 0):
    """All batches of so many epochs."""
    stream = FeatureStream(documents, run.train.tokens_per_batch, seed=run.seed, workers=workers)
    total = sum(len(stream.epoch_batches(epoch)) for epoch in range(epochs))
    return [batch for step in stream.steps(0, total) for batch in step]


@pytest.mark.parametrize("workers", [0, 3])
def test_first_epoch_makes_the_shards_and_later_ones_read_them(
    model_dir, chats, target, tmp_path, monkeypatch, workers
):
    passes = counted(monkeypatch)
    run = make_run(model_dir, chats, tmp_path / "hybrid", "hybrid")
    documents = open_features(run, target)
    assert not passes  # nothing is computed before it is asked for
    first = stream_of(run, documents, workers=workers)
    assert sum(passes) == len(documents)
    assert len(passes) == len(first) == len(list(store_path(run, "train").glob("shard-*")))
    for _ in range(2):
        again = stream_of(run, documents, epochs=2, workers=workers)
        assert all(alike(a, b) for a, b in zip(again[: len(first)], first, strict=True))
    assert sum(passes) == len(documents)
    passes.clear()
    fresh = stream_of(run, open_features(make_run(model_dir, chats, tmp_path / "live", "live"), target))
    assert all(alike(a, b) for a, b in zip(fresh, first, strict=True))
    assert sum(passes) == len(documents)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_hybrid_reads_the_dtype_that_it_writes(model_dir, chats, target, tmp_path, dtype):
    """The first epoch sees what later ones see."""
    run = make_run(model_dir, chats, tmp_path, "hybrid", dtype)
    first, again = (stream_of(run, open_features(run, target)) for _ in range(2))
    assert all(alike(a, b) for a, b in zip(first, again, strict=True))
    assert first[0].taps_TKD.dtype == torch.bfloat16


def test_killed_hybrid_run_uses_what_is_there(model_dir, chats, target, tmp_path, monkeypatch):
    passes = counted(monkeypatch)
    run = make_run(model_dir, chats, tmp_path, "hybrid")
    stream = FeatureStream(open_features(run, target), run.train.tokens_per_batch, seed=run.seed)
    kept = [batch for step in stream.steps(0, 3) for batch in step]
    assert len(passes) == 3
    before = {path: path.stat().st_mtime_ns for path in store_path(run, "train").glob("shard-*")}
    whole = stream_of(run, open_features(run, target))
    assert sum(passes) == len(stream.lengths)
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert all(alike(a, b) for a, b in zip(whole[:3], kept, strict=True))


def test_hybrid_keeps_few_shards_open(model_dir, chats, target, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "OPEN_SHARDS", 2)
    run = make_run(model_dir, chats, tmp_path, "hybrid", tokens_per_batch=64)
    documents = open_features(run, target)
    made = documents.read(range(len(documents)))
    assert isinstance(documents, HybridDocuments)
    assert len(documents.shards) == 2
    assert all(same(a, b) for a, b in zip(made, documents.read(range(len(documents))), strict=True))


def test_hybrid_of_another_run_is_refused(model_dir, chats, target, tmp_path):
    stream_of(*(lambda run: (run, open_features(run, target)))(make_run(model_dir, chats, tmp_path, "hybrid")))
    with pytest.raises(UserError, match=r"features of another run: train\.tokens_per_batch was 256"):
        open_features(make_run(model_dir, chats, tmp_path, "hybrid", tokens_per_batch=300), target)
    with pytest.raises(UserError, match="features of another run: features was 'hybrid'"):
        harvest(make_run(model_dir, chats, tmp_path, "stored"))


@pytest.mark.parametrize("order", ["hybrid stored", "stored hybrid"])
def test_hybrid_and_stored_shards_are_never_mixed(model_dir, chats, target, tmp_path, order):
    """Their units hold other documents: refused, or made anew, but not taken for one another."""
    found = []
    for features in order.split():
        run = make_run(model_dir, chats, tmp_path, features, tokens_per_batch=512)
        try:
            if features == "stored":
                harvest(run)
                made = list(FeatureReader(store_path(run, "train")))
            else:
                documents = open_features(run, target)
                made = documents.read(range(len(documents)))
        except UserError:
            assert found  # refused: fine
            return
        found.append(sorted(document.ids_T.tolist() for document in made))
    assert found[0] == found[1]


def test_damaged_hybrid_shard_is_mended(model_dir, chats, target, tmp_path):
    """As its message says: verify removes it, and it is made anew."""
    run = make_run(model_dir, chats, tmp_path, "hybrid")
    whole = stream_of(run, open_features(run, target))
    victim = store_path(run, "train") / "shard-00001.safetensors"
    blob = bytearray(victim.read_bytes())
    blob[-1] ^= 1
    victim.write_bytes(blob)
    with pytest.raises(UserError, match=r"shard-00001.*headwright verify"):
        stream_of(run, open_features(run, target))
    config = tmp_path / "run.yaml"
    config.write_text(dump(run))
    with pytest.raises(SystemExit):
        verify(["--config", str(config)])
    assert not victim.exists()
    assert all(alike(a, b) for a, b in zip(stream_of(run, open_features(run, target)), whole, strict=True))


@pytest.mark.parametrize("features", ["live", "hybrid"])
@pytest.mark.parametrize("stage", [main, train_main])
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--dry-run"],
    ],
)
def test_live_answers_of_the_target_are_refused_at_once(
    model_dir, chats, tmp_path, monkeypatch, capsys, features, stage, arguments
):
    """Before a model is loaded or a file is written, with what to do instead."""
    run = tiny_run(
        model_dir,
        chats,
        tmp_path / "runs",
        harvest={"taps": list(TAPS), "tokens_per_batch": 512, "features": features},
    )
    config = tmp_path / "run.yaml"
    config.write_text(dump(run))
    monkeypatch.setattr(Target, "load", None)
    with pytest.raises(SystemExit) as caught:
        stage(["--config", str(config), *arguments])
    errors = capsys.readouterr().err
    assert caught.value.code == 2
    assert "headwright regenerate" in errors
    assert "answers.by: corpus" in errors
    assert not store_path(run, "train").exists()
