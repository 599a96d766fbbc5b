"""Files → rows: every format gives the same rows at the right places, and what is broken is reported, never fatal."""

import csv
import gzip
import io
import json
import os
import tracemalloc
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.configs import UserError
from headwright.configs.schema import CorpusConfig, Source
from headwright.data import corpus, sources
from headwright.data.corpus import Skipped, read_corpus, read_source
from headwright.data.sources import Malformed, file_rows, matching
from headwright.data.spool import Spool, View


def table_value(value):
    """What a table's cell holds: chats as JSON."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def table_text(rows, delimiter):
    """Separated values; columns are those of all rows."""
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)), delimiter=delimiter)
    writer.writeheader()
    writer.writerows({key: table_value(value) for key, value in row.items()} for row in rows)
    return out.getvalue()


def arrow_bytes(rows, new):
    """An Arrow file or stream in batches of two rows."""
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


def parquet_bytes(rows, **options):
    """A Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue().to_pybytes()


def lines(rows):
    """JSON Lines."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


WRITERS = {
    "a.jsonl": lines,
    "ascii.jsonl": lambda rows: "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode(),
    "crlf.jsonl": lambda rows: lines(rows).replace(b"\n", b"\r\n"),
    "bom.jsonl": lambda rows: b"\xef\xbb\xbf" + lines(rows),
    "a.json": lambda rows: json.dumps(rows).encode(),
    "bom.json": lambda rows: b"\xef\xbb\xbf" + json.dumps(rows, indent=1).encode(),
    "data.json": lambda rows: json.dumps({"version": "1", "data": rows}).encode(),
    "rows.json": lambda rows: json.dumps({"rows": rows}).encode(),
    "a.csv": lambda rows: table_text(rows, ",").encode(),
    "bom.csv": lambda rows: b"\xef\xbb\xbf" + table_text(rows, ",").encode(),
    "a.tsv": lambda rows: table_text(rows, "\t").encode(),
    "a.parquet": parquet_bytes,
    "json.parquet": lambda rows: parquet_bytes([{k: table_value(v) for k, v in row.items()} for row in rows]),
    "a.arrow": lambda rows: arrow_bytes(rows, pa.ipc.new_file),
    "stream.arrow": lambda rows: arrow_bytes(rows, pa.ipc.new_stream),
}
PLAIN = [name for name in WRITERS if not name.endswith((".parquet", ".arrow"))]
NAMES = [
    *WRITERS,
    *(f"{name}.gz" for name in PLAIN),
    *(f"{name}.zst" for name in PLAIN),
]


def write(path, rows):
    """The rows in the format of the file's name."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    blob = WRITERS.get(name, WRITERS["a" + Path(name).suffix])(rows)
    path.write_bytes(pack(path.suffix, blob))
    return path


def pack(suffix, blob):
    """Bytes, compressed as the suffix says."""
    if suffix == ".zst":
        return pytest.importorskip("zstandard").ZstdCompressor().compress(blob)
    return gzip.compress(blob) if suffix == ".gz" else blob


def documents(path, **source):
    """The documents of a source, and what was skipped."""
    skipped = Skipped(rows=Spool(None, list, list))
    return list(read_source(Source(path=str(path), **source), None, skipped)), [json.loads(x) for x in skipped.lines()]


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(str.strip)
CHAT = st.lists(WORDS, min_size=1, max_size=3).map(
    lambda texts: {"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]}
)
PAIR = st.builds(lambda q, a: {"prompt": q, "response": a}, WORDS, WORDS).filter(
    lambda row: not any(value.lstrip().startswith("[") for value in row.values())  # see the test of such texts
)
ROWS = st.lists(CHAT, min_size=1, max_size=5) | st.lists(PAIR, min_size=1, max_size=5)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(rows=ROWS)
def test_every_format_gives_the_same_documents(tmp_path_factory, name, rows):
    path = write(tmp_path_factory.mktemp("rows") / name, rows)
    found, skipped = documents(path)
    assert skipped == []
    expected = [corpus.make_document(row, Source(path=str(path)), "", None) for row in rows]
    assert [(d.messages, d.key, d.source) for d in found] == [(d.messages, d.key, d.source) for d in expected]


FIVE = [{"prompt": f"question {i}", "response": f"answer {i}"} for i in range(5)]


@pytest.mark.parametrize("name", [n for n in NAMES if not any(kind in str(n) for kind in (".csv", ".tsv"))])
def test_places(tmp_path, name):
    path = write(tmp_path / name, FIVE)
    expected = [f"{path}:{i + 1}" if ".jsonl" in name else f"{path}[{i}]" for i in range(5)]
    assert [place for place, _ in file_rows(path)] == expected


@pytest.mark.parametrize("name", ["a.csv", "bom.csv", "a.tsv.gz", "a.csv.zst"])
def test_places_in_tables(tmp_path, name):
    path = write(tmp_path / name, FIVE)
    assert [place for place, _ in file_rows(path)] == [f"{path}:{line}" for line in range(2, 7)]


def test_places_skip_empty_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n\r\n{"prompt": "a"}\n  \n{"prompt": "b"}')
    assert [place for place, _ in file_rows(path)] == [f"{path}:3", f"{path}:5"]


def test_places_of_a_table(tmp_path):
    """The line on which a row begins: after the header, empty lines, a value of two lines and a refused row."""
    path = tmp_path / "a.csv"
    path.write_bytes(b'prompt,response\nq1,a1\n\n"two\nlines",a2\nx,y,z\nq3,a3\n')
    assert [int(place.rsplit(":", 1)[1]) for place, _ in file_rows(path)] == [2, 4, 6, 7]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".md"])
def test_plain_text_is_the_same_packed_or_not(tmp_path, kind, suffix):
    """A text of several blocks and many pieces: all of it, in order, each piece at its block's line."""
    text = "".join(f"word{i:06d} наука\n" for i in range(20_000))
    path = tmp_path / f"a{kind}{suffix}"
    path.write_bytes(pack(suffix, b"\xef\xbb\xbf" + text.encode()))
    rows = list(file_rows(path))
    assert "".join(row["text"] for _, row in rows) == text
    assert len(rows) > 1
    starts = [int(place.rsplit(":", 1)[1]) for place, _ in rows]
    assert [text.splitlines()[start - 1] for start in starts] == [row["text"].splitlines()[0] for _, row in rows]
    found, skipped = documents(path, words=5)
    assert ("".join(document.text for document in found), skipped) == (text, [])


def test_plain_text_with_windows_line_ends(tmp_path):
    text = "".join(f"word{i} and more\n" for i in range(99))
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(text.replace("\n", "\r\n").encode())
    one, two = (documents(tmp_path / name, words=5)[0] for name in ("a.txt", "b.txt"))
    assert [d.key for d in one] == [d.key for d in two]


def test_broken_line_of_a_text_is_left_out(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one two three\ncaf\xe9\nfour five six\n")
    found, skipped = documents(path, words=2)
    assert [document.text for document in found] == ["one two three\nfour five six\n"]
    assert [(row["place"], row["why"]) for row in skipped] == [(f"{path}:2", "not UTF-8 at byte 3")]


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl",
        *(n for n in ("a.csv", "a.tsv", "a.parquet", "a.arrow")),
    ],
)
def test_text_that_looks_like_a_list_stays_text(tmp_path, name):
    rows = [{"prompt": "primes below 6?", "response": "[2, 3, 5]"}, {"prompt": '["a"]', "response": "b"}]
    found, skipped = documents(write(tmp_path / name, rows))
    assert skipped == []
    assert [[turn["content"] for turn in d.messages] for d in found] == [list(row.values()) for row in rows]


MIXED = [
    {"prompt": "q1", "response": "a1"},
    {"messages": [{"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"}]},
    {"conversations": [{"from": "human", "value": "q3"}, {"from": "gpt", "value": "a3"}]},
    {"text": "some words in a row"},
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
]


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl",
        "a.csv",
        "a.parquet",
        "a.arrow",
    ],
)
def test_columns_that_a_row_does_not_use_are_empty(tmp_path, name):
    """Tables have every column in every row."""
    keys = {key: None for row in MIXED for key in row}
    found, skipped = documents(write(tmp_path / name, [keys | row for row in MIXED]), words=2)
    assert skipped == []
    assert [[turn["content"] for turn in d.messages] or d.text or list(d.ids) for d in found] == [
        ["q1", "a1"],
        ["q2", "a2"],
        ["q3", "a3"],
        "some words in a row",
        [1, 2, 3],
    ]


def test_pattern_reads_files_in_the_order_of_their_names(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz", "c.csv", "sub/d.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        kind = "a." + name.split(".", 1)[1]
        blob = WRITERS[kind.removesuffix(".gz")]([{"prompt": f"in {name}"}])
        (tmp_path / name).write_bytes(pack(tmp_path.joinpath(name).suffix, blob))
    (tmp_path / "sub" / "notes.xyz").write_text("never read")
    asked = [d.messages[0]["content"] for d in documents(tmp_path / "*.*")[0]]
    assert asked == ["in a.jsonl.gz", "in b.jsonl", "in c.csv"]
    assert [path.name for path in matching(str(tmp_path / "**" / "*.[pj]*"))] == ["a.jsonl.gz", "b.jsonl", "d.parquet"]


def test_file_whose_name_is_a_pattern(tmp_path):
    path = write(tmp_path / "a.jsonl", FIVE).rename(tmp_path / "set[1]*.jsonl")
    assert len(documents(path)[0]) == 5


@pytest.mark.parametrize("name", ["a.xls", "a", "a.jsonl.bz2", "a.parquet.gz", "a.arrow.zst", ".gz", "*"])
def test_unknown_suffix_is_refused_before_anything_is_read(tmp_path, name, monkeypatch):
    monkeypatch.setattr(sources, "open_file", lambda path: pytest.fail("a file was opened"))
    good = write(tmp_path / "good.jsonl", FIVE)
    (tmp_path / ("odd.xyz" if name == "*" else name)).write_bytes(b"")
    config = CorpusConfig([Source(path=str(good)), Source(path=str(tmp_path / name))])
    with pytest.raises(UserError, match=r"expected \.jsonl, .* also as \.gz and \.zst"):
        read_corpus(config, 0)


def test_no_match_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "open_file", lambda path: pytest.fail("a file was opened"))
    config = CorpusConfig(
        [Source(path=str(write(tmp_path / "good.jsonl", FIVE))), Source(path=str(tmp_path / "*.csv"))]
    )
    with pytest.raises(UserError, match=r"\*\.csv: no such file"):
        read_corpus(config, 0)


def test_unreadable_file_is_a_user_error(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sources, "open_file", refuse)
    with pytest.raises(UserError, match=r"a\.jsonl: Permission denied"):
        list(file_rows(write(tmp_path / "a.jsonl", FIVE)))


# Torn and broken files

MANY = [{"prompt": f"question {i} {zlib.crc32(str(i).encode())}", "response": f"answer {i}"} for i in range(300)]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.parquet", "a.arrow", "stream.arrow", "a.json"])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_torn_file_is_reported_once(tmp_path, name, share):
    """Rows before the tear are kept where the format allows it; the next file is read."""
    path = write(tmp_path / name, MANY)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    rows = list(file_rows(path))
    broken = [(place, row) for place, row in rows if isinstance(row, Malformed)]
    assert len(broken) == 1
    assert broken[0] == rows[-1]
    assert broken[0][0].startswith(str(path))
    assert [row for _, row in rows[:-1]] == MANY[: len(rows) - 1]
    if name.endswith(".gz"):
        assert len(rows) > 20
    write(tmp_path / "b.jsonl", FIVE)
    assert len(documents(tmp_path / "*.*")[0]) == len(rows) - 1 + 5


@pytest.mark.parametrize("name", ["a.csv.zst", "a.jsonl.zst"])
def test_torn_zst_is_reported(tmp_path, name):
    rows_in = [{"prompt": f"question {i} {zlib.crc32(str(i).encode())}", "response": "a"} for i in range(12_000)]
    path = write(tmp_path / name, rows_in)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    *rows, (_, last) = file_rows(path)
    assert isinstance(last, Malformed)
    assert "breaks off" in str(last)
    assert [row for _, row in rows] == rows_in[: len(rows)]
    assert len(rows) > 100


def test_zst_of_several_frames_is_read_whole(tmp_path):
    """As several packers, and `cat`, write it."""
    path, blob = tmp_path / "a.csv.zst", table_text(MANY, ",").encode()
    path.write_bytes(pack(".zst", blob[:5000]) + pack(".zst", blob[5000:]))
    assert [row for _, row in file_rows(path)] == MANY


def test_gz_of_several_members_is_read_whole(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(MANY[:150])) + gzip.compress(lines(MANY[150:])))
    assert [row for _, row in file_rows(path)] == MANY


FLIPPED = [
    "a.jsonl.gz",
    "a.parquet",
    "a.json.zst",
    "a.csv",
]


@pytest.mark.parametrize("name", FLIPPED)
def test_flipped_bytes_are_never_fatal(tmp_path, name):
    blob = write(tmp_path / name, MANY).read_bytes()
    for place in range(0, len(blob), max(1, len(blob) // 60)):
        broken = bytearray(blob)
        broken[place] ^= 0x55
        (tmp_path / name).write_bytes(broken)
        assert all(place.startswith(str(tmp_path / name)) for place, _ in file_rows(tmp_path / name))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow", "a.jsonl.gz", "a.txt"])
@pytest.mark.parametrize("blob", [b"", b"\x00" * 64, b"PAR1", b"\xff\xfe{\x00}\x00", b"\n\n"])
def test_empty_and_foreign_files_are_never_fatal(tmp_path, name, blob):
    (tmp_path / name).write_bytes(blob)
    assert documents(tmp_path / name)[0] == []


def test_arrow_value_that_python_cannot_hold(tmp_path):
    table = pa.table({"prompt": ["q1", "q2", "q3"], "when": pa.array([0, 10**15, 0], pa.timestamp("s"))})
    pq.write_table(table, tmp_path / "a.parquet")
    found, skipped = documents(tmp_path / "a.parquet")
    assert [d.messages[0]["content"] for d in found] == ["q1", "q3"]
    assert [row["place"] for row in skipped] == [f"{tmp_path / 'a.parquet'}[1]"]


def test_arrow_value_that_json_cannot_hold(tmp_path):
    turn = pa.struct({"role": pa.string(), "content": pa.string(), "name": pa.binary()})
    rows = [[{"role": "user", "content": text, "name": b"x"}] for text in "ab"]
    pq.write_table(pa.table({"messages": pa.array(rows, pa.list_(turn))}), tmp_path / "a.parquet")
    documents(tmp_path / "a.parquet")


# Memory


@pytest.mark.parametrize("size", [9, 10, 11, 20, 30, 31])
@pytest.mark.parametrize("end", ["", "\n"])
def test_long_line_is_reported_and_passed(tmp_path, monkeypatch, size, end):
    """Lines of any length around the limit and its multiples: the neighbours are read, lines stay counted."""
    monkeypatch.setattr(sources, "LONGEST", 10)
    path = tmp_path / "a.jsonl"
    path.write_text("1\n" + "2" * size + "\n3\n" + "4" * size + end)
    rows = list(file_rows(path))
    assert [place for place, _ in rows] == [f"{path}:{number}" for number in (1, 2, 3, 4)]
    kinds = [type(row) for _, row in rows]
    assert kinds == ([int] * 4 if size == 9 else [int, Malformed, int, Malformed])


def peak_of(path):
    """The most memory that reading a file takes, and the rows."""
    tracemalloc.start()
    try:
        rows = [(place, str(row)[:80]) for place, row in file_rows(path)]
        return tracemalloc.get_traced_memory()[1], rows
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl",
        "a.txt",
        "a.jsonl.gz",
        "a.csv",
    ],
)
def test_long_line_is_not_held(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "LONGEST", 1 << 16)
    path, row = tmp_path / name, lines([{"prompt": "x" * (10 << 20)}])
    path.write_bytes(pack(path.suffix, b"prompt\n" + row + b"good\n"))
    peak, rows = peak_of(path)
    assert peak < 3 << 20
    assert any("longer than" in row or "limit" in row for _, row in rows)


def test_reading_holds_a_few_rows_only(tmp_path):
    rows = [{"prompt": f"{i} " + "x" * 1000} for i in range(20_000)]
    for name in ("a.jsonl", "a.csv", "a.jsonl.gz"):
        tracemalloc.start()
        count = sum(1 for _ in file_rows(write(tmp_path / name, rows)))
        tracemalloc.stop()
        assert count == len(rows)
        tracemalloc.start()
        count = sum(1 for _ in file_rows(tmp_path / name))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (count, peak < 2 << 20) == (len(rows), True)


# Hub


def test_hub_rows(monkeypatch):
    """Rows and places of a data set, streamed or not; whatever the library raises is one message."""
    import datasets

    rows = datasets.Dataset.from_list(FIVE)
    calls = []

    def load(hub, config, **options):
        calls.append((hub, config, options))
        return rows.to_iterable_dataset() if options["streaming"] else rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    whole = list(sources.source_rows(Source(hub="org/set", config="main", split="test"), 0))
    assert whole == [(f"org/set[{i}]", row) for i, row in enumerate(FIVE)]
    assert calls == [("org/set", "main", {"split": "test", "revision": None, "streaming": False})]
    streamed = [list(sources.source_rows(Source(hub="org/set", streaming=True, limit=3), 0)) for _ in range(2)]
    assert streamed[0] == streamed[1]
    assert len(streamed[0]) == 3
    assert all(row in FIVE for _, row in streamed[0])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: 1 / 0)
    with pytest.raises(UserError, match="corpus hub org/set: division by zero"):
        list(sources.source_rows(Source(hub="org/set"), 0))


# Spool

VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(), max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(records=st.lists(VALUE, max_size=8), data=st.data())
def test_spool_is_a_list(records, data):
    """Also with lone surrogates; a view is the same list, chosen and ordered."""
    spool = Spool(None, lambda record: record, lambda record: record)
    assert [spool.append(record) for record in records] == list(range(len(records)))
    assert (list(spool), len(spool)) == (records, len(records))
    numbers = data.draw(st.lists(st.integers(0, len(records) - 1))) if records else []
    view = View(spool, numbers)
    assert list(view) == [view[index] for index in range(len(view))] == [records[number] for number in numbers]


def test_spool_writes_on_when_the_disk_takes_a_part(monkeypatch):
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, blob, place: whole(file, blob[:3], place))
    spool = Spool(None, str, str)
    for word in ("a", "several letters", ""):
        spool.append(word)
    assert list(spool) == ["a", "several letters", ""]


def test_spool_leaves_no_file(tmp_path):
    spool = Spool(tmp_path / "new", str, str)
    spool.append("x" * 9999)
    assert list((tmp_path / "new").iterdir()) == []


def test_spool_holds_no_records():
    spool = Spool(None, str, str)
    spool.append("warm")
    tracemalloc.start()
    for number in range(3000):
        spool.append(f"{number} " + "x" * 3000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert spool[2999].startswith("2998 ")
