"""From sources to a corpus: bad rows listed and survived, shares and caps, duplicates, the split, and forms of rows."""

import json
import random
from collections import Counter

import pytest
from conftest import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.configs import UserError
from headwright.configs.schema import CorpusConfig, Source
from headwright.data import corpus, sources
from headwright.data.chat import Renderer
from headwright.data.corpus import Skipped, encode_document, encode_prompt, make_document, read_corpus, read_source


def jsonl(path, rows):
    """JSON Lines; bytes are written as they stand."""
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def asked(documents):
    """First user turns, in order."""
    return [next(turn["content"] for turn in d.messages if turn["role"] == "user") for d in documents]


def mixed(*parts, held_out=0.5, seed=0, **config):
    """The corpus of sources."""
    return read_corpus(CorpusConfig(list(parts), held_out=held_out, **config), seed)


def listed(found):
    """skipped.jsonl."""
    return [json.loads(line) for line in found.skipped.lines()]


# Bad rows


def turns(*pairs):
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def nested(depth):
    return "[" * depth + "]" * depth


BAD = [
    b'{"prompt": "caf\xe9"}',
    b"\xff\xfe",
    b"{",
    b'{"prompt": "a"} {"prompt": "b"}',
    b"[" * 5000,
    b'{"a":' * 3000 + b"1" + b"}" * 3000,
    b"9" * 5000,
    b"null",
    b"NaN",
    b"-1e999",
    b'"text"',
    b"[]",
    b'[{"role": "user", "content": "q"}]',
    b'{"prompt": "\\ud83d"}',
    b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\\udc00"}]}',
    b'{"messages": [{"role": "user", "content": "q", "name": "\\udc00"}]}',
    b'{"text": "' + b"\\ud800 " * 40 + b'"}',
    {},
    {"messages": None, "conversations": None},
    {"messages": [None]},
    {"messages": [[]]},
    {"messages": {"role": "user", "content": "q"}},
    {"messages": "q"},
    {"messages": 5},
    turns(),
    turns(("", "q")),
    turns((None, "q")),
    turns((5, "q")),
    turns(({"a": 1}, "q")),
    turns(("narrator", "q")),
    turns(("USER", "q")),
    turns(("user", "")),
    turns(("user", " \n\t")),
    turns(("user", None)),
    turns(("user", 7)),
    turns(("user", {"text": "q"})),
    turns(("user", [None])),
    turns(("user", ["q"])),
    turns(("user", [{"text": "q"}])),
    turns(("user", [{"type": "text"}])),
    turns(("user", [{"type": "text", "text": 5}])),
    turns(("user", [{"type": "image", "url": "x"}])),
    turns(("user", [{"type": {"a": 1}, "text": "q"}])),
    turns(("user", [])),
    turns(("assistant", "a")),
    turns(("system", "s"), ("assistant", "a")),
    turns(("user", "q"), ("assistant", None)),
    turns(("user", "q"), ("tool", None)),
    turns(("user", "q"), ("", "a")),
    {"messages": [{"role": "user"}]},
    {"messages": [{"content": "q"}]},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": "f()"}]},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [None]}]},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]},
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]},
        ]
    },
    {"conversations": [{"from": "human"}]},
    {"conversations": [{"from": 3, "value": "q"}]},
    {"conversations": [{"value": "q"}]},
    {"prompt": 3},
    {"prompt": ["q"]},
    {"prompt": {"text": "q"}},
    {"prompt": "  "},
    {"question": None, "answer": "a"},
    {"turns": [None]},
    {"turns": ["q", ""]},
    {"turns": "q"},
    {"text": 3},
    {"text": ["a"]},
    {"text": "short"},
    {"text": ""},
    {"input_ids": None},
    {"input_ids": []},
    {"input_ids": [1, 2]},
    {"input_ids": [1, "2"], "loss_mask": [0, 1]},
    {"input_ids": [1, True], "loss_mask": [0, 1]},
    {"input_ids": [1, -2], "loss_mask": [0, 1]},
    {"input_ids": [1.5, 2], "loss_mask": [0, 1]},
    {"input_ids": [1, 2], "loss_mask": [0]},
    {"input_ids": [1, 2], "loss_mask": [0, 2]},
    {"input_ids": [1, 2], "loss_mask": [0, None]},
    {"input_ids": [1, 2], "loss_mask": [0, 0]},
    {"input_ids": [1, 2], "loss_mask": [1, 1]},
    {"input_ids": "1 2", "loss_mask": [0, 1]},
]
FATAL = {
    "arguments nested too deeply": (
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "tool_calls": [{"name": "f", "arguments": nested(9999)}]},
            ]
        },
        "RecursionError of a call's arguments is not caught",
    ),
    "tools nested deeply": (
        b'{"prompt": "q", "tools": ' + nested(700).encode() + b"}",
        "a value that JSON reads and dataclasses.asdict cannot walk: RecursionError",
    ),
    "a name nested deeply": (
        b'{"messages": [{"role": "user", "content": "q", "name": ' + nested(700).encode() + b"}]}",
        "the same in a message",
    ),
}


def five_hundred(seed=0):
    """Every kind of bad row, 500 in all, with 100 good ones between them."""
    rows = [*(BAD * 8)[:500], *({"prompt": f"good {i}", "response": "a"} for i in range(100))]
    random.Random(seed).shuffle(rows)
    rows.insert(250, b'{"prompt": "' + b"x" * (10 << 20) + b'"}')
    return rows


def test_five_hundred_bad_rows(tmp_path, capsys):
    """Each is listed with its file and line; every good row survives."""
    rows = five_hundred()
    path = jsonl(tmp_path / "a.jsonl", rows)
    found = mixed(Source(path=str(path)))
    good = [i for i, row in enumerate(rows, 1) if isinstance(row, dict) and str(row.get("prompt")).startswith("good")]
    assert [d.place for d in found.everything] == [f"{path}:{line}" for line in good]
    bad = sorted(set(range(1, len(rows) + 1)) - set(good))
    assert [row["place"] for row in listed(found)] == [f"{path}:{line}" for line in bad]
    assert all(row["what"] == "malformed rows" and row["why"] for row in listed(found))
    assert listed(found)[bad.index(251)]["why"] == "longer than 8 MiB"
    assert found.skipped.counts == Counter({"malformed rows": 501})
    assert capsys.readouterr().out.count("skipped") == corpus.SHOWN


@pytest.mark.parametrize("row", BAD, ids=lambda row: str(row)[:60])
def test_strict_stops_at_the_first_bad_row(tmp_path, row):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "good 1"}, row, {"prompt": "good 2"}, b"{"])
    with pytest.raises(UserError, match=r"a\.jsonl:2: .* \(corpus\.strict\)"):
        mixed(Source(path=str(path)), strict=True)


@pytest.mark.parametrize("name", FATAL)
def test_deeply_nested_values_are_never_fatal(tmp_path, name):
    row, _ = FATAL[name]
    path = jsonl(tmp_path / "a.jsonl", [row, *({"prompt": f"good {i}"} for i in range(20))])
    found = mixed(Source(path=str(path)))
    assert {f"good {i}" for i in range(20)} <= set(asked(found.everything))


def test_place_is_printed_as_it_is(tmp_path, capsys):
    path = jsonl(tmp_path / "a.jsonl", [b""] * 99 + [b"{"])
    list(read_source(Source(path=str(path)), None, Skipped()))
    assert "a.jsonl:100:" in "".join(capsys.readouterr().out.split())


def test_the_list_is_by_document_too(tmp_path):
    """Stages add what they leave out, and strict stops them as well."""
    skipped = Skipped(rows=corpus.Spool(tmp_path, list, list))
    skipped.add("too long", "a:1", "900 tokens")
    assert list(skipped.lines()) == ['{"place": "a:1", "what": "too long", "why": "900 tokens"}\n']
    assert str(skipped) == "1 too long"
    with pytest.raises(UserError, match="a:1: 900 tokens"):
        Skipped(strict=True).add("too long", "a:1", "900 tokens")


GOOD_ORDERS = [
    (["user"], ["q"]),
    (["system", "user", "assistant"], ["s", "q", "a"]),
    (["assistant", "user", "assistant"], ["hi", "q", "a"]),
    (["user", "user", "assistant", "assistant"], ["q", "q2", "a", "a2"]),
    (["user", "tool", "assistant"], ["q", "r", "a"]),
    (["user", "assistant", "system", "user"], ["q", "", "s", "q2"]),
    (["developer", "user", "function", "ipython"], ["d", "q", "", ""]),
]


@pytest.mark.parametrize(("roles", "texts"), GOOD_ORDERS)
def test_unusual_orders_of_roles_are_kept_as_they_are(roles, texts):
    row = turns(*zip(roles, texts, strict=True))
    document = make_document(row, Source(path="x"), "", None)
    assert [turn["role"] for turn in document.messages] == roles
    assert [turn["content"] for turn in document.messages] == texts


@settings(max_examples=150, deadline=None)
@given(blob=st.binary(max_size=60) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_are_rows_or_listed(tmp_path_factory, blob):
    """As lines of a file between good rows."""
    path = tmp_path_factory.mktemp("bytes") / "a.jsonl"
    path.write_bytes(b'{"prompt": "first"}\n' + blob + b'\n{"prompt": "last"}\n')
    found = list(read_source(Source(path=str(path)), None, Skipped()))
    assert [asked(found)[0], asked(found)[-1]] == ["first", "last"]
    assert found[-1].place == f"{path}:{blob.count(10) + 3}"


# Shares


def source_of(folder, name, count, start=0, **options):
    """A file of `count` prompts."""
    path = folder / f"{name}.jsonl"
    if not path.exists():
        jsonl(path, [{"prompt": f"{name} question {i}"} for i in range(start, start + count)])
    return Source(path=str(path), **options)


def shares(found):
    """Documents by source."""
    return Counter(d.source for d in found.everything)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(20, 60), min_size=2, max_size=3),
    weights=st.lists(st.sampled_from([0.5, 1, 2, 3, 7]), min_size=3, max_size=3),
)
def test_weights_are_shares(tmp_path_factory, sizes, weights):
    """In proportion to within rounding, and no larger mix would be: one source is used whole."""
    folder = tmp_path_factory.mktemp("mix")
    parts = [source_of(folder, "abc"[i], size, weight=weights[i]) for i, size in enumerate(sizes)]
    found = shares(mixed(*parts))
    scale = min(size / weight for size, weight in zip(sizes, weights))
    assert all(abs(found["abc"[i]] - max(1, weights[i] * scale)) <= 0.5 for i in range(len(sizes)))
    assert any(found["abc"[i]] == size for i, size in enumerate(sizes))


def test_two_to_one(tmp_path):
    found = mixed(source_of(tmp_path, "a", 90, weight=2), source_of(tmp_path, "b", 90, weight=1))
    assert shares(found) == {"a": 90, "b": 45}


def test_source_without_weight_is_used_whole(tmp_path):
    parts = [
        source_of(tmp_path, "a", 90, weight=1),
        source_of(tmp_path, "b", 30, weight=1),
        source_of(tmp_path, "c", 50),
    ]
    assert shares(mixed(*parts)) == {"a": 30, "b": 30, "c": 50}


@settings(max_examples=15, deadline=None)
@given(weights=st.lists(st.sampled_from([0.1, 0.3, 0.6, 1.0]), min_size=2, max_size=2), seed=st.integers(0, 3))
def test_lower_weight_is_a_subset(tmp_path_factory, weights, seed):
    folder = tmp_path_factory.mktemp("nested")
    one, two = (
        set(
            asked(
                mixed(
                    source_of(folder, "a", 60),
                    source_of(folder, "b", 60, weight=w),
                    source_of(folder, "c", 60, weight=1),
                    seed=seed,
                ).everything
            )
        )
        for w in sorted(weights)
    )
    assert one <= two


def test_shares_are_not_biased_towards_one_side(tmp_path):
    """A source cut to a tenth keeps a tenth on either side."""
    parts = [source_of(tmp_path, "a", 2000, weight=10), source_of(tmp_path, "b", 2000, weight=1)]
    found = mixed(*parts, held_out=0.25)
    held = sum(d.source == "b" for d in found.held_out)
    assert shares(found)["b"] == 200
    assert abs(held - 50) < 4 * (200 * 0.25 * 0.75) ** 0.5


def test_weight_does_not_move_documents_between_sides(tmp_path):
    part = source_of(tmp_path, "a", 200)
    whole = mixed(part)
    cut = mixed(source_of(tmp_path, "a", 200, weight=1), source_of(tmp_path, "b", 50, weight=1))
    assert {x for x in asked(cut.train) if x.startswith("a")} <= set(asked(whole.train))
    assert {x for x in asked(cut.held_out) if x.startswith("a")} <= set(asked(whole.held_out))


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(30)), limit=st.integers(2, 30), seed=st.integers(0, 2))
def test_limit_chooses_the_same_whatever_the_order(tmp_path_factory, order, limit, seed):
    """Also with the rows of the set twice: duplicates do not count."""
    folder = tmp_path_factory.mktemp("limit")
    rows = [{"prompt": f"question {i}"} for i in range(30)]
    straight = jsonl(folder / "one.jsonl", rows)
    twice = jsonl(folder / "two.jsonl", [rows[i] for i in order] + rows)
    rest = source_of(folder, "rest", 50)
    one, two = (
        mixed(Source(path=str(path), limit=limit, name="x"), rest, seed=seed, held_out=0.5)
        for path in (straight, twice)
    )
    assert shares(one)["x"] == shares(two)["x"] == limit
    assert [set(asked(side)) for side in (one.train, one.held_out)] == [
        set(asked(side)) for side in (two.train, two.held_out)
    ]


def test_streaming_without_limit_is_refused(monkeypatch):
    monkeypatch.setattr(sources, "hub_rows", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(UserError, match="corpus source org/set: streaming needs a limit"):
        mixed(Source(hub="org/set", streaming=True))


# The split


@settings(max_examples=20, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2))
def test_side_depends_on_the_first_user_turn_alone(tmp_path_factory, data, seed):
    """Whatever the source, its format, the form of the row, the order, and duplicates."""
    folder = tmp_path_factory.mktemp("split")
    questions = [f"question {i}" for i in range(24)]
    straight = mixed(Source(path=str(jsonl(folder / "all.jsonl", [{"prompt": q} for q in questions]))), seed=seed)
    forms = [
        lambda q: {"prompt": q},
        lambda q: {"question": f" {q} ", "answer": "a"},
        lambda q: turns(("system", "s"), ("user", q), ("assistant", "a"), ("user", "again"), ("assistant", "b")),
        lambda q: {"conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": q}]},
        lambda q: {"turns": [q.replace(" ", "\n"), "more"]},
        lambda q: turns(("user", [{"type": "text", "text": q}])),
    ]
    picks = data.draw(
        st.lists(st.tuples(st.sampled_from(questions), st.sampled_from(forms), st.booleans()), max_size=20)
    )
    rows = [[form(q) for q, form, where in picks if where == side] for side in (False, True)]
    rows[1] += [{"prompt": q} for q in questions]
    (folder / "one.json").write_text(json.dumps([*rows[0], {"prompt": questions[0]}]))
    parts = [Source(path=str(folder / "one.json")), Source(path=str(jsonl(folder / "two.jsonl", rows[1])))]
    found = mixed(*parts[:: data.draw(st.sampled_from([1, -1]))], seed=seed)
    for side in ("train", "held_out"):
        clean = [" ".join(q.split()) for q in asked(getattr(found, side))]
        assert len(clean) == len(set(clean))
        assert set(clean) == set(asked(getattr(straight, side)))


def test_everything_is_both_sides(tmp_path):
    found = mixed(source_of(tmp_path, "a", 40))
    assert sorted(asked(found.everything)) == sorted([*asked(found.train), *asked(found.held_out)])
    assert found.everything[3] == list(found.everything)[3]


# Duplicates


def lorem(seed, count=60):
    """A text of random words."""
    return [f"w{random.Random(seed * 1000 + i).randrange(5000)}" for i in range(count)]


def test_near_duplicates_are_dropped_across_sources(tmp_path):
    """One word changed of sixty: a near copy. Other texts, and the same words in another order, stay."""
    pytest.importorskip("datasketch")
    texts = [lorem(i) for i in range(30)]
    copies = [[*text[:30], "changed", *text[31:]] for text in texts[:10]]
    shuffled = [text[::-1] for text in texts[20:]]
    one = jsonl(tmp_path / "one.jsonl", [{"prompt": " ".join(text)} for text in texts])
    two = jsonl(tmp_path / "two.jsonl", [{"prompt": " ".join(text)} for text in [*copies, *shuffled]])
    parts = [Source(path=str(one)), Source(path=str(two))]
    found = mixed(*parts, near_duplicates=0.6)
    assert asked(found.everything) == [" ".join(text) for text in [*texts, *shuffled]]
    assert found.skipped.counts == Counter({"near-duplicates": 10})
    assert shares(mixed(*parts)) == {"one": 30, "two": 20}


def test_near_duplicates_count_answers_and_texts(tmp_path):
    """All words of a chat count; short ones are compared, too."""
    pytest.importorskip("datasketch")
    answer = " ".join(lorem(1, 80))
    rows = [{"prompt": f"q{i}", "response": answer} for i in range(2)] + [{"prompt": f"short {i}"} for i in range(9)]
    assert len(mixed(Source(path=str(jsonl(tmp_path / "a.jsonl", rows))), near_duplicates=0.8).everything) == 10


def test_source_of_near_copies_alone(tmp_path):
    pytest.importorskip("datasketch")
    one = jsonl(tmp_path / "one.jsonl", [{"prompt": " ".join(lorem(i))} for i in range(20)])
    two = jsonl(tmp_path / "two.jsonl", [{"prompt": " ".join([*lorem(i), "more"])} for i in range(20)])
    found = mixed(Source(path=str(one)), Source(path=str(two)), near_duplicates=0.6)
    assert shares(found) == {"one": 20}


def test_empty_source_after_duplicates_is_refused(tmp_path):
    one = jsonl(tmp_path / "one.jsonl", [{"prompt": f"q{i // 2}"} for i in range(20)])
    two = jsonl(tmp_path / "two.jsonl", [b"{"])
    with pytest.raises(UserError, match="corpus source two: no usable document"):
        mixed(Source(path=str(one)), Source(path=str(two)))


def test_near_duplicates_need_a_package(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(UserError, match="pip install datasketch"):
        mixed(source_of(tmp_path, "a", 5), near_duplicates=0.5)


# Rows of tokens


@pytest.mark.parametrize("key", ["loss_mask", "mask", "labels_mask"])
@pytest.mark.parametrize("kind", [int, bool])
def test_tokens_are_taken_as_they_are(key, kind):
    ids, mask = [5, 6, 7, 8, 9], [0, 0, 1, 0, 1]
    row = {"input_ids": ids, key: [kind(on) for on in mask], "text": "not read"}
    document = make_document(row, Source(path="set.jsonl", samples=2), "set.jsonl:1", "not added")
    renderer = Renderer(make_tokenizer())
    encoded = encode_document(document, renderer)
    assert (encoded.ids, encoded.mask) == (ids, [bool(on) for on in mask])
    assert encode_prompt(document, renderer) == [5, 6]
    assert (document.source, document.samples, document.place) == ("set", 2, "set.jsonl:1")


def test_tokens_are_split_and_deduplicated_by_their_prompt(tmp_path):
    rows = [{"input_ids": [i, i + 1, 100 + j], "loss_mask": [0, 0, 1]} for i in range(40) for j in range(2)]
    found = mixed(Source(path=str(jsonl(tmp_path / "a.jsonl", rows))))
    assert sorted(d.ids[0] for d in found.everything) == list(range(40))
    assert found.skipped.counts["duplicates"] == 40
    assert all(type(on) is bool for d in found.everything for on in d.mask)


# Rows of chats


@pytest.mark.parametrize(("given_role", "role"), [*corpus.ROLES.items(), *((r, r) for r in sorted(corpus.KNOWN_ROLES))])
def test_roles(given_role, role):
    row = {"messages": [{"role": "user", "content": "q"}, {"from": given_role, "value": "x"}]}
    assert make_document(row, Source(path="x"), "", None).messages[1] == {"role": role, "content": "x"}


def test_unknown_role_is_named():
    with pytest.raises(ValueError, match="unknown role 'narrator': expected one of assistant, developer"):
        make_document(turns(("narrator", "q")), Source(path="x"), "", None)


@pytest.mark.parametrize(
    "role",
    [
        "system",
        "developer",
    ],
)
def test_system_prompt_is_not_added_to_a_chat_that_has_one(role):
    row = turns((role, "own"), ("user", "q"))
    assert len(make_document(row, Source(path="x"), "", "be brief").messages) == 2


def test_content_parts():
    """Text parts are joined; reasoning parts become the reasoning."""
    parts = [
        {"type": "thinking", "thinking": "hm "},
        {"type": "reasoning", "reasoning": "so"},
        {"type": "text", "text": "one "},
        {"type": "text", "text": "two"},
    ]
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": parts},
        ]
    }
    asked_turn, said_turn = make_document(row, Source(path="x"), "", None).messages
    assert asked_turn == {"role": "user", "content": "q"}
    assert said_turn == {"role": "assistant", "content": "one two", "reasoning_content": "hm so"}


def test_empty_content_part():
    row = turns(("user", "q"), ("assistant", [{"type": "text", "text": ""}, {"type": "text", "text": "a"}]))
    assert make_document(row, Source(path="x"), "", None).messages[1]["content"] == "a"


def test_keys_of_a_message():
    """Reasoning and calls are the assistant's alone; names and ids are kept; nulls and other keys are not."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, null]}'}}
    row = {
        "messages": [
            {"role": "user", "content": "q", "name": "Ann", "reasoning": "x", "tool_calls": [call], "weight": 1},
            {"role": "assistant", "content": None, "tool_calls": [call], "thinking": "hm", "name": None},
            {"role": "tool", "content": "r", "tool_call_id": "c1"},
            {"role": "assistant", "content": "", "reasoning_content": "so"},
        ],
        "tools": [{"type": "function"}],
    }
    document = make_document(row, Source(path="x"), "", None)
    parsed = {"type": "function", "function": {"name": "f", "arguments": {"a": [1, None]}}, "id": "c1"}
    assert document.messages == (
        {"role": "user", "content": "q", "name": "Ann"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [parsed]},
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "reasoning_content": "so"},
    )
    assert document.tools == [{"type": "function"}]


def test_documents_survive_the_disk(tmp_path):
    """Every kind of document is read back equal."""
    rows = [
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
        {"text": "a few words of text"},
        turns(("user", "Привет 👩‍👩‍👧"), ("assistant", "да")),
        {**turns(("user", "q")), "tools": [{"name": "f", "n": 1.5, "none": None}]},
        {
            "messages": [
                {"role": "user", "content": "r"},
                {"role": "assistant", "tool_calls": [{"name": "f"}], "content": ""},
            ]
        },
        *({"prompt": f"q{i}"} for i in range(20)),
    ]
    source = Source(path=str(jsonl(tmp_path / "a.jsonl", rows)), words=2, samples=3)
    made = [make_document(row, source, f"{source.path}:{i}", None) for i, row in enumerate(rows, 1)]
    assert list(mixed(source).everything) == made
    limited = list(mixed(Source(path=source.path, words=2, samples=3, limit=99)).everything)
    assert limited == made
