"""The page, cell by cell against the report; its verdict; hostile names; and what a browser makes of it at several widths."""

import copy
import io
import json
import math
import re
import shutil
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import make_room, tiny_run
from PIL import Image

from headwright.configs import UserError
from headwright.configs.schema import PromptSet
from headwright.data.harvest import harvest
from headwright.eval import plots
from headwright.eval import report as pages
from headwright.eval.acceptance import evaluate
from headwright.eval.calculator import Costs, expected_tokens
from headwright.eval.metrics import DEFINITIONS
from headwright.eval.prompts import make_prompt
from headwright.eval.records import read_report
from headwright.eval.report import advice, write_html
from headwright.train.run import train

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OVERRIDE = "\u202e"  # what follows is laid out from right to left
HOSTILE = f"<script>alert(1)</script></style>--><b onload='x'>\"'&amp;{{{{ 7 * 7 }}}}{OVERRIDE}" + "w" * 120
SECTIONS = [
    "Five answers",
    "Results",
    "By domain and language",
    "Acceptance by depth",
    "Where the time goes",
    "Calculator",
    "Samples",
    "As others count",
    "Definitions",
    "Provenance",
]


@pytest.fixture(scope="module")
def run(model_dir, chats, tmp_path_factory):
    """A trained run, evaluated on its own prompts and on Cyrillic and Latin ones of another file."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [{"turns": ["Почему небо голубое?", "А ночью?"], "category": "sky"}, {"turns": ["Go"], "category": "count"}]
    (folder / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    wanted = {
        "sets": [{"set": "held-out"}, {"path": str(folder / "other.jsonl")}],
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


@pytest.fixture
def plain(monkeypatch):
    """No plots: they take most of the time, and words do not need them."""
    monkeypatch.setattr(pages, "figures", lambda directory, report, head: {})


# A page, read


@dataclass
class Page(HTMLParser):
    """Tags and words of a page outside its pictures."""

    text: str
    tags: list = field(default_factory=list)  # (name, attributes, the words inside)
    open: list = field(default_factory=list)
    pictures: int = 0

    def __post_init__(self):
        HTMLParser.__init__(self)
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        """A tag begins."""
        self.pictures += tag == "svg"
        if not self.pictures:
            self.tags.append([tag, dict(attrs), ""])
            if tag not in ("meta", "br"):
                self.open.append(self.tags[-1])

    def handle_endtag(self, tag):
        """It ends; all are nested well."""
        if not self.pictures:
            assert self.open.pop()[0] == tag
        self.pictures -= tag == "svg"

    def handle_data(self, data):
        """Words belong to all that is open."""
        if not self.pictures:
            for entry in self.open:
                entry[2] += data

    def all(self, *names: str) -> list[str]:
        """The words in every tag of these names."""
        return [said(words) for name, _, words in self.tags if name in names]

    def of(self, mark: str) -> list[str]:
        """The words in every tag of a class."""
        return [said(words) for _, attributes, words in self.tags if mark in (attributes.get("class") or "").split()]

    def tables(self) -> list[list[list[str]]]:
        """The cells of each row of each table."""
        found: list[list[list[str]]] = []
        for name, _, words in self.tags:
            if name == "table":
                found.append([])
            elif name == "tr":
                found[-1].append([])
            elif name in ("th", "td"):
                found[-1][-1].append(said(words))
        return found


def said(words: str) -> str:
    """Without line breaks."""
    return " ".join(words.split())


def page_of(report, folder: Path) -> Page:
    """The page of a report, read."""
    write_html(folder, report)
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def band(value: float, interval) -> str:
    """A number with its interval."""
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def gain(value, interval) -> str:
    """A speed-up with its interval."""
    return "–" if value is None else f"{value:.2f}× [{interval[0]:.2f}, {interval[1]:.2f}]"


def best_of(report):
    """The entries of the shape that the page is about."""
    return advice([entry for entry in report["entries"] if entry["drafter"] == report["entries"][0]["drafter"]])


# Numbers


def test_sections_stand_in_order_behind_the_verdict(report, tmp_path, plain):
    changed = report | {"target_changed": {"text": "this adapter changes the target"}}
    page = page_of(changed, tmp_path)
    assert page.all("h2") == SECTIONS
    places = {
        name: page.text.index(mark)
        for name, mark in (("verdict", '<div class="verdict'), ("changed", "this adapter"), ("first", "<h2>"))
    }
    assert places["verdict"] < places["changed"] < places["first"]
    assert page.of("verdict")[1] == "this adapter changes the target."


def test_five_answers_with_their_numbers(report, tmp_path, plain):
    page, first, answers = page_of(report, tmp_path), report["entries"][0], report["answers"]
    asked = page.all("dt")[:5]
    assert asked == [
        "Relative to what?",
        "At what batch size?",
        "On what stack and device?",
        "On what data?",
        "With what tree?",
    ]
    told = dict(zip(asked, page.all("dd")))
    ours, theirs = first["baseline_tokens_per_second"], first["baseline_hf_tokens_per_second"]
    assert told[asked[0]] == f"{answers['baseline']}: {ours:.1f} tok/s (ours), {theirs:.1f} tok/s (transformers)"
    assert told[asked[1]] == "1"
    assert told[asked[2]].startswith(answers["stack"])
    assert f"others kept {report['other_load']['median']:.1f} processors busy" in told[asked[2]]
    assert told[asked[3]].startswith(answers["data"])
    assert f"{100 * report['baseline_repeated_4grams']:.0f} % of the 4-grams" in told[asked[3]]
    assert told[asked[4]] == answers["tree_shape"]


def test_every_entry_has_its_row(report, tmp_path, plain):
    """Results, latencies and others' figures, cell by cell under their headings."""
    tables = page_of(report, tmp_path).tables()
    results, latency, others = tables[0], tables[-3], tables[-1]
    for table in (results, latency, others):
        assert {len(row) for row in table} == {len(table[0])}
    for entry, row in zip(report["entries"], results[1:], strict=True):
        each, lossless = entry["speedup_per_prompt"], entry["lossless"]
        assert dict(zip(results[0], row)) == {
            "drafter": entry["drafter"],
            "shape": entry["shape"]["name"],
            "T": "0",
            "set": entry["prompt_set"],
            "τ [95 %]": band(entry["acceptance_length"], entry["acceptance_length_ci95"]),
            "τ macro": f"{entry['acceptance_length_macro']:.2f}",
            "tok/s": f"{entry['tokens_per_second']:.1f}",
            "characters/s": f"{entry['chars_per_second']:.0f}",
            "speed-up [95 %]": gain(entry["speedup"], entry["speedup_ci95"]),
            "per prompt, p10–p90": f"{each['p10']:.2f}–{each['p90']:.2f}",
            "GPU, modelled": f"{entry['speedup_model']['modelled_gpu']:.2f}×",
            "same text": f"{lossless['identical']} of {lossless['prompts']}",
        }
    for entry, row in zip(report["entries"], latency[1:], strict=True):
        times = [entry[key][part] for key in ("ttft_ms", "token_latency_ms", "gap_ms") for part in ("p50", "p95")]
        model = entry["speedup_model"]
        assert row == [
            f"{entry['drafter']} {entry['shape']['name']}, {entry['prompt_set']}",
            *(f"{time:.0f}" for time in times),
            f"{model['break_even_tau_here']:.2f}",
            f"{model['ceiling_here']:.2f}×",
        ]
    for entry, row in zip(report["entries"], others[1:], strict=True):
        spec, vllm, sglang = (entry["compatible"][name] for name in ("spec_bench", "vllm", "sglang"))
        assert row[1:] == [
            f"{spec['mean_accepted_tokens']:.2f}",
            f"{spec['speedup_ratio']:.2f}×",
            f"{vllm['mean_acceptance_length']:.2f}",
            f"{100 * vllm['draft_acceptance_rate']:.1f} %",
            f"{sglang['accept_length']:.2f}",
            f"{100 * sglang['accept_rate']:.1f} %",
        ]


def test_every_side_has_its_domains_and_languages(report, tmp_path, plain):
    """One domain was not timed: it has a τ, and no speed-up."""
    untimed = report["pooled"][1]["by_domain"]["sky"]
    untimed |= {"speedup": None, "speedup_ci95": None}
    page = page_of(report, tmp_path)
    assert page.all("h3") == ["eagle3 chain-3", "eagle3 tree-3x2-6", "prompt-lookup chain-3"]
    for side, table in zip(report["pooled"], page.tables()[1:4], strict=True):
        found = {**side["by_domain"], **side["by_language"]}
        assert list(found) == ["chats", "sky", "count", "Latin", "Cyrillic"]
        assert [row[0] for row in table[1:]] == list(found)
        for row, group in zip(table[1:], found.values()):
            assert row[1:] == [
                str(group["prompts"]),
                band(group["acceptance_length"], group["acceptance_length_ci95"]),
                gain(group["speedup"], group["speedup_ci95"]),
                pages.sure(group),
                f"{group['tokens_per_second']:.1f}",
                f"{group['chars_per_second']:.0f}",
            ]
    assert page.tables()[2][2][3:5] == ["–", "not timed"]


def test_calculator_is_the_formula_at_the_heads_first_chain(report, tmp_path, plain):
    """α from τ and the costs from the phases, by hand."""
    page, entry = page_of(report, tmp_path), report["entries"][0]
    table, told = page.tables()[-2], next(words for words in page.all("p") if words.startswith("eagle3 chain-3: as if"))
    model, depth = entry["speedup_model"], entry["shape"]["depth"]
    low, high = 0.0, 1.0
    for _ in range(50):
        alpha = (low + high) / 2
        low, high = (alpha, high) if expected_tokens(alpha, depth) < entry["acceptance_length"] else (low, alpha)
    node = (model["verify_in_steps"] + model["overhead_in_steps"] - 1) / depth
    costs = Costs(model["draft_in_steps"] / depth, node)
    assert table[0] == ["depth", *map(str, range(1, 11))]
    numbers = [float(cell) for cell in table[1][1:]]
    assert numbers == pytest.approx([costs.speedup(alpha, each) for each in range(1, 11)], abs=0.0051)
    assert f"accepted with α = {alpha:.3f}, a draft step cost c = {costs.draft:.3f} and a verified node" in told
    even = costs.break_even(depth)
    assert f"a = {node:.3f} plain steps. Depth 3 breaks even at {'no α' if even is None else f'α = {even:.2f}'}" in told
    assert f"no chain exceeds {costs.asymptote:.2f}×" in told


def test_samples_show_what_was_drafted(report, tmp_path, plain):
    """In bold what was accepted; all together is the answer. The prompt stands folded above."""
    entry = best_of(report)["entry"]
    sample = {"source": "poems", "place": "p.jsonl:7", "asked": "Say it", "first": "Ro"}
    sample |= {"cycles": [{"accepted": "ses are", "target": " red"}, {"accepted": "", "target": ", violets\n"}]}
    entry["samples"].append(sample)
    page = page_of(report, tmp_path)
    bold = [cycle["accepted"] for shown in entry["samples"] for cycle in shown["cycles"]]
    assert page.all("b") == [said(words) for words in bold]
    whole = [
        shown["first"] + "".join(cycle["accepted"] + cycle["target"] for cycle in shown["cycles"])
        for shown in entry["samples"]
    ]
    asked = [shown["asked"] for shown in entry["samples"]]
    assert page.of("sample") == [said(words) for pair in zip(asked, whole) for words in pair]
    assert "Ro<b>ses are</b> red<b></b>, violets\n" in page.text
    assert "poems, p.jsonl:7" in page.all("small")
    assert len(page.all("details")) == len(entry["samples"])


def test_definitions_and_provenance(run, report, tmp_path, plain):
    page = page_of(report, tmp_path)
    assert dict(zip(page.all("dt")[5:], page.all("dd")[5:])) == {name: said(text) for name, text in DEFINITIONS.items()}
    told, target = page.all("small")[-1], report["target"]
    for word in (report["schema"], report["date"], target["name"], target["fingerprint"], target["template_hash"]):
        assert word in told
    assert f"Head {report['head']}." in told
    shutil.copy(run.directory / "provenance.json", tmp_path)
    trained = json.loads((tmp_path / "provenance.json").read_text(encoding="utf-8"))
    told = page_of(report, tmp_path).all("small")[-1]
    assert f"with Headwright {trained['versions']['headwright']}" in told
    assert trained["device"] in told


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"versions": {"headwright": "1"}, "revision": null}'])
def test_any_provenance_makes_a_page(report, tmp_path, plain, text):
    (tmp_path / "provenance.json").write_text(text, encoding="utf-8")
    assert f"Head {report['head']}" in page_of(report, tmp_path).all("small")[-1]


@pytest.mark.parametrize(
    ("lines", "drawn"),
    [
        ("", False),
        ('{"step": 1, "loss_0": 2.5}\n{"step": 2, "lo', False),
        ('{"step": 1, "tau": 1.5}\n', False),
        ('{"step": 1, "loss_0": 2.5}\n{"step": 1, "tau": 1.5}\n{"step": 2, "loss_0": 2', True),
        ('{"step": 1, "loss_0": NaN, "loss_1": null}\n{"step": 1, "tau": NaN}\n', True),
    ],
)
def test_training_is_drawn_where_losses_and_tau_are_known(tmp_path, lines, drawn):
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    assert plots.training(tmp_path / "metrics.jsonl").startswith("<svg") == drawn
    assert plots.training(tmp_path / "none.jsonl") == ""


def test_text_that_is_not_the_targets_is_called_so(report, tmp_path, plain):
    """Typical acceptance, some different texts, sampled text."""
    kinds = ({"rule": "typical acceptance is not lossless"}, {"identical": 1, "prompts": 3}, None)
    for entry, lossless in zip(report["entries"], kinds):
        entry["lossless"] = lossless
    shown = [row[-1] for row in page_of(report, tmp_path).tables()[0][1:4]]
    assert shown == ["not lossless", "1 of 3", "sampled"]


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
    assert pages.sure({"speedup_ci95": interval, "timed_prompts": 2}) == says


@pytest.mark.parametrize(
    ("interval", "words", "mark"),
    [
        ([1.2, 1.6], "Worth it here: 1.40× plain decoding", "faster"),
        ([0.3, 0.9], "Not worth it here: 1.40× plain decoding", "slower"),
        ([0.9, 1.6], "No clear gain here: 1.40× plain decoding", "difference"),
    ],
)
def test_headline_says_what_the_interval_says(report, tmp_path, plain, interval, words, mark):
    for entry in report["entries"]:
        entry |= {"speedup": 1.4, "speedup_ci95": interval}
    page = page_of(report, tmp_path)
    assert page.all("strong") == [words]
    block, model = page.of("verdict")[0], report["entries"][0]["speedup_model"]
    assert block.startswith(f"{words} [{interval[0]:.2f}, {interval[1]:.2f}]")
    assert ", with eagle3 in the shape chain-3, " in block
    assert "the best of 2 measured" in block
    assert f"drafting pays above τ = {model['break_even_tau_here']:.2f}" in block
    assert f"Modelled, not measured: {model['modelled_gpu']:.2f}× on a GPU ({model['modelled_gpu_assumes']})" in block
    assert page.of(mark) == [block]


def test_headline_is_of_the_head_alone(report, tmp_path, plain):
    """A baseline that is faster than the head makes neither the head nor its shape worth it."""
    speeds = {"eagle3 chain-3": 0.4, "eagle3 tree-3x2-6": 0.5, "prompt-lookup chain-3": 9.0}
    for entry in report["entries"]:
        speed = speeds[f"{entry['drafter']} {entry['shape']['name']}"]
        entry |= {"speedup": speed, "speedup_ci95": [speed - 0.1, speed + 0.1]}
    page = page_of(report, tmp_path)
    assert page.all("strong") == ["Not worth it here: 0.50× plain decoding"]
    assert "eagle3 in the shape tree-3x2-6, the best of 2" in page.of("verdict")[0]


def test_domains_of_the_best_shape_follow_the_headline(report, tmp_path, plain):
    best = best_of(report)
    best["entries"][1]["by_domain"]["sky"] |= {"speedup": None, "speedup_ci95": None}
    block = page_of(report, tmp_path).of("verdict")[0]
    for entry in best["entries"]:
        for name, group in entry["by_domain"].items():
            numbers = gain(group["speedup"], group["speedup_ci95"])
            shown = f"{numbers}, {pages.sure(group)}"
            assert re.search(rf"\b{name}\b[^;]*: {re.escape(shown)}[;.]", block)
    assert re.search(r"\bsky\b[^;]*: –, not timed", block)


def entry(shape, speedup, prompt_set="a", temperature=0.0, domains=("d",)):
    """An entry as far as the advice reads it."""
    found = {"speedup": speedup, "speedup_ci95": [speedup - 0.1, speedup + 0.1], "timed_prompts": 2}
    named = {"shape": {"name": shape}, "prompt_set": prompt_set, "temperature": temperature}
    return named | found | {"by_domain": dict.fromkeys(domains, found)}


def test_advice_takes_means_over_sets_not_sums():
    """A shape that was measured on more sets has no larger number by that."""
    found = advice([entry("chain", 1.2), entry("chain", 1.2, "b"), entry("tree", 1.5)])
    assert (found["shape"], found["entries"]) == ("tree", [entry("tree", 1.5)])


def test_advice_keeps_temperatures_apart():
    """The mean of a shape's sampled entries at two temperatures is nobody's speed."""
    found = advice([entry("chain", 0.2, temperature=0.5), entry("chain", 2.0, temperature=1.0)])
    assert (found["temperature"], found["entry"]["speedup"], len(found["entries"])) == (1.0, 2.0, 1)
    found = advice([entry("chain", 3.0, temperature=0.5), entry("tree", 0.8)])
    assert (found["shape"], found["verdict"]) == ("tree", "slower")


def test_advice_of_equals_is_the_first():
    found = advice([entry("chain", 1.3), entry("tree", 1.3)])
    assert found["shape"] == "chain"
    found = advice([entry("tree", 1.3, domains=("x", "y")), entry("chain", 1.3), entry("tree", 1.3, "b", domains="z")])
    assert [row[:2] for row in found["traffic"]] == [("a", "x"), ("a", "y"), ("b", "z")]


def test_headline_over_several_sets_says_whose_it_is(report, tmp_path, plain):
    """Twice as fast on one set and half as fast on the other is not simply worth it."""
    for found in report["entries"]:
        fast = found["prompt_set"] == "held-out"
        found |= {"speedup": 2.0 if fast else 0.5, "speedup_ci95": [1.9, 2.1] if fast else [0.4, 0.6]}
    page = page_of(report, tmp_path)
    first = page.of("verdict")[0].split("a cycle costs")[0]
    assert not page.all("strong")[0].startswith("Worth it here") or "held-out" in first


def test_domains_of_one_name_in_two_sets_are_told_apart(report, tmp_path, plain):
    for found in report["entries"]:
        found["by_domain"] = {"code": next(iter(found["by_domain"].values()))}
    block = page_of(report, tmp_path).of("verdict")[0]
    assert "held-out" in block
    assert "other" in block


def test_headline_of_sampled_text_says_so(report, tmp_path, plain):
    for found in report["entries"]:
        found |= {"temperature": 0.7, "lossless": None}
    assert "T=0.7" in page_of(report, tmp_path).of("verdict")[0]


def test_headline_of_a_lossy_rule_says_so(report, tmp_path, plain):
    for found in report["entries"]:
        found |= {"temperature": 0.7, "lossless": {"rule": "typical acceptance is not lossless"}}
    assert "not lossless" in page_of(report, tmp_path).of("verdict")[0]


def test_the_command_that_is_shown_works(run, monkeypatch):
    """From where `headwright eval` was called, with runs in runs/."""
    page = Page((run.directory / "report.html").read_text(encoding="utf-8"))
    command = page.all("code")[0].split()
    assert command[:3] == ["headwright", "speedup", "--report"]
    monkeypatch.chdir(run.directory.parent.parent)
    assert read_report(Path(command[3]))["name"] == run.name


def test_a_drafter_without_a_draft_has_no_rate(report, tmp_path, plain):
    """vLLM counts no cycle then: its figures are NaN in the report."""
    nothing = {"mean_acceptance_length": math.nan, "draft_acceptance_rate": math.nan}
    report["entries"][-1]["compatible"]["vllm"] = nothing
    assert page_of(report, tmp_path).tables()[-1][-1][3:5] == ["–", "–"]


def test_one_prompt_shows_no_clear_difference(report, tmp_path, plain):
    """Whatever its speed-up: chance is not seen in a sample of one."""
    group = report["pooled"][0]["by_domain"]["sky"]
    assert (group["timed_prompts"], group["speedup_ci95"]) == (1, [group["speedup"]] * 2)
    assert page_of(report, tmp_path).tables()[1][2][4] == "one prompt says little"


def test_the_picture_of_groups_says_whose_they_are(report, tmp_path):
    """matplotlib notes each drawn text in a comment, or draws it as text."""
    for found in report["entries"]:
        found["speedup"] = 2.0 if "tree" in found["shape"]["name"] else 1.0
    head = [found for found in report["entries"] if found["drafter"] == "eagle3"]
    assert "eagle3 tree-3x2-6" in pages.figures(tmp_path, report, head)["groups"]


# Any text, any file


def test_what_is_not_there_is_left_out(report, tmp_path, plain):
    """No metrics, no chain, sampled only: each makes a page."""
    assert "Training" not in page_of(report, tmp_path).all("h2")
    trees = report | {"entries": [entry for entry in report["entries"] if entry["shape"]["kind"] != "chain"]}
    assert "Calculator" not in page_of(trees, tmp_path).all("h2")
    sampled = copy.deepcopy(report)
    for entry in sampled["entries"]:
        entry |= {"temperature": 0.7, "lossless": None}
    assert "T=0.7" in page_of(sampled, tmp_path).text


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
    page = page_of(report, tmp_path)
    assert page.all("h3")[-1] == "trees, deeper"
    assert any("deeper is longer" in words for words in page.all("small"))


def named(report, name: str):
    """A report in which every word from outside is `name`."""
    bad = copy.deepcopy(report) | {"name": name, "coverage": {name: {"coverage": 0.5}}}
    bad["target"]["name"] = bad["answers"]["data"] = bad["answers"]["stack"] = name
    bad["target_changed"] = {"text": name}
    for found in bad["entries"]:
        found |= {"drafter": name, "prompt_set": name}
        found["shape"]["name"] = name
        found["by_domain"] = {name: next(iter(found["by_domain"].values()))}
        for sample in found["samples"]:
            sample |= {"place": name, "asked": name, "first": name, "source": name}
            sample["cycles"] = [{"accepted": name, "target": name}]
    for side in bad["pooled"]:
        side |= {"drafter": name, "shape": name}
        for kind in ("by_domain", "by_language"):
            side[kind] = {name: next(iter(side[kind].values()))}
    return bad


def many(report):
    """Twelve entries on six sets with long names, and as many domains."""
    wide = copy.deepcopy(report) | {"entries": []}
    for number in range(6):
        for original in report["entries"][:4:2]:
            name = f"a set whose name is rather long, number {number}"
            wide["entries"].append(copy.deepcopy(original) | {"prompt_set": name})
            wide["entries"][-1]["by_domain"] = {name: original["by_domain"]["chats"]}
    return wide


@pytest.fixture(scope="module")
def files(run, tmp_path_factory):
    """The run's own page, and pages of a hostile and of a large report."""
    report, found = read_report(run.directory), {"usual": run.directory / "report.html"}
    for name, made in (("hostile", named(report, HOSTILE)), ("many", many(report))):
        found[name] = tmp_path_factory.mktemp(name) / "report.html"
        write_html(found[name].parent, made)
    return found


def outline(page: Page) -> list[tuple[str, str]]:
    """Tags and attributes."""
    return [(name, repr(attributes)) for name, attributes, _ in page.tags]


def test_hostile_words_make_no_tag_and_are_read_as_they_are(report, files, tmp_path, monkeypatch):
    """The page has the same tags and attributes as with a harmless name, and its pictures are sound XML."""
    drawn = dict.fromkeys(("groups", "rates", "histogram", "phases", "model", "coverage"), "<svg></svg>")
    monkeypatch.setattr(pages, "figures", lambda directory, report, head: drawn)
    page, harmless = Page(files["hostile"].read_text(encoding="utf-8")), page_of(named(report, "a"), tmp_path)
    assert outline(page) == outline(harmless)
    name = said(HOSTILE)
    for words in (page.all("h1")[0], page.of("verdict")[0], page.all("h3")[0]):
        assert name in words
    assert page.tables()[0][1][0] == page.tables()[0][1][3] == page.tables()[1][1][0] == name
    assert page.of("sample")[0] == name
    assert page.all("b")[0] == name
    pictures = re.findall(r"<svg.*?</svg>", page.text, flags=re.S)
    assert len(pictures) == 6
    for picture in pictures:
        ElementTree.fromstring(picture)


@pytest.mark.parametrize("name", ["usual", "hostile"])
def test_nothing_is_fetched_or_run(files, name):
    """No address in any attribute but within the page, no script, no rule that loads."""
    page, found = files[name], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            """Every tag, those of pictures too."""
            found.extend((tag, name, value or "") for name, value in [("", ""), *attrs])

    Reader().feed(page.read_text(encoding="utf-8"))
    tags = {tag for tag, _, _ in found}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "img", "image", "foreignobject", "form"}
    for tag, name, value in found:
        assert not name.startswith("on"), (tag, name)
        assert name not in ("src", "srcset", "action", "http-equiv", "background"), (tag, name)
        assert not name.endswith("href") or value.startswith("#"), (tag, value)
        assert re.sub(r"url\(#\w+\)", "", value).count("url(") == 0, (tag, value)
    rules = re.findall(r"<style.*?</style>", page.read_text(encoding="utf-8"), flags=re.S)
    assert rules
    assert not [rule for rule in rules if re.search(r"url\(|@import|@font-face", rule)]


def test_a_page_depends_on_nothing_drawn_before(report, tmp_path):
    first = page_of(report, tmp_path).text
    plots.coverage({"other": {"coverage": 0.1}})
    assert page_of(json.loads(json.dumps(report)), tmp_path).text == first
    assert plots.plt.get_fignums() == []
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("name", ["$", "a_b^c", "_x", "", "-->", "a\nb", "רפואה"])
def test_any_name_can_be_drawn(name):
    row = {"coverage": 0.5}
    ElementTree.fromstring(plots.coverage({name: row, "other": row}))


@pytest.mark.parametrize("name", ["$$", r"$\frac$", "a $x_{$ b", "$x^2$"])
def test_dollars_are_drawn_as_dollars(name):
    """A category of a user's row, or a directory of a head. The last one is drawn, as italics."""
    picture = plots.coverage({name: {"coverage": 0.5}})
    assert name in picture
    assert "DejaVuSans-Oblique" not in picture


@pytest.mark.filterwarnings("ignore:Glyph")
def test_chinese_names_are_drawn():
    """As text: paths of a font that has only boxes for them say nothing."""
    picture = ElementTree.fromstring(plots.coverage({"数学": {"coverage": 0.5}}))
    assert "数学" in "".join(picture.itertext())


@pytest.mark.parametrize(
    "draw",
    [
        lambda report: plots.groups(report["pooled"][0], "eagle3 chain-3"),
        lambda report: plots.phases(report["entries"][:1]),
        lambda report: plots.coverage(report["coverage"]),
    ],
    ids=["groups", "phases", "coverage"],
)
def test_long_names_leave_a_picture_its_width(report, draw):
    """A head's directory or a category; 500 points in a phone's 358 pixels make letters of 5 to 7 pixels."""
    picture = draw(named(report, "eagle3 heads/of-a-longer-name/checkpoints/step-1000"))
    assert float(re.findall(r'viewBox="0 0 ([\d.]+) ', picture)[0]) <= 500


def test_a_category_that_is_no_text_is_no_row(tiny):
    with pytest.raises(ValueError, match="surrogates not allowed"):
        make_prompt(PromptSet(path="x.jsonl"), make_room(tiny), "x:1", {"prompt": "Hello", "category": "\ud800"})


@pytest.mark.parametrize("text", ["[]", '{"schema": "headwright.study/1"}'])
def test_a_study_that_is_none_is_left_out(report, tmp_path, plain, text):
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "depth.json").write_text(text, encoding="utf-8")
    assert "Studies" not in page_of(report, tmp_path).all("h2")


# Reading


def test_reports_that_cannot_be_read(report, tmp_path):
    """By file and by directory; each is one UserError that says what to do."""
    with pytest.raises(UserError, match=r"none\.json is missing: headwright eval first"):
        read_report(tmp_path / "none.json")
    with pytest.raises(UserError, match=r"report\.json is missing"):
        read_report(tmp_path)
    file = tmp_path / "any.json"
    for text in (b"null", b"3", b'"x"', b"\xff", b"", b'{"schema": "headwright.acceptance/1", "entries": [1]}'):
        file.write_bytes(text)
        with pytest.raises(UserError, match=r"any\.json: not a report"):
            read_report(file)
    file.write_bytes(b'{"entries": []}')
    with pytest.raises(UserError, match=r"schema None, this version reads .*: headwright eval again"):
        read_report(file)
    file.write_text(json.dumps(report | {"entries": []}), encoding="utf-8")
    with pytest.raises(UserError, match="no entries"):
        read_report(file)
    for key in ("answers", "pooled"):
        file.write_text(json.dumps({name: value for name, value in report.items() if name != key}), encoding="utf-8")
        with pytest.raises(UserError, match=rf"earlier version, without \['{key}'\]: headwright eval again"):
            read_report(file)
    del report["entries"][-1]["per_prompt"]
    file.write_text(json.dumps(report), encoding="utf-8")
    with pytest.raises(UserError, match="earlier version, without per_prompt"):
        read_report(file)


# In a browser


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def view(browser):
    """Opens a file at a width and height; in the end nothing may have been told or asked but the file itself."""
    told, asked, opened = [], [], []

    def show(file: Path, width: int, height: int):
        tab = browser.new_page(viewport={"width": width, "height": height})
        tab.on("console", lambda message: told.append(message.text))
        tab.on("pageerror", lambda error: told.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(file.as_uri())
        opened.append((tab, file.as_uri()))
        return tab

    yield show
    for tab, _ in opened:
        tab.close()
    assert told == []
    assert asked == [address for _, address in opened]


MEASURE = """() => {
  const all = (name, root = document) => [...root.querySelectorAll(name)];
  const box = e => e.getBoundingClientRect(), size = e => parseFloat(getComputedStyle(e).fontSize);
  const outside = all('body *').filter(e => !e.closest('.wide > *') && !e.closest('svg > *') && e.checkVisibility());
  const spill = outside.filter(e => box(e).right > innerWidth + 0.5 || box(e).left < -0.5);
  const texts = (root, found = []) => {
    const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const range = document.createRange();
      range.selectNode(walk.currentNode);
      if (walk.currentNode.data.trim()) found.push(...range.getClientRects());
    }
    return found;
  };
  return {
    width: document.documentElement.scrollWidth,
    spill: spill.map(e => e.tagName),
    bare: all('table').filter(e => !e.closest('.wide')).length,
    stuck: all('.wide').filter(e => {
      e.scrollLeft = 1e6;
      const last = e.querySelector('tr').lastElementChild;
      const reached = box(last).right <= box(e).right + 1 && box(last).left >= box(e).left - 1;
      const may = e.scrollWidth <= e.clientWidth || ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
      e.scrollLeft = 0;
      return !(may && (reached || box(last).width > e.clientWidth));
    }).length,
    wide: all('.wide').map(e => [e.scrollWidth, e.clientWidth]),
    svgs: all('svg').map(e => ({
      seen: e.checkVisibility(), x: box(e).left, y: box(e).top, width: box(e).width, height: box(e).height,
      shape: e.viewBox.baseVal.width / e.viewBox.baseVal.height,
    })),
    clipped: all('.verdict').flatMap(e => texts(e).filter(r =>
      r.right > box(e).right + 0.5 || r.left < box(e).left - 0.5 || r.bottom > box(e).bottom + 0.5)).length,
    body: Math.min(...all('p, dt, dd, td, th, li').filter(e => !e.querySelector('small')).map(size)),
    least: Math.min(...outside.filter(e => e.innerText && e.innerText.trim()).map(size)),
  };
}"""
WINDOWS = [(1280, 900), (390, 844), (320, 640)]


@pytest.mark.parametrize(
    ("name", "width", "height"), [(name, *size) for name in ("usual", "hostile", "many") for size in WINDOWS]
)
def test_a_page_fits_its_window(view, files, name, width, height):
    """Only tables are wider, in frames that scroll to their last column; and there is something to be seen."""
    tab = view(files[name], width, height)
    found = tab.evaluate(MEASURE)
    assert found["width"] <= width
    assert (found["spill"], found["bare"], found["stuck"], found["clipped"]) == ([], 0, 0, 0)
    assert len(found["wide"]) == 7
    if width < 400:
        assert any(inner > outer for inner, outer in found["wide"])
    assert len(found["svgs"]) == (7 if name == "usual" else 6)
    for svg in found["svgs"]:
        assert svg["seen"]
        assert svg["width"] >= 200
        assert svg["width"] / svg["height"] == pytest.approx(svg["shape"], rel=0.02)
    assert found["body"] >= 14
    assert found["least"] >= 13
    picture = Image.open(io.BytesIO(tab.screenshot(full_page=True))).convert("RGB")
    assert picture.width == width
    assert colours(picture) > 300
    for svg in found["svgs"]:
        corners = (svg["x"], svg["y"], svg["x"] + svg["width"], svg["y"] + svg["height"])
        assert colours(picture.crop(tuple(map(int, corners)))) > 8


def colours(picture) -> int:
    """How many a picture has, looked at every third point of every third line."""
    small = picture.resize((picture.width // 3, picture.height // 3), Image.Resampling.NEAREST)
    return len(small.getcolors(small.width * small.height))


def test_prompts_unfold(view, files):
    tab = view(files["usual"], 390, 844)
    folded = tab.locator("details .sample").first
    assert not folded.is_visible()
    tab.locator("summary").first.click()
    assert folded.is_visible()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


BROKEN = """() => [...document.querySelectorAll('th')].flatMap(th => {
  const found = [], walk = document.createTreeWalker(th, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) for (const word of walk.currentNode.data.matchAll(/[^\\s\\/–-]+[\\/–-]?/g)) {
    const range = document.createRange();
    range.setStart(walk.currentNode, word.index);
    range.setEnd(walk.currentNode, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1) found.push(word[0]);
  }
  return found;
})"""


@pytest.mark.parametrize(("width", "height"), WINDOWS)
def test_headings_of_tables_break_between_words(view, files, width, height):
    assert view(files["many"], width, height).evaluate(BROKEN) == []


PLACES = """word => {
  const walk = document.createTreeWalker(document.querySelector('.verdict'), NodeFilter.SHOW_TEXT);
  const spots = [];
  while (walk.nextNode()) for (let i = 0; i < walk.currentNode.data.length; i++) {
    const range = document.createRange();
    range.setStart(walk.currentNode, i);
    range.setEnd(walk.currentNode, i + 1);
    spots.push([walk.currentNode.data[i], range.getBoundingClientRect().left]);
  }
  const start = spots.map(s => s[0]).join('').indexOf(word);
  return spots.slice(start, start + word.length + 6).map(s => s[1]);
}"""


@pytest.mark.parametrize("name", ["רפואה", f"abc{OVERRIDE}"])
def test_numbers_after_a_name_stand_in_order(view, report, tmp_path, plain, name):
    """After a Hebrew name, or one that turns the direction, `1.20×` still stands to the right of it and reads so."""
    for found in report["entries"]:
        found["by_domain"] = {name: next(iter(found["by_domain"].values()))}
    write_html(tmp_path, report)
    places = view(tmp_path / "report.html", 1280, 900).evaluate(PLACES, name)
    word, numbers = places[: len(name)], places[len(name) + 2 :]
    assert numbers == sorted(numbers)
    assert numbers[0] > max(word)
