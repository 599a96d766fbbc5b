"""Chats over real local servers that stall, drop, refuse and talk nonsense: every chat is answered once, or says why not."""

import time
from collections import Counter

import pytest
from fake_server import FAULTS, answer_to, assert_conditioned, dead_url, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwright.configs import UserError
from headwright.configs.schema import RegenerateConfig
from headwright.data import server
from headwright.data.server import answer_over_servers

pytest.importorskip("openai")
SAMPLING = {"temperature": 0.0, "max_tokens": 9}


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Short pauses."""
    monkeypatch.setattr(server, "FIRST_PAUSE", 0.004)
    monkeypatch.setattr(server, "LONGEST_PAUSE", 0.03)


def rounds_of(name: str, turns: int) -> list:
    """The user's turns of a chat."""
    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"{name} 0"}]
    return [first, *([{"role": "user", "content": f"{name} {turn}"}] for turn in range(1, turns))]


def ask(urls, chats, tools=None, sampling=SAMPLING, key="secret", **changes):
    """Everything that came back, by name. Nothing comes twice."""
    config = RegenerateConfig(urls=urls, **{"timeout": 5.0, "retries": 6, "concurrency": 4} | changes)
    jobs = ((name, rounds_of(name, turns), tools, sampling) for name, turns in chats.items())
    results = list(answer_over_servers(config, "model", key, jobs))
    assert Counter(name for name, _, _ in results) == Counter(list(chats))
    return {name: (messages, error) for name, messages, error in results}


def assert_all_answered(found, chats):
    for name, turns in chats.items():
        messages, error = found[name]
        assert error == ""
        assert_conditioned(messages, turns)
        asked = [turn for turn in messages if turn["role"] != "assistant"]
        assert asked == [turn for turns in rounds_of(name, turns) for turn in turns]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    faults=st.lists(st.sampled_from(FAULTS), max_size=12),
    turns=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    concurrency=st.integers(1, 3),
)
def test_all_is_answered_once_whatever_goes_wrong_for_a_while(faults, turns, concurrency):
    chats = {f"chat {number}": count for number, count in enumerate(turns)}
    with serving(lambda number, body: faults[number] if number < len(faults) else None) as fake:
        found = ask([fake.url], chats, concurrency=concurrency, timeout=0.4, retries=30)
    assert_all_answered(found, chats)
    assert len(fake.bodies) >= sum(turns) + min(len(faults), 1)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_tried_again(fault):
    """Each of them once on every turn: two requests a turn, and the answer is the one that was whole."""
    with serving(lambda number, body: fault if number % 2 == 0 else None) as fake:
        found = ask([fake.url], {"a": 2}, timeout=0.5, concurrency=1)
    assert_all_answered(found, {"a": 2})
    assert len(fake.bodies) >= 4
    assert fake.bodies[0]["messages"] == fake.bodies[1]["messages"]


@pytest.mark.parametrize("fault", ["stall", "trickle"])
def test_time_limit_holds_for_the_whole_request(fault):
    with serving(lambda number, body: fault) as fake:
        started = time.monotonic()
        [(messages, error)] = ask([fake.url], {"a": 1}, timeout=0.3, retries=1).values()
        took = time.monotonic() - started
    assert messages is None
    assert "no answer within 0.3 s" in error or "timed out" in error.lower()
    assert 0.6 <= took < 2.4  # the server would have gone on for three seconds each time
    assert len(fake.bodies) == 2


@pytest.mark.parametrize(("concurrency", "count"), [(1, 1), (3, 1), (2, 2)])
def test_never_more_requests_in_flight_than_asked_for(concurrency, count):
    """Measured over all servers together; and the slots are used."""
    chats = {f"chat {number}": 2 for number in range(14)}
    flights = []

    def fault(number, body):
        flights.append(sum(fake.busy for fake in fakes))
        return "500" if number % 5 == 2 else None

    fakes = []
    with serving(fault, think=0.02) as one, serving(fault, think=0.02) as two:
        fakes += [one, two][:count]
        assert_all_answered(ask([fake.url for fake in fakes], chats, concurrency=concurrency, retries=20), chats)
    assert max(flights) <= concurrency * count
    assert max(fake.busiest for fake in fakes) <= concurrency * count
    assert max(flights) >= min(2, concurrency * count)


def test_concurrency_is_per_server_also_when_another_is_dead():
    with serving(think=0.02) as fake:
        chats = {f"chat {number}": 1 for number in range(24)}
        assert_all_answered(ask([fake.url, dead_url(), dead_url()], chats, concurrency=2, retries=30), chats)
    assert fake.busiest <= 2


def test_servers_share_the_load():
    chats = {f"chat {number}": 1 for number in range(30)}
    with serving(think=0.02) as one, serving(think=0.02) as two:
        assert_all_answered(ask([one.url, two.url], chats, concurrency=2), chats)
    assert len(one.bodies) + len(two.bodies) == 30
    assert min(len(one.bodies), len(two.bodies)) >= 10


@pytest.mark.parametrize("fault", ["dead", "500", "429 1", "hang up"])
def test_a_bad_server_does_not_stop_the_run(fault):
    chats = {f"chat {number}": 2 for number in range(12)}
    with serving() as good, serving(lambda number, body: fault) as bad:
        urls = [dead_url() if fault == "dead" else bad.url, good.url]
        assert_all_answered(ask(urls, chats, concurrency=2, retries=30), chats)
    assert len(good.bodies) >= 24
    assert len(bad.bodies) < 24  # it rests between attempts


def test_requests_per_minute():
    """Five a second: six requests take a second, less what the first one needs to be on its way."""
    with serving() as fake:
        ask([fake.url], {f"chat {number}": 1 for number in range(6)}, requests_per_minute=300, concurrency=6)
    assert len(fake.times) == 6
    assert 0.5 <= max(fake.times) - min(fake.times) < 5


def test_requests_per_minute_counts_what_failed_too():
    with serving(lambda number, body: "500" if number < 3 else None) as fake:
        ask([fake.url], {"a": 1}, requests_per_minute=300)
    assert len(fake.times) == 4
    assert fake.times[-1] - fake.times[0] >= 0.35


def test_retry_after_is_waited_for(monkeypatch):
    monkeypatch.setattr(server, "LONGEST_PAUSE", 30.0)
    with serving(lambda number, body: "429 0.5" if number == 0 else None) as fake:
        ask([fake.url], {"a": 1})
    assert 0.45 <= fake.times[1] - fake.times[0] < 3


def test_retry_after_of_an_hour_is_not(monkeypatch):
    monkeypatch.setattr(server, "LONGEST_PAUSE", 0.2)
    with serving(lambda number, body: "429 3600" if number == 0 else None) as fake:
        ask([fake.url], {"a": 1})
    assert 0.15 <= fake.times[1] - fake.times[0] < 3


def test_pauses_grow(monkeypatch):
    monkeypatch.setattr(server, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(server, "LONGEST_PAUSE", 0.2)
    with serving(lambda number, body: "503" if number < 4 else None) as fake:
        ask([fake.url], {"a": 1})
    pauses = [b - a for a, b in zip(fake.times, fake.times[1:])]
    assert len(pauses) == 4
    assert all(pause >= 0.5 * least for pause, least in zip(pauses, (0.05, 0.1, 0.2, 0.2)))


@pytest.mark.parametrize("code", ["400", "401", "404", "422"])
def test_refused_first_turn_fails_at_once_with_the_reason(code):
    with serving(lambda number, body: code if "bad" in body["messages"][1]["content"] else None) as fake:
        found = ask([fake.url], {"bad": 2, "good": 2})
    assert_all_answered({"good": found["good"]}, {"good": 2})
    messages, error = found["bad"]
    assert messages is None
    assert f"no: {code}" in error
    assert fake.url in error
    assert len(fake.bodies) == 3


def test_refused_later_turn_ends_the_chat_with_what_it_has():
    with serving(lambda number, body: "400" if len(body["messages"]) > 3 else None) as fake:
        messages, error = ask([fake.url], {"a": 3})["a"]
    assert error == ""
    assert_conditioned(messages, 1)
    assert len(fake.bodies) == 2


@pytest.mark.parametrize("fault", ["500", "429", "broken", "hang up", "empty"])
def test_exhausted_retries(fault):
    """Also on a later turn the whole chat fails: half a chat is not what was asked for."""
    with serving(lambda number, body: fault if len(body["messages"]) > 3 else None) as fake:
        messages, error = ask([fake.url], {"a": 3}, retries=2)["a"]
    assert messages is None
    assert error.startswith(fake.url)
    assert len(fake.bodies) == 1 + 3


def test_all_servers_dead_is_one_error_soon():
    given = []

    def chats():
        for number in range(5000):
            given.append(number)
            yield number, rounds_of("x", 1), None, SAMPLING

    config = RegenerateConfig(urls=[dead_url(), dead_url()], retries=1, concurrency=2, timeout=1.0)
    failed = []
    with pytest.raises(UserError, match="chats in a row got no answer"):
        failed.extend(answer_over_servers(config, "model", "key", chats()))
    assert len(given) < 40


def test_servers_that_die_on_the_way_are_one_error_soon():
    chats = ((number, rounds_of("x", 1), None, SAMPLING) for number in range(150))
    with serving(lambda number, body: "500" if number >= 3 else None) as fake:
        config = RegenerateConfig(urls=[fake.url], retries=1, concurrency=4, timeout=1.0)
        with pytest.raises(UserError):
            list(answer_over_servers(config, "model", "key", chats))
    assert len(fake.bodies) < 120


def test_a_wrong_key_is_one_error_soon():
    chats = ((number, rounds_of("x", 1), None, SAMPLING) for number in range(150))
    with serving(lambda number, body: "401") as fake:
        config = RegenerateConfig(urls=[fake.url], retries=1, concurrency=4, timeout=1.0)
        with pytest.raises(UserError, match="401"):
            list(answer_over_servers(config, "model", "key", chats))
    assert len(fake.bodies) < 120


def test_cut_off_answer_ends_the_chat():
    with serving(reply=lambda body: {"finish_reason": "length"}) as fake:
        messages, error = ask([fake.url], {"a": 3})["a"]
    assert error == ""
    assert_conditioned(messages, 1)
    assert len(fake.bodies) == 1


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept(name):
    def reply(body):
        return {"message": {"role": "assistant", "content": answer_to(body["messages"]), name: "hm"}}

    with serving(reply=reply) as fake:
        messages, _ = ask([fake.url], {"a": 2})["a"]
    assert [turn.get("reasoning_content") for turn in messages if turn["role"] == "assistant"] == ["hm", "hm"]
    assert messages[-1]["content"] == answer_to(messages[:-1])


def test_tool_calls_are_kept_and_end_the_chat():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    reply = {"finish_reason": "tool_calls", "message": {"role": "assistant", "content": None, "tool_calls": [call]}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    with serving(reply=lambda body: reply) as fake:
        messages, error = ask([fake.url], {"a": 2}, tools=tools)["a"]
    assert error == ""
    assert messages[-1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert len(fake.bodies) == 1
    assert fake.bodies[0]["tools"] == tools


def test_what_is_asked_for_arrives():
    sampling = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 17, "seed": 5}
    extra = {"top_k": 40, "chat_template_kwargs": {"enable_thinking": False}}
    with serving() as fake:
        ask([fake.url], {"a": 2}, sampling=sampling | {"extra_body": extra}, key="sk-very-secret")
    assert len(fake.bodies) == 2
    for body, headers in zip(fake.bodies, fake.headers):
        assert body["path"] == "/v1/chat/completions"
        assert {key: body[key] for key in (*sampling, *extra, "model")} == sampling | extra | {"model": "model"}
        assert "tools" not in body
        assert headers["authorization"] == "Bearer sk-very-secret"


NONSENSE = ["[]", "null", "7", '"text"', '{"choices": [null]}', '{"choices": "abc"}']
NONSENSE += ['{"choices": [{"message": null}]}', '{"choices": [{"message": {"content": 5}}]}']
NONSENSE += ['{"choices": {}}', "[" * 100_000]


@pytest.mark.parametrize("body", NONSENSE, ids=lambda text: text[:40])
def test_nonsense_is_tried_again(body):
    with serving(lambda number, _: body if number == 0 else None) as fake:
        assert_all_answered(ask([fake.url], {"a": 1}), {"a": 1})
    assert len(fake.bodies) == 2


@pytest.mark.parametrize("after", ["²", "-1", "nan", "inf", "1e9", ".", "1.5.2", ""])
def test_odd_retry_after(after):
    with serving(lambda number, _: f"503 {after}" if number == 0 else None) as fake:
        assert_all_answered(ask([fake.url], {"a": 1}), {"a": 1})
    assert len(fake.bodies) == 2


def test_half_a_character_is_no_answer():
    """JSON may spell one; no file and no tokenizer takes it."""
    half = '{"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": "x\\ud83d"}}]}'
    with serving(lambda number, _: half if number == 0 else None) as fake:
        assert_all_answered(ask([fake.url], {"a": 1}), {"a": 1})


def test_connections_are_closed_afterwards():
    with serving() as fake:
        ask([fake.url], {f"chat {number}": 1 for number in range(6)})
        limit = time.monotonic() + 1
        while fake.open and time.monotonic() < limit:
            time.sleep(0.01)
        assert fake.open == 0


def test_stopping_early_leaves_nothing_running():
    """The consumer may stop at any time, as an interrupted stage does."""
    with serving(think=0.05) as fake:
        config = RegenerateConfig(urls=[fake.url], concurrency=4, timeout=5.0)
        chats = ((number, rounds_of("x", 3), None, SAMPLING) for number in range(100))
        results = answer_over_servers(config, "model", "key", chats)
        next(results)
        results.close()
        time.sleep(0.2)
        asked = len(fake.bodies)
        time.sleep(0.2)
        assert len(fake.bodies) == asked < 40
