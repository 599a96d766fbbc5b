"""Text while it comes: pieces add up to the whole, and stop strings are found wherever they fall."""

import pytest
from conftest import make_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwright.eval.text import UNFINISHED, Printer, Stops

TOKENIZER = make_tokenizer()
BYTES = {TOKENIZER.convert_ids_to_tokens(token): token for token in range(256)}
ALPHABETS = st.sampled_from(
    [
        "ab",
        "ab \n\t",
        "абвгд ё",
        "é́̂̈ñ",  # combining marks
        "😀👩\u200d💻🇩🇪👍🏽",
        "漢字かな",
        "a\u00a0я漢😀\u0301\n�",
    ]
)


@st.composite
def texts(draw, least: int = 0) -> str:
    """Of one alphabet or of all characters."""
    if draw(st.booleans()):
        return draw(st.text(draw(ALPHABETS), min_size=least, max_size=30))
    return draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=least, max_size=30))


def tokens_of(text: str) -> list[int]:
    """One token per byte."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert len(tokens) == len(text.encode())
    return tokens


def raw_tokens(data: bytes) -> list[int]:
    """Tokens of bytes that need not be text."""
    table = {tokens_of(chr(code))[0]: code for code in range(128)}
    known = {code: token for token, code in table.items()}
    for text in ("\u0080", "ÿ"):
        assert len(tokens_of(text)) == 2
    # GPT-2's table: bytes that do not print stand at 256 and beyond, in order
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {code: chr(code) for code in printing}
    symbols |= {code: chr(256 + n) for n, code in enumerate(code for code in range(256) if code not in symbols)}
    tokens = [BYTES[symbols[code]] for code in data]
    assert all(known[code] == token for code, token in zip(data, tokens) if code < 128)
    return tokens


def cuts(tokens: list[int], places: list[int]) -> list[list[int]]:
    """A stream of tokens, some at a time."""
    ends = sorted({min(place, len(tokens)) for place in places} | {len(tokens)})
    return [tokens[start:end] for start, end in zip([0, *ends], ends)]


# Printer


@settings(max_examples=300, deadline=None)
@given(text=texts(), places=st.lists(st.integers(0, 100), max_size=40))
@example(text="👩\u200d💻", places=list(range(20)))
@example(text="a�b�", places=list(range(20)))
def test_pieces_are_together_the_whole_text(text, places):
    """Whatever comes at once: a byte, half a character, several. Pieces end with whole characters."""
    printer, pieces = Printer(TOKENIZER), []
    for part in cuts(tokens_of(text), places):
        pieces.append(printer.push(part))
    assert "".join(pieces) + printer.held() == text
    for count in range(len(pieces)):
        assert text.startswith("".join(pieces[:count]))
    if "�" not in text:
        assert printer.held() == ""


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=30), special=st.lists(st.tuples(st.integers(0, 30), st.integers(256, 271)), max_size=4))
def test_pieces_of_bytes_that_are_no_text(data, special):
    """A model may say anything: broken characters, special tokens, rows of the vocabulary that mean nothing."""
    tokens = raw_tokens(data)
    for place, token in special:
        tokens.insert(min(place, len(tokens)), token)
    printer = Printer(TOKENIZER)
    said = "".join(printer.push([token]) for token in tokens)
    assert said + printer.held() == TOKENIZER.decode(tokens)


def test_half_a_character_is_held_back():
    """Each piece comes as soon as it is whole, and no sooner."""
    printer = Printer(TOKENIZER)
    assert [printer.push([token]) for token in tokens_of("aя😀b")] == ["a", "", "я", "", "", "", "😀", "b"]
    assert printer.push(tokens_of("😀")[:2]) == ""
    assert printer.held() == UNFINISHED


def test_the_printer_asks_for_few_tokens():
    """A long text is not decoded again and again."""

    class Counting:
        longest = 0

        def decode(self, tokens):
            self.longest = max(self.longest, len(tokens))
            return TOKENIZER.decode(tokens)

    counting = Counting()
    printer = Printer(counting)
    for token in tokens_of("я" * 200):
        printer.push([token])
    assert counting.longest < 10


# Stops


def completed_at(stops: Stops, tokens: list[int]) -> int | None:
    """How many tokens there are when a stop is first seen."""
    return next((count for count in range(1, len(tokens) + 1) if stops.completed(tokens[:count])), None)


def by_hand(stops: list[str], tokens: list[int]) -> int | None:
    """The same by decoding the whole text every time."""
    for count in range(1, len(tokens) + 1):
        if any(stop in TOKENIZER.decode(tokens[:count]) for stop in stops):
            return count
    return None


@st.composite
def stopped(draw) -> tuple[str, list[str]]:
    """A text, and stops of which some stand in it."""
    text = draw(texts(1))
    stops = draw(st.lists(texts(1).map(lambda stop: stop[:4]), max_size=2))
    for _ in range(draw(st.integers(0, 2))):
        start, length = draw(st.integers(0, len(text) - 1)), draw(st.integers(1, 12))
        stops.append(text[start : start + length])
    stops = [stop for stop in stops if "�" not in stop]
    return text, stops or ["."]


@settings(max_examples=400, deadline=None)
@given(case=stopped())
@example(case=("aaab", ["aab"]))
@example(case=("x😀😀y", ["😀y", "y"]))
def test_a_stop_is_seen_with_its_last_token(case):
    """Every stop here straddles tokens; the first that is complete ends the text, at the token that a search in the whole text
    finds.
    """
    text, stops = case
    tokens = tokens_of(text)
    assert completed_at(Stops(TOKENIZER, stops), tokens) == by_hand(stops, tokens)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(min_size=1, max_size=40), start=st.integers(0, 39), length=st.integers(1, 6))
def test_a_stop_among_bytes_that_are_no_text(data, start, length):
    """Broken characters before, behind and around a stop."""
    tokens = raw_tokens(data)
    stop = TOKENIZER.decode(tokens)[start : start + length]
    if stop and "�" not in stop:
        assert completed_at(Stops(TOKENIZER, [stop]), tokens) == by_hand([stop], tokens)


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("one two", ["three"], "one two"),
        ("a b c", ["c", "b"], "a "),
        ("b", ["b"], ""),
        ("яблоко 😀 груша", ["😀"], "яблоко "),
        ("abab", ["ba", "ab"], ""),
    ],
)
def test_text_is_cut_before_the_first_stop(text, stops, kept):
    assert Stops(TOKENIZER, stops).cut(text) == kept


def test_a_stop_inside_a_token_of_many_characters():
    """A token may hold more than the stop: it is the last, and the text is cut inside it."""

    class Words:
        def decode(self, tokens):
            return "".join(("hello ", "wor", "ld! bye ", "END and more", " ")[token] for token in tokens)

    stops = Stops(Words(), ["END", "world"])
    assert [stops.completed([0, 1]), stops.completed([0, 1, 2]), stops.completed([0, 4, 4, 3])] == [False, True, True]
    assert stops.cut(Words().decode([0, 1, 2])) == "hello "


def test_a_special_token_as_a_stop():
    """Where end tokens are ignored, a stop may name one."""
    token = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    stops = Stops(TOKENIZER, ["<|im_end|>"])
    assert stops.completed([*tokens_of("abc"), token])
    assert not stops.completed(tokens_of("abc"))


def test_what_stands_before_the_last_token_does_not_stop_again():
    """Whoever goes on after a stop is not stopped at every token."""
    stops = Stops(TOKENIZER, ["ab"])
    assert stops.completed(tokens_of("xab"))
    assert not stops.completed(tokens_of("xabc"))
    assert stops.completed(tokens_of("xabcab"))


def test_a_stop_around_tokens_that_spell_nothing():
    """Padded rows of a vocabulary have no text, and a model may say them."""
    tokens = [*tokens_of("a"), *[271] * 10, *tokens_of("b")]
    assert TOKENIZER.decode(tokens) == "ab"
    assert Stops(TOKENIZER, ["ab"]).completed(tokens)
