"""`headwright watch` on recorded pages of the real engines, over HTTP; the dashboards name only metrics that are there."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_cases import entry, refused, report, save

from headwright.configs import UserError
from headwright.eval import monitor
from headwright.eval.monitor import Limits, Reading, Window, between, judge, main, parse

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parent / "metrics").glob("*.txt")}
GOLDEN = Path(__file__).parent / "golden"
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


class Server(ThreadingHTTPServer):
    """Answers with one page after another, the last one for ever. An answer: text, a status, or raw bytes of a connection."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[str | int | bytes] = []
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def next(self) -> str | int | bytes:
        """What comes now."""
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Handler(BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        answer = self.server.next()
        if isinstance(answer, int):
            self.send_error(answer)
        elif isinstance(answer, bytes):
            self.wfile.write(answer)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def watched(server: Server, capsys, *words: str, pages: tuple[str | int | bytes, ...] = ()) -> tuple[int, list[dict]]:
    """Exit code and windows."""
    server.answers = list(pages)
    code = 0
    try:
        main(["--url", server.url, "--json", "--timeout", "5", *words])
    except SystemExit as ended:
        code = ended.code
    shown = capsys.readouterr()
    assert code == 2 or not shown.err.strip()
    return code, [json.loads(text) for text in shown.out.splitlines()]


def refusal(server: Server, capsys, *words: str, page: str | int | bytes) -> str:
    """The one message about a page."""
    server.answers = [page]
    return refused(main, capsys, "--url", server.url, "--break-even", "1.5", "--timeout", "5", *words)


# Pages


def test_vllm_counters_are_read():
    assert parse(PAGES["vllm-0"]) == Reading("vllm", 0, 0, 0, [0, 0, 0])
    assert parse(PAGES["vllm-1"]) == Reading("vllm", 28, 84, 42, [19, 14, 9])
    assert parse(PAGES["vllm-2"]) == Reading("vllm", 84, 252, 126, [59, 42, 25])


def test_sglang_counters_and_gauges_are_read():
    """Answers that are streamed and others are counted apart: 192 + 176 tokens."""
    assert parse(PAGES["sglang-idle"]) == Reading("sglang", None)
    assert parse(PAGES["sglang-gauges"]) == Reading("sglang", None, length=2.375, rate=pytest.approx(1.375 / 3))
    assert parse(PAGES["sglang-1"]) == Reading("sglang", 73, tokens=176, length=2.375, rate=pytest.approx(1.375 / 3))
    assert parse(PAGES["sglang-2"]) == Reading("sglang", 163, tokens=368, length=2.1, rate=pytest.approx(1.1 / 3))


def test_engines_of_one_server_are_counted_together():
    second = "\n".join(text for text in PAGES["vllm-1"].splitlines() if 'engine="0"' in text).replace('"0",m', '"1",m')
    assert parse(PAGES["vllm-2"] + second) == Reading("vllm", 112, 336, 168, [78, 56, 34])
    rank = PAGES["sglang-2"].replace('tp_rank="0"', 'tp_rank="0",dp_rank="1"')
    both = parse(PAGES["sglang-1"] + "".join(text + "\n" for text in rank.splitlines() if text.startswith("sglang:")))
    assert (both.drafts, both.tokens) == (73 + 163, 176 + 368)
    assert both.length == pytest.approx((2.375 + 2.1) / 2)
    idle = "".join(text + "\n" for text in PAGES["sglang-idle"].splitlines() if text.startswith("sglang:"))
    assert parse(PAGES["sglang-2"] + idle).length == 2.1, "ranks that have not drafted have no acceptance length"


def test_one_model_of_several():
    other = PAGES["vllm-2"].replace('"tiny"', '"other"')
    page = PAGES["vllm-1"] + "".join(text + "\n" for text in other.splitlines() if text.startswith("vllm:"))
    assert parse(page, "tiny") == parse(PAGES["vllm-1"])
    assert parse(page, "other") == parse(PAGES["vllm-2"])
    assert parse(page).drafts == 112
    with pytest.raises(UserError, match="--model third: the server has "):
        parse(page, "third")


def test_positions_are_in_the_order_of_numbers():
    first = PAGES["vllm-1"].splitlines()
    places = [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="{place}"}} {20 - place}'
        for place in (10, 2, 0, 11, 1, 3, 4, 5, 9, 8, 7, 6)
    ]
    page = "\n".join([text for text in first if "per_pos" not in text] + places) + "\n"
    assert parse(page).places == [20 - place for place in range(12)]


WORDS = st.sampled_from(
    [*PAGES["vllm-1"].split(), *PAGES["sglang-1"].split(), "{", "}", '"', "\\", "NaN", "#", "=", ","]
)


@settings(max_examples=150)
@given(st.text(max_size=60) | st.lists(WORDS, max_size=12).map(" ".join) | st.lists(WORDS, max_size=12).map("\n".join))
def test_any_text_is_read_or_refused(text):
    try:
        found = parse(text)
    except UserError:
        return
    assert found.engine in ("vllm", "sglang")


# Windows


def test_what_happened_between_two_readings_of_vllm():
    first, second = parse(PAGES["vllm-1"]), parse(PAGES["vllm-2"])
    found = between(first, second)
    assert (found.engine, found.drafts, found.tau, found.acceptance_rate) == ("vllm", 56, 1 + 84 / 56, 84 / 168)
    assert found.accepted_per_position == [40 / 56, 28 / 56, 16 / 56]
    assert between(first, first) == Window("vllm", 0, None, None, [])


def test_the_window_of_the_recording_is_what_our_decoder_counts():
    """Between the last two pages the server answered the prompts of tests/engine_cases.py once."""
    ours = json.loads((GOLDEN / "eagle3" / "counters.json").read_text(encoding="utf-8"))
    found = between(parse(PAGES["vllm-1"]), parse(PAGES["vllm-2"]))
    assert found.drafts == ours["drafts"]
    assert [round(share * found.drafts) for share in found.accepted_per_position] == ours["accepted_per_pos"]
    assert found.tau == pytest.approx(1 + sum(ours["accepted_per_pos"]) / ours["drafts"])
    assert found.tau == pytest.approx(1 + sum(found.accepted_per_position))


def test_what_happened_between_two_readings_of_sglang():
    first, second = parse(PAGES["sglang-1"]), parse(PAGES["sglang-2"])
    found = between(first, second)
    assert (found.drafts, found.tau) == (90, 192 / 90)
    assert found.acceptance_rate == pytest.approx(1.1 / 3)
    assert found.accepted_per_position == []
    assert between(parse(PAGES["sglang-gauges"]), first).tau == 176 / 73, "the first passes that are counted"
    assert between(first, first).tau is None


def test_without_counted_passes_sglangs_gauge_is_taken():
    assert between(None, parse(PAGES["sglang-gauges"])) == Window(
        "sglang", None, 2.375, pytest.approx(1.375 / 3), []
    )  # fmt: skip
    assert between(None, parse(PAGES["sglang-idle"])).tau is None


def test_the_first_reading_counts_from_the_servers_start():
    found = between(None, parse(PAGES["vllm-2"]))
    assert (found.drafts, found.tau) == (84, 2.5)
    assert found.accepted_per_position == [59 / 84, 42 / 84, 25 / 84]
    assert between(None, parse(PAGES["sglang-2"])).tau == 368 / 163


def test_counters_that_went_back_belong_to_a_new_server():
    assert between(parse(PAGES["vllm-2"]), parse(PAGES["vllm-1"])) == between(None, parse(PAGES["vllm-1"]))
    assert between(parse(PAGES["sglang-2"]), parse(PAGES["sglang-1"])) == between(None, parse(PAGES["sglang-1"]))
    assert between(parse(PAGES["sglang-2"]), parse(PAGES["sglang-gauges"])).tau == 2.375
    assert between(parse(PAGES["sglang-1"]), parse(PAGES["vllm-2"])) == between(None, parse(PAGES["vllm-2"]))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_new_server_that_has_drafted_more_than_the_old_one(engine):
    """It was started anew since, and has accepted less in more drafts."""
    if engine == "vllm":
        before, now = Reading("vllm", 50, 150, 100, [50, 30, 20]), Reading("vllm", 60, 180, 20, [10, 6, 4])
    else:
        before, now = Reading("sglang", 50, tokens=150), Reading("sglang", 60, tokens=90)
    found = between(before, now)
    assert found == between(None, now)


@given(st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=3, max_size=3))
def test_windows_add_up(servings):
    """Each number is a draft of three tokens, of which so many stood."""
    seen, found = [Reading("vllm", 0, 0, 0, [0, 0, 0])], []
    for number in range(len(servings)):
        drafts = [stood for serving in servings[: number + 1] for stood in serving]
        places = [sum(stood > place for stood in drafts) for place in range(3)]
        seen.append(Reading("vllm", len(drafts), 3 * len(drafts), sum(drafts), places))
        found.append(between(seen[-2], seen[-1]))
    for window, serving in zip(found, servings):
        assert window.drafts == len(serving)
        assert window.tau == (pytest.approx(1 + sum(serving) / len(serving)) if serving else None)
        assert window.tau is None or sum(window.accepted_per_position) == pytest.approx(window.tau - 1)
        assert window.acceptance_rate == (pytest.approx(sum(serving) / len(serving) / 3) if serving else None)


# Verdicts


@pytest.mark.parametrize(
    ("window", "limits", "verdict", "reasons"),
    [
        (Window("vllm", 100, 1.5, 0.2, []), Limits(1.5, 1.5), "ok", 0),
        (Window("vllm", 100, 1.49, 0.2, []), Limits(1.5), "drifted", 1),
        (Window("vllm", 100, 1.49, 0.2, []), Limits(1.4, 1.6), "drifted", 1),
        (Window("vllm", 100, 1.3, 0.2, []), Limits(1.4, 1.6), "drifted", 2),
        (Window("vllm", 99, 1.3, 0.2, []), Limits(1.4), "unknown", 1),
        (Window("vllm", 0, None, None, []), Limits(1.4, least_drafts=0), "unknown", 1),
        (Window("sglang", None, 1.3, 0.2, []), Limits(1.4), "drifted", 1),
        (Window("sglang", None, 1.5, 0.2, []), Limits(1.4), "ok", 0),
        (Window("sglang", None, None, None, []), Limits(1.4), "unknown", 1),
    ],
)
def test_verdicts(window, limits, verdict, reasons):
    found = judge(window, limits)
    assert (found["verdict"], len(found["why"])) == (verdict, reasons)
    assert found["tau"] == window.tau


def test_exit_codes(server, capsys):
    vllm, sglang = (PAGES["vllm-2"],), (PAGES["sglang-2"],)
    code, found = watched(server, capsys, "--break-even", "2.5", "--min-drafts", "84", pages=vllm)
    assert (code, found[0]["verdict"], found[0]["tau"], found[0]["why"]) == (0, "ok", 2.5, [])
    code, found = watched(server, capsys, "--break-even", "2.51", "--min-drafts", "84", pages=vllm)
    assert (code, found[0]["verdict"]) == (1, "drifted")
    assert found[0]["why"] == ["τ 2.50 is below break-even 2.51: drafting costs more than it brings"]
    code, found = watched(server, capsys, "--break-even", "2.5", pages=vllm)
    assert (code, found[0]["verdict"], found[0]["why"]) == (3, "unknown", ["84 drafts, fewer than 100"])
    assert watched(server, capsys, "--expect", "2.2", pages=sglang)[0] == 0
    assert watched(server, capsys, "--expect", "2.3", pages=sglang)[0] == 1
    assert watched(server, capsys, "--expect", "2.3", pages=(PAGES["sglang-gauges"],))[0] == 0
    assert watched(server, capsys, "--expect", "2.3", pages=(PAGES["sglang-idle"],))[0] == 3
    assert watched(server, capsys, "--expect", "2.3", pages=(404,))[0] == 2
    assert set(server.asked) == {"/metrics"}


def test_addresses(server, capsys):
    server.answers = [PAGES["vllm-2"]]
    for address in (server.url, f"{server.url}/", f"{server.url}/metrics", f"{server.url}/metrics/"):
        main(["--url", address, "--break-even", "1", "--min-drafts", "1", "--json"])
    main(["--url", f"{server.url}/gate", "--break-even", "1", "--min-drafts", "1"])
    assert server.asked == ["/metrics", "/metrics", "/metrics", "/metrics/", "/gate/metrics"]
    assert capsys.readouterr().out.splitlines()[-1] == (
        "ok: vllm τ 2.500 over 84 drafts, 50% of the drafted tokens accepted; accepted at each position: 70% 50% 30%"
    )


def test_intervals(server, capsys):
    pages = tuple(PAGES[f"vllm-{number}"] for number in range(3))
    words = ("--interval", "0.05", "--times", "3", "--min-drafts", "20", "--break-even", "2")
    code, found = watched(server, capsys, *words, pages=pages)
    assert [(window["drafts"], window["tau"], window["verdict"]) for window in found] == [
        (28, 2.5, "ok"),
        (56, 2.5, "ok"),
        (0, None, "unknown"),
    ]
    assert found[1]["accepted_per_position"] == [40 / 56, 28 / 56, 16 / 56]
    assert code == 3, "of the last window"
    assert len(server.asked) == 4


def test_a_server_that_is_started_anew_between_two_readings(server, capsys):
    pages = tuple(PAGES[f"vllm-{number}"] for number in (1, 2, 0, 1))
    words = ("--interval", "0.05", "--times", "3", "--min-drafts", "20", "--break-even", "2")
    code, found = watched(server, capsys, *words, pages=pages)
    assert [window["drafts"] for window in found] == [56, 0, 28]
    assert code == 0


def test_it_ends_with_the_first_window_that_has_drifted_unless_told_otherwise(server, capsys):
    pages = tuple(PAGES[f"sglang-{name}"] for name in ("idle", "1", "2", "2"))
    words = ("--interval", "0.05", "--times", "3", "--min-drafts", "20", "--break-even", "2.2")
    code, found = watched(server, capsys, *words, pages=pages)
    assert ([window["verdict"] for window in found], code) == (["ok", "drifted"], 1)
    code, found = watched(server, capsys, *words, "--keep-going", pages=pages)
    assert ([window["verdict"] for window in found], code) == (["ok", "drifted", "unknown"], 3)


def test_without_a_number_of_times_it_goes_on_until_one_has_drifted(server, capsys):
    pages = tuple(PAGES[f"vllm-{number}"] for number in (0, 1, 1, 1, 2))
    words = ("--interval", "0.02", "--min-drafts", "50", "--break-even", "2.6")
    code, found = watched(server, capsys, *words, pages=pages)
    assert ([window["verdict"] for window in found], code) == (["unknown"] * 3 + ["drifted"], 1)


def test_one_model_on_the_command_line(server, capsys):
    other = PAGES["vllm-2"].replace('"tiny"', '"other"')
    page = PAGES["vllm-1"] + "".join(text + "\n" for text in other.splitlines() if text.startswith("vllm:"))
    words = ("--break-even", "2", "--min-drafts", "1")
    assert watched(server, capsys, *words, "--model", "tiny", pages=(page,))[1][0]["drafts"] == 28
    assert watched(server, capsys, *words, "--model", "other", pages=(page,))[1][0]["drafts"] == 84
    assert watched(server, capsys, *words, pages=(page,))[1][0]["drafts"] == 112
    assert "--model third: the server has " in refusal(server, capsys, "--model", "third", page=page)


def test_what_was_measured_is_expected(server, capsys, tmp_path):
    entries = (
        entry(acceptance_length_ci95=[2.4, 2.8]),
        entry(name="chain-3", acceptance_length_ci95=[2.6, 2.9]),
        entry(drafter="prompt-lookup", name="chain-2", acceptance_length_ci95=[1.1, 1.2]),
    )
    place = save(tmp_path / "run", report(*entries))
    words, pages = ("--min-drafts", "20", "--report", place), (PAGES["vllm-2"],)
    assert watched(server, capsys, *words, pages=pages)[0] == 0
    code, found = watched(server, capsys, *words, "--shape", "chain-3", pages=pages)
    assert (code, found[0]["why"]) == (1, ["τ 2.50 is below 2.60, the low end of what was measured"])
    assert watched(server, capsys, *words, "--expect", "2.45", "--shape", "chain-3", pages=pages)[0] == 0
    assert watched(server, capsys, *words, "--break-even", "2.7", pages=pages)[0] == 1
    message = refusal(server, capsys, "--report", place, "--shape", "chain-2", page=pages[0])
    assert "--shape chain-2: the report has chain-5, chain-3\n" in message
    assert "is missing" in refusal(server, capsys, "--report", str(tmp_path), page=pages[0])
    old = save(tmp_path / "old", {"schema": "headwright.acceptance/0"})
    assert "this version reads" in refusal(server, capsys, "--report", old, page=pages[0])


# Messages


def test_nothing_to_compare_with(server, capsys):
    assert "give --break-even" in refused(main, capsys, "--url", server.url)
    assert server.asked == []
    for seconds in ("0", "-1"):
        assert f"--interval {float(seconds)}" in refusal(server, capsys, "--interval", seconds, page=PAGES["vllm-2"])


def test_servers_that_have_no_metrics(server, capsys):
    assert "the server answers 404: start SGLang with --enable-metrics" in refusal(server, capsys, page=404)
    assert refusal(server, capsys, page=503).endswith("/metrics: the server answers 503\n")
    html = "<!doctype html>\n<html><body>hello</body></html>\n"
    assert "this is no page of Prometheus metrics" in refusal(server, capsys, page=html)
    other = "# TYPE up gauge\nup 1\n"
    assert "neither vLLM's nor SGLang's metrics are on this page" in refusal(server, capsys, page=other)
    assert "neither vLLM's nor SGLang's" in refusal(server, capsys, page="")
    assert "codec can't decode" in refusal(server, capsys, page=b"HTTP/1.1 200 OK\r\n\r\nvllm:x \xff\xfe 1\n")


def test_vllm_without_speculative_decoding(server, capsys):
    page = "".join(text + "\n" for text in PAGES["vllm-2"].splitlines() if "spec_decode" not in text)
    assert "generation_tokens_total" in page
    message = refusal(server, capsys, page=page)
    assert "vllm shows no metrics of speculative decoding: was it started with a draft head?" in message


def test_sglang_without_speculative_decoding(server, capsys):
    """Answers have been given, and no pass has verified anything."""
    page = "".join(text + "\n" for text in PAGES["sglang-2"].splitlines() if not re.match("sglang:spec_", text))
    page += "".join(text + "\n" for text in PAGES["sglang-idle"].splitlines() if re.match("sglang:spec_", text))
    assert "sglang shows no metrics of speculative decoding" in refusal(server, capsys, page=page)


def test_servers_that_cannot_be_reached(capsys):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    message = refused(main, capsys, "--url", f"http://127.0.0.1:{port}", "--break-even", "1.5")
    assert "refused" in message
    assert f"http://127.0.0.1:{port}/metrics" in message
    for address in ("127.0.0.1:8000", "ftp://127.0.0.1", "file:///etc", "http://"):
        assert f"--url {address}: give http://" in refused(main, capsys, "--url", address, "--break-even", "1.5")


def test_a_server_that_does_not_answer(capsys):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        message = refused(main, capsys, "--url", address, "--break-even", "1.5", "--timeout", "0.2")
    assert "timed out" in message
    assert time.monotonic() - begun < 3


def test_a_server_that_does_not_speak_http(server, capsys):
    assert "error: http://127.0.0.1" in refusal(server, capsys, page=b"SSH-2.0-OpenSSH_9.2\r\n")


def test_an_address_with_a_port_that_is_no_number(capsys):
    assert "port" in refused(main, capsys, "--url", "http://127.0.0.1:port", "--break-even", "1.5")


def test_an_interval_that_is_no_number(server, capsys):
    assert "--interval nan" in refusal(server, capsys, "--interval", "nan", page=PAGES["vllm-2"])


def test_a_huge_page_is_not_read_to_its_end(server, capsys):
    """Metrics behind the longest page that is read are not guessed at, and memory is bounded."""
    before = "# " + "x" * monitor.LONGEST + "\n"
    assert "longer than 16 MiB" in refusal(server, capsys, page=before + PAGES["vllm-2"])


def test_a_page_that_is_too_long_is_refused(server, capsys, monkeypatch):
    page = PAGES["vllm-2"].replace('tokens_total{engine="0",model_name="tiny"} 126.0', "tokens_total{} 126.0")
    cut = len(page[: page.index(" 126.0")].encode()) + 2  # accepted tokens: 1
    monkeypatch.setattr(monitor, "LONGEST", cut)
    refusal(server, capsys, "--min-drafts", "1", page=page)


# Dashboards


def expressions(board: dict) -> list[str]:
    """All PromQL of a dashboard, its variables' too."""
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries = [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    return found + [query["query"] for query in queries]


def uids(found: object) -> Iterator[object]:
    """Every uid, at any depth."""
    if isinstance(found, dict):
        yield from (value for key, value in found.items() if key == "uid")
        for value in found.values():
            yield from uids(value)
    elif isinstance(found, list):
        for value in found:
            yield from uids(value)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_dashboards(engine):
    board = json.loads((CONFIGS / f"grafana-{engine}.json").read_text(encoding="utf-8"))
    recorded = {
        match[1]
        for name, page in PAGES.items()
        if name.startswith(f"{engine}-")
        for match in re.finditer(r"^(\w+:\w+)", page, re.MULTILINE)
    }
    asked = set()
    for text in expressions(board):
        names = re.findall(r"\b(?:vllm|sglang):\w+", text)
        asked |= set(names)
        assert names or text == "vector($break_even)"
        assert text.count("(") == text.count(")")
        for name in names:
            counter = f"rate({name}{{" in text and "[$__rate_interval]" in text
            assert counter == name.endswith("_total") or text.startswith("label_values")
    assert asked <= recorded
    assert {monitor.DRAFTS, monitor.ACCEPTED, monitor.PLACES} <= asked or {monitor.CALLS, monitor.TOKENS} <= asked
    assert board["schemaVersion"] >= 39
    assert "uid" not in board
    assert board["id"] is None
    assert set(uids(board)) == {"${datasource}"}
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert (variables["break_even"]["type"], variables["break_even"]["query"]) == ("textbox", "1.5")
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(panel["title"] and panel["description"] for panel in board["panels"])
    length = board["panels"][0]
    assert "bonus token included" in length["description"]
    assert length["targets"][-1]["expr"] == "vector($break_even)"
