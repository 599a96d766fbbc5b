"""Sides of a comparison: conversations turn by turn, fair turns, what is kept of them, and what one run's clock says."""

import itertools
import json
import math
import time
from dataclasses import asdict, replace

import pytest
import torch
from conftest import make_room, make_target, make_tiny_head

import headwright.eval.decode as decode
import headwright.eval.sides as module
from headwright.data.target import Target
from headwright.eval.clock import PHASES
from headwright.eval.decode import decode_plain, generate, generate_one
from headwright.eval.drafters import PromptLookup
from headwright.eval.entries import losslessness
from headwright.eval.kept import Kept
from headwright.eval.metrics import as_others_count, latencies, percentiles
from headwright.eval.prompts import Prompt, Room
from headwright.eval.settings import PLAIN, Generation, Settings
from headwright.eval.sides import (
    OURS,
    TRANSFORMERS,
    TURN,
    Contest,
    Side,
    Spoken,
    TransformersSide,
    baselines,
    converse,
    median_of,
)
from headwright.heads.draft_tree import TreeShape

CHAIN = TreeShape.chain(3)
TREE = TreeShape("dynamic", 3, 2, 6)


def user(text: str) -> dict:
    """A user's turn."""
    return {"role": "user", "content": text}


def conversation(room: Room, *texts: str, place: str = "p") -> Prompt:
    """A prompt of several turns."""
    rounds = [[user(text)] for text in texts]
    return Prompt(room.renderer.prompt_ids(rounds[0]), "s", place, "set", rounds=rounds)


def greedy(target: Target, ids: list[int], count: int, ends: bool = True) -> list[int]:
    """Whole passes without any cache; with `ends`, up to an end token."""
    said: list[int] = []
    while len(said) < count and len(ids) + len(said) < target.spec.max_positions:
        features = target.features(torch.tensor([ids + said], device=target.device))
        said.append(int(target.logits(features.last_BND[0, -1]).argmax()))
        if ends and said[-1] in target.spec.eos_token_ids:
            break
    return said


@pytest.fixture(scope="module")
def room(tiny) -> Room:
    return make_room(tiny)


@pytest.fixture(scope="module")
def head(tiny):
    return make_tiny_head(tiny)


@pytest.fixture(scope="module")
def early(tiny) -> Target:
    """A target that ends its texts: its end token is the third that it says to `[65, 66, 67]`."""
    return make_target(eos_token_id=greedy(tiny, [65, 66, 67], 3, ends=False)[2])


def all_sides(head, count: int, ignore_eos: bool = False) -> list[Side]:
    """Both baselines, a head in a chain and in a tree, a drafter without training."""
    settings = Settings(CHAIN, count, ignore_eos=ignore_eos)
    return [
        *baselines(settings),
        Side("head", head, settings),
        Side("head", head, replace(settings, shape=TREE)),
        Side("lookup", PromptLookup(), settings),
    ]


# Conversations


@pytest.mark.parametrize("number", range(5))
def test_turn_by_turn_is_what_a_hand_made_loop_asks(tiny, head, number):
    """Each turn is asked by the template with the side's own answers before it, without their end tokens."""
    target = tiny
    side, tokenizer = all_sides(head, 8)[number], target.tokenizer
    texts = ["Hello", "Привет, и ещё?", "third"]
    room = make_room(target)
    spoken = converse(target, side, conversation(room, *texts), room, 0)
    assert len(spoken.turns) == 3
    messages: list[dict] = []
    for text, turn in zip(texts, spoken.turns):
        messages.append(user(text))
        asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
        assert turn.tokens == greedy(target, ids, 8)
        said = turn.tokens[:-1] if turn.tokens[-1] in target.spec.eos_token_ids else turn.tokens
        messages.append({"role": "assistant", "content": tokenizer.decode(said)})


def test_end_tokens_do_not_stand_in_the_next_prompt(early):
    """The template writes the end of a turn itself; tokens that merely look like one in the middle stay."""
    room = make_room(early)
    [end, *_] = room.ends
    prompt = conversation(room, "A", "B")
    tokens = [early.tokenizer("yes")["input_ids"], [end]]
    ids = room.conversation(prompt, [tokens[0] + tokens[1]])
    assert ids == room.conversation(prompt, [tokens[0]])
    assert early.tokenizer.decode(ids).count("<|im_start|>") == 4
    assert "yes<|im_end|>\n<|im_start|>user\nB" in early.tokenizer.decode(ids)
    assert room.text([]) == ""
    assert room.text([end]) == ""


def test_a_system_turn_stays_before_all_turns(room):
    system = {"role": "system", "content": "Be brief"}
    prompt = Prompt([1], "s", "p", rounds=[[system, user("A")], [user("B")]])
    text = room.renderer.tokenizer.decode(room.conversation(prompt, [[97]]))
    assert text.count("Be brief") == 1
    assert text.index("Be brief") < text.index("user\nA") < text.index("user\nB")


def test_a_prompt_without_rounds_has_one_turn(tiny, room):
    """Held-out prompts."""
    spoken = converse(tiny, baselines(Settings(CHAIN, 5))[0], Prompt([65, 66], "s", "p"), room, 0)
    assert [turn.tokens for turn in spoken.turns] == [decode_plain(tiny, [65, 66], 5).tokens]


def test_a_conversation_without_room_ends(tiny):
    """The next prompt must leave room for a token; what was said stands."""
    side = baselines(Settings(CHAIN, 6))[0]
    whole = make_room(tiny)
    prompt = conversation(whole, "A", "B", "C")
    spoken = converse(tiny, side, prompt, whole, 0)
    needed = [len(whole.conversation(prompt, [turn.tokens for turn in spoken.turns[:count]])) for count in range(3)]
    for turns in (1, 2):
        for spare, wanted in ((0, turns), (1, turns + 1)):
            found = converse(tiny, side, prompt, make_room(tiny, context=needed[turns] + spare), 0)
            assert [turn.tokens for turn in found.turns] == [turn.tokens for turn in spoken.turns[:wanted]]


def test_a_template_that_refuses_the_next_turn_ends_a_conversation(room):
    """Such as one that forbids what the target has said."""
    target = make_target()
    target.tokenizer.chat_template = "{% if messages|length > 1 %}{{ raise_exception('no') }}{% endif %}x"
    strict = make_room(target)
    prompt = conversation(strict, "A", "B")
    assert strict.conversation(prompt, []) == prompt.ids
    assert strict.conversation(prompt, [[97]]) is None


def test_prompts_may_have_limits_of_their_own(tiny, room):
    side = baselines(Settings(CHAIN, 9))[0]
    prompt = replace(conversation(room, "A", "B"), limit=3)
    assert [len(turn.tokens) for turn in converse(tiny, side, prompt, room, 0).turns] == [3, 3]


def test_every_turn_has_random_numbers_of_its_own(tiny, room, monkeypatch):
    seeds = []
    monkeypatch.setattr(Side, "decode", lambda self, target, ids, limit, seed: seeds.append(seed) or Generation([1]))
    converse(tiny, baselines(Settings(CHAIN, 4))[0], conversation(room, "A", "B", "C"), room, 7)
    assert seeds == [7, 7 + TURN, 7 + 2 * TURN]


def test_a_conversation_counts_as_a_whole(tiny, room, head):
    """All counts are the sums of the turns; a turn that adds nothing changes nothing."""
    side = Side("head", head, Settings(CHAIN, 8))
    spoken = converse(tiny, side, conversation(room, "A", "B"), room, 0)
    first, second = spoken.turns
    whole = spoken.whole
    for name in ("tokens", "accepted", "emitted", "drafted", "stood", "moments"):
        assert getattr(whole, name) == getattr(first, name) + getattr(second, name), name
    assert whole.seconds == first.seconds + second.seconds
    assert whole.phases == {name: first.phases[name] + second.phases[name] for name in PHASES}
    assert whole.finish == second.finish
    assert whole.warmup == first.warmup + second.warmup
    assert Spoken.read(json.loads(json.dumps(asdict(spoken)))).whole == whole


def test_then_does_not_change_what_it_joins():
    turn = Generation([1, 2], [1], [1], [3], 2.0, dict.fromkeys(PHASES, 1.0), 0.5, "length", [2], [0.1, 0.2])
    more = Generation([3], [], [], [], 1.0, dict.fromkeys(PHASES, 0.25), 0.25, "eos", [], [0.4])
    before = [asdict(turn), asdict(more)]
    phases = dict.fromkeys(PHASES, 1.25)
    wanted = Generation([1, 2, 3], [1], [1], [3], 3.0, phases, 0.75, "eos", [2], [0.1, 0.2, 0.4])
    assert turn.then(more) == wanted
    assert [asdict(turn), asdict(more)] == before


# Equal work


@pytest.mark.parametrize("number", range(5))
def test_end_tokens_end_a_text_unless_they_are_ignored(early, number):
    """Without: at the end token, by all sides alike. With: exactly max_new_tokens."""
    head = make_tiny_head(early)
    ids, count = [65, 66, 67], 9
    wanted = greedy(early, ids, count)
    assert len(wanted) == 3
    assert all_sides(head, count)[number].decode(early, ids, count, 0).tokens == wanted
    found = all_sides(head, count, ignore_eos=True)[number].decode(early, ids, count, 0)
    assert len(found.tokens) == count


@pytest.mark.parametrize(
    "number",
    [
        0,
        pytest.param(1),
        2,
        3,
        4,
    ],
)
def test_text_is_the_same_where_end_tokens_are_ignored(early, number):
    """As a greedy loop says it that knows no end tokens."""
    side = all_sides(make_tiny_head(early), 9, ignore_eos=True)[number]
    found = side.decode(early, [65, 66, 67], 9, 0).tokens
    wanted = greedy(early, [65, 66, 67], 9, ends=False)
    assert wanted[2] in early.spec.eos_token_ids
    assert found == wanted


@pytest.mark.parametrize("number", range(5))
def test_no_side_goes_beyond_the_context(number):
    """Nor needs to be told."""
    target = make_target(max_position_embeddings=24)
    ids = list(range(65, 65 + 20))
    side = all_sides(make_tiny_head(target), 30)[number]
    assert side.decode(target, ids, 30, 0).tokens == greedy(target, ids, 30, ends=False) != []


def test_transformers_says_what_plain_decoding_says(tiny, room):
    """Over conversations, too; its clock knows the whole alone."""
    ours, theirs = baselines(Settings(CHAIN, 10))
    assert (ours.name, theirs.name) == (OURS, TRANSFORMERS)
    assert isinstance(theirs, TransformersSide)
    for texts in (["A", "B"], ["count to three"]):
        mine, other = (converse(tiny, side, conversation(room, *texts), room, 0) for side in (ours, theirs))
        assert [turn.tokens for turn in mine.turns] == [turn.tokens for turn in other.turns]
        assert other.whole.seconds > 0
        assert (other.whole.emitted, other.whole.moments) == ([], [])
    assert baselines(Settings(CHAIN, 10, ignore_eos=True))[0].settings == Settings(PLAIN, 10, ignore_eos=True)


# One run's clock and counts


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_moments_of_a_text(tiny, head, shape):
    """One when the first token is there, one at each cycle's end, none after the text's end."""
    begun = time.perf_counter()
    found = generate_one(tiny, head, [65, 66, 67], Settings(shape, 12))
    spent = time.perf_counter() - begun
    assert len(found.moments) == len(found.emitted) + 1
    assert found.moments[0] > 0
    assert all(before < now for before, now in itertools.pairwise(found.moments))
    assert found.moments[-1] <= found.seconds <= spent
    assert len(found.tokens) == 1 + sum(found.emitted)


def test_first_moment_is_the_time_to_the_first_token(tiny, head, monkeypatch):
    """The prefill counts; a drafter that then takes in the prompt does not."""
    real_extend, real_prime, clock = tiny.extend, decode.Decoder.prime, [0.0]

    def extend(*args):
        clock[0] += 1.0
        return real_extend(*args)

    def prime(*args):
        clock[0] += 100.0
        return real_prime(*args)

    monkeypatch.setattr(decode.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(tiny, "extend", extend)
    monkeypatch.setattr(decode.Decoder, "prime", prime)
    found = generate(tiny, head, [[65, 66, 67]], Settings(CHAIN, 6)).generations[0]
    assert found.moments == [1.0, *(101.0 + cycle for cycle in range(1, len(found.emitted) + 1))]


def test_moments_begin_with_the_texts_own_turn(tiny, monkeypatch):
    """A text that waits in a queue for others does not wait by this clock."""
    real, clock = tiny.extend, [0.0]

    def extend(*args):
        clock[0] += 1.0
        return real(*args)

    monkeypatch.setattr(decode.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(tiny, "extend", extend)
    found = generate(tiny, None, [[65 + number] for number in range(3)], Settings(PLAIN, 4, ignore_eos=True))
    assert [out.moments for out in found.generations] == [[1.0, 2.0, 3.0, 4.0]] * 3
    assert [out.seconds for out in found.generations] == [4.0] * 3


class Oracle(PromptLookup):
    """Knows a text; with `wrong`, guesses at its multiples are wrong."""

    def __init__(self, text: list[int], wrong: int | None = None):
        super().__init__()
        self.text, self.wrong = text, wrong

    def lookup(self, tokens: list[int], count: int) -> list[int]:
        """What comes next."""
        guesses = self.text[len(tokens) : len(tokens) + count]
        return [
            (t + 1) % 256 if self.wrong and (len(tokens) + i) % self.wrong == 0 else t for i, t in enumerate(guesses)
        ]


def run_of_record(
    target: Target, limit: int, *cycles: tuple[list[int], int, int], stop: int | None = None
) -> Generation:
    """`record` fed by hand: a first token, then cycles (tokens, accepted, drafted)."""
    decoder = decode.Decoder(target, None, [[65]], Settings(PLAIN, limit))
    decoder.ends = frozenset(() if stop is None else [stop])
    row = decode.Row(0, [65], limit, torch.Generator(), decode.Pace(None), time.perf_counter(), decoder.texts[0])
    decoder.record(row, [1])
    for tokens, accepted, drafted in cycles:
        decoder.record(row, tokens, accepted, drafted)
    return row.out


def test_stood_counts_what_the_end_of_the_text_cuts_off(tiny):
    """vLLM counts whole cycles: accepted drafts beyond the limit stand there, and are not emitted here."""
    found = run_of_record(tiny, 6, ([2, 3], 1, 3), ([4, 5, 6, 7], 3, 3))
    assert (found.tokens, found.finish) == ([1, 2, 3, 4, 5, 6], "length")
    assert (found.emitted, found.accepted, found.stood, found.drafted) == ([2, 3], [1, 3], [1, 3], [3, 3])
    found = run_of_record(tiny, 5, ([2, 3], 1, 3), ([4, 5, 6, 7], 3, 3))
    assert (found.emitted, found.accepted, found.stood) == ([2, 2], [1, 2], [1, 3])
    found = run_of_record(tiny, 9, ([2, 9, 4, 5], 3, 3), stop=9)
    assert (found.tokens, found.finish) == ([1, 2, 9], "eos")
    assert (found.emitted, found.accepted, found.stood, found.drafted) == ([2], [2], [3], [3])


@pytest.mark.parametrize("wrong", [None, 5])
@pytest.mark.parametrize("count", range(2, 10))
def test_stood_differs_in_the_last_cycle_only(tiny, count, wrong):
    """With the real decoder, wherever the limit falls in a chain that is right."""
    ids = [65, 66, 67]
    known = ids + greedy(tiny, ids, 16)
    found = generate_one(tiny, Oracle(known, wrong), ids, Settings(CHAIN, count))
    assert found.tokens == known[3 : 3 + count]
    assert len(found.stood) == len(found.accepted) == len(found.emitted) == len(found.drafted)
    assert found.stood[:-1] == found.accepted[:-1] == [emitted - 1 for emitted in found.emitted[:-1]]
    assert found.accepted[-1] == min(found.stood[-1], found.emitted[-1])
    assert all(stood <= drafted for stood, drafted in zip(found.stood, found.drafted))
    if wrong is None:
        assert found.stood == found.drafted == [3] * math.ceil((count - 1) / 4)


# Figures by hand


def turn(emitted: list[int], moments: list[float], drafted: list[int] | None = None, stood: list[int] | None = None):
    """A turn with given cycles."""
    stood = [count - 1 for count in emitted] if stood is None else stood
    accepted = [min(pair) for pair in zip(stood, emitted)]
    tokens = list(range(1 + sum(emitted)))
    return Generation(tokens, accepted, emitted, drafted or [3] * len(emitted), 9.0, stood=stood, moments=moments)


def test_latencies_by_hand():
    """A cycle's tokens share its time; the first token is no gap; turns do not run into each other."""
    turns = [turn([2, 1], [0.5, 0.9, 1.0]), turn([4], [0.1, 0.5]), Generation([7], moments=[0.3])]
    found = latencies(turns)
    assert set(found) == {"ttft_ms", "token_latency_ms", "gap_ms"}
    assert found["ttft_ms"]["p50"] == pytest.approx(300)  # of 100, 300, 500
    assert found["ttft_ms"]["p95"] == pytest.approx(480)
    assert found["gap_ms"]["p50"] == pytest.approx(400)  # of 400, 100, 400
    assert found["token_latency_ms"]["p50"] == pytest.approx(100)  # of 200, 200, 100, 100, 100, 100, 100
    assert found["token_latency_ms"]["p95"] == pytest.approx(200)


def test_latencies_of_nothing():
    """Answers of one token have no gaps; sides that were not watched have nothing."""
    found = latencies([Generation([7], moments=[0.3])])
    assert found["ttft_ms"] == {"p50": pytest.approx(300), "p95": pytest.approx(300)}
    assert all(math.isnan(value) for name in ("gap_ms", "token_latency_ms") for value in found[name].values())
    assert all(math.isnan(value) for part in latencies([]).values() for value in part.values())


def test_percentiles_by_hand():
    assert percentiles([1.0, 2.0, 3.0, 4.0, 5.0], (10, 50, 90)) == pytest.approx({"p10": 1.4, "p50": 3.0, "p90": 4.6})
    assert percentiles([7.0]) == {"p50": 7.0, "p95": 7.0}
    assert math.isnan(percentiles([])["p95"])


def test_figures_of_others_by_hand():
    """Two turns: one with a cycle that had no draft, one cut at its end inside an accepted path."""
    turns = [turn([3, 1], [0.0] * 3, drafted=[3, 0]), turn([4, 2], [0.0] * 3, drafted=[3, 5], stood=[3, 4])]
    found = as_others_count(turns, speeds=[10.0, 30.0], plain=[5.0, 20.0])
    assert found["spec_bench"] == {
        "mean_accepted_tokens": (3 + 1 + 4 + 2) / 4,  # all cycles, emitted, bonus included
        "speedup_ratio": (40 / 2) / (25 / 2),  # of means: the mean of ratios were 1.75
    }
    assert found["vllm"] == {
        "mean_acceptance_length": 1 + (2 + 3 + 4) / 3,  # in full, and without the cycle that had no draft
        "draft_acceptance_rate": 9 / 11,
    }
    assert found["sglang"] == {"accept_length": (5 + 7) / 4, "accept_rate": 9 / 11}  # first tokens, too


def test_figures_of_others_where_there_is_nothing():
    for found in (as_others_count([], [], []), as_others_count([Generation([7])], [], [])):
        assert all(math.isnan(value) for part in found.values() for value in part.values())
    plain = as_others_count([turn([1, 1], [0.0] * 3, drafted=[0, 0])], [2.0], [1.0])
    assert plain["spec_bench"] == {"mean_accepted_tokens": 1.0, "speedup_ratio": 2.0}
    assert plain["sglang"]["accept_length"] == 1.5
    assert all(math.isnan(value) for value in plain["vllm"].values())


# What is kept


def count_calls(results):
    """Work that counts how often it is done."""
    calls = []

    def work():
        calls.append(len(calls))
        return results[len(calls) - 1]

    return work, calls


def test_kept_results_are_what_json_makes_of_them(tmp_path):
    """Tuples and numbers as keys, alike at the first time and when they are read again."""
    value = {"pair": (1, 2), 3: [0.1, None, "Привет"]}
    wanted = {"pair": [1, 2], "3": [0.1, None, "Привет"]}
    kept = Kept(tmp_path / "kept.jsonl", {"a": 1})
    work, calls = count_calls([value, value])
    assert kept.recall("x", work) == kept.recall("x", work) == wanted
    again = Kept(tmp_path / "kept.jsonl", {"a": 1})
    assert again.recall("x", work) == wanted
    assert calls == [0]
    assert again.seconds() == kept.seconds() > 0


def test_kept_lines_are_appended(tmp_path, capsys):
    """What stands there is never written again while a run goes on; going on is told."""
    path = tmp_path / "kept.jsonl"
    kept = Kept(path, {"a": 1})
    states = [path.read_text(encoding="utf-8")]
    for name in "abc":
        kept.recall(name, lambda name=name: name * 2)
        states.append(path.read_text(encoding="utf-8"))
    assert all(
        now.startswith(before) and now.count("\n") == before.count("\n") + 1
        for before, now in itertools.pairwise(states)
    )
    assert json.loads(states[-1].splitlines()[0]) == {"identity": {"a": 1}}
    assert [json.loads(line)["name"] for line in states[-1].splitlines()[1:]] == ["a", "b", "c"]
    assert "continuing" not in capsys.readouterr().out
    assert Kept(path, {"a": 1}).parts == {"a": "aa", "b": "bb", "c": "cc"}
    assert f"continuing {path}" in capsys.readouterr().out.replace("\n", "")
    assert path.read_text(encoding="utf-8") == states[-1]


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_torn_line_is_forgotten_and_the_rest_is_not(tmp_path, cut):
    """Wherever the kill fell; what comes next stands on a line of its own."""
    path = tmp_path / "kept.jsonl"
    kept = Kept(path, {"a": 1})
    for name in "ab":
        kept.recall(name, lambda name=name: name)
    path.write_bytes(path.read_bytes()[:-cut])
    again = Kept(path, {"a": 1})
    assert again.parts == {"a": "a"}
    again.recall("b", lambda: "new")
    assert Kept(path, {"a": 1}).parts == {"a": "a", "b": "new"}


@pytest.mark.parametrize("line", ["", "[]", "7", '{"name": "z", "value": 1}', '{"value": 1, "seconds": 1}', "\0\0"])
def test_nothing_is_taken_from_behind_a_line_that_is_no_result(tmp_path, line):
    path = tmp_path / "kept.jsonl"
    kept = Kept(path, {})
    kept.recall("a", lambda: 1)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n" + kept.line("a").replace('"a"', '"b"') + "\n")
    assert Kept(path, {}).parts == {"a": 1}


def test_another_identity_starts_anew(tmp_path):
    path = tmp_path / "kept.jsonl"
    Kept(path, {"a": 1, "b": 2}).recall("x", lambda: 1)
    assert Kept(path, {"b": 2, "a": 1}).parts == {"x": 1}
    assert Kept(path, {"a": 1, "b": 3}).parts == {}
    assert Kept(path, {"a": 1, "b": 2}).parts == {}
    path.write_text("", encoding="utf-8")
    assert Kept(path, {"a": 1, "b": 2}).parts == {}


def test_work_that_fails_is_not_kept(tmp_path):
    kept = Kept(tmp_path / "kept.jsonl", {})
    with pytest.raises(ZeroDivisionError):
        kept.recall("x", lambda: 1 / 0)
    assert Kept(tmp_path / "kept.jsonl", {}).parts == kept.parts == {}


# Contests


class Actor(Side):
    """A side that says its name and takes as long as it is told."""

    def decode(self, target, ids, limit, seed):
        """Noted in `said`, which all share."""
        self.said.append((self.name, ids[0], limit, seed))
        if self.times is None:
            return Generation([limit, 1], seconds=1.0)
        return Generation([limit, 1], seconds=self.times[len(self.said) % len(self.times)])


def actors(names: str, said: list, times=None) -> list[Actor]:
    """Some of them."""
    made = [Actor(name, None, Settings(CHAIN, 7)) for name in names]
    for side in made:
        side.said, side.times = said, times
    return made


def prompts(count: int) -> list[Prompt]:
    """Prompts of one token, their number."""
    return [Prompt([number], "s", f"p{number}", "set") for number in range(count)]


def contest(tiny, tmp_path, **more) -> Contest:
    """A contest that keeps its answers."""
    return Contest(tiny, make_room(tiny), Kept(tmp_path / "kept.jsonl", {"of": "test"}), **more)


def played(said: list) -> list[str]:
    """Sides in the order in which they decoded, without the warm-up."""
    return [f"{name}{number}" for name, number, limit, _ in said if limit != module.WARM]


def test_order_turns_from_prompt_to_prompt(tiny, tmp_path):
    """All sides decode a prompt before the next comes; each is first in turn."""
    said: list = []
    found = contest(tiny, tmp_path).run(actors("abc", said), prompts(4), "x")
    assert played(said) == ["a0", "b0", "c0", "b1", "c1", "a1", "c2", "a2", "b2", "a3", "b3", "c3"]
    assert [(name, limit) for name, _, limit, _ in said[:3]] == [("a", 4), ("b", 4), ("c", 4)]
    assert list(found) == ["a chain-3 T=0", "b chain-3 T=0", "c chain-3 T=0"]
    assert all(len(spoken) == 4 for spoken in found.values())


def test_order_turns_from_round_to_round(tiny, tmp_path):
    said: list = []
    contest(tiny, tmp_path, rounds=3).run(actors("ab", said), prompts(2), "x")
    assert played(said) == ["a0", "b0", "b0", "a0", "a0", "b0", "b1", "a1", "a1", "b1", "b1", "a1"]


def test_random_numbers_follow_the_prompt(tiny, tmp_path):
    """Not the side, not the round; counted on from the first prompt."""
    said: list = []
    contest(tiny, tmp_path, seed=100, rounds=2, first=5).run(actors("ab", said), prompts(2), "x")
    assert {(number, seed) for _, number, limit, seed in said if limit != module.WARM} == {(0, 105), (1, 106)}


def test_medians_of_rounds():
    """The run that took it, whole; of two the faster one."""
    runs = [Spoken([Generation([place], seconds=seconds)]) for place, seconds in enumerate((3.0, 1.0, 2.0))]
    assert median_of(runs) is runs[2]
    assert median_of(runs[:2]) is runs[1]
    assert median_of(runs[:1]) is runs[0]
    several = [Spoken([Generation([1], seconds=a), Generation([2], seconds=b)]) for a, b in ((1, 9), (4, 4), (2, 1))]
    assert median_of(several) is several[1]


def test_rounds_give_their_median(tiny, tmp_path):
    """Of what the clock says, by each side for itself."""
    times = iter([0.0, 0.0, 5.0, 50.0, 30.0, 1.0, 3.0, 40.0])  # warm-up; then a b, b a, a b
    said: list = []
    sides = actors("ab", said)
    for side in sides:
        side.decode = lambda target, ids, limit, seed: Generation([1], seconds=next(times))
    found = contest(tiny, tmp_path, rounds=3).run(sides, prompts(1), "x")
    assert [spoken[0].whole.seconds for spoken in found.values()] == [3.0, 40.0]


def test_a_contest_that_goes_on_decodes_nothing_again(tiny, tmp_path):
    """Not even for warming up, once all is there."""
    said: list = []
    whole = contest(tiny, tmp_path, rounds=2).run(actors("ab", said), prompts(3), "x")
    count = len(said)
    again = contest(tiny, tmp_path, rounds=2).run(actors("ab", said), prompts(3), "x")
    assert len(said) == count
    assert again == whole
    contest(tiny, tmp_path, rounds=2).run(actors("abc", said), prompts(3), "x")
    assert {name for name, *_ in said[count:]} == {"c"}
    assert len(said) - count == 1 + 6


@pytest.mark.parametrize("death", range(2, 8))
def test_killed_and_resumed_repeats_nothing(tiny, tmp_path, death):
    """Each answer is given once, whenever the kill came; only the warm-up is done again."""
    said: list = []

    class Killed(Exception):
        pass

    def dying(side):
        real = side.decode

        def decode(*args):
            if len(said) == death:
                raise Killed
            return real(*args)

        side.decode = decode
        return side

    with pytest.raises(Killed):
        contest(tiny, tmp_path).run([dying(side) for side in actors("ab", said)], prompts(3), "x")
    assert len(said) == death
    contest(tiny, tmp_path).run(actors("ab", said), prompts(3), "x")
    assert sorted(played(said)) == sorted(["a0", "b0", "a1", "b1", "a2", "b2"])


def test_answers_of_other_weights_are_not_taken(tiny, tmp_path):
    """A further head's mark stands in the name; so do temperature, shape, set, place and round."""
    said: list = []
    [side] = actors("a", said)
    contest(tiny, tmp_path).run([side], prompts(1), "x")
    changed = [
        replace(side.settings, shape=TREE),
        replace(side.settings, policy=replace(side.settings.policy, temperature=1)),
    ]
    others = [Actor("a", None, side.settings, " 1234"), *(Actor("a", None, settings) for settings in changed)]
    names = {contest(tiny, tmp_path).name(each, prompts(1)[0], 0) for each in [side, *others]}
    assert len(names) == 4
    other = replace(prompts(1)[0], set="other")
    assert contest(tiny, tmp_path).name(side, other, 0) not in names
    assert contest(tiny, tmp_path).name(side, prompts(1)[0], 1) not in names


def test_load_is_what_others_did(monkeypatch):
    """Processors: their seconds, without this process's own, over the wall clock. Never less than none."""
    before = module.Usage(100.0, 10.0, 50.0)
    for after, wanted in ((module.Usage(109.0, 12.0, 54.0), 7 / 4), (module.Usage(101.0, 13.0, 54.0), 0.0)):
        monkeypatch.setattr(module.Usage, "now", classmethod(lambda cls, after=after: after))
        assert before.load() == wanted


def test_contest_with_real_sides(tiny, head, tmp_path):
    """Chats and single prompts by all sides: one text, whoever says it; the same after reading it again."""
    room = make_room(tiny)
    asked = [conversation(room, "A", "B", place="talk"), Prompt([65, 66], "s", "single", "set")]
    sides = all_sides(head, 8)
    found = contest(tiny, tmp_path).run(sides, asked, "x")
    texts = {key: [[turn.tokens for turn in spoken.turns] for spoken in said] for key, said in found.items()}
    assert len(texts) == 5
    assert all(text == texts["plain plain T=0"] for text in texts.values())
    assert [len(text) for text in texts["plain plain T=0"]] == [2, 1]
    assert all(spoken.load >= 0 for said in found.values() for spoken in said)
    again = contest(tiny, tmp_path).run(sides, asked, "x")
    assert again == found


# Losslessness of conversations


def test_texts_that_part_in_a_later_turn(tiny, room):
    """The turn is told, and the gap is of that turn's own prompt."""
    prompt = conversation(room, "A", "B")
    first, second = (turn.tokens for turn in converse(tiny, baselines(Settings(CHAIN, 6))[0], prompt, room, 0).turns)
    other = [*second[:3], (second[3] + 1) % 256, *second[4:]]
    found = losslessness(tiny, room, [prompt], [[first, other]], [[first, second]], Settings(CHAIN))
    [parted] = found["divergences"]
    assert (parted["place"], parted["turn"], parted["token"]) == ("p", 1, 3)
    logits = tiny.logits(tiny.features(torch.tensor([room.conversation(prompt, [first]) + second[:3]])).last_BND[0, -1])
    assert parted["logit_gap"] == pytest.approx(float(logits.max() - logits[other[3]]), rel=1e-4)
    assert found["greedy_identity"] == 0.0
    assert found["divergences_per_1000_tokens"] == 1000 / len(first + second)


def test_turns_after_the_first_difference_are_not_compared(tiny, room):
    """They were asked otherwise."""
    prompt = conversation(room, "A", "B")
    found = losslessness(tiny, room, [prompt], [[[1, 2], [3]]], [[[1, 4], [5]]], Settings(CHAIN))
    assert [(each["turn"], each["token"]) for each in found["divergences"]] == [(0, 1)]
    same = losslessness(tiny, room, [prompt], [[[1, 2], [3]]], [[[1, 2], [3]]], Settings(CHAIN))
    assert (same["identical"], same["divergences"]) == (1, [])


# Others on the machine


class Loads:
    """In the place of what is decoded and of the machine's own counters: one load after another."""

    def __init__(self, monkeypatch, said: list[float], seen: list[float]):
        self.said, self.seen, self.slept = iter(said), iter(seen), 0.0
        monkeypatch.setattr(module, "converse", lambda *_: Spoken([Generation([1])], next(self.said)))
        monkeypatch.setattr(module.Usage, "load", lambda _: next(self.seen))
        monkeypatch.setattr(module.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        """Not really."""
        self.slept += seconds


def told(patience: float) -> dict:
    """What a contest keeps of one side's answer."""
    return Contest(None, None, None, patience=patience).say(
        Side("plain", None, Settings(PLAIN)), Prompt([1], "s", "p"), 0
    )


def test_a_disturbed_measurement_is_made_again_when_others_have_finished(monkeypatch):
    loads = Loads(monkeypatch, said=[0.9, 0.5, 0.1, 7.0], seen=[1.0, 0.8, 0.0, 0.6, 0.2])
    assert told(100)["load"] == 0.1
    assert loads.slept == 5 * module.LOOK


def test_the_least_disturbed_counts_where_patience_ends(monkeypatch):
    loads = Loads(monkeypatch, said=[0.9, 0.6, 0.8], seen=[0.1] * 9)
    assert told(2 * module.LOOK)["load"] == 0.6
    assert loads.slept == 2 * module.LOOK


@pytest.mark.parametrize(("patience", "load"), [(0, 0.9), (100, module.DISTURBED)])
def test_nobody_waits_without_patience_or_reason(monkeypatch, patience, load):
    loads = Loads(monkeypatch, said=[load], seen=[])
    assert told(patience)["load"] == load
    assert loads.slept == 0
