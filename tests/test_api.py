"""The decoder as a library: what it says is the target's own text, however it is called, and however it is shown."""

import copy
import string
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from conftest import fit, make_model, make_tiny_head, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shape import greedy, with_spec

import headwright.eval
from headwright.configs import UserError
from headwright.data.sampling import Policy
from headwright.data.target import Target
from headwright.eval.api import Answer, Piece, Speculator, speculate, stream
from headwright.eval.decode import PLAIN, Settings, decode_plain, generate
from headwright.eval.drafters import PromptLookup
from headwright.eval.text import Holder, Printer, Stops
from headwright.heads.draft_tree import TreeShape
from headwright.heads.saved import load_head, save_head

TOKENIZER = make_tokenizer()
LETTERS = string.ascii_lowercase + " .,!"
TAPS = (0, 1, 2)
NEW = 30
CHAT = [{"role": "user", "content": "why is the sky blue?"}]
PROMPTS = ["a sky", [5, 6, 7, 8, 9], CHAT, "x", list(range(40, 70)), [{"role": "system", "content": "be kind"}, *CHAT]]


def make_speaker(letters: str = LETTERS, seed: int = 0):
    """A model of two layers that says these characters only; every token of its vocabulary has a text."""
    model = make_model(seed=seed, vocab=259, num_hidden_layers=2)
    kept = [*TOKENIZER.encode(letters, add_special_tokens=False), 258]
    weight = model.get_output_embeddings().weight.data
    weight[[token for token in range(259) if token not in kept]] = 0
    weight[258] *= 0.3  # now and then
    return model


@dataclass
class World:
    """A model and a head, in memory and on disk."""

    target: Target
    model: Path
    run: Path

    @property
    def head(self) -> Path:
        return self.run / "head"


def make_world(folder: Path) -> World:
    """The head has seen the text that tests ask for."""
    target = Target(make_speaker(), make_tokenizer(), str(folder / "model"), TAPS)
    target.model.save_pretrained(folder / "model")
    target.tokenizer.save_pretrained(folder / "model")
    asks = Speculator(target)
    questions = [asks.ids(prompt) for prompt in PROMPTS]
    head = fit(make_tiny_head(target, None, steps=3), target, greedy(target, questions, NEW), 60)
    save_head(head, folder / "run" / "head")
    return World(target, folder / "model", folder / "run")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("speaker"))


@pytest.fixture(scope="module")
def speculator(world) -> Speculator:
    return Speculator(world.target, world.head, "tree-3x3-8")


def plain_text(target: Target, ids: list[int], new: int = NEW, **options) -> tuple[list[int], str]:
    """Tokens of plain decoding, and the text without an end token."""
    [out] = generate(target, None, [ids], Settings(PLAIN, new, **options)).generations
    spoken = [token for token in out.tokens if token not in target.spec.eos_token_ids]
    return out.tokens, target.tokenizer.decode(spoken)


def ids_of(prompt) -> list[int]:
    """A prompt's ids by hand."""
    if isinstance(prompt, str):
        return TOKENIZER.encode(prompt, add_special_tokens=False)
    if isinstance(prompt[0], dict):
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in prompt)
        return TOKENIZER.encode(text + "<|im_start|>assistant\n", add_special_tokens=False)
    return prompt


# All ways to call it


def test_prompts_as_text_as_messages_as_ids(speculator):
    for prompt in PROMPTS:
        assert speculator.ids(prompt) == ids_of(prompt)
    assert speculator.ids(tuple(PROMPTS[1])) == PROMPTS[1]


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
@pytest.mark.parametrize("shape", ["chain-4", "tree-3x3-8", "eagle-1", TreeShape.static([[0], [1], [0, 0]])], ids=str)
def test_answers_are_the_targets_own_text(world, shape, prompt):
    answer = speculate(world.target, world.head, prompt, shape, max_new_tokens=NEW)
    assert (answer.tokens, answer.text) == plain_text(world.target, ids_of(prompt))
    assert answer.acceptance_length > 1


@pytest.mark.parametrize("kind", ["directory", "name", "pair", "target"])
def test_a_target_by_directory_by_pair_or_loaded(world, kind):
    target = {
        "directory": world.model,
        "name": str(world.model),
        "pair": (make_speaker(), make_tokenizer()),
        "target": world.target,
    }[kind]
    before = decode_plain(world.target, ids_of(CHAT), NEW)
    for head in (world.head, str(world.head), world.run, None):
        speculator = Speculator(target, head, "chain-4")
        answer = speculator(CHAT, max_new_tokens=NEW)
        assert answer.tokens == before.tokens
        assert speculator.shape == (PLAIN if head is None else TreeShape.chain(4))
        assert (answer.acceptance_length > 1) == (head is not None)


def test_a_head_or_a_drafter_itself(world):
    """And its taps are those that the target is loaded with."""
    head = load_head(world.head, world.target).eval()
    wanted = plain_text(world.target, ids_of("a sky"))
    by_file = speculate(world.target, world.head, "a sky", max_new_tokens=NEW)
    for target in (world.target, world.model):
        answer = speculate(target, head, "a sky", max_new_tokens=NEW)
        assert (answer.tokens, answer.text) == wanted
        assert answer.details.accepted == by_file.details.accepted
    assert speculate(world.target, PromptLookup(), "a sky", max_new_tokens=NEW).tokens == wanted[0]


def test_the_package_offers_the_same(world):
    """`from headwright.eval import …`"""
    assert headwright.eval.speculate is speculate
    assert headwright.eval.stream is stream
    assert (headwright.eval.Speculator, headwright.eval.Answer, headwright.eval.Piece) == (Speculator, Answer, Piece)
    assert sorted(headwright.eval.__all__) == ["Answer", "Piece", "Speculator", "speculate", "stream"]
    with pytest.raises(AttributeError, match="no attribute 'specolate'"):
        headwright.eval.specolate  # noqa: B018
    pieces = list(headwright.eval.stream(world.target, world.head, "a sky", max_new_tokens=NEW))
    assert "".join(piece.text for piece in pieces) == plain_text(world.target, ids_of("a sky"))[1]


def test_importing_the_package_imports_no_torch():
    code = """
import sys
import headwright.eval
try:
    headwright.eval.nothing
except AttributeError:
    pass
else:
    raise SystemExit("no error")
heavy = {"torch", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# Several prompts


@pytest.mark.parametrize("batch", [1, 3, 9])
def test_several_prompts_at_a_time(world, speculator, batch):
    """In their order, whoever ends first."""
    answers = speculator.generate(PROMPTS, batch=batch, max_new_tokens=NEW)
    assert [(a.tokens, a.text) for a in answers] == [plain_text(world.target, ids_of(prompt)) for prompt in PROMPTS]
    assert speculator.generate([], batch=batch) == []


def test_seeds_count_from_the_first(speculator):
    """Sampled texts: prompt i of a call is drawn with seed + i, alone or among others."""
    rules = {"temperature": 1.0, "max_new_tokens": 20}
    together = speculator.generate(["a sky"] * 3, seed=5, **rules)
    alone = [speculator("a sky", seed=5 + number, **rules) for number in range(3)]
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    assert len({a.text for a in alone}) == 3
    assert speculator("a sky", seed=6, **rules).tokens == alone[1].tokens


# Statistics


def test_statistics_fit_the_details(speculator):
    answer = speculator(CHAT, max_new_tokens=NEW)
    details = answer.details
    assert details.tokens == answer.tokens
    assert answer.acceptance_length == sum(details.emitted) / len(details.emitted)
    assert sum(details.emitted) + 1 == len(answer.tokens)
    assert answer.tokens_per_second == len(answer.tokens) / answer.seconds
    assert answer.seconds > 0
    assert sum(details.phases.values()) == pytest.approx(answer.seconds, rel=0.2)
    assert details.phases["verify"] > 0
    assert answer.lossless


def test_how_a_text_ends(world, speculator):
    """eos, stop, length, and the end of the context."""
    tokens, text = plain_text(world.target, ids_of("x"), ignore_eos=True)
    cases = {
        "length": (world.target, {}),
        "stop": (world.target, {"stop": text[5:8]}),
        "eos": (with_spec(world.target, eos_token_ids=(tokens[9],)), {}),
        "context": (with_spec(world.target, max_positions=12), {}),
    }
    for finish, (target, options) in cases.items():
        answer = Speculator(target, speculator.drafter, "chain-3")("x", max_new_tokens=NEW, **options)
        assert answer.finish == finish
        assert len(answer.tokens) == {"length": NEW, "context": 11}.get(finish, len(answer.tokens))
        assert list(stream(target, speculator.drafter, "x", max_new_tokens=NEW, **options))[-1].finish == finish


def test_only_typical_acceptance_is_not_lossless(speculator):
    for rule in ("auto", "walk", "sampled", "typical"):
        answer = speculator("x", max_new_tokens=4, temperature=0.8, verification=rule)
        assert answer.lossless == (rule != "typical")


def test_options_reach_the_decoder(speculator):
    """One by one."""
    rules = speculator.settings(7, 0.9, 5, 0.8, 0.1, 1.2, 0.3, "end", True, "walk", 1.5, 4)
    assert rules.policy == Policy(0.9, 5, 0.8, 0.1, 1.2, 0.3)
    assert (rules.max_new_tokens, rules.stop, rules.ignore_eos) == (7, ("end",), True)
    assert (rules.verification, rules.fallback.break_even, rules.batch) == ("walk", 1.5, 4)
    assert speculator.settings(stop=["a", "b"]).stop == ("a", "b")
    assert speculator.settings().fallback is None
    assert speculator.settings().shape == speculator.shape


@pytest.mark.parametrize("break_even", [1.0, 1e6])
def test_break_even_lets_drafting_rest(world, speculator, break_even):
    """A bar that nothing reaches: eight cycles are drafted, then none for a while. The text is the same."""
    answer = speculator(CHAT, max_new_tokens=60, break_even=break_even, ignore_eos=True)
    assert answer.tokens == plain_text(world.target, ids_of(CHAT), 60, ignore_eos=True)[0]
    drafted = answer.details.drafted
    assert all(drafted[:8])
    assert len(drafted) > 8
    assert any(drafted[8:40]) == (break_even == 1.0)
    assert any(drafted[40:]) or break_even == 1.0


# Streams


def joined(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def flags(pieces: list[Piece]) -> list[tuple[str, bool]]:
    """Every character, and whether it is shown as drafted."""
    return [(character, drafted) for piece in pieces for text, drafted in piece.parts for character in text]


RANDOM_PROMPTS = st.lists(st.integers(0, 258), min_size=1, max_size=20)


@settings(max_examples=20, deadline=None)
@given(
    prompt=RANDOM_PROMPTS,
    new=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    seed=st.integers(0, 9),
    ignore=st.booleans(),
)
def test_a_stream_is_the_answer_in_pieces(speculator, prompt, new, temperature, seed, ignore):
    """Text, tokens and counts, cycle by cycle; of sampled texts, too."""
    rules = {"max_new_tokens": new, "temperature": temperature, "ignore_eos": ignore}
    answer = speculator(prompt, seed=seed, **rules)
    pieces = list(speculator.stream(prompt, seed=seed, **rules))
    assert joined(pieces) == answer.text
    assert [token for piece in pieces for token in piece.tokens] == answer.tokens
    assert [piece.accepted for piece in pieces] == [0, *answer.details.accepted]
    assert [len(piece.tokens) for piece in pieces] == [1, *answer.details.emitted]
    assert [piece.finish for piece in pieces] == [""] * (len(pieces) - 1) + [answer.finish]
    assert pieces[-1].acceptance_length == pytest.approx(answer.acceptance_length, nan_ok=True)
    ends = {258} if answer.finish == "eos" else set()
    spoken = [token for token in answer.tokens if token not in ends]
    said = [(piece, n) for piece in pieces for n, token in enumerate(piece.tokens) if token not in ends]
    if answer.text.isascii() and len(answer.text) == len(spoken):  # each token spells one character
        assert flags(pieces) == [(c, n < piece.accepted) for c, (piece, n) in zip(answer.text, said, strict=True)]


def test_drafted_characters_are_marked(speculator):
    """And no others; a text of one character for each token."""
    pieces = list(speculator.stream(CHAT, max_new_tokens=NEW, ignore_eos=True))
    wanted = [n < piece.accepted for piece in pieces for n in range(len(piece.tokens))]
    assert [drafted for _, drafted in flags(pieces)] == wanted
    assert sum(wanted) > 5


@pytest.fixture(scope="module")
def babbler() -> Speculator:
    """Says bytes of any kind: half characters, broken ones, special tokens."""
    target = Target(make_model(seed=3, num_hidden_layers=2), make_tokenizer(), "babbler", TAPS)
    return Speculator(target, make_tiny_head(target, None), "tree-2x4-10")


@pytest.fixture(scope="module")
def mixed() -> Speculator:
    """Says Cyrillic letters of two bytes, and what comes of cutting them."""
    target = Target(make_speaker("абвгдежзийклмноп рст", seed=1), make_tokenizer(), "mixed", TAPS)
    head = fit(make_tiny_head(target, None, steps=2), target, greedy(target, [[5], [60, 61]], 60), 40)
    return Speculator(target, head, "chain-4")


@pytest.mark.parametrize("name", ["babbler", "mixed"])
@settings(max_examples=12, deadline=None)
@given(prompt=RANDOM_PROMPTS, new=st.integers(1, 40), seed=st.integers(0, 9))
def test_a_stream_of_broken_characters(request, name, prompt, new, seed):
    """Pieces hold whole characters, and the rest comes with the last one."""
    speculator = request.getfixturevalue(name)
    rules = {"max_new_tokens": new, "temperature": 1.0, "seed": seed}
    answer, pieces = speculator(prompt, **rules), list(speculator.stream(prompt, **rules))
    assert joined(pieces) == answer.text == speculator.target.tokenizer.decode(spoken_by(answer, speculator))
    for piece in pieces[:-1]:
        assert not piece.text.endswith("�")


def spoken_by(answer: Answer, speculator: Speculator) -> list[int]:
    """Without the token that ended it."""
    return answer.tokens[:-1] if answer.finish == "eos" else answer.tokens


def cut_by_hand(tokens: list[int], stops: list[str]) -> tuple[int, str]:
    """How many tokens are said, and the text before the first stop."""
    for count in range(1, len(tokens) + 1):
        text = TOKENIZER.decode(tokens[:count])
        ends = [text.index(stop) for stop in stops if stop in text]
        if ends:
            return count, text[: min(ends)]
    return len(tokens), TOKENIZER.decode(tokens)


@pytest.mark.parametrize("name", ["speculator", "mixed"])
@settings(max_examples=15, deadline=None)
@given(
    prompt=RANDOM_PROMPTS,
    places=st.lists(st.tuples(st.integers(0, 39), st.integers(1, 9)), min_size=1, max_size=3),
    others=st.lists(st.text("abc а", min_size=1, max_size=3), max_size=2),
)
def test_a_stop_string_is_never_shown(request, name, prompt, places, others):
    """Nor a part of it that belongs to it: what has been shown at any moment is the beginning of the cut text."""
    speculator = request.getfixturevalue(name)
    tokens, text = plain_text(speculator.target, prompt, 40, ignore_eos=True)
    stops = [stop for start, length in places if (stop := text[start : start + length]) and "�" not in stop]
    stops += others
    if not stops:
        return
    count, wanted = cut_by_hand(tokens, stops)
    rules = {"max_new_tokens": 40, "stop": stops, "ignore_eos": True}
    answer, pieces = speculator(prompt, **rules), list(speculator.stream(prompt, **rules))
    assert (answer.tokens, answer.text) == (tokens[:count], wanted)
    assert joined(pieces) == wanted
    assert not any(stop in wanted for stop in stops)
    assert answer.finish == ("stop" if wanted != TOKENIZER.decode(tokens[:count]) else "length")
    assert [token for piece in pieces for token in piece.tokens] == tokens[:count]
    assert [piece.accepted for piece in pieces[1:]] == answer.details.accepted
    for number in range(len(pieces)):
        assert wanted.startswith(joined(pieces[:number]))


def test_of_two_stops_that_end_together_the_longer_one_is_cut(world, speculator):
    """Both are complete with the same character."""
    text = plain_text(world.target, ids_of(CHAT), ignore_eos=True)[1]
    place = next(n for n in range(4, NEW) if text[n] not in text[:n])
    for stops in ([text[place - 3 : place + 1], text[place]], [text[place], text[place - 3 : place + 1]]):
        rules = {"stop": stops, "max_new_tokens": NEW, "ignore_eos": True}
        assert speculator(CHAT, **rules).text == text[: place - 3]
        assert joined(list(speculator.stream(CHAT, **rules))) == text[: place - 3]


def test_end_tokens_are_counted_and_not_shown(world, speculator):
    """Wherever in a cycle they fall."""
    tokens, _ = plain_text(world.target, ids_of(CHAT), ignore_eos=True)
    inside = 0
    for place in range(1, 20):
        if tokens[place] in tokens[:place]:
            continue
        target = with_spec(world.target, eos_token_ids=(tokens[place],))
        pieces = list(stream(target, speculator.drafter, CHAT, "chain-5", max_new_tokens=NEW))
        assert joined(pieces) == TOKENIZER.decode(tokens[:place])
        assert pieces[-1].finish == "eos"
        assert pieces[-1].tokens[-1] == tokens[place]
        inside += pieces[-1].accepted == len(pieces[-1].tokens)
    assert inside, "an accepted draft was an end token"


def test_what_may_become_a_stop_is_held_back(world, speculator):
    """And is shown as soon as it cannot: with stops of one character nothing waits."""
    rules = {"max_new_tokens": NEW, "ignore_eos": True}
    for stop, behind in (("§", 0), ("§§§§", 3)):
        text, shown = "", ""
        for piece in speculator.stream("a sky", stop=stop, **rules):
            text += TOKENIZER.decode(piece.tokens)
            shown += piece.text
            assert shown == (text if piece.finish else text[: max(0, len(text) - behind)])


def test_streams_may_be_left_and_mixed(world, speculator):
    """One that is not read to its end disturbs no other."""
    wanted = [plain_text(world.target, ids_of(prompt))[1] for prompt in ("a sky", CHAT)]
    left = speculator.stream("x", max_new_tokens=NEW)
    next(left)
    streams = [speculator.stream(prompt, max_new_tokens=NEW) for prompt in ("a sky", CHAT)]
    texts = ["", ""]
    for number in [0, 1] * NEW:
        texts[number] += next(streams[number], Piece([], [], 0, 1.0)).text
    left.close()
    assert texts == wanted


# Parts of a stream


PARTS = st.lists(st.tuples(st.text("abc", max_size=4), st.booleans()), max_size=12)


def spread(parts) -> list[tuple[str, bool]]:
    """Character by character."""
    return [(character, drafted) for text, drafted in parts for character in text]


@settings(max_examples=100, deadline=None)
@given(groups=st.lists(PARTS, max_size=5), stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3))
def test_a_holder_delays_and_keeps_whose_each_character_is(groups, stops):
    """By one less than the longest stop, and no more."""
    holder, pushed, shown = Holder(stops), [], []
    hold = max((len(stop) - 1 for stop in stops), default=0)
    for group in groups:
        pushed += spread(group)
        out = holder.push(group)
        assert all(text for text, _ in out)
        shown += spread(out)
        assert shown == pushed[: max(len(shown), len(pushed) - hold)]
        assert len(shown) == max(0, len(pushed) - hold)
    assert shown + spread(holder.end([], None)) == pushed


@settings(max_examples=100, deadline=None)
@given(groups=st.lists(PARTS, max_size=4), stop=st.text("abc", min_size=1, max_size=4))
def test_a_holder_ends_before_the_stop(groups, stop):
    """A text that is pushed until a stop is complete is shown up to it."""
    holder, text, shown = Holder([stop]), "", ""
    for group in groups:
        before, text = text, text + "".join(part for part, _ in group)
        if stop in text:
            shown += "".join(part for part, _ in holder.end(group, Stops(TOKENIZER, [stop])))
            assert shown == text[: text.index(stop)]
            return
        shown += "".join(part for part, _ in holder.push(group))
        assert text.startswith(shown)
        assert before.startswith(shown[: len(before)])


@given(
    text=st.text("aя😀", max_size=12), places=st.lists(st.integers(0, 40), max_size=8), stop=st.text("aя", max_size=3)
)
def test_printer_and_holder_together(text, places, stop):
    """Bytes in, whole characters out, the last of them held."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    ends = sorted({min(place, len(tokens)) for place in places} | {len(tokens)})
    printer, holder, shown = Printer(TOKENIZER), Holder([stop] if stop else []), ""
    for start, end in zip([0, *ends], ends):
        shown += "".join(part for part, _ in holder.push([(printer.push(tokens[start:end]), True)]))
        assert text.startswith(shown)
    rest = holder.end([(printer.held(), False)], None)
    assert shown + "".join(part for part, _ in rest) == text
    assert len(rest) <= max(0, len(stop) - 1)


# Mistakes


@pytest.mark.parametrize("prompt", [CHAT, "x"], ids=["messages", "text"])
def test_no_chat_template(world, prompt):
    """Text needs none."""
    target = copy.copy(world.target)
    target.tokenizer = make_tokenizer(template=None)
    if prompt == "x":
        assert speculate(target, None, prompt, max_new_tokens=3).tokens
        return
    with pytest.raises(UserError, match="no chat template: give text or token ids"):
        speculate(target, None, prompt)


def test_a_missing_head(world, tmp_path):
    """Seen before a model is loaded."""
    for target in (world.target, world.model, tmp_path / "no-model"):
        with pytest.raises(UserError, match="no head there"):
            speculate(target, tmp_path / "none", "x")
    (tmp_path / "head.json").write_text("{", encoding="utf-8")
    for target in (world.target, world.model):
        with pytest.raises(UserError, match=r"no head there|cannot be read"):
            speculate(target, tmp_path, "x")


def test_a_missing_model(world, tmp_path):
    with pytest.raises(UserError, match="no such model directory"):
        speculate(tmp_path / "no-model", world.head, "x")


def test_a_head_of_another_target(world):
    other = Target(make_speaker(seed=4), make_tokenizer(), "other", TAPS)
    with pytest.raises(UserError, match="not for other"):
        speculate(other, world.head, "x")
    with pytest.raises(UserError, match=r"trained on taps \[0, 1, 2\], the target gives \[1\]"):
        speculate(Target(world.target.model, make_tokenizer(), "fewer", (1,)), world.head, "x")


@pytest.mark.parametrize("shape", ["chain", "chain-0", "tree-3x3", "tree-2x2-99", "eagle-9", "none.json"])
def test_a_bad_shape(world, shape):
    with pytest.raises(UserError, match=r"shape|static tree"):
        Speculator(world.target, world.head, shape)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.9}, "mean nothing at temperature 0"),
        ({"top_k": 5}, "mean nothing at temperature 0"),
        ({"temperature": -1.0}, "out of range"),
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"stop": ""}, "must not be empty"),
        ({"stop": ["a", ""]}, "must not be empty"),
        ({"verification": "never"}, "give auto, walk, sampled or typical"),
        ({"break_even": 0.0}, "fallback out of range"),
    ],
    ids=str,
)
def test_bad_options(speculator, options, message):
    with pytest.raises(UserError, match=message):
        speculator("x", **options)
    with pytest.raises(UserError, match=message):
        next(speculator.stream("x", **options))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "at least one token"),
        ([], "at least one token"),
        ([300], "vocabulary ends at 259"),
        ([5] * 512, "shorten it"),
    ],
    ids=["empty", "no ids", "unknown token", "too long"],
)
def test_bad_prompts(speculator, prompt, message):
    with pytest.raises(UserError, match=message):
        speculator(prompt)
    with pytest.raises(UserError, match=message):
        next(speculator.stream(prompt))


def test_the_context_may_be_filled_to_its_end(speculator):
    """One more token fits behind a prompt of 511."""
    answer = speculator([5] * 511, max_new_tokens=9)
    assert (len(answer.tokens), answer.finish) == (1, "context")
    assert replace(answer, text="").details is answer.details
