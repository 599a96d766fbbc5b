"""The report: its contract, the definitions of its metrics, and that the same run gives the same τ."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from conftest import TAPS, make_room, tiny_run

from headwright.configs import UserError
from headwright.data.batch import DocumentFeatures
from headwright.data.harvest import harvest, store_path
from headwright.data.sampling import Policy
from headwright.data.store import FeatureReader
from headwright.data.target import Target
from headwright.eval.acceptance import SCHEMA, evaluate
from headwright.eval.clock import PHASES
from headwright.eval.decode import Generation, Settings, decode_plain, speculate
from headwright.eval.entries import losslessness
from headwright.eval.metrics import (
    DEFINITIONS,
    acceptance_length,
    acceptance_metrics,
    bootstrap,
    phase_milliseconds,
    repeated_4grams,
    tokens_per_second,
)
from headwright.eval.prompts import Prompt, held_out_prompts
from headwright.eval.rollout_tau import Cycles
from headwright.heads.draft_tree import TreeShape
from headwright.heads.export import export_run
from headwright.heads.saved import load_head
from headwright.train.run import train
from headwright.train.summary import summarise


@pytest.fixture(scope="module")
def run(model_dir, chats, tmp_path_factory):
    """A trained and evaluated run."""
    run = tiny_run(model_dir, chats, tmp_path_factory.mktemp("runs"))
    harvest(run)
    train(run)
    evaluate(run)
    return run


@pytest.fixture(scope="module")
def report(run):
    return json.loads((run.directory / "report.json").read_text(encoding="utf-8"))


ENTRY = {
    "drafter",
    "shape",
    "prompt_set",
    "temperature",
    "acceptance_length",
    "acceptance_length_macro",
    "acceptance_length_ci95",
    "cycles",
    "drafted",
    "accepted",
    "accepted_per_position",
    "conditional_per_position",
    "histogram",
    "by_domain",
    "by_language",
    "turns",
    "repeated_4grams",
    "tokens_per_second",
    "chars_per_second",
    "baseline_tokens_per_second",
    "baseline_hf_tokens_per_second",
    "speedup",
    "speedup_ci95",
    "speedup_per_prompt",
    "timed_prompts",
    "ttft_ms",
    "token_latency_ms",
    "gap_ms",
    "phases_ms",
    "warmup_seconds",
    "speedup_model",
    "verification",
    "lossless",
    "compatible",
    "per_prompt",
    "samples",
}


def test_report_has_every_key_of_its_contract(report):
    assert report["schema"] == SCHEMA == "headwright.acceptance/1"
    assert set(report["answers"]) == {"baseline", "batch_size", "stack", "data", "tree_shape"}
    assert all(report["answers"].values())
    assert set(DEFINITIONS) == set(report["definitions"])
    names = [(e["drafter"], e["shape"]["name"], e["temperature"]) for e in report["entries"]]
    assert names == [("eagle3", "chain-3", 0.0), ("eagle3", "tree-3x2-6", 0.0), ("prompt-lookup", "chain-3", 0.0)]
    for entry in report["entries"]:
        assert set(entry) == ENTRY
        assert set(entry["phases_ms"]) == set(PHASES)
        assert set(entry["by_domain"]) == {"chats"}
        assert set(entry["by_language"]) == {"Latin"}
        assert (entry["prompt_set"], entry["turns"], entry["timed_prompts"]) == ("held-out", 3, 2)
        assert entry["by_domain"]["chats"] == entry["by_language"]["Latin"]
        assert entry["by_domain"]["chats"]["acceptance_length"] == entry["acceptance_length"]


def test_numbers_of_an_entry_fit_each_other(report):
    for entry in report["entries"]:
        depth = entry["shape"]["depth"]
        cycles, histogram, joint = entry["cycles"], entry["histogram"], entry["accepted_per_position"]
        assert len(histogram) == depth + 1
        assert sum(histogram) == cycles
        assert sum(k * n for k, n in enumerate(histogram)) == entry["accepted"]
        assert joint == pytest.approx([sum(histogram[k:]) / cycles for k in range(1, depth + 1)])
        assert math.prod(entry["conditional_per_position"]) == pytest.approx(joint[-1])
        low, high = entry["acceptance_length_ci95"]
        assert 1 <= low <= entry["acceptance_length"] <= high <= depth + 1
        assert entry["accepted"] <= entry["drafted"]


def test_greedy_entries_are_lossless(report):
    nothing = {"divergences_per_1000_tokens": 0.0, "divergences": []}
    for entry in report["entries"]:
        assert entry["lossless"] == {"prompts": 3, "identical": 3, "greedy_identity": 1.0} | nothing


def test_report_is_what_the_decoder_counts(run, report):
    """The first entry, decoded again by hand."""
    target = Target.load(run.target, TAPS)
    head = load_head(run.directory / "head", target).eval()
    prompts = held_out_prompts(FeatureReader(store_path(run, "held-out")), run.eval.prompts)
    runs = [speculate(target, head, p.ids, TreeShape("chain", 3, 1, 3), run.eval.max_new_tokens) for p in prompts]
    for key, value in acceptance_metrics(runs, 3, run.seed).items():
        assert report["entries"][0][key] == value, key


CLOCK = re.compile("second|speed|_ms$")


def without_clock(found):
    """A part of a report without what a clock has said."""
    if isinstance(found, dict):
        return {key: without_clock(value) for key, value in found.items() if not CLOCK.search(key)}
    return [without_clock(value) for value in found] if isinstance(found, list) else found


def test_evaluating_again_gives_the_same_tau_to_the_last_digit(run, report):
    """From scratch, not from what was kept."""
    (run.directory / "eval.jsonl").unlink()
    evaluate(run)
    again = json.loads((run.directory / "report.json").read_text(encoding="utf-8"))
    for before, after in zip(report["entries"], again["entries"], strict=True):
        assert without_clock(before) == without_clock(after)
    for key in ("pooled", "coverage", "answers", "baseline_repeated_4grams", "head", "target"):
        assert without_clock(report[key]) == without_clock(again[key]), key


def test_html_is_one_file_of_its_own(run, report):
    """Nothing is fetched: no address in any script, style, image or link, and every plot is inline."""
    page = (run.directory / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?!#)[^"'\s>]+""", re.sub(r'xlink:href="#[^"]*"', "", page))
    assert not re.search(r"<script|@import|<link|url\(\s*[\"']?(?!#)", page)
    assert page.count("<svg") == 7  # groups, rates, histogram, phases, model, coverage, training
    assert f"{report['entries'][0]['acceptance_length']:.2f}" in page
    for answer in (report["answers"]["data"], report["answers"]["stack"]):
        assert answer.split(";")[0] in page


def test_html_escapes_what_the_model_wrote(run):
    """Samples are the target's bytes: they are text on the page, whatever they say."""
    page = (run.directory / "report.html").read_text(encoding="utf-8")
    body = page.split("<body>")[1]
    known = "svg|g|path|defs|use|text|rect|clipPath|metadata|style|rdf|cc|dc|title|tspan|line|polygon|image"
    known += "|h1|h2|p|dl|dt|dd|table|tr|th|td|div|span|b|small|strong|em|a|ul|li|code|pre|br|body|html|figure|details"
    known += "|summary|h3|bdi"
    assert not re.findall(rf"<(?!/?(?:{known})\b)[a-zA-Z/|][^>]*>", re.sub(r"<!--.*?-->", "", body, flags=re.S))


def test_evaluating_before_training_says_so(model_dir, chats, run, tmp_path):
    bare = tiny_run(model_dir, chats, tmp_path)
    with pytest.raises(UserError, match="run the harvest first"):
        evaluate(bare)
    harvest(bare)
    with pytest.raises(UserError, match="train first"):
        evaluate(bare)


def test_summary_and_export_of_an_evaluated_run(run, report, capsys):
    """The measured τ stands in both."""
    export_run(run)
    tau = f"{report['entries'][0]['acceptance_length']:.2f}"
    notes = (run.directory / "export" / "portable" / "SERVE.md").read_text(encoding="utf-8")
    assert f"- chain (chain-3), comparable with vLLM: τ = {tau} [" in notes
    assert "- tree (tree-" in notes
    assert "], greedy; accepted at each position: " in notes
    capsys.readouterr()
    summarise(run)
    assert tau in capsys.readouterr().out


def test_a_run_that_was_only_sampled_is_not_called_greedy(run, capsys):
    """temperatures: [0.7] is a legal config; summary and SERVE.md must neither fail nor claim a greedy number."""
    sampled = replace(run, eval=replace(run.eval, temperatures=[0.7]))
    before = (run.directory / "report.json").read_bytes()
    try:
        evaluate(sampled)
        entries = json.loads((run.directory / "report.json").read_text(encoding="utf-8"))["entries"]
        assert [entry["temperature"] for entry in entries] == [0.7] * 3
        assert [entry["lossless"] for entry in entries] == [None] * 3
        export_run(sampled)
        capsys.readouterr()
        summarise(sampled)
        notes = (run.directory / "export" / "portable" / "SERVE.md").read_text(encoding="utf-8")
        assert "greedy" not in notes
        assert "greedy" not in capsys.readouterr().out
    finally:
        (run.directory / "report.json").write_bytes(before)


# Definitions


def generation(accepted: list[int], emitted: list[int] | None = None, drafted: int = 3, seconds: float = 2.0):
    """A run with given cycles."""
    emitted = emitted or [a + 1 for a in accepted]
    phases = {name: 0.1 * (index + 1) for index, name in enumerate(PHASES)}
    return Generation(list(range(1 + sum(emitted))), accepted, emitted, [drafted] * len(accepted), seconds, phases)


def test_acceptance_metrics_by_hand():
    """Two prompts of unequal length: pooled cycles and the mean over prompts differ."""
    runs = [generation([3, 1, 0, 0]), generation([2, 3], emitted=[3, 3])]
    found = acceptance_metrics(runs, 3)
    assert found["acceptance_length"] == acceptance_length(runs) == (8 + 6) / 6
    assert found["acceptance_length_macro"] == (8 / 4 + 6 / 2) / 2
    assert found["cycles"] == 6
    assert found["drafted"] == 18
    assert found["accepted"] == 9
    assert found["histogram"] == [2, 1, 1, 2]
    assert found["accepted_per_position"] == [4 / 6, 3 / 6, 2 / 6]
    assert found["conditional_per_position"] == pytest.approx([4 / 6, 3 / 4, 2 / 3])


def test_a_depth_that_is_never_reached_counts_as_zero():
    found = acceptance_metrics([generation([0, 1])], 4)
    assert found["accepted_per_position"] == [0.5, 0.0, 0.0, 0.0]
    assert found["conditional_per_position"] == [0.5, 0.0, 0.0, 0.0]
    assert found["histogram"] == [1, 1, 0, 0, 0]


def test_an_answer_without_a_cycle_changes_no_average():
    """A prompt whose first token ends it."""
    with_it, without = ([generation([1, 2]), *more] for more in ([Generation([7])], []))
    for key in ("acceptance_length", "acceptance_length_macro", "cycles", "histogram"):
        assert acceptance_metrics(with_it, 3)[key] == acceptance_metrics(without, 3)[key]


def test_cycles_of_the_replay_use_the_same_definitions():
    cycles, runs = Cycles([3, 1, 0, 0], [4, 2, 1, 1]), [generation([3, 1, 0, 0])]
    assert cycles.acceptance_length == acceptance_length(runs)
    assert cycles.joint(3) == acceptance_metrics(runs, 3)["accepted_per_position"]


def test_bootstrap_is_an_interval_around_the_statistic():
    items = [1.0, 2.0, 3.0, 4.0]
    mean = lambda sample: sum(sample) / len(sample)  # noqa: E731
    low, high = bootstrap(items, mean, seed=0)
    assert 1.0 <= low < 2.5 < high <= 4.0
    assert bootstrap(items, mean, seed=0) == [low, high]
    assert bootstrap([2.0] * 5, mean, seed=1) == [2.0, 2.0]


def test_speeds_and_phases_by_hand():
    runs = [generation([1], seconds=1.0), generation([0, 0], seconds=3.0)]
    assert tokens_per_second(runs) == (3 + 3) / 4.0
    milliseconds = phase_milliseconds(runs)
    assert milliseconds["prefill"] == pytest.approx(100.0)  # per prompt
    assert milliseconds["draft"] == pytest.approx(2 * 200 / 3)  # per cycle


def test_repeated_4grams():
    assert repeated_4grams([[1, 2, 3, 4, 5]]) == 0.0
    assert repeated_4grams([[1, 1, 1, 1, 1, 1]]) == 2 / 3
    assert repeated_4grams([[1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4]]) == 1 / 6  # other answers do not count
    assert repeated_4grams([[1, 2], []]) == 0.0


def test_losslessness_reports_where_texts_part_and_by_how_much(tiny):
    """Places, gaps, and a text that only ends early."""
    prompts = [Prompt([65, 66, 67 + i], "s", f"p{i}") for i in range(3)]
    plain = [decode_plain(tiny, p.ids, 6).tokens for p in prompts]
    other = [*plain[1][:2], (plain[1][2] + 1) % 272, *plain[1][3:]]
    settings = Settings(TreeShape.chain(3))
    texts = [plain[0], other, plain[2][:4]]
    found = losslessness(
        tiny, make_room(tiny), prompts, [[text] for text in texts], [[text] for text in plain], settings
    )
    assert (found["prompts"], found["identical"]) == (3, 1)
    assert found["greedy_identity"] == 1 / 3
    assert found["divergences_per_1000_tokens"] == 1000 * 2 / sum(map(len, texts))
    changed, short = found["divergences"]
    logits = tiny.logits(tiny.features(torch.tensor([prompts[1].ids + plain[1][:2]])).last_BND[0, -1])
    assert (changed["place"], changed["turn"], changed["token"]) == ("p1", 0, 2)
    assert changed["logit_gap"] == pytest.approx(float(logits.max() - logits[other[2]]), rel=1e-4)
    assert short == {"place": "p2", "turn": 0, "token": 4, "logit_gap": None}


def test_losslessness_is_not_claimed_where_nothing_is_compared(tiny):
    """Sampled text has no plain twin; typical acceptance says that it is not lossless."""
    sampled = Settings(TreeShape.chain(3), policy=Policy(0.7))
    typical = Settings(TreeShape.chain(3), policy=Policy(0.7), verification="typical")
    prompts = [Prompt([65], "s", "p")]
    assert losslessness(tiny, make_room(tiny), prompts, [[[1, 2]]], [[[1, 3]]], sampled) is None
    assert set(losslessness(tiny, make_room(tiny), prompts, [[[1, 2]]], [[[1, 2]]], typical)) == {"rule"}
    assert "not lossless" in losslessness(tiny, make_room(tiny), prompts, [[[1, 2]]], [[[1, 2]]], typical)["rule"]


# Prompts


class Store:
    """Documents and notes as a reader gives them."""

    root = "store"

    def __init__(self, sources: str, prompts: list[int] | None = None):
        self.notes = [{"source": source, "place": f"{source}{i}"} for i, source in enumerate(sources)]
        self.prompts = prompts or [2] * len(sources)

    def __iter__(self):
        for i, count in enumerate(self.prompts):
            ids, mask = torch.tensor([i] * count + [9, 9]), torch.tensor([False] * count + [True, True])
            yield DocumentFeatures(ids, mask, *[torch.zeros(0)] * 4)


def test_prompts_are_taken_from_the_sources_in_turn():
    places = lambda store, count: [p.place for p in held_out_prompts(store, count)]  # noqa: E731
    assert places(Store("aaabca"), 5) == ["a0", "b3", "c4", "a1", "a2"]
    assert places(Store("aaabca"), 99) == ["a0", "b3", "c4", "a1", "a2", "a5"]
    assert places(Store("aab"), 2) == ["a0", "b2"]


def test_prompts_end_where_the_answer_begins():
    first, second = held_out_prompts(Store("ab", [3, 1]), 2)
    assert (first.ids, second.ids) == ([0, 0, 0], [1])
    assert first.source == "a"


def test_documents_without_a_prompt_are_left_out():
    assert [p.place for p in held_out_prompts(Store("ab", [0, 1]), 9)] == ["b1"]
    with pytest.raises(UserError, match="no held-out prompt"):
        held_out_prompts(Store("a", [0]), 9)
