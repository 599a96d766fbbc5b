"""Shards: fp8 loses what its formula says and no more; damage is found, named and mended; big stores open at once."""

import gc
import json
import math
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import broken, tiny_run
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_harvest import SIDES, assert_same_store, same_shards, times
from test_store import fill, make_documents, manifest, same

import headwright.data.store as store
from headwright.configs import UserError, dump
from headwright.data.batch import DocumentFeatures, last_rows
from headwright.data.damage import main as verify
from headwright.data.harvest import harvest, store_path
from headwright.data.shard import Shard, ShardError
from headwright.data.store import DTYPES, FeatureReader, FeatureWriter, bytes_per_token, read_manifest

# fp8


def plain_fp8(row: list[float]) -> list[float]:
    """e4m3 with one power of two per row, number by number in Python's own floats."""
    largest = max(map(abs, row))
    exponent = math.frexp(largest / 448)[1] if largest else 0
    return [math.ldexp(plain_e4m3(math.ldexp(value, -exponent)), exponent) for value in row]


def plain_e4m3(value: float) -> float:
    """The nearest multiple of the step that e4m3 has there, ties to even."""
    if value == 0:
        return 0.0
    step = 2.0 ** (max(math.frexp(abs(value))[1] - 1, -6) - 3)
    return round(value / step) * step


def document_of(rows: list[list[float]]) -> DocumentFeatures:
    """A document whose taps and last states are these rows of one width."""
    taps_TKD = torch.tensor(rows).repeat_interleave(2, 0).reshape(len(rows), 2, -1)
    mask_T = torch.ones(len(rows), dtype=torch.bool)
    count = len(last_rows(mask_T))
    zeros = torch.zeros(count)
    return DocumentFeatures(torch.arange(len(rows)), mask_T, taps_TKD, taps_TKD[:count, 0], zeros.long(), zeros)


def stored(root: Path, document: DocumentFeatures, dtype: str) -> DocumentFeatures:
    """Through a store and back."""
    fill(root, [document], dtype=dtype).finish()
    return FeatureReader(root)[0]


values = st.floats(-1, 1, width=32).map(lambda x: x if abs(x) > 1e-20 else 0.0)
rows = st.lists(st.tuples(st.lists(values, min_size=4, max_size=4), st.integers(-60, 60)), min_size=1, max_size=5)


def scaled(drawn) -> list[list[float]]:
    """Rows of very different sizes, as bfloat16 has them."""
    return [torch.ldexp(torch.tensor(row), torch.tensor(e)).bfloat16().tolist() for row, e in drawn]


@settings(max_examples=60, deadline=None)
@given(rows)
@pytest.mark.parametrize("dtype", ["fp8", "fp8-taps"])
def test_fp8_is_its_formula(tmp_path_factory, dtype, drawn):
    document = document_of(scaled(drawn))
    found = stored(tmp_path_factory.mktemp("store"), document, dtype)
    assert found.taps_TKD.dtype == found.last_RD.dtype == torch.bfloat16
    wanted = torch.tensor([[plain_fp8(row) for row in taps] for taps in document.taps_TKD.tolist()])
    assert torch.equal(found.taps_TKD.float(), wanted)
    last_RD = wanted[: len(document.last_RD), 0] if dtype == "fp8" else document.last_RD
    assert torch.equal(found.last_RD.float(), last_RD)
    for name in ("ids_T", "mask_T", "argmax_R", "logz_R"):
        assert torch.equal(getattr(found, name), getattr(document, name))


@settings(max_examples=60, deadline=None)
@given(rows)
def test_fp8_error_is_bounded_per_row(tmp_path_factory, drawn):
    """Half a step of three mantissa bits; below the smallest normal number, half of the smallest step."""
    wanted_TKD = document_of(scaled(drawn)).taps_TKD
    found = stored(tmp_path_factory.mktemp("store"), document_of(scaled(drawn)), "fp8")
    error_TKD = (found.taps_TKD.float() - wanted_TKD).abs()
    largest_TK1 = wanted_TKD.abs().amax(-1, keepdim=True)
    assert bool((error_TKD <= torch.maximum(2**-4 * wanted_TKD.abs(), 2**-10 / 224 * largest_TK1)).all())


@settings(max_examples=60, deadline=None)
@given(rows)
def test_fp8_of_fp8_changes_nothing(tmp_path_factory, drawn):
    root = tmp_path_factory.mktemp("store")
    once = stored(root / "once", document_of(scaled(drawn)), "fp8")
    largest = once.taps_TKD.float().abs().amax(-1)
    assume(bool((torch.frexp(largest / 448)[0] != 0.5).all()))  # the next test's case
    assert same(stored(root / "twice", once, "fp8"), once)


def test_fp8_of_a_row_that_rounds_up_to_the_largest_number(tmp_path):
    once = stored(tmp_path / "once", document_of([[440.0, 2**-9, -3 * 2**-9, 1.0]]), "fp8")
    assert once.taps_TKD[0, 0].tolist() == [448.0, 2**-9, -3 * 2**-9, 1.0]
    assert same(stored(tmp_path / "twice", once, "fp8"), once)


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
        ([2e4, 1.0, -3.0, 0.5], [20480.0, 1.0, -3.0, 0.5]),
        ([448.0, -448.0, 32.0, 0.0], [448.0, -448.0, 32.0, 0.0]),
        ([3e38, 0.0, 0.0, 1.0], [3e38, 0.0, 0.0, 0.0]),
        ([2.0**-100, 0.0, -(2.0**-101), 0.0], [2.0**-100, 0.0, -(2.0**-101), 0.0]),
    ],
)
def test_fp8_of_zeros_and_of_huge_and_tiny_rows(tmp_path, row, wanted):
    """One position, hence no `last`; then three of them."""
    for count in (1, 3):
        found = stored(tmp_path / str(count), document_of([row] * count), "fp8")
        row_D = torch.tensor(row).bfloat16().tolist()
        assert found.taps_TKD.float().tolist() == [[plain_fp8(row_D)] * 2] * count
        assert found.last_RD.float().tolist() == [plain_fp8(row_D)] * (count - 1)
        assert found.last_RD.shape == (count - 1, 4)
        torch.testing.assert_close(found.taps_TKD[0, 0].double(), torch.tensor(wanted).double(), rtol=0.07, atol=0)


@pytest.mark.parametrize("size", [2.0**-121, 2.0**-125])
def test_fp8_of_the_smallest_rows(tmp_path, size):
    """What cannot be kept may become zero; it must not become large, or no number at all."""
    found = stored(tmp_path, document_of([[size, 0.0, -size, size / 2]]), "fp8").taps_TKD[0, 0].float()
    assert bool((found.abs() <= size).all())


def test_fp8_of_the_largest_rows_is_finite(tmp_path):
    found = stored(tmp_path, document_of([[3.38e38, 0.0, 0.0, 1.0]]), "fp8").taps_TKD
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_bytes_on_disk_are_as_foretold(tmp_path, dtype):
    """All but the header, and 24 bytes a document for its place and checksum (and 16 for the first place)."""
    documents = make_documents(17)
    fill(tmp_path, documents, per_unit=4, dtype=dtype).finish()
    per_token, per_row = bytes_per_token(2, 3, dtype)
    wanted = sum(len(d.ids_T) * per_token + len(d.last_RD) * per_row for d in documents)
    shards = [Shard(path) for path in sorted(tmp_path.glob("shard-*"))]
    assert sum(len(shard.map) - shard.start for shard in shards) == wanted + 32 * 17 + 16 * len(shards)


def test_unknown_states_are_refused_before_fp8_hides_them(tmp_path):
    document = document_of([[1.0, 2.0, float("inf"), 0.0]])
    with pytest.raises(UserError, match=r"set\.jsonl:1: taps is not finite"):
        fill(tmp_path, [document], dtype="fp8")


# Damage

NAMES = ("ids", "mask", "taps", "taps_scale", "last", "last_scale", "argmax", "logz", "offsets", "checksums")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A store of three shards of two documents each, its documents as read, and the bytes of the middle shard."""
    root = tmp_path_factory.mktemp("small")
    fill(root, make_documents(6, seed=3), per_unit=2, dtype="fp8").finish()
    shard = root / "shard-00001.safetensors"
    return root, list(FeatureReader(root)), shard, shard.read_bytes()


def check_found(small, blob: bytes) -> None:
    """With the middle shard's file replaced: it alone is named, and no document is other than what was written."""
    root, documents, path, whole = small
    assert blob != whole
    path.write_bytes(blob)
    try:
        assert broken(root) == ["shard-00001.safetensors"]
        reader, refused, named = FeatureReader(root), [], []
        for number, document in enumerate(documents):
            try:
                assert same(reader[number], document)
            except UserError as error:
                refused.append(number)
                named.append(path.name in str(error))
        assert named
        assert all(named)
        assert set(refused) <= {2, 3}
    finally:
        path.write_bytes(whole)


def in_names(whole: bytes, place: int) -> bool:
    """Whether a byte lies in the name of one of the tensors."""
    end = 8 + int.from_bytes(whole[:8], "little")
    spans = [(whole.index(f'"{name}":{{'.encode(), 8, end) + 1, len(name)) for name in NAMES]
    return any(start <= place < start + length for start, length in spans)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), bit=st.integers(0, 7), header=st.booleans())
def test_any_flipped_bit_is_found(small, data, bit, header):
    whole = small[3]
    end = 8 + int.from_bytes(whole[:8], "little")
    place = data.draw(st.integers(0, end - 1) if header else st.integers(end, len(whole) - 1))
    assume(not in_names(whole, place))
    blob = bytearray(whole)
    blob[place] ^= 1 << bit
    check_found(small, bytes(blob))


@pytest.mark.parametrize("name", NAMES)
def test_flipped_bit_in_the_name_of_a_tensor_is_found(small, name):
    whole = small[3]
    blob = bytearray(whole)
    blob[whole.index(f'"{name}":{{'.encode(), 8) + 1] ^= 1
    check_found(small, bytes(blob))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_truncation_at_any_length_is_found(small, data):
    whole = small[3]
    length = data.draw(st.one_of(st.sampled_from([0, 7, 8, len(whole) - 1]), st.integers(0, len(whole) - 1)))
    check_found(small, whole[:length])
    path = small[2]
    path.write_bytes(whole[:length])
    units = FeatureWriter(small[0], manifest(3, "fp8")).missing()
    path.write_bytes(whole)
    assert units == [1]  # and the next harvest makes it anew


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=1, max_size=40))
def test_what_was_appended_is_found(small, more):
    check_found(small, small[3] + more)


def test_a_shard_of_another_place_is_found(small):
    """Whole in itself, and not the one that belongs there."""
    check_found(small, (small[0] / "shard-00000.safetensors").read_bytes())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
@example(b"\x02\0\0\0\0\0\0\0{}")
@example(b"\x02\0\0\0\0\0\0\0[]")
@example(b"\x04\0\0\0\0\0\0\0null")
def test_any_other_file_is_one_message(tmp_path_factory, blob):
    path = tmp_path_factory.getbasetemp() / "some.safetensors"
    path.write_bytes(blob)
    try:
        assert Shard(path).table == {}
    except ShardError:
        assert Shard.expected_size(path) != len(blob)


@pytest.mark.parametrize("column", [0, 3])
def test_flipped_bit_in_the_index_is_found(tmp_path, column):
    """The shard of a document, and its length."""
    fill(tmp_path, make_documents(6, seed=3), per_unit=2).finish()
    path = tmp_path / "index.safetensors"
    blob = bytearray(path.read_bytes())
    blob[len(blob) - 6 * 40 + 2 * 40 + column * 8] ^= 1  # the third document's
    path.write_bytes(blob)
    with pytest.raises(UserError, match="index"):
        list(FeatureReader(tmp_path))


@pytest.mark.parametrize("method", ["answers", "response_tokens"])
def test_flipped_token_is_found_where_only_tokens_are_read(tmp_path, method):
    fill(tmp_path, make_documents(6, seed=3), per_unit=2).finish()
    path = tmp_path / "shard-00001.safetensors"
    shard = Shard(path)
    blob = bytearray(path.read_bytes())
    blob[shard.start + shard.table["ids"]["data_offsets"][0]] ^= 1
    path.write_bytes(blob)
    with pytest.raises(UserError, match="shard-00001"):
        list(getattr(FeatureReader(tmp_path), method)())


# verify, and the harvest after it


@pytest.fixture
def run(model_dir, chats, tmp_path):
    """The same harvest once more."""
    run = tiny_run(model_dir, chats, tmp_path)
    harvest(run)
    return run


def flip(path: Path, place: float) -> None:
    """One bit of a file."""
    blob = bytearray(path.read_bytes())
    blob[int(len(blob) * place)] ^= 4
    path.write_bytes(blob)


def test_verify_removes_what_is_damaged_and_the_harvest_makes_only_that_anew(done, run, tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(dump(run))
    verify(["--config", str(config)])
    victims = [
        store_path(run, "train") / "shard-00002.safetensors",
        store_path(run, "held-out") / "shard-00000.safetensors",
    ]
    before = times(run)
    for place, victim in zip((0.7, 0.5), victims):
        flip(victim, place)
    for arguments in (["--dry-run"], []):
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            verify(["--config", str(config), *arguments])
        errors = capsys.readouterr().err
        assert caught.value.code == 2
        assert "2 damaged shards" in errors
        assert all(str(victim) in errors for victim in victims)
        assert all(victim.exists() == bool(arguments) for victim in victims)
        assert [read_manifest(store_path(run, side)).complete for side in SIDES] == [bool(arguments)] * 2
    with pytest.raises(UserError, match="the harvest is not finished"):
        FeatureReader(store_path(run, "train"))
    harvest(run)
    after = times(run)
    assert {name for name in before if before[name] != after[name]} == {str(victim) for victim in victims}
    for side in SIDES:
        assert_same_store(store_path(done, side), store_path(run, side))
        same_shards(store_path(done, side), store_path(run, side))
    verify(["--config", str(config)])


def test_verify_of_nothing_says_so(model_dir, chats, tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(dump(tiny_run(model_dir, chats, tmp_path / "runs")))
    verify(["--config", str(config)])
    assert "no features there" in " ".join(capsys.readouterr().out.split())


# Big stores


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """Ten thousand shards of two documents: one file under ten thousand names."""
    root = tmp_path_factory.mktemp("big")
    documents = make_documents(2, seed=8)
    done = fill(root, documents).finish()
    places = store.load_file(root / "index.safetensors")["places"].repeat(10_000, 1)
    places[:, 0] = torch.arange(10_000).repeat_interleave(2)
    save_file({"places": places}, root / "index.safetensors")
    shards = [done.shards[0] | {"file": store.shard_name(unit)} for unit in range(10_000)]
    index = store.checksum(root / "index.safetensors")
    text = json.dumps(asdict(done) | {"shards": shards, "units": 10_000, "index": index})
    (root / "manifest.json").write_text(text)
    return root, documents


def test_ten_thousand_shards_open_without_any(big, tmp_path, monkeypatch):
    """They are not even there."""
    root, documents = big
    for name in ("manifest.json", "index.safetensors"):
        (tmp_path / name).write_bytes((root / name).read_bytes())
    monkeypatch.setattr(store, "open_shard", None)
    reader = FeatureReader(tmp_path)
    assert len(reader) == 20_000
    assert reader.lengths() == [len(d.ids_T) for d in documents] * 10_000


def test_random_access_keeps_few_shards_open(big, monkeypatch):
    root, documents = big
    for unit in range(1, 10_000):
        if not (root / store.shard_name(unit)).exists():
            os.link(root / store.shard_name(0), root / store.shard_name(unit))
    opened, original = [], store.open_shard
    monkeypatch.setattr(store, "open_shard", lambda path: opened.append(path.name) or original(path))
    reader = FeatureReader(root)
    chosen = torch.randperm(20_000, generator=torch.Generator().manual_seed(0))[:1000].tolist()
    gc.collect()
    before = sum(isinstance(thing, Shard) for thing in gc.get_objects())
    for number in chosen:
        assert same(reader[number], documents[number % 2])
        assert len(reader.shards) <= 128
    assert set(opened) == {store.shard_name(number // 2) for number in chosen}
    assert sum(isinstance(thing, Shard) for thing in gc.get_objects()) - before <= 128
    held = list(reader.shards)
    opened.clear()
    assert all(same(reader[2 * unit], documents[0]) for unit in held)
    assert opened == []  # what is open is used again


def test_views_outlive_their_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "OPEN_SHARDS", 2)
    documents = make_documents(30, seed=9)
    fill(tmp_path, documents, per_unit=2).finish()
    reader = FeatureReader(tmp_path)
    kept = reader.read(range(30))
    assert list(reader.shards) == [13, 14]
    for path in tmp_path.glob("shard-*"):
        path.unlink()
    reader.shards.clear()
    gc.collect()
    assert all(same(a, b) for a, b in zip(kept, documents, strict=True))
