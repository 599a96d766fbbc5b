"""The store gives back what was put in, whole or not at all; the stream shows each document once per epoch."""

import errno
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import broken
from hypothesis import given, settings
from hypothesis import strategies as st

import headwright.data.store as store
from headwright.configs import UserError
from headwright.data.batch import DocumentFeatures, last_rows
from headwright.data.store import DTYPES, FeatureReader, FeatureWriter, Manifest, read_manifest, sweep
from headwright.data.stream import FeatureStream, whole_batches

FIELDS = ("ids_T", "mask_T", "taps_TKD", "last_RD", "argmax_R", "logz_R")


def make_documents(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[DocumentFeatures]:
    """Random documents of 1 to 20 tokens; some bear no loss."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(1, 21, (), generator=generator))
        mask_T = torch.rand(length, generator=generator) < 0.6
        rows = len(last_rows(mask_T))
        made.append(
            DocumentFeatures(
                torch.randint(0, 99999, (length,), generator=generator),
                mask_T,
                torch.randn(length, 2, 3, generator=generator).to(dtype),
                torch.randn(rows, 3, generator=generator).to(dtype),
                torch.randint(0, 99999, (rows,), generator=generator),
                torch.randn(rows, generator=generator),
            )
        )
    return made


def note(index: int) -> dict:
    """What the store remembers of a document."""
    return {"key": f"k{index}", "source": "s", "place": f"set.jsonl:{index + 1}", "sample": 0}


def manifest(units: int, dtype: str = "float32", **identity) -> Manifest:
    """A manifest about to be filled."""
    return Manifest({"target": "abc", "taps": [1, 2], **identity}, {"name": "tiny"}, [1, 2], dtype, units)


def fill(
    root: Path, documents: list[DocumentFeatures], per_unit: int = 3, dtype: str = "float32", only=None
) -> FeatureWriter:
    """Write the units that are missing (or `only` those)."""
    units = [range(start, min(start + per_unit, len(documents))) for start in range(0, len(documents), per_unit)]
    writer = FeatureWriter(root, manifest(len(units), dtype))
    for unit in writer.missing() if only is None else only:
        writer.write(unit, [documents[i] for i in units[unit]], [note(i) for i in units[unit]], 0.5)
    return writer


def same(one: DocumentFeatures, two: DocumentFeatures) -> bool:
    """Equal bit for bit, dtypes included."""
    pairs = [(getattr(one, name), getattr(two, name)) for name in FIELDS]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def shard_contents(root: Path) -> dict[str, tuple[dict, bytes]]:
    """Header and data of all shards. (safetensors writes the metadata's keys in any order: the rest is byte for byte.)"""
    found = {}
    for path in sorted(root.glob("*.safetensors")):
        blob = path.read_bytes()
        end = 8 + int.from_bytes(blob[:8], "little")
        found[path.name] = (json.loads(blob[8:end]), blob[end:])
    return found


def without_checksums(found: Manifest) -> dict:
    """A manifest but for what depends on the order of metadata keys."""
    return asdict(found) | {"shards": [{k: v for k, v in shard.items() if k != "xxh64"} for shard in found.shards]}


def names(root: Path) -> list[str]:
    """Every file of a store, hidden ones too."""
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_round_trip_is_bit_exact(tmp_path, dtype):
    documents = make_documents(10, dtype=DTYPES[dtype])
    done = fill(tmp_path, documents, dtype=dtype).finish()
    reader = FeatureReader(tmp_path)
    assert len(reader) == 10
    assert all(same(a, b) for a, b in zip(reader, documents))
    assert same(reader[7], documents[7])
    assert reader.lengths() == [len(d.ids_T) for d in documents]
    assert reader.notes == [note(i) for i in range(10)]
    assert torch.equal(torch.cat(list(reader.response_tokens())), torch.cat([d.ids_T[d.mask_T] for d in documents]))
    assert reader.manifest == done == read_manifest(tmp_path)
    assert (done.documents, done.tokens) == (10, sum(reader.lengths()))
    assert done.response_tokens == sum(int(d.mask_T.sum()) for d in documents)
    assert done.bytes == sum(path.stat().st_size for path in tmp_path.glob("shard-*"))
    assert done.seconds == 2.0
    assert broken(reader.root) == []


@settings(max_examples=15, deadline=None)
@given(count=st.integers(1, 9), per_unit=st.integers(1, 4), seed=st.integers(0, 99))
def test_round_trip_of_any_division(tmp_path_factory, count, per_unit, seed):
    root, documents = tmp_path_factory.mktemp("store"), make_documents(count, seed)
    fill(root, documents, per_unit).finish()
    assert all(same(a, b) for a, b in zip(FeatureReader(root), documents, strict=True))


def test_no_document_is_a_complete_store(tmp_path):
    assert FeatureWriter(tmp_path, manifest(0)).finish().complete
    assert len(FeatureReader(tmp_path)) == 0


def test_missing_units_are_made_again_byte_for_byte(tmp_path):
    documents = make_documents(10)
    fill(tmp_path / "straight", documents).finish()
    writer = fill(tmp_path / "broken", documents, only=[2, 0])
    assert writer.missing() == [1, 3]
    assert writer.finish() is None
    with pytest.raises(UserError, match="the harvest is not finished"):
        FeatureReader(tmp_path / "broken")
    fill(tmp_path / "broken", documents).finish()
    assert shard_contents(tmp_path / "broken") == shard_contents(tmp_path / "straight")
    broken, straight = (read_manifest(tmp_path / name) for name in ("broken", "straight"))
    assert without_checksums(broken) == without_checksums(straight)
    (tmp_path / "broken" / "shard-00001.safetensors").unlink()
    assert fill(tmp_path / "broken", documents).missing() == []
    assert shard_contents(tmp_path / "broken") == shard_contents(tmp_path / "straight")


def test_finish_twice_is_once(tmp_path):
    writer = fill(tmp_path, make_documents(5))
    first = writer.finish()
    assert writer.finish() == first
    assert FeatureWriter(tmp_path, manifest(2)).finish() == first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target": "xyz"}, "target was 'abc', now it is 'xyz'"),
        ({"taps": [1, 3]}, r"taps was \[1, 2\], now it is \[1, 3\]"),
        ({"seed": 1}, "seed was None, now it is 1"),
    ],
)
def test_another_run_is_refused(tmp_path, change, words):
    fill(tmp_path, make_documents(5)).finish()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=words):
        FeatureWriter(tmp_path, manifest(2, **change))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["taps_TKD", "last_RD"])
def test_states_that_are_not_finite_are_refused_with_their_place(tmp_path, value, name):
    documents = [make_documents(1, seed)[0] for seed in range(40)]
    documents = [d for d in documents if len(d.last_RD) >= 2][:4]
    getattr(documents[2], name)[-1].flatten()[-1] = value
    row = sum(len(getattr(d, name)) for d in documents[:3]) - 1
    writer = FeatureWriter(tmp_path, manifest(1))
    with pytest.raises(UserError, match=rf"set\.jsonl:3: {name[:4]} is not finite .*, row {row}"):
        writer.write(0, documents, [note(i) for i in range(4)], 1.0)
    assert names(tmp_path) == ["manifest.json"]


def test_states_too_large_for_the_dtype_are_refused(tmp_path):
    """70000 is a number in fp32, and infinite in fp16."""
    documents = make_documents(3)
    documents[1].taps_TKD[0, 0, 0] = 70000.0
    fill(tmp_path / "a", documents)
    with pytest.raises(UserError, match=r"set\.jsonl:2"):
        fill(tmp_path / "b", documents, dtype="float16")


class Killed(BaseException):
    """Stands for anything that ends a process in the middle."""


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), Killed(), KeyboardInterrupt()])
def test_write_that_fails_leaves_nothing(tmp_path, monkeypatch, error):
    documents = make_documents(6)
    writer = fill(tmp_path, documents, only=[0])
    before = names(tmp_path)

    def half(tensors, path, metadata):
        Path(path).write_bytes(b"half a shard")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(store, "save_file", half)
        with pytest.raises(type(error)):
            fill(tmp_path, documents, only=[1])
    assert names(tmp_path) == before
    assert writer.missing() == [1]
    fill(tmp_path, documents).finish()
    assert all(same(a, b) for a, b in zip(FeatureReader(tmp_path), documents, strict=True))


def test_manifest_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    writer = fill(tmp_path, make_documents(5))
    before = (tmp_path / "manifest.json").read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            writer.finish()
    assert (tmp_path / "manifest.json").read_bytes() == before
    assert "manifest.json" in names(tmp_path)
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]
    assert writer.finish().complete


def test_sweep_removes_what_was_left_half_written(tmp_path):
    fill(tmp_path, make_documents(5)).finish()
    before = names(tmp_path)
    (tmp_path / ".shard-00001.safetensors.1234abcd.tmp").write_bytes(b"half")
    (tmp_path / ".manifest.json.1234abcd.tmp").write_bytes(b"{")
    alive = tmp_path / ".index.safetensors.9999abcd.tmp"  # of another process, at this moment
    alive.write_bytes(b"half")
    for scratch in tmp_path.glob(".*.1234abcd.tmp"):
        os.utime(scratch, (0, 0))
    assert len(FeatureReader(tmp_path)) == 5
    sweep(tmp_path)
    assert names(tmp_path) == sorted([*before, alive.name])


@pytest.mark.parametrize("place", [0.5, 0.99])
def test_changed_shard_is_found(tmp_path, place):
    fill(tmp_path, make_documents(10)).finish()
    path = tmp_path / "shard-00002.safetensors"
    blob = bytearray(path.read_bytes())
    blob[int(len(blob) * place)] ^= 1
    path.write_bytes(blob)
    assert broken(tmp_path) == ["shard-00002.safetensors"]
    with pytest.raises(UserError, match=r"shard-00002.*headwright verify"):
        list(FeatureReader(tmp_path))


@pytest.mark.parametrize("damage", ["gone", "cut", "empty"])
def test_damaged_shard_is_one_message(tmp_path, damage):
    """A complete store with a shard that cannot be opened: the user is told which."""
    fill(tmp_path, make_documents(10)).finish()
    path = tmp_path / "shard-00001.safetensors"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5] if damage == "cut" else b"")
    with pytest.raises(UserError, match="shard-00001"):
        list(FeatureReader(tmp_path))


def test_no_store(tmp_path):
    with pytest.raises(UserError, match="no feature store there: run the harvest first"):
        FeatureReader(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ('{"schema": ', "not valid JSON"),
        ("{}", "schema None"),
        ('{"schema": "headwright.features/9"}', "this version reads headwright.features/2"),
        ("[]", r"manifest\.json"),
        ('"text"', r"manifest\.json"),
        ('{"schema": "headwright.features/2"}', r"manifest\.json"),
        ('{"schema": "headwright.features/2", "more": 1}', r"manifest\.json"),
    ],
)
def test_broken_manifest(tmp_path, text, words):
    (tmp_path / "manifest.json").write_text(text)
    for call in (lambda: FeatureReader(tmp_path), lambda: FeatureWriter(tmp_path, manifest(1))):
        with pytest.raises(UserError, match=words):
            call()


def test_manifest_is_plain_json(tmp_path):
    done = fill(tmp_path, make_documents(5)).finish()
    assert json.loads((tmp_path / "manifest.json").read_text()) == asdict(done)


# The stream


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> FeatureReader:
    """A store of 31 documents, each with its own ids."""
    root = tmp_path_factory.mktemp("stream")
    documents = make_documents(31, seed=5)
    for index, document in enumerate(documents):
        document.ids_T[:] = index
    fill(root, documents, per_unit=4).finish()
    return FeatureReader(root)


def contents(batches) -> list[int]:
    """The documents of batches that bear loss, or would. A batch repeated without loss shows no mask."""
    found = []
    for batch in batches:
        found += [int(batch.ids_T[batch.segment_T == segment][0]) for segment in batch.segment_T.unique()]
    return found


def real(stream: FeatureStream, batches, step: int, epoch: int = 0) -> list:
    """Micro-batches of a step that are not repetitions beyond the end of the epoch."""
    count = len(stream.epoch_batches(epoch))
    first = step * stream.group + stream.rank * stream.accumulate
    return [batch for place, batch in enumerate(batches) if first + place < count]


@pytest.mark.parametrize("tokens", [1, 20, 64, 10**6])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_document_once_per_epoch_within_the_budget(reader, tokens, epoch):
    batches = FeatureStream(reader, tokens).epoch_batches(epoch)
    learned = [document for document, rows in enumerate(reader.loss_rows()) if rows]
    assert sorted({piece.document for batch in batches for piece in batch}) == learned
    lengths = reader.lengths()
    assert all(batches)
    assert all(len(batch) == 1 or sum(lengths[p.document] for p in batch) <= tokens for batch in batches)


@pytest.mark.parametrize("product", [1, 2, 3, 4, 6])
def test_a_step_is_the_same_documents_however_it_is_shared(reader, product):
    straight = FeatureStream(reader, 40, accumulate=product)
    count = straight.steps_per_epoch()
    wanted = [contents(real(straight, batches, step)) for step, batches in enumerate(straight.steps(0, count))]
    learned = [document for document, rows in enumerate(reader.loss_rows()) if rows]
    assert sorted(document for step in wanted for document in step) == learned
    for world in (1, 2, 3):
        if product % world:
            continue
        ranks = [FeatureStream(reader, 40, product // world, rank, world) for rank in range(world)]
        assert {stream.steps_per_epoch() for stream in ranks} == {count}
        shared = zip(*(stream.steps(0, count) for stream in ranks), strict=True)
        for step, parts in enumerate(shared):
            assert {len(part) for part in parts} == {product // world}
            together = [d for stream, part in zip(ranks, parts) for d in contents(real(stream, part, step))]
            assert together == wanted[step]


def test_repetitions_at_the_end_bear_no_loss(reader):
    plain = FeatureStream(reader, 40)
    rows = sum(batch.loss_rows() for step in plain.steps(0, plain.steps_per_epoch()) for batch in step)
    assert rows > 0
    for world, accumulate in ((1, 4), (2, 3), (3, 5), (5, 5)):
        found, sizes = 0, set()
        for rank in range(world):
            stream = FeatureStream(reader, 40, accumulate, rank, world)
            steps = list(stream.steps(0, stream.steps_per_epoch()))
            found += sum(batch.loss_rows() for step in steps for batch in step)
            sizes.add((len(steps), *(len(step) for step in steps)))
        assert found == rows
        assert len(sizes) == 1  # every rank makes as many forward passes


@settings(max_examples=20, deadline=None)
@given(stop=st.integers(1, 40), data=st.data(), accumulate=st.integers(1, 3))
def test_resumed_is_straight(reader, stop, data, accumulate):
    start = data.draw(st.integers(0, stop))
    stream = FeatureStream(reader, 50, accumulate, seed=3)
    straight = [contents(step) for step in stream.steps(0, stop)]
    assert len(straight) == stop
    resumed = FeatureStream(reader, 50, accumulate, seed=3)
    assert [contents(step) for step in resumed.steps(start, stop)] == straight[start:]


def test_order_depends_on_seed_and_epoch_alone(reader):
    def order(epoch: int, **options) -> list[int]:
        torch.rand(7)  # the global generator plays no part
        stream = FeatureStream(reader, **({"tokens_per_batch": 40} | options))
        return [piece.document for batch in stream.epoch_batches(epoch) for piece in batch]

    base = order(0)
    assert base == order(0) == order(0, accumulate=2, world=2, rank=1)
    assert base != sorted(base)
    assert len({tuple(order(epoch, seed=seed)) for epoch in range(3) for seed in range(3)}) == 9


def test_whole_batches_are_all_documents_in_order(reader):
    lengths = reader.lengths()
    for tokens in (1, 40, 10**6):
        groups = list(whole_batches(reader, tokens))
        assert [document for group in groups for document in group] == list(range(31))
        assert all(len(group) == 1 or sum(lengths[d] for d in group) <= tokens for group in groups)
