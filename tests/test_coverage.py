"""What a draft vocabulary covers: counts, shares by script and source, and the bound on τ, each against a plain count."""

import random
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from conftest import SPECIAL, TAPS, make_tokenizer, tiny_run
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.configs import UserError, dump
from headwright.configs.schema import RunConfig, VocabConfig
from headwright.data.batch import Answer, answers_of, runs_of
from headwright.data.coverage import Bound, cover, main, show, show_sizes
from headwright.data.harvest import harvest, store_path
from headwright.data.scripts import NO_LETTERS, script_of
from headwright.data.store import FeatureReader
from headwright.data.target import Target
from headwright.data.vocab import (
    DraftVocab,
    build_vocab,
    byte_pieces,
    choose_vocab,
    count_tokens,
    coverage,
    full_vocab,
    group_counts,
    grouped,
    pinned_ids,
)
from headwright.eval.rollout_tau import replay
from headwright.heads.saved import load_head
from headwright.train.run import train

TEXTS = {
    "Cyrillic": "Привет, мир",
    "Latin": "Hello, wörld",
    "Han": "你好世界",
    "Kana": "こんにちは カタカナー",
    "Hangul": "안녕하세요",
    "Arabic": "مرحبا بالعالم",
    "Devanagari": "नमस्ते दुनिया",
    "Greek": "Γειά σου",
    "Hebrew": "שלום עולם",
    "Thai": "สวัสดีชาวโลก",
}


# Scripts


@pytest.mark.parametrize(("script", "text"), TEXTS.items())
def test_script_of_a_text(script, text):
    assert script_of(text) == script
    assert script_of(f"12 + 34 = {text}!") == script


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("слово и word", "Cyrillic"),
        ("a word и", "Latin"),
        ("漢字とかなまじり", "Kana"),
        ("東京都庁へ", "Han"),
        ("", NO_LETTERS),
        ("12,345.67 %", NO_LETTERS),
        ("🙂 → ∑ \n", NO_LETTERS),
        ("٣٤٥", NO_LETTERS),
        ("\ufffd\ufffd", NO_LETTERS),
        ("\ue000", NO_LETTERS),
    ],
)
def test_script_of_mixed_text(text, script):
    assert script_of(text) == script


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([*"abcdeабвгд你好世", *" 12.,"]), max_size=20))
def test_script_is_that_of_most_letters(letters):
    counts = Counter({"Latin": 0, "Cyrillic": 0, "Han": 0})
    for letter in letters:
        counts.update({"Latin"} if letter in "abcde" else {"Cyrillic"} if letter in "абвгд" else ())
        counts.update({"Han"} if letter in "你好世" else ())
    found = script_of("".join(letters))
    assert counts[found] == max(counts.values()) if max(counts.values()) else found == NO_LETTERS


@pytest.mark.parametrize(
    ("letter", "script"),
    [("ｱ", "Kana"), ("Ａ", "Latin"), ("々", "Han"), ("ﾊ", "Kana"), ("ª", "Latin"), ("ℂ", "Latin"), ("µ", "Greek")],
)
def test_script_of_odd_letters(letter, script):
    assert script_of(letter) == script


# Groups


def answer(tokenizer, text: str, source: str = "s") -> Answer:
    """An answer whose argmax is its own text."""
    ids = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.long)
    return Answer(source, ids, ids.clone())


LINES = st.lists(st.sampled_from([*TEXTS.values(), "12 34", "", "  ", "a"]), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), LINES), min_size=1, max_size=4))
def test_a_piece_of_a_letter_counts_to_the_script_of_its_line(texts):
    """The tokenizer spells every letter in several bytes, and none of these has a script."""
    tokenizer = make_tokenizer()
    found = group_counts(
        SimpleNamespace(answers=lambda: (answer(tokenizer, "\n".join(lines), source) for source, lines in texts)),
        tokenizer,
        torch.zeros(272, dtype=torch.long),
    )
    wanted: dict[str, Counter] = {}
    for source, lines in texts:
        whole = "\n".join(lines)
        if whole:
            wanted.setdefault(source, Counter()).update(tokenizer(whole)["input_ids"])
        for line in whole.splitlines(keepends=True):
            wanted.setdefault(script_of(line), Counter()).update(tokenizer(line)["input_ids"])
    found = {name: counts for name, counts in found.items() if counts.any()}
    assert found.keys() == wanted.keys()
    for name, counts in found.items():
        assert {i: int(counts[i]) for i in counts.nonzero()[:, 0].tolist()} == wanted[name]


def test_lines_are_cut_behind_every_token_with_a_line_break():
    tokenizer = make_tokenizer()
    parts = list(grouped([answer(tokenizer, "привет\nhello\n\n12")], tokenizer))
    assert [(name, tokenizer.decode(part.ids)) for name, part in parts] == [
        (("source", "s"), "привет\nhello\n\n12"),
        (("script", "Cyrillic"), "привет\n"),
        (("script", "Latin"), "hello\n"),
        (("script", NO_LETTERS), "\n"),
        (("script", NO_LETTERS), "12"),
    ]
    assert all(torch.equal(part.ids, part.argmax) for _, part in parts)


def test_a_source_named_like_a_script_is_not_counted_twice():
    tokenizer = make_tokenizer()
    found = cover(full_vocab(272), grouped([answer(tokenizer, "hello", "Latin")], tokenizer), 5)
    assert all(group.tokens == 5 for group in found.values())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=6))
def test_counts_equal_bincount(pieces):
    counts = count_tokens([torch.tensor(piece, dtype=torch.long) for piece in pieces], 10)
    flat = [token for piece in pieces for token in piece]
    assert torch.equal(counts, torch.bincount(torch.tensor(flat, dtype=torch.long), minlength=10))
    assert {i: n for i, n in enumerate(counts.tolist()) if n} == Counter(flat)


# Coverage


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 9)), min_size=1))),
    st.sets(st.integers(0, 9), min_size=1),
)
def test_table_equals_a_plain_count(made, kept):
    vocab = DraftVocab(torch.tensor(sorted(kept)), 10)
    pieces = [
        (name, Answer(name, torch.tensor([i for i, _ in pairs]), torch.tensor([a for _, a in pairs])))
        for name, pairs in made
    ]
    found = cover(vocab, pieces, 3)
    assert found.keys() == {name for name, _ in made}
    sizes = [group.tokens for group in found.values()]
    assert sizes == sorted(sizes, reverse=True)
    for name, group in found.items():
        ids = [i for source, pairs in made if source == name for i, _ in pairs]
        chosen = [a for source, pairs in made if source == name for _, a in pairs if a >= 0]
        assert (group.tokens, group.inside) == (len(ids), sum(i in kept for i in ids))
        assert (group.chosen, group.chosen_inside) == (len(chosen), sum(a in kept for a in chosen))
        assert group.ids == set(ids)
        shown = group.row(name)
        assert shown[:4] == (name, len(ids), len(set(ids)), f"{sum(i in kept for i in ids) / len(ids):.2%}")
        assert shown[4] == (f"{sum(a in kept for a in chosen) / len(chosen):.2%}" if chosen else "–")


def perfect(ids: list[int], kept: set[int], depth: int) -> torch.Tensor:
    """What `agreement` says of a head that guesses every token right that it can say."""
    ahead = torch.zeros(len(ids), depth, dtype=torch.bool)
    for row in range(len(ids)):
        for step in range(depth):
            ahead[row, step] = row + 2 + step < len(ids) and ids[row + 2 + step] in kept
    return ahead


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.sets(st.integers(0, 5)), st.integers(1, 6))
def test_bound_is_what_a_perfect_head_reaches(ids, kept, depth):
    prompt = [9, 9, 9]
    mask = torch.tensor([False] * 3 + [True] * len(ids))
    cycles = replay(mask, perfect(prompt + ids, kept, depth))
    bound = Bound(depth)
    bound.add([token in kept for token in ids])
    assert (bound.cycles, bound.emitted) == (len(cycles.emitted), sum(cycles.emitted))
    assert bound.tau == pytest.approx(cycles.acceptance_length, nan_ok=True)


@pytest.mark.parametrize("later", [[0, 1, 1, 1, 1, 1, 1], [1, 1]])
def test_bound_of_a_chat_of_several_turns(later):
    """Every turn starts anew with a token of the target: a head may reach more than the bound that is shown."""
    first, kept = [1] * 7, {1}
    ids = [9, 9, *first, 9, 9, 9, *later]
    mask = torch.tensor([False] * 2 + [True] * len(first) + [False] * 3 + [True] * len(later))
    parts = [(("source", "s"), part) for part in answers_of("s", torch.tensor(ids), mask, None)]
    [group] = cover(DraftVocab(torch.tensor([1]), 10), parts, 5).values()
    cycles = replay(mask, perfect(ids, kept, 5))
    assert (group.bound.cycles, group.bound.emitted) == (len(cycles.emitted), sum(cycles.emitted))


def test_lines_of_a_script_have_no_bound():
    """A line is no answer: what a head reaches over a whole answer says nothing about it, and the other way round."""
    tokenizer = make_tokenizer()
    found = cover(full_vocab(272), grouped([answer(tokenizer, "a\n" * 61)], tokenizer), 5)
    assert found["script", "Latin"].bound is None
    assert found["source", "s"].bound.tau > 5


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_full_vocabulary_is_bounded_by_the_depth_alone(depth):
    bound = Bound(depth)
    for _ in range(3):
        bound.add([True] * (1 + 40 * (depth + 1)))
    assert bound.tau == depth + 1


# Quotas


def has_share(vocab, counts, share, size):
    """The group's own most frequent tokens take at least its share, when it has as many."""
    place = int(Fraction(str(share)) * size)
    top = [i for i in torch.argsort(counts, descending=True, stable=True).tolist() if counts[i] > 0][:place]
    return set(top) <= set(vocab.ids_W.tolist())


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_each_group_has_its_share_and_the_rest_goes_by_frequency(data):
    one, two = (data.draw(st.lists(st.integers(0, 9), min_size=24, max_size=24)) for _ in range(2))
    groups = {"one": torch.tensor(one), "two": torch.tensor(two)}
    counts = groups["one"] + groups["two"]
    pinned = sorted(data.draw(st.sets(st.integers(0, 23), max_size=3)))
    usable = [i for i in range(24) if counts[i] or i in pinned]
    if len(usable) <= len(pinned) + 1 or len(usable) == 24:
        return
    size = data.draw(st.integers(len(pinned) + 1, len(usable)))
    shares = data.draw(st.sampled_from([(0.5, 0.5), (0.25, 0.5), (0.0, 1.0), (0.1, 0.2)]))
    quotas = dict(zip(groups, shares))
    vocab = build_vocab(counts, size, pinned, groups, quotas)
    kept = set(vocab.ids_W.tolist())
    assert len(kept) == len(vocab) == size
    assert vocab.ids_W.tolist() == sorted(kept)
    assert set(pinned) <= kept
    assert all(counts[i] > 0 or i in pinned for i in kept)
    forced = set(pinned)
    for name, share in quotas.items():
        assert has_share(vocab, groups[name], share, size - len(pinned))
        order = sorted(range(24), key=lambda i: (-groups[name][i], i))[: int(share * (size - len(pinned)))]
        forced |= {i for i in order if groups[name][i] > 0}
    rest = sorted((i for i in range(24) if i not in forced), key=lambda i: (-counts[i], i))
    assert kept == forced | set(rest[: size - len(forced)])


def test_a_rare_script_gets_places_that_frequency_would_not_give():
    counts = {"big": torch.tensor([90, 80, 70, 60, 0, 0, 0]), "small": torch.tensor([0, 0, 0, 0, 3, 2, 1])}
    total = counts["big"] + counts["small"]
    assert build_vocab(total, 4, []).ids_W.tolist() == [0, 1, 2, 3]
    assert build_vocab(total, 4, [], counts, {"small": 0.5}).ids_W.tolist() == [0, 1, 4, 5]
    assert build_vocab(total, 5, [6], counts, {"small": 0.5}).ids_W.tolist() == [0, 1, 4, 5, 6]
    assert build_vocab(total, 4, [], counts, {"small": 0.0}).ids_W.tolist() == [0, 1, 2, 3]


def test_a_share_is_not_rounded_below_itself():
    counts = torch.arange(200, 0, -1)
    groups = {"rare": torch.where(torch.arange(200) >= 100, counts, 0)}
    vocab = build_vocab(counts, 100, [], groups, {"rare": 0.29})
    assert int((vocab.ids_W >= 100).sum()) == 29


def test_bad_quotas_are_refused():
    groups = {"Latin": torch.tensor([3, 2, 1]), "Han": torch.tensor([0, 1, 1])}
    counts = groups["Latin"] + groups["Han"]
    with pytest.raises(UserError, match=r"vocab\.quotas add up to 1\.1"):
        build_vocab(counts, 2, [], groups, {"Latin": 0.6, "Han": 0.5})
    with pytest.raises(UserError, match=r"vocab\.quotas\.Klingon: no such script or source .*: Latin, Han"):
        build_vocab(counts, 2, [], groups, {"Klingon": 0.1})
    assert len(build_vocab(counts, 2, [], groups, {"Latin": 0.5, "Han": 0.5})) == 2


def test_shares_that_add_up_to_one_are_taken():
    """Whatever the rounding of their sum."""
    counts = torch.arange(1, 9)
    for shares in ([0.5, 0.25, 0.25], [0.33, 0.56, 0.11]):
        groups = {str(number): counts for number in range(len(shares))}
        assert len(build_vocab(counts, 5, [], groups, {str(n): share for n, share in enumerate(shares)})) == 5


# Special tokens


def test_special_tokens_that_only_keep_a_place_are_not_kept():
    """Of Gemma there are 6242: more than the vocabulary of a head. One that ends texts is kept in any case."""
    names = ["<|think|>", "<unused0>", "<unused1>", "<|reserved_special_token_7|>", "[UNUSED3]"]
    tokenizer = make_tokenizer(special=[*SPECIAL, *names])
    places = dict(zip(names, tokenizer.convert_tokens_to_ids(names)))
    size = max(places.values()) + 1
    kept = set(pinned_ids(tokenizer, [258], size, False))
    assert places["<|think|>"] in kept
    assert not kept & {places[name] for name in names[1:]}
    assert set(pinned_ids(tokenizer, [places["<unused0>"]], size, False)) == kept | {places["<unused0>"]}


# Byte pieces


def fallback_tokenizer():
    """A vocabulary with `<0x00>` … and a few words, in no tidy order."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["<unk>", "▁a", "b", "!"]
    random.Random(0).shuffle(names)
    model = tokenizers.models.BPE({n: i for i, n in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    return SimpleNamespace(
        get_vocab=tokenizers.Tokenizer(model).get_vocab, all_special_ids=[names.index("<unk>")]
    ), names


def test_byte_pieces_of_a_byte_fallback_vocabulary():
    tokenizer, names = fallback_tokenizer()
    assert [names[i] for i in byte_pieces(tokenizer, len(names))] == [f"<0x{byte:02X}>" for byte in range(256)]
    assert pinned_ids(tokenizer, [], len(names), True) == sorted(i for i, n in enumerate(names) if n[0] == "<")
    assert pinned_ids(tokenizer, [3], len(names), False) == sorted({3, names.index("<unk>")})


def test_byte_pieces_of_a_byte_level_vocabulary():
    tokenizer = make_tokenizer()
    pieces = byte_pieces(tokenizer, 272)
    assert sorted(pieces) == list(range(256))
    assert {tokenizer.decode([i]) for i in pieces} >= {chr(byte) for byte in range(32, 127)}
    assert pinned_ids(tokenizer, [258], 272, True) == list(range(259))
    assert byte_pieces(tokenizer, 100) == [i for i in pieces if i < 100]


@settings(max_examples=30, deadline=None)
@given(st.text(min_size=1, max_size=12))
def test_any_text_can_be_said_with_pinned_bytes(text):
    tokenizer = make_tokenizer()
    pinned = pinned_ids(tokenizer, [258], 272, True)
    vocab = build_vocab(torch.zeros(272, dtype=torch.long), len(pinned), pinned)
    ids = torch.tensor(tokenizer(text.encode("utf-8", "replace").decode())["input_ids"])
    assert bool((vocab.index_V[ids] >= 0).all())


# A run


@pytest.fixture(scope="module")
def harvested(model_dir, chats, tmp_path_factory):
    """A harvested run."""
    run = tiny_run(model_dir, chats, tmp_path_factory.mktemp("runs"), train={"epochs": 1, "tokens_per_batch": 256})
    harvest(run)
    return run


def chosen(run, reader) -> DraftVocab:
    """The draft vocabulary of a run, of stored features."""
    return choose_vocab(run, reader, reader.manifest.target, make_tokenizer())


def state_of(run) -> dict:
    """Every file, with its time and bytes."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.directory.rglob("*") if path.is_file()}


def test_stored_answers_equal_the_documents(harvested):
    """Ids, and the target's own choices, against a plain walk over what the reader gives."""
    reader = FeatureReader(store_path(harvested, "train"))
    target = Target.load(harvested.target, TAPS)
    stored = list(reader.answers())
    assert len(stored) == len(reader)
    for note, document, part in zip(reader.notes, reader, stored):
        assert part.source == note["source"] == "chats"
        assert part.ids.tolist() == document.ids_T[document.mask_T].tolist()
        start = int(document.mask_T.int().argmax())
        logits = target.model(document.ids_T[None]).logits[0].argmax(-1)
        assert part.argmax[0] == -1
        assert part.argmax[1:].tolist() == logits[start : start + len(part.ids) - 1].tolist()
    flat = Counter(token for document in reader for token in document.ids_T[document.mask_T].tolist())
    counts = count_tokens(reader.response_tokens(), 272)
    assert {i: n for i, n in enumerate(counts.tolist()) if n} == flat


def test_bound_of_a_store_is_what_a_perfect_head_reaches(harvested):
    reader = FeatureReader(store_path(harvested, "held-out"))
    tokenizer = make_tokenizer()
    vocab = chosen(harvested, FeatureReader(store_path(harvested, "train")))
    kept = set(vocab.ids_W.tolist())
    group = cover(vocab, grouped(reader.answers(), tokenizer), 3)["source", "chats"]
    emitted = [n for d in reader for n in replay(d.mask_T, perfect(d.ids_T.tolist(), kept, 3)).emitted]
    assert (group.bound.cycles, group.bound.emitted) == (len(emitted), sum(emitted))
    said = [token for document in reader for token in document.ids_T[document.mask_T].tolist()]
    assert (group.tokens, group.inside) == (len(said), sum(token in kept for token in said))
    assert all(len(runs_of(document.mask_T)) == 1 for document in reader)


def test_tables_are_printed_and_nothing_changes(harvested, tmp_path, capsys):
    before = state_of(harvested)
    config = tmp_path / "run.yaml"
    config.write_text(dump(harvested))
    main(["--config", str(config)])
    out = capsys.readouterr().out
    assert state_of(harvested) == before
    train_side, held = (FeatureReader(store_path(harvested, side)) for side in ("train", "held-out"))
    vocab = chosen(harvested, train_side)
    for words in ("training text, vocabulary of 24", "held-out text, vocabulary of 24", "τ bound, chain of 3"):
        assert words in " ".join(out.split())
    rows = [line.replace("│", " ").split() for line in out.splitlines() if line.startswith("│ source chats")]
    for reader, row in zip((train_side, held), rows, strict=True):
        counts = count_tokens(reader.response_tokens(), 272)
        assert row[2:5] == [str(int(counts.sum())), str(int((counts > 0).sum())), f"{coverage(vocab, counts):.2%}"]
    assert "all that occur" in out
    show(harvested, dry_run=True)
    assert state_of(harvested) == before


def test_quotas_of_a_run(harvested):
    reader, tokenizer = FeatureReader(store_path(harvested, "train")), make_tokenizer()
    counts = count_tokens(reader.response_tokens(), 272)
    groups = group_counts(reader, tokenizer, counts)
    assert torch.equal(groups["chats"], counts)
    assert torch.equal(sum(part for name, part in groups.items() if name != "chats"), counts)
    rare = min((name for name in groups if name != "chats"), key=lambda name: int(groups[name].sum()))
    run = with_vocab(harvested, size=20, quotas={rare: 0.5})
    pinned = pinned_ids(tokenizer, [258], 272, False)
    vocab = chosen(run, reader)
    assert len(vocab) == 20
    assert set(pinned) <= set(vocab.ids_W.tolist())
    assert has_share(vocab, groups[rare], 0.5, 20 - len(pinned))
    with pytest.raises(UserError, match=r"quotas\.Klingon"):
        chosen(with_vocab(harvested, size=20, quotas={"Klingon": 0.5}), reader)
    with pytest.raises(UserError, match=r"only .* distinct"):
        chosen(with_vocab(harvested, size=271), reader)


def with_vocab(run: RunConfig, **changes) -> SimpleNamespace:
    """The run with another draft vocabulary."""
    return SimpleNamespace(vocab=VocabConfig(pin_bytes=False, **changes))


def test_another_size_needs_no_harvest(harvested, model_dir, chats, capsys):
    """The features stay as they are, to the nanosecond, and training takes the new vocabulary."""
    features = {path: state for path, state in state_of(harvested).items() if "features" in str(path.parent)}
    assert features
    target = Target.load(harvested.target, TAPS)
    for size in (30, None):
        run = tiny_run(
            model_dir,
            chats,
            harvested.directory.parent,
            train={"epochs": 1, "tokens_per_batch": 512, "evals": 1, "saves": 1},
            vocab={"size": size, "pin_bytes": False},
        )
        show(run)
        assert f"vocabulary of {size or 272}" in capsys.readouterr().out
        if size:
            train(run)
            head = load_head(run.directory / "head", target)
            assert len(head.vocab) == size
            wanted = chosen(run, FeatureReader(store_path(run, "train")))
            assert torch.equal(head.vocab.ids_W, wanted.ids_W)
    now = state_of(harvested)
    assert {path: now[path] for path in features} == features


def test_sizes_below_what_is_always_kept_are_left_out(capsys):
    """A tokenizer with many special tokens, as those with reserved ones have."""
    counts = torch.ones(2000, dtype=torch.long)
    reader = SimpleNamespace(
        manifest=SimpleNamespace(target={"vocab_size": 2000, "eos_token_ids": [0]}),
        response_tokens=lambda: iter([torch.arange(2000)]),
        answers=lambda: iter([Answer("s", torch.arange(2000), counts)]),
    )
    tokenizer = SimpleNamespace(get_vocab=dict, all_special_ids=list(range(600)))
    show_sizes(SimpleNamespace(vocab=VocabConfig(size=1500)), reader, reader, tokenizer)
    assert "1024" in capsys.readouterr().out
