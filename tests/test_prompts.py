"""Prompt sets: what is read of every project's own rows, how they are asked, and what is said of rows that are no prompts."""

import hashlib
import io
import json
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, make_room, make_target, tiny_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headwright.data.demo as demo
import headwright.eval.prompts as module
from headwright.configs import UserError
from headwright.configs.load import build
from headwright.configs.schema import EvalConfig, PromptSet
from headwright.data.demo import DemoSet
from headwright.data.harvest import harvest, store_path
from headwright.data.packages import Package
from headwright.data.sources import Malformed
from headwright.data.store import FeatureReader
from headwright.eval.prompt_sets import KNOWN, user_turns
from headwright.eval.prompts import (
    Prompt,
    Room,
    check_sets,
    described_prompts,
    held_out_prompts,
    in_turn,
    label,
    make_prompt,
    read_set,
    read_sets,
    rounds_of,
    rows_of,
)

DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="module")
def room(tiny) -> Room:
    """A template with room for anything."""
    return make_room(tiny, context=1 << 20)


def asked(row, name: str | None = None, template: str | None = None) -> list[str]:
    """What a row asks, turn by turn."""
    turns = user_turns(row, KNOWN[name] if name else None, template)
    assert {turn["role"] for turn in turns} == {"user"}
    return [turn["content"] for turn in turns]


def lines(path: Path, *rows) -> str:
    """A JSONL file; strings as they are."""
    text = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    return str(path)


# The field's files


MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
OTHERS = ("translation", "summarization", "qa", "math_reasoning", "rag")
SPEC_BENCH = dict.fromkeys(MT_BENCH, 10) | dict.fromkeys(OTHERS, 80)
FILES = [
    ("spec-bench", "spec_bench/question", {2: 80, 1: 400}, SPEC_BENCH, "en"),
    ("mt-bench", "eagle/mt_bench_question", {2: 80}, {"chat": 80}, "en"),
    (None, "eagle/mt_bench_question", {2: 80}, dict.fromkeys(MT_BENCH, 10), "Latin"),
    ("humaneval", "eagle/humaneval_question", {1: 80}, {"code": 80}, "en"),
    ("gsm8k", "eagle/gsm8k_question", {1: 80}, {"math": 80}, "en"),
    ("gsm8k", "gsm8k/test", {1: 1319}, {"math": 1319}, "en"),
    ("mbpp", "mbpp/mbpp", {1: 974}, {"code": 974}, "en"),
    ("arena-hard", "ru/arena_hard_en_question", {1: 500}, {"chat": 500}, "en"),
    ("ru-arena-hard", "ru/arena_hard_ru_question", {1: 500}, {"chat": 500}, "ru"),
    ("ru-mt-bench", "ru/ru_mt_bench_question", {2: 80}, {"chat": 80}, "ru"),
    ("ru-alpaca", "ru/ru_alpaca_seed_tasks", {1: 137}, {"instructions": 137}, "ru"),
    ("alpaca", "self_instruct/seed_tasks", {1: 175}, {"instructions": 175}, "en"),
    (None, "self_instruct/user_oriented_instructions", {1: 252}, {"user_oriented_instructions": 252}, "Latin"),
]


def shared(name: str) -> str:
    """A file of the shared data, or a skipped test."""
    path = DATA / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path.name}: no shared data beside this checkout")
    return str(path)


@pytest.mark.parametrize(("name", "file", "turns", "domains", "language"), FILES)
def test_sets_as_their_authors_publish_them(room, capsys, name, file, turns, domains, language):
    """Every row is a prompt; turns, domains and language of all."""
    found = list(read_set(PromptSet(name, path=shared(file)), room))
    assert Counter(len(prompt.rounds) for prompt in found) == turns
    assert Counter(prompt.domain for prompt in found) == domains
    assert {prompt.language for prompt in found} == {language}
    assert {prompt.set for prompt in found} == {name or Path(file).name}
    assert len({prompt.place for prompt in found}) == len(found)
    assert "left out" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "file", "row", "wanted"),
    [
        (
            "mt-bench",
            "eagle/mt_bench_question",
            0,
            [
                "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences and "
                "must-see attractions.",
                "Rewrite your previous response. Start every sentence with the letter A.",
            ],
        ),
        (
            "ru-mt-bench",
            "ru/ru_mt_bench_question",
            0,
            [
                "Составьте увлекательный пост для туристического блога о недавней поездке на Гавайи, рассказывая о культурных "
                "впечатлениях и обязательных к посещению достопримечательностях.",
                "Перепишите свой предыдущий ответ. Начинайте каждое предложение с буквы А.",
            ],
        ),
        (
            "arena-hard",
            "ru/arena_hard_en_question",
            0,
            ["Use ABC notation to write a melody in the style of a folk tune."],
        ),
        (
            "mbpp",
            "mbpp/mbpp",
            0,
            [
                "Write a function to find the minimum cost path to reach (m, n) from (0, 0) for the given cost matrix "
                "cost[][] and a position (m, n) in cost[][].\nYour code should pass these tests:\n\n"
                "assert min_cost([[1, 2, 3], [4, 8, 2], [1, 5, 3]], 2, 2) == 8\n"
                "assert min_cost([[2, 3, 4], [5, 9, 3], [2, 6, 4]], 2, 2) == 12\n"
                "assert min_cost([[3, 4, 5], [6, 10, 4], [3, 7, 5]], 2, 2) == 16"
            ],
        ),
        (
            "ru-alpaca",
            "ru/ru_alpaca_seed_tasks",
            136,
            [
                'Задай вопрос, на который можно ответить только "да" или "нет", основываясь на предоставленной информации.\n\n'
                "Сегодня на улице холодно и пасмурно."
            ],
        ),
    ],
)
def test_wording_of_real_rows(name, file, row, wanted):
    """To the letter; a row whose input is empty is its instruction."""
    rows = Path(shared(file)).read_text(encoding="utf-8").split("\n")
    assert asked(json.loads(rows[row]), name) == wanted


def test_first_ids_are_those_of_the_template(room):
    """The first turn alone, up to where the assistant speaks."""
    first = next(read_set(PromptSet("mt-bench", path=shared("eagle/mt_bench_question")), room))
    [[turn], [second]] = first.rounds
    text = room.renderer.tokenizer.decode(first.ids)
    assert text == f"<|im_start|>user\n{turn['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert second["content"] not in text


# Rows of other forms


HUMANEVAL = "Complete the following Python function.\n\n```python\ndef f(x):\n    ...\n```"
ROWS = [
    ("mt-bench", {"prompt": ["Write.", "Shorter."], "prompt_id": 1, "category": "writing"}, ["Write.", "Shorter."]),
    ("vicuna", {"question_id": 1, "category": "generic", "turns": ["Why?"]}, ["Why?"]),
    ("humaneval", {"task_id": "HumanEval/0", "prompt": "def f(x):\n    ...\n\n", "entry_point": "f"}, [HUMANEVAL]),
    ("humaneval", {"turns": ["Complete the code I provided."]}, ["Complete the code I provided."]),
    (
        "mbpp",
        {"prompt": "Add two.", "test_list": ["assert f(1) == 3"], "code": "…"},  # the sanitised version
        ["Add two.\nYour code should pass these tests:\n\nassert f(1) == 3"],
    ),
    (
        "cnn-dm",
        {"article": "It rained.", "highlights": "Rain.", "id": "a"},
        ["Summarize the following article.\n\nIt rained."],
    ),
    ("nq", {"question": "who wrote it", "answer": ["she"]}, ["who wrote it"]),
    ("nq", {"question": {"text": "who wrote it", "tokens": []}}, ["who wrote it"]),
    ("gsm8k", {"question": "2+2?", "answer": "#### 4"}, ["2+2?"]),
    ("math-500", {"problem": "Find $x$.", "solution": "…", "answer": "1", "subject": "Algebra"}, ["Find $x$."]),
    (
        "speed-bench",
        {"question_id": "7", "category": "coding", "sub_category": None, "turns": ["One", "Two", "Three"]},
        ["One", "Two", "Three"],
    ),
    ("t-math", {"question": "Сколько будет $2+2$?", "verifiable_answer": "4"}, ["Сколько будет $2+2$?"]),
    (
        "ru-code-eval",
        {"instruction": "Допишите код.\n{function}", "inputs": {"function": "def f(x):\n    d = {x}"}, "outputs": "…"},
        ["Допишите код.\ndef f(x):\n    d = {x}"],
    ),
    ("alpaca", {"instruction": "Add.", "input": "1, 2", "output": "3"}, ["Add.\n\n1, 2"]),
    ("alpaca", {"instruction": "Say {hello}.", "input": " ", "output": "Hello"}, ["Say {hello}."]),
    (None, {"instruction": "Sum up.", "context": "It rained.", "response": "Rain."}, ["Sum up.\n\nIt rained."]),
    (None, {"instruction": "Add.", "instances": [{"input": "1, 2"}, {"input": "3, 4"}]}, ["Add.\n\n1, 2"]),
    ("arena-hard", {"turns": [{"content": "Hello"}]}, ["Hello"]),
    (None, {"prompt": "Hello", "response": "Hi"}, ["Hello"]),
    (None, {"query": "Hello"}, ["Hello"]),
    (None, {"text": "Hello"}, ["Hello"]),
    (None, {"conversations": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}]}, ["A"]),
]


@pytest.mark.parametrize(("name", "row", "wanted"), ROWS)
def test_wording_of_other_forms(name, row, wanted):
    assert asked(row, name) == wanted


def test_chats_keep_their_system_turn_and_lose_the_answers(room):
    """What the assistant said is said anew."""
    roles = ("system", "user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": f"{role} {place}"} for place, role in enumerate(roles)]
    prompt = make_prompt(PromptSet(name="x"), room, "p", {"messages": turns})
    assert prompt.rounds == [turns[:2], turns[3:4]]
    assert room.renderer.tokenizer.decode(prompt.ids).startswith(
        "<|im_start|>system\nsystem 0<|im_end|>\n<|im_start|>user"
    )


def test_rounds_end_with_a_user():
    turn = lambda role: {"role": role, "content": role}  # noqa: E731
    system, user = turn("system"), turn("user")
    assert rounds_of([system, user, user, system]) == [[system, user], [user]]
    with pytest.raises(ValueError, match="no user turn"):
        rounds_of([system])


def test_template_puts_words_around_a_row():
    """Around any key of any set; nothing of a row is a format of its own."""
    row = {"article": "{It} rained", "turns": ["not asked"]}
    assert asked(row, None, "Summarize: {article}") == ["Summarize: {It} rained"]
    assert asked(row, "cnn-dm", "{article}!") == ["{It} rained!"]
    for template, message in (
        ("{artikel}", "template: no key 'artikel' among"),
        ("{", "template: "),
        ("{}", "template: "),
    ):
        with pytest.raises(ValueError, match=message):
            asked(row, None, template)


@pytest.mark.parametrize(
    ("row", "template"),
    [
        ({"a": None}, "{a[b]}"),
        ({"a": [1]}, "{a[b]}"),
        ({"a": None}, "{a:>5}"),
        ({"instruction": "Write {a:d}", "inputs": {"a": None}}, None),
    ],
)
def test_templates_that_do_not_suit_a_value(row, template):
    with pytest.raises(ValueError):
        user_turns(row, None, template)


@pytest.mark.parametrize(
    ("row", "name", "message"),
    [
        ([1], None, "not a JSON object"),
        (None, None, "not a JSON object"),
        ({}, None, "no turns, messages, prompt"),
        ({"turns": []}, None, "no turns"),
        ({"turns": ["one", " "]}, None, "a turn is empty or no text"),
        ({"turns": [{"text": "one"}]}, None, "a turn is empty or no text"),
        ({"prompt": 7}, None, "a turn is empty or no text"),
        ({"prompt": "\ud800"}, None, "surrogates not allowed"),
        ({"question": "2+2?"}, "humaneval", r"not a row of this set .*its keys are \['question'\]"),
        ({"text": "Add.", "test_list": None}, "mbpp", "not a row of this set"),
        ({"instruction": "{function}", "inputs": {"code": "x"}}, "ru-code-eval", "no key 'function'"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, None, "unknown role"),
    ],
)
def test_rows_that_are_no_prompts(row, name, message):
    with pytest.raises(ValueError, match=message):
        asked(row, name)


def test_texts_in_chats_are_checked_like_all_others():
    """A lone surrogate cannot be asked, in whatever turn it stands."""
    with pytest.raises(ValueError, match="surrogates not allowed"):
        asked({"messages": [{"role": "user", "content": "Hello"}, {"role": "user", "content": "\ud800"}]})


KEYS = "turns prompt messages conversations instruction inputs instances question problem query text test_list article"
KEYS += " input context content role from value a"
WORDS = ["user", "assistant", "system", "text", "\ud800", "{a}", "{", "{}", "{a.b}", "{a!x}", "{a[0]}", "{a:d}"]
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(WORDS)
KEY = st.sampled_from(KEYS.split()) | st.text(max_size=3)
JSON = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=4), max_leaves=10
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(KEY, JSON, max_size=5) | JSON,
    st.sampled_from([None, *KNOWN]),
    st.sampled_from([None, "x {a}", "{a", "{a[b]}", "{a:d}"]),
)
def test_any_json_is_turns_or_a_value_error(row, name, template):
    try:
        turns = user_turns(row, KNOWN[name] if name else None, template)
    except ValueError:
        return
    assert turns
    assert all(isinstance(turn["content"], str) and turn["role"] in ("system", "developer", "user") for turn in turns)


# Sets


def test_bad_rows_are_named_with_their_place_and_left_out(room, tmp_path, capsys):
    """Three are shown, all are counted."""
    path = lines(tmp_path / "mine.jsonl", {"prompt": "Hello"}, "{torn", {"x": 1}, [], {"prompt": ""}, {"prompt": "Bye"})
    found = list(read_set(PromptSet(path=path), room))
    assert [prompt.place for prompt in found] == [f"{path}:1", f"{path}:6"]
    shown = capsys.readouterr().out
    for number, why in ((2, ""), (3, "no turns, messages"), (4, "not a JSON object")):
        assert f"mine: left out {path}:{number}: {why}" in shown
    assert f"{path}:5" not in shown
    assert "mine: 4 rows left out in all" in shown


def test_a_set_without_prompts_is_an_error(room, tmp_path):
    """The first reason is told."""
    with pytest.raises(UserError, match=r"eval.sets empty: no usable prompt in it$"):
        list(read_set(PromptSet(path=lines(tmp_path / "empty.jsonl")), room))
    with pytest.raises(UserError, match=r"eval.sets bad: no usable prompt in it: .*bad.jsonl:1: no turns"):
        list(read_set(PromptSet(path=lines(tmp_path / "bad.jsonl", {"x": 1}, {"y": 1})), room))


def test_prompts_longer_than_the_context_are_named_and_left_out(tiny, tmp_path, capsys):
    """One that fills it is too long: nothing could be said."""
    frame = len(make_room(tiny).renderer.prompt_ids([{"role": "user", "content": ""}]))
    path = lines(tmp_path / "long.jsonl", *({"prompt": "x" * (count - frame)} for count in (99, 100, 101)))
    room = make_room(tiny, context=100)
    [only] = read_set(PromptSet(path=path), room)
    assert len(only.ids) == 99
    shown = capsys.readouterr().out
    for number, count in ((2, 100), (3, 101)):
        assert f"{path}:{number}: a prompt of {count} tokens leaves no room in the target's context of 100" in shown
    with pytest.raises(UserError, match=r"no usable prompt in it: .* a prompt of 99 tokens leaves no room"):
        list(read_set(PromptSet(path=path), make_room(tiny, context=99)))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([PromptSet("mt-bnech")], "no set 'mt-bnech'; did you mean mt-bench?"),
        ([PromptSet("held-uot")], "did you mean held-out?"),
        ([PromptSet("xyzzy")], "there are: held-out, mt-bench, vicuna"),
        ([PromptSet()], "give a set's name, and at most one of path, hub and demo"),
        ([PromptSet(path="a.jsonl", hub="a/b")], "at most one of path, hub and demo, not ['path', 'hub']"),
        ([PromptSet("held-out", demo="gsm8k")], "held-out is the run's own split"),
        ([PromptSet("spec-bench")], "spec-bench is on no hub: give the path of its file"),
        ([PromptSet("vicuna")], "vicuna is on no hub"),
        ([PromptSet(path="/nowhere/a.jsonl")], "/nowhere/a.jsonl: no such file"),
        ([PromptSet(demo="gsm9k")], "no demo set 'gsm9k'"),
        ([PromptSet("gsm8k"), PromptSet("gsm8k")], "two sets are called 'gsm8k': give one a name"),
        ([PromptSet("gsm8k"), PromptSet(hub="a/b", name="gsm8k")], "two sets are called 'gsm8k'"),
        ([PromptSet("gsm8k"), PromptSet(demo="gsm8k")], "two sets are called 'gsm8k'"),
    ],
)
def test_mistakes_in_sets_are_found_without_reading_them(sets, message):
    with pytest.raises(UserError) as error:
        check_sets(sets)
    assert message in str(error.value)


def test_sets_that_are_right(tmp_path):
    path = lines(tmp_path / "question.en.jsonl", {"prompt": "x"})
    sets = [
        PromptSet("held-out"),
        PromptSet("gsm8k"),
        PromptSet("gsm8k", hub="my/gsm8k", name="mine"),
        PromptSet("vicuna", demo="vicuna"),
        PromptSet("spec-bench", path=path),
        PromptSet(path=path),
        PromptSet(hub="a/b"),
    ]
    check_sets(sets)
    assert [label(wanted) for wanted in sets] == [
        "held-out",
        "gsm8k",
        "mine",
        "vicuna",
        "spec-bench",
        "question",
        "a/b",
    ]


def test_sets_of_a_run_file():
    """Keys are checked as everywhere."""
    found = build(EvalConfig, {"sets": [{"set": "held-out"}, {"path": "a.jsonl", "turns": 1, "prompts": 4}]}, "test")
    assert found.sets == [PromptSet("held-out"), PromptSet(path="a.jsonl", turns=1, prompts=4)]
    assert EvalConfig().sets == [PromptSet("held-out")]
    with pytest.raises(UserError, match="sets"):
        build(EvalConfig, {"sets": []}, "test")
    with pytest.raises(UserError, match="pathh"):
        build(EvalConfig, {"sets": [{"pathh": "a.jsonl"}]}, "test")
    with pytest.raises(UserError, match="turns"):
        build(EvalConfig, {"sets": [{"path": "a.jsonl", "turns": 0}]}, "test")


@pytest.mark.parametrize(
    ("wanted", "place"),
    [
        (PromptSet("gsm8k"), ("openai/gsm8k", "main", "test", None)),
        (PromptSet("mt-bench"), ("HuggingFaceH4/mt_bench_prompts", None, "train", None)),
        (PromptSet("nq", split="train", revision="v2"), ("google-research-datasets/nq_open", None, "train", "v2")),
        (PromptSet("gsm8k", config="socratic"), ("openai/gsm8k", "socratic", "test", None)),
        (PromptSet("mbpp", hub="my/mbpp"), ("my/mbpp", None, "test", None)),
        (PromptSet(hub="a/b", split="dev"), ("a/b", None, "dev", None)),
    ],
)
def test_where_on_the_hub_a_set_is(monkeypatch, wanted, place):
    """Nothing is fetched here."""
    seen = []
    monkeypatch.setattr(module, "source_rows", lambda source, seed: seen.append(source) or iter([("a/b[0]", {})]))
    assert list(rows_of(wanted)) == [("a/b[0]", {})]
    [source] = seen
    assert (source.hub, source.config, source.split, source.revision) == place
    assert (source.path, source.demo) == (None, None)


def test_what_a_user_says_of_a_set_counts_more_than_what_is_known(room):
    """Name, domain, language; a row's category, then the set's name, where nothing is known."""
    row = {"question": "Сколько?", "category": "sums"}
    known = make_prompt(PromptSet("gsm8k", path="x"), room, "p", row)
    assert (known.set, known.domain, known.language) == ("gsm8k", "math", "en")
    said = make_prompt(PromptSet("gsm8k", path="x", name="n", domain="d", language="l"), room, "p", row)
    assert (said.set, said.source, said.domain, said.language) == ("n", "n", "d", "l")
    mine = make_prompt(PromptSet(path="x/own.jsonl"), room, "p", row)
    assert (mine.set, mine.domain, mine.language) == ("own", "sums", "Cyrillic")
    assert make_prompt(PromptSet(path="x/own.jsonl"), room, "p", {"question": "2+2?"}).domain == "own"


def test_turns_limit_a_conversation(room):
    row = {"turns": ["one", "two", "three"]}
    for turns, wanted in ((None, 3), (1, 1), (2, 2), (9, 3)):
        prompt = make_prompt(PromptSet(path="x", turns=turns), room, "p", row)
        assert [[turn["content"]] for [turn] in prompt.rounds] == [[text] for text in row["turns"][:wanted]]
        assert prompt.ids == make_prompt(PromptSet(path="x"), room, "p", row).ids


def test_language_is_that_of_what_is_asked(room):
    row = {"turns": ["Hello there", "Переведите"]}
    assert make_prompt(PromptSet(path="x", turns=1), room, "p", row).language == "Latin"


@pytest.mark.parametrize(("text", "language"), [("Да?", "Cyrillic"), ("What is the sea?", "Latin"), ("好", "Han")])
def test_the_language_of_a_held_out_prompt_is_its_users(room, text, language):
    """However many letters the template puts around it."""
    ids = room.renderer.prompt_ids([{"role": "user", "content": text}])
    [prompt] = described_prompts([Prompt(ids, "some", "place")], room)
    assert prompt.language == language
    assert room.text(room.own(ids)) == text
    assert described_prompts([prompt], room, PromptSet("held-out", language="ru"))[0].language == "ru"


def test_a_system_prompt_of_the_run_says_nothing_of_the_language(room):
    known = replace(room, system="You are a helpful assistant who answers at length.")
    ids = room.renderer.prompt_ids([{"role": "system", "content": known.system}, {"role": "user", "content": "Да?"}])
    [prompt] = described_prompts([Prompt(ids, "some", "place")], known)
    assert prompt.language == "Cyrillic"


def test_the_language_of_plain_text(room):
    [prompt] = described_prompts([Prompt(room.renderer.tokenizer("Небо и море")["input_ids"], "some", "place")], room)
    assert prompt.language == "Cyrillic"


# Choice


def prompts(domains: str) -> list[Prompt]:
    """One of each letter's domain."""
    return [Prompt([1], "s", f"{name}{place}", domain=name) for place, name in enumerate(domains)]


def test_prompts_are_taken_from_the_domains_in_turn():
    places = lambda domains, count: [prompt.place for prompt in in_turn(prompts(domains), count)]  # noqa: E731
    assert places("aaabca", 5) == ["a0", "b3", "c4", "a1", "a2"]
    assert places("aaabca", 99) == ["a0", "b3", "c4", "a1", "a2", "a5"]
    assert places("bba", 2) == ["b0", "a2"]
    assert places("", 3) == []


def test_sources_stand_for_domains_that_are_not_known():
    found = [Prompt([1], source, f"{source}{place}") for place, source in enumerate("aab")]
    assert [prompt.place for prompt in in_turn(found, 2)] == ["a0", "b2"]


@settings(max_examples=100, deadline=None)
@given(st.text("abc", max_size=12), st.integers(1, 14))
def test_choice_is_fair_and_in_order(domains, count):
    """No domain has two more than another that has any left; within a domain the order is the file's."""
    chosen = in_turn(prompts(domains), count)
    assert len(chosen) == min(count, len(domains))
    taken = Counter(prompt.domain for prompt in chosen)
    for name, total in Counter(domains).items():
        assert taken[name] in (total, *(each for each in (max(taken.values()), max(taken.values()) - 1)))
        mine = [int(prompt.place[1:]) for prompt in chosen if prompt.domain == name]
        assert mine == [place for place, domain in enumerate(domains) if domain == name][: taken[name]]


@pytest.fixture(scope="module")
def talks(model_dir, tmp_path_factory):
    """A harvest of chats of two turns, all of them held out as far as may be."""
    folder = tmp_path_factory.mktemp("talks")
    turn = lambda role, text: {"role": role, "content": text}  # noqa: E731
    rows = [
        {"messages": [turn(role, f"{role} {i} {again}") for again in range(2) for role in ("user", "assistant")]}
        for i in range(12)
    ]
    lines(folder / "talks.jsonl", *rows)
    run = tiny_run(model_dir, folder / "talks.jsonl", folder / "runs")
    run.corpus.held_out, run.corpus.sources[0].samples = 0.5, 1
    harvest(run)
    return run


def reader_of(run) -> FeatureReader:
    """Its held-out features."""
    return FeatureReader(store_path(run, "held-out"))


def test_sets_of_a_run_are_read_in_order_and_alike_each_time(talks, tiny, tmp_path):
    """eval.prompts of each, or a number of its own; held-out ones have their source and script."""
    path = lines(tmp_path / "mine.jsonl", *({"prompt": f"Вопрос {i}", "category": "ab"[i % 2]} for i in range(6)))
    talks.eval.sets = [PromptSet(path=path), PromptSet("held-out", prompts=2)]
    talks.eval.prompts = 3
    found = read_sets(talks, tiny, reader_of(talks))
    assert [prompt.set for prompt in found] == ["mine"] * 3 + ["held-out"] * 2
    assert [prompt.place for prompt in found[:3]] == [f"{path}:{number}" for number in (1, 2, 3)]
    assert [(prompt.domain, prompt.language) for prompt in found[3:]] == [("talks", "Latin")] * 2
    assert [prompt.rounds for prompt in found[3:]] == [[], []]
    assert read_sets(talks, tiny, reader_of(talks)) == found
    with pytest.raises(UserError, match="headwright harvest first"):
        read_sets(talks, tiny, None)


def test_every_held_out_turn_is_a_prompt(talks):
    """Both turns of each chat are there, the second with the first before it."""
    found = held_out_prompts(reader_of(talks), 99)
    assert len(found) == len(reader_of(talks).notes) >= 6
    assert len({tuple(prompt.ids) for prompt in found}) == len(found)


def test_held_out_prompts_have_places_of_their_own(talks):
    found = held_out_prompts(reader_of(talks), 99)
    assert len({prompt.place for prompt in found}) == len(found)


# Registry packages


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """A demo set that is fetched already."""
    buffer = io.BytesIO()
    rows = [{"turns": ["One", "Two"], "category": "c"}, {"prompt": "def f():\n    ...\n", "task_id": "t"}]
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("toy/rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("HEADWRIGHT_CACHE", str(tmp_path))
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "toy_set-1.0-py3-none-any.whl").write_bytes(buffer.getvalue())
    package = Package("toy-set", "1.0", hashlib.sha256(buffer.getvalue()).hexdigest())
    for name in ("mt-bench", "humaneval"):
        monkeypatch.setitem(demo.SETS, name, DemoSet(package, "toy/rows.jsonl", "MIT", lambda row: row["prompt"]))


def test_demo_sets_are_asked_with_all_their_turns(toy, room):
    first, second = read_set(PromptSet("mt-bench", demo="mt-bench"), room)
    assert [turn["content"] for [turn] in first.rounds] == ["One", "Two"]
    assert (first.place, second.place) == ("toy-set/rows.jsonl:1", "toy-set/rows.jsonl:2")
    assert (first.domain, first.language) == ("chat", "en")


def test_demo_sets_are_asked_in_the_words_of_the_set(toy, room):
    _, second = read_set(PromptSet("humaneval", demo="humaneval"), room)
    assert second.rounds[0][0]["content"] == HUMANEVAL.replace("f(x)", "f()")


def test_demo_sets_are_known_by_their_own_name(toy, room):
    """docs/evaluation.md shows them without `set`."""
    _, second = read_set(PromptSet(demo="humaneval"), room)
    assert second.rounds[0][0]["content"] == HUMANEVAL.replace("f(x)", "f()")
    assert (second.domain, second.language) == ("code", "en")


def test_places_of_malformed_rows(monkeypatch, room, capsys):
    """A source's own words about a row."""
    rows = [("f:1", Malformed("the file breaks off")), ("f:2", {"prompt": "x"})]
    monkeypatch.setattr(module, "source_rows", lambda source, seed: iter(rows))
    assert [prompt.place for prompt in read_set(PromptSet(hub="a/b"), room)] == ["f:2"]
    assert "a/b: left out f:1: the file breaks off" in capsys.readouterr().out


def test_options_of_the_template_reach_it(model_dir, chats, tmp_path):
    """corpus.template, as in the harvest."""
    run = tiny_run(model_dir, chats, tmp_path)
    target = make_target()
    target.tokenizer.chat_template = "{{ loud }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    run.corpus.template = {"loud": "!!"}
    room = Room.of(run, target)
    assert (room.context, room.ends) == (512, frozenset(target.spec.eos_token_ids))
    assert target.tokenizer.decode(make_prompt(PromptSet(path="x"), room, "p", {"prompt": "hi"}).ids) == "!!hi"
