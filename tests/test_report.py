"""The page: what it says first, that it needs nothing but itself, and how it looks in a real browser at several widths."""

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import tiny_run

from headwright.configs import UserError
from headwright.data.harvest import harvest
from headwright.eval.acceptance import evaluate
from headwright.eval.metrics import DEFINITIONS
from headwright.eval.records import read_report
from headwright.eval.report import advice, sure, write_html
from headwright.train.run import train

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RUSSIAN = "Почему небо голубое?"
HOSTILE = "<script>alert(1)</script>\"'&\u202e" + "w" * 300


@pytest.fixture(scope="module")
def run(model_dir, chats, tmp_path_factory):
    """A trained run, evaluated on two sets: its own and a conversation in Cyrillic."""
    folder = tmp_path_factory.mktemp("runs")
    other = folder / "other.jsonl"
    rows = [{"turns": [RUSSIAN, "А ночью?"], "category": "sky"}, {"turns": ["Count to 3"], "category": "count"}]
    other.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    wanted = {
        "sets": [{"set": "held-out"}, {"path": str(other)}],
        "prompts": 3,
        "max_new_tokens": 10,
        "timed_prompts": 2,
        "shapes": [{"kind": "chain", "depth": 3}, {"kind": "dynamic", "depth": 3, "top_k": 2, "nodes": 6}],
    }
    run = tiny_run(model_dir, chats, folder, eval=wanted)
    harvest(run)
    train(run)
    evaluate(run)
    return run


@pytest.fixture
def report(run):
    return read_report(run.directory)


def page_of(report, folder: Path) -> str:
    """The page of a report."""
    write_html(folder, report)
    return (folder / "report.html").read_text(encoding="utf-8")


def words(page: str) -> str:
    """What is read, without tags, pictures and line breaks."""
    bare = re.sub(r"<svg.*?</svg>|<style.*?</style>|<[^>]+>", " ", page, flags=re.S)
    for mark, sign in (("&lt;", "<"), ("&gt;", ">"), ("&#34;", '"'), ("&#39;", "'"), ("&amp;", "&")):
        bare = bare.replace(mark, sign)
    return " ".join(bare.split())


# Words


def test_page_says_everything_and_the_verdict_first(run, report):
    text = words((run.directory / "report.html").read_text(encoding="utf-8"))
    places = [text.index(word) for word in ("plain decoding", "Five answers", "Results", "By domain and language")]
    assert places == sorted(places)
    for answer in report["answers"].values():
        assert " ".join(str(answer).split()) in text
    for entry in report["entries"]:
        low, high = entry["speedup_ci95"]
        assert f"{entry['speedup']:.2f}× [{low:.2f}, {high:.2f}]" in text
        low, high = entry["acceptance_length_ci95"]
        assert f"{entry['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]" in text
    for part in (*DEFINITIONS.values(), report["schema"], report["date"], report["target"]["fingerprint"]):
        assert " ".join(part.split()) in text
    for name in ("sky", "count", "chats", "Cyrillic", "Latin"):
        assert f" {name} " in text
    assert "As others count" in text
    assert "Calculator" in text


def test_same_report_gives_the_same_bytes(report, tmp_path):
    assert page_of(report, tmp_path) == page_of(copy.deepcopy(report), tmp_path)


def test_what_is_not_there_is_left_out(report, tmp_path):
    """No metrics, no provenance, no chain, sampled only, an adapted target: each makes a page."""
    assert "Training" not in words(page_of(report, tmp_path))
    trees = report | {"entries": [entry for entry in report["entries"] if entry["shape"]["kind"] != "chain"]}
    assert "Calculator" not in words(page_of(trees, tmp_path))
    sampled = copy.deepcopy(report)
    for entry in sampled["entries"]:
        entry |= {"temperature": 0.7, "lossless": None}
    assert "T=0.7" in page_of(sampled, tmp_path)
    changed = report | {"target_changed": {"text": "this head's adapter changes the target"}}
    assert "this head's adapter changes the target" in words(page_of(changed, tmp_path))


def test_studies_of_the_run_stand_in_it(report, tmp_path):
    study = {
        "schema": "headwright.study/1",
        "study": "depth",
        "about": "trees, deeper",
        "answers": report["answers"],
        "rows": [{"depth": 1, "tau": 1.5}, {"depth": 2, "tau": None}],
        "plot": {"kind": "lines", "x": "depth", "y": ["tau"], "by": None},
        "says": "deeper is longer",
    }
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "depth.json").write_text(json.dumps(study), encoding="utf-8")
    (tmp_path / "studies" / "old.json").write_text('{"schema": "headwright.study/0"}', encoding="utf-8")
    text = words(page_of(report, tmp_path))
    assert "trees, deeper" in text
    assert "deeper is longer" in text


def hostile(report):
    """Names and texts that would like to be markup, or are endless."""
    bad = copy.deepcopy(report)
    for entry in bad["entries"]:
        entry["prompt_set"] = HOSTILE if entry["prompt_set"] != "held-out" else "held-out"
        entry["by_domain"] = {HOSTILE: next(iter(entry["by_domain"].values()))}
        for sample in entry["samples"]:
            sample |= {"place": HOSTILE, "asked": HOSTILE, "first": HOSTILE, "source": HOSTILE}
    for side in bad["pooled"]:
        side["by_domain"] = {HOSTILE: next(iter(side["by_domain"].values()))}
    return bad | {"name": HOSTILE}


def test_hostile_text_is_text(report, tmp_path):
    page = page_of(hostile(report), tmp_path)
    assert "<script" not in page
    assert HOSTILE[:25] in words(page)


# The verdict


@pytest.mark.parametrize(
    ("interval", "says"),
    [
        ([1.1, 1.3], "faster"),
        ([0.5, 0.9], "slower"),
        ([0.9, 1.1], "no clear difference"),
        ([1.0, 1.2], "no clear difference"),
        (None, "not timed"),
    ],
)
def test_an_interval_says_only_what_it_shows(interval, says):
    assert sure(interval) == says


def entry(shape: str, speedup: float, temperature: float = 0.0, prompt_set: str = "a"):
    """An entry as far as the verdict reads it."""
    band = [speedup - 0.1, speedup + 0.1]
    return {
        "shape": {"name": shape},
        "temperature": temperature,
        "speedup": speedup,
        "speedup_ci95": band,
        "prompt_set": prompt_set,
        "by_domain": {f"domain of {prompt_set}": {"speedup": speedup, "speedup_ci95": band}},
    }


def test_advice_is_the_best_greedy_shape_over_all_sets():
    entries = [
        entry("chain", 1.5),
        entry("tree", 1.3),
        entry("chain", 0.6, prompt_set="b"),
        entry("tree", 1.2, prompt_set="b"),
        entry("hot", 9.0, temperature=1.0),
    ]
    found = advice(entries)
    assert (found["shape"], found["verdict"]) == ("tree", "faster")
    assert [(name, says) for _, name, _, says in found["traffic"]] == [
        ("domain of a", "faster"),
        ("domain of b", "faster"),
    ]
    assert advice([entry("hot", 0.5, temperature=1.0)])["verdict"] == "slower"


# Reading


def test_reports_that_are_none(run, report, tmp_path):
    with pytest.raises(UserError, match=r"report\.json is missing: headwright eval first"):
        read_report(tmp_path)
    for text, wrong in (
        ("{", "not a report"),
        ("[]", "not a report"),
        (json.dumps(report | {"schema": "headwright.acceptance/2"}), "headwright.acceptance/2.*this version reads"),
        (json.dumps(report | {"entries": []}), "no entries"),
        (json.dumps({key: value for key, value in report.items() if key != "pooled"}), "earlier version"),
    ):
        (tmp_path / "report.json").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=wrong):
            read_report(tmp_path)
    assert read_report(run.directory / "report.json") == report


# In a browser


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


OVERHANGS = """() => [...document.querySelectorAll('body *')]
    .filter(e => !e.closest('.wide') && !e.closest('svg') && !e.closest('details:not([open]) > :not(summary)'))
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.tagName + '.' + e.className)"""


def many(report):
    """A dozen entries of six sets with long names."""
    wide = copy.deepcopy(report)
    wide["entries"] = []
    for number in range(6):
        for original in report["entries"][:2]:
            name = f"a set whose name is rather long, number {number}"
            wide["entries"].append(copy.deepcopy(original) | {"prompt_set": name})
    return wide


@pytest.mark.parametrize(
    ("make", "width"),
    [(copy.deepcopy, 1280), (copy.deepcopy, 390), (hostile, 320), (many, 1280), (many, 390)],
    ids=["usual, desktop", "usual, phone", "hostile, small phone", "many, desktop", "many, phone"],
)
def test_nothing_overflows_and_nothing_is_fetched(browser, report, tmp_path, make, width):
    """Tables scroll in their own frames; no message on the console, no request but the file itself."""
    page_of(make(report), tmp_path)
    view = browser.new_page(viewport={"width": width, "height": 800})
    told, asked = [], []
    view.on("console", lambda message: told.append(message.text))
    view.on("pageerror", lambda error: told.append(str(error)))
    view.on("request", lambda request: asked.append(request.url))
    view.goto((tmp_path / "report.html").as_uri())
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    assert view.evaluate(OVERHANGS) == []
    assert told == []
    assert [url for url in asked if not url.startswith("file:")] == []
    assert len(asked) == 1
    widths = view.evaluate("[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().width)")
    assert len(widths) >= 5
    assert min(widths) >= 200
    assert view.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 14
    assert len(view.screenshot()) > 10_000  # a blank page packs into less
    view.close()
