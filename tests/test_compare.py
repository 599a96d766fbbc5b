"""`headwright compare`: pairs by hand, interval and test against brute force, what is matched with what, and messages."""

import itertools
import json
import statistics
from fractions import Fraction

import numpy as np
import pytest
from conftest import tiny_run
from hypothesis import given
from hypothesis import strategies as st
from report_cases import entry, refused, report, row, save

from headwright.data.harvest import harvest
from headwright.eval.acceptance import evaluate
from headwright.eval.compare import (
    ENUMERATED,
    Line,
    compared,
    main,
    pairs_of,
    prompt_gains,
    sign_test,
    speed_ratio,
    tau,
    tau_gain,
)
from headwright.train.run import train

BASE = [row("a:1", 10, 20, 0.1, 0.2), row("a:2", 5, 15, 0.1, 0.3), row("a:3", 8, 8), row("b:1", 4, 12, 0.2, None)]
OTHER = [row("a:2", 5, 20, 0.1, 0.3), row("a:1", 10, 25, 0.2, 0.6), row("b:1", 4, 10, 0.2, None), row("c:9", 1, 6)]


def line(rows: list[dict], run: str = "first", **more) -> Line:
    """A line as it is read from a report."""
    return Line(run, entry(rows, **more), "one core", True)


def found_by(capsys, *words: str) -> list[dict]:
    """What the command says with --json."""
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


def brute_force(values: list[Fraction]) -> Fraction:
    """The share of sign patterns whose sum is as large as the one that was seen."""
    patterns = list(itertools.product((-1, 1), repeat=len(values)))
    sums = [abs(sum(sign * value for sign, value in zip(signs, values))) for signs in patterns]
    return Fraction(sum(each >= abs(sum(values)) for each in sums), len(patterns))


# Pairs


def test_by_hand():
    """a:1, a:2 and b:1 are common; b:1 was not timed."""
    found = compared(line(BASE), line(OTHER, "second"))
    assert (found["base"], found["name"]) == ("first: eagle3 chain-5", "second: eagle3 chain-5")
    assert (found["prompt_set"], found["prompts"], found["timed_prompts"]) == ("held-out", 3, 2)
    assert found["tau_base"] == pytest.approx(47 / 19)
    assert found["tau"] == pytest.approx(55 / 19)
    assert found["tau_gain"] == pytest.approx(8 / 19)
    assert found["tau_p"] == pytest.approx(brute_force([Fraction(1, 2), Fraction(1), Fraction(-1, 2)]))
    assert found["speedup"] == pytest.approx((0.6 + 0.3) / (0.2 + 0.1))
    assert found["speed_ratio"] == pytest.approx(((0.6 + 0.3) / (0.2 + 0.1)) / ((0.2 + 0.3) / (0.1 + 0.1)))


def test_prompts_are_paired_by_place_and_those_not_in_common_left_out():
    pairs = pairs_of(line(BASE), line(OTHER))
    assert [(a["place"], b["place"]) for a, b in pairs] == [("a:1", "a:1"), ("a:2", "a:2"), ("b:1", "b:1")]
    assert prompt_gains(pairs) == pytest.approx([0.5, 1.0, -0.5])


def test_a_prompt_asked_twice_is_paired_by_its_count():
    twice = [row("a:1", 10, 10), row("a:1", 10, 20), row("a:2", 10, 30)]
    pairs = pairs_of(line(twice), line([row("a:1", 10, 40), row("a:1", 10, 50)]))
    assert [(a["emitted"], b["emitted"]) for a, b in pairs] == [(10, 40), (20, 50)]


def test_a_prompt_without_a_cycle_counts_in_neither():
    """The first token ended its answer."""
    ended = {"place": "z", "tokens": 1, "seconds": 0.1, "cycles": 0, "emitted": 0, "accepted": 0}
    with_it = compared(line([*BASE, ended]), line([*OTHER, ended]))
    without = compared(line(BASE), line(OTHER))
    assert with_it["prompts"] == without["prompts"] + 1
    for key in ("tau", "tau_base", "tau_gain", "tau_p", "speed_ratio"):
        assert with_it[key] == without[key]


def test_what_has_not_been_timed_has_no_speed():
    rows = [row("a:1", 10, 20, plain=None)]
    found = compared(line(rows), line(rows))
    assert (found["timed_prompts"], found["speedup"], found["speed_ratio"], found["speed_ratio_ci95"]) == (
        0,
        None,
        None,
        None,
    )


# Interval and test


def random_rows(generator: np.random.Generator, count: int) -> list[dict]:
    """Prompts whose τ, speed and baselines differ widely."""
    cycles = generator.integers(3, 40, count)
    taus = generator.uniform(1, 6, count)
    spent, plain = generator.uniform(0.01, 0.5, count), generator.uniform(0.1, 0.5, count)
    return [row(f"p:{i}", int(cycles[i]), int(cycles[i] * taus[i]), spent[i], plain[i]) for i in range(count)]


def test_equal_reports_differ_by_nothing():
    rows = random_rows(np.random.default_rng(0), 20)
    found = compared(line(rows), line(rows))
    assert (found["tau_gain"], found["tau_gain_ci95"], found["tau_p"]) == (0, [0, 0], 1)
    assert found["speed_ratio"] == 1
    assert found["speed_ratio_ci95"] == [1, 1]


def test_the_interval_is_of_pairs():
    """One more token a cycle, in every prompt: certain, though prompts differ by far more."""
    rows = random_rows(np.random.default_rng(1), 20)
    better = [each | {"emitted": each["emitted"] + each["cycles"]} for each in rows]
    found = compared(line(rows), line(better))
    assert found["tau_gain_ci95"] == pytest.approx([1, 1])
    assert found["tau_p"] == pytest.approx(1 / 10_001, rel=0.2)


def test_the_ratio_of_speeds_is_of_pairs_and_each_is_over_its_own_baseline():
    """The same prompts on a machine three times as slow, by a head that is a quarter faster there."""
    rows = random_rows(np.random.default_rng(2), 20)
    slower = [
        each | {"seconds": each["seconds"] * 3 / 1.25, "plain_seconds_per_token": each["plain_seconds_per_token"] * 3}
        for each in rows
    ]
    found = compared(line(rows), line(slower))
    assert found["speed_ratio"] == pytest.approx(1.25)
    assert found["speed_ratio_ci95"] == pytest.approx([1.25, 1.25])
    assert found["tau_gain"] == 0


def test_the_interval_holds_the_difference_and_what_is_found_depends_on_the_seed_alone():
    generator = np.random.default_rng(3)
    first, second = line(random_rows(generator, 15)), line(random_rows(generator, 15))
    found = compared(first, second, seed=5)
    for key in ("tau_gain", "speed_ratio"):
        low, high = found[f"{key}_ci95"]
        assert low < found[key] < high
    assert compared(first, second, seed=5) == found
    for key in ("tau_gain_ci95", "speed_ratio_ci95"):
        assert compared(first, second, seed=6)[key] != found[key]


def test_changing_sides_turns_every_difference_round():
    generator = np.random.default_rng(4)
    first, second = line(random_rows(generator, 12), "a"), line(random_rows(generator, 12), "b")
    there, back = compared(first, second), compared(second, first)
    assert back["tau_gain"] == pytest.approx(-there["tau_gain"])
    assert back["tau_gain_ci95"] == pytest.approx([-bound for bound in reversed(there["tau_gain_ci95"])])
    assert back["speed_ratio"] == pytest.approx(1 / there["speed_ratio"])
    assert (back["tau_p"], back["tau"], back["base"]) == (there["tau_p"], there["tau_base"], there["name"])


@given(st.lists(st.integers(-6, 6), max_size=9))
def test_p_of_few_pairs_is_that_of_all_sign_patterns(values):
    """With ties and zeros: a prompt without a difference has no sign."""
    thirds = [Fraction(value, 3) for value in values]
    assert sign_test([float(value) for value in thirds], 0) == pytest.approx(float(brute_force(thirds)))


def test_p_of_many_pairs_is_near_that_of_all_sign_patterns():
    for seed in range(4):
        values = np.random.default_rng(seed).normal(0.3, 1, ENUMERATED + 1)
        signs = 1 - 2 * (np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1)
        exact = (np.abs(signs @ values) >= abs(values.sum()) - 1e-12).mean()
        sampled = sign_test(values.tolist(), seed)
        assert sampled == pytest.approx(exact, abs=4 * (exact * (1 - exact) / 10_000) ** 0.5 + 1e-4)
        assert sampled != exact


def test_p_of_many_pairs_is_never_zero():
    assert sign_test([1.0] * 40, 0) == pytest.approx(1 / 10_001)
    assert sign_test([0.0] * 40 + [1.0], 0) == 1, "one difference: either sign is as large"


@pytest.mark.parametrize(("pairs", "draws"), [(10, 600), (24, 300)], ids=["all patterns", "sampled patterns"])
def test_under_the_null_p_is_uniform(pairs, draws):
    """Prompts differ, and chance alone decides which side has which answer."""
    generator = np.random.default_rng(11)
    found = [sign_test((generator.normal(0, 1, pairs) * generator.exponential(1, pairs)).tolist(), 0)
             for _ in range(draws)]  # fmt: skip
    for level in (0.05, 0.2, 0.5):
        share = sum(p <= level for p in found) / draws
        assert share == pytest.approx(level, abs=3.5 * (level * (1 - level) / draws) ** 0.5)
    assert statistics.fmean(found) == pytest.approx(0.5, abs=3.5 / (12 * draws) ** 0.5)


@given(st.lists(st.tuples(*[st.integers(1, 50)] * 4), min_size=1, max_size=8))
def test_the_gain_is_the_difference_of_pooled_taus(numbers):
    pairs = [(row("p", a, a + b), row("p", c, c + d)) for a, b, c, d in numbers]
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    assert tau_gain(pairs) == pytest.approx(tau(second) - tau(first))
    assert tau(first) == pytest.approx(sum(a + b for a, b, _, _ in numbers) / sum(a for a, *_ in numbers))
    assert speed_ratio(pairs) == pytest.approx(1), "all spend alike"


# What is matched with what


def names(rows: list[dict]) -> list[tuple[str, str]]:
    return [(found["base"], found["name"]) for found in rows]


def test_two_reports(tmp_path, capsys):
    """The heads with each other, whatever they are; other drafters with the same; shapes and temperatures alike."""
    lookup = entry(drafter="prompt-lookup", name="chain-3")
    first = report(entry(), entry(name="chain-3"), lookup, entry(temperature=1.0))
    second = report(
        entry(drafter="medusa"), lookup, entry(drafter="medusa", name="chain-2"), entry(drafter="suffix"), name="second"
    )
    places = save(tmp_path / "a", first), save(tmp_path / "b", second)
    assert names(found_by(capsys, *places)) == [
        ("first: eagle3 chain-5", "second: medusa chain-5"),
        ("first: prompt-lookup chain-3", "second: prompt-lookup chain-3"),
    ]
    assert names(found_by(capsys, *places, "--drafter", "prompt")) == [
        ("first: prompt-lookup chain-3", "second: prompt-lookup chain-3")
    ]
    warm = report(entry(temperature=1.0), name="warm")
    assert names(found_by(capsys, places[0], save(tmp_path / "w", warm))) == [
        ("first: eagle3 chain-5 T=1", "warm: eagle3 chain-5 T=1")
    ]


def test_sets_are_compared_apart(tmp_path, capsys):
    def of(name, easy, hard):
        sets = (entry([row("1", 10, easy)], prompt_set="easy"), entry([row("1", 10, hard)], prompt_set="hard"))
        return save(tmp_path / name, report(*sets, name=name))

    places = of("a", 20, 12), of("b", 25, 11)
    found = found_by(capsys, *places)
    assert [(each["prompt_set"], round(each["tau_gain"], 6)) for each in found] == [("easy", 0.5), ("hard", -0.1)]
    assert [each["prompt_set"] for each in found_by(capsys, *places, "--set", "hard")] == ["hard"]
    main([*places])
    shown = capsys.readouterr().out
    assert "easy: against a: eagle3 chain-5 (τ 2.00)" in shown
    assert "hard: against a: eagle3 chain-5 (τ 1.20)" in shown


def test_several_reports_of_one_name_are_told_apart(tmp_path, capsys):
    places = [save(tmp_path / name, report(entry())) for name in "abc"]
    found = found_by(capsys, *places, f"{places[2]}/report.json")
    assert names(found) == [
        (f"{places[0]}: eagle3 chain-5", f"{place}: eagle3 chain-5")
        for place in (*places[1:], f"{places[2]}/report.json")
    ]


def test_one_report_with_several_entries(tmp_path, capsys):
    """Heads, shapes, temperatures and drafters, all against the first."""
    entries = [
        entry(),
        entry(name="tree-3x2-6"),
        entry(drafter="eagle3 runs/b/head"),
        entry(drafter="prompt-lookup", name="chain-3"),
        entry(temperature=0.7),
    ]
    place = save(tmp_path / "a", report(*entries))
    found = names(found_by(capsys, place))
    assert {base for base, _ in found} == {"first: eagle3 chain-5"}
    assert [name.removeprefix("first: ") for _, name in found] == [
        "eagle3 tree-3x2-6",
        "eagle3 runs/b/head chain-5",
        "prompt-lookup chain-3",
        "eagle3 chain-5 T=0.7",
    ]
    chains = found_by(capsys, place, "--shape", "chain-5", "--temperature", "0")
    assert names(chains) == [("first: eagle3 chain-5", "first: eagle3 runs/b/head chain-5")]


def test_a_table_for_people(tmp_path, capsys):
    second = report(entry(OTHER), name="second", stack="another machine")
    untimed = report(entry([row("a:1", 10, 25, plain=None)]), name="third")
    places = (save(tmp_path / "a", report(entry(BASE))), save(tmp_path / "b", second), save(tmp_path / "c", untimed))
    main([*places])
    shown = capsys.readouterr().out
    cells = {
        name: [cell.strip() for cell in text.split("│")[1:-1]]
        for text in shown.splitlines()
        for name in ("second", "third")
        if text.startswith(f"│ {name}")
    }
    assert cells["second"][:3] == ["second: eagle3 chain-5", "3", "2.89"]
    assert cells["second"][3].startswith("+0.42 [-0.50, +1.00]")
    assert cells["second"][4] == "0.750"
    assert cells["second"][5].startswith("1.20 [")
    assert cells["third"] == ["third: eagle3 chain-5", "1", "2.50", "+0.50 [+0.50, +0.50]", "1.000", "–"]
    assert "different stacks" in shown
    assert "another machine | one core" in shown
    main([places[0], places[2]])
    assert "different stacks" not in capsys.readouterr().out


def test_an_evaluated_run(model_dir, chats, tmp_path, capsys):
    """Its own entries against the first, whose numbers are the report's; a copy of it, equal to it."""
    run = tiny_run(model_dir, chats, tmp_path)
    for stage in (harvest, train, evaluate):
        stage(run)
    capsys.readouterr()
    written = json.loads((run.directory / "report.json").read_text(encoding="utf-8"))
    found = found_by(capsys, str(run.directory))
    assert [each["name"] for each in found] == ["tiny: eagle3 tree-3x2-6", "tiny: prompt-lookup chain-3"]
    for each, whole in zip(found, written["entries"][1:]):
        assert (each["prompts"], each["timed_prompts"]) == (3, 2)
        assert each["tau_base"] == pytest.approx(written["entries"][0]["acceptance_length"])
        assert each["tau"] == pytest.approx(whole["acceptance_length"])
        assert each["speedup"] == pytest.approx(whole["speedup"])
        assert each["speed_ratio"] == pytest.approx(whole["speedup"] / written["entries"][0]["speedup"])
    copied = found_by(capsys, str(run.directory), save(tmp_path / "copy", written))
    assert len(copied) == 3
    assert {(each["tau_gain"], each["tau_p"], each["speed_ratio"]) for each in copied} == {(0, 1, 1)}


# Messages


def test_nothing_in_common(tmp_path, capsys):
    places = [save(tmp_path / name, report(entry([row(name, 2, 4)]), name=name)) for name in "ab"]
    assert refused(main, capsys, *places) == ("error: b: eagle3 chain-5: no prompt in common with a: eagle3 chain-5\n")


def test_nothing_to_compare(tmp_path, capsys):
    place = save(tmp_path / "a", report(entry()))
    other = save(tmp_path / "b", report(entry(name="chain-3"), name="other"))
    for words in ([place], [place, other], [place, place, "--shape", "chain-9"], [place, place, "--set", "none"]):
        assert "nothing to compare" in refused(main, capsys, *words)


def test_reports_that_cannot_be_read(tmp_path, capsys):
    good = save(tmp_path / "good", report(entry()))
    assert "is missing: headwright eval first" in refused(main, capsys, good, str(tmp_path / "none"))
    old = {"schema": "headwright.acceptance/0", "entries": []}
    assert "this version reads headwright.acceptance/1" in refused(main, capsys, good, save(tmp_path / "old", old))
    for key in ("answers", "pooled"):
        less = {name: value for name, value in report(entry()).items() if name != key}
        assert f"without ['{key}']" in refused(main, capsys, save(tmp_path / "less", less), good)
    bare = report({name: value for name, value in entry().items() if name != "per_prompt"})
    assert "without per_prompt: headwright eval again" in refused(main, capsys, good, save(tmp_path / "bare", bare))
    for number, text in enumerate(('{"schema"', "[]", '"text"', "")):
        assert "not a report" in refused(main, capsys, good, save(tmp_path / f"broken-{number}", text))


@pytest.mark.parametrize("entries", [[], None, [1]])
def test_reports_whose_entries_are_none(entries, tmp_path, capsys):
    broken = save(tmp_path / "broken", report() | {"entries": entries})
    assert "not a report" in refused(main, capsys, save(tmp_path / "good", report(entry())), broken)
