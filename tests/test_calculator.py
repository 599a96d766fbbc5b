"""`headwright speedup`: the formulas against sums, enumeration, simulation and a published table; a report's own numbers."""

import itertools
import json
import math

import numpy as np
import pytest
from conftest import tiny_run
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from report_cases import entry, model, refused, report, save

from headwright.configs import UserError
from headwright.data.harvest import harvest
from headwright.eval.acceptance import evaluate
from headwright.eval.calculator import Costs, alpha_of, answer, expected_tokens, main, measured
from headwright.eval.records import read_report
from headwright.eval.report import formula
from headwright.train.run import train

ALPHAS = st.floats(0, 0.999)
PRICES = st.just(0.0) | st.floats(1e-6, 3)
DEPTHS = st.integers(1, 40)
COSTS = st.builds(Costs, PRICES, PRICES, st.none() | st.integers(1, 60))

# α: best depth and speed-up at a draft step of .02, .05, .10 and .20 plain steps (reference/methods.md, 4.1)
TABLE = {
    0.6: ((6, 2.17), (4, 1.92), (3, 1.67), (2, 1.40)),
    0.7: ((8, 2.76), (6, 2.35), (4, 1.98), (3, 1.58)),
    0.8: ((11, 3.82), (8, 3.09), (6, 2.47), (4, 1.87)),
    0.9: ((19, 6.37), (13, 4.67), (10, 3.43), (7, 2.37)),
}
CELLS = [(alpha, cost, *cell) for alpha, cells in TABLE.items() for cost, cell in zip((0.02, 0.05, 0.10, 0.20), cells)]


def answered(capsys, *words: str) -> dict:
    """What the command says with --json."""
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


# Formulas


@given(ALPHAS, DEPTHS)
def test_expected_tokens_are_the_direct_sum(alpha, depth):
    assert expected_tokens(alpha, depth) == pytest.approx(sum(alpha**k for k in range(depth + 1)))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("depth", [1, 2, 6])
def test_expected_tokens_are_those_of_all_outcomes(alpha, depth):
    """Every pattern of accepted and refused drafts: tokens up to the first refusal, and the target's own."""
    mean = 0.0
    for pattern in itertools.product((True, False), repeat=depth):
        accepted = next((place for place, stood in enumerate(pattern) if not stood), depth)
        mean += math.prod(alpha if stood else 1 - alpha for stood in pattern) * (accepted + 1)
    assert expected_tokens(alpha, depth) == pytest.approx(mean)


@pytest.mark.parametrize("alpha", [0.35, 0.8])
def test_speedup_is_that_of_a_simulated_clock(alpha):
    depth, costs, cycles = 5, Costs(0.07, 0.02), 100_000
    drawn = np.random.default_rng(3).random((cycles, depth)) < alpha
    tokens = 1 + np.logical_and.accumulate(drawn, axis=1).sum(1)
    clock = cycles * (depth * 0.07 + 1 + depth * 0.02)  # draft steps, a plain pass, what its nodes add
    error = 4 * tokens.std() / math.sqrt(cycles)
    assert expected_tokens(alpha, depth) == pytest.approx(tokens.mean(), abs=error)
    assert costs.speedup(alpha, depth) == pytest.approx(tokens.sum() / clock, abs=error)


@pytest.mark.parametrize(("alpha", "cost", "depth", "speedup"), CELLS)
def test_best_depth_and_speedup_are_the_published_ones(alpha, cost, depth, speedup):
    costs = Costs(cost)
    assert costs.best_depth(alpha, 32) == depth
    assert round(costs.speedup(alpha, depth), 2) == speedup


def test_nodes_of_a_pass_are_the_depth_unless_they_are_given():
    assert Costs(0.1, 0.02).cycle(5) == pytest.approx(0.5 + 1 + 0.1)
    assert Costs(0.1, 0.02, 30).cycle(5) == pytest.approx(0.5 + 1 + 0.6)
    assert Costs(0.1).cycle(5) == pytest.approx(1.5)


def test_limits():
    for depth in (1, 5, 30):
        assert expected_tokens(0, depth) == 1
        assert expected_tokens(1, depth) == depth + 1
        assert Costs(0.1).speedup(0, depth) == pytest.approx(1 / (1 + 0.1 * depth))
        assert Costs(0).speedup(0.7, depth) == expected_tokens(0.7, depth)
    assert Costs(0.1).best_depth(0, 20) == 0
    assert Costs(0).best_depth(0, 20) == 0, "nothing lost, nothing gained: it does not pay"
    assert Costs(0).best_depth(0.5, 20) == 20
    assert Costs(0.3).best_depth(1, 20) == 20


@given(ALPHAS, COSTS, DEPTHS, st.floats(0.001, 1))
def test_speedup_rises_with_acceptance_and_falls_with_every_cost(alpha, costs, depth, more):
    base = costs.speedup(alpha, depth)
    assert costs.speedup(min(alpha + more, 1), depth) >= base
    assert Costs(costs.draft + more, costs.node, costs.nodes).speedup(alpha, depth) < base
    assert Costs(costs.draft, costs.node + more, costs.nodes).speedup(alpha, depth) < base
    assert Costs(costs.draft, costs.node, (costs.nodes or depth) + 1).speedup(alpha, depth) <= base
    assert expected_tokens(alpha, depth + 1) >= expected_tokens(alpha, depth)


@given(ALPHAS, COSTS, st.integers(1, 40))
def test_best_depth_is_best_and_pays(alpha, costs, deepest):
    best = costs.best_depth(alpha, deepest)
    speeds = [costs.speedup(alpha, depth) for depth in range(1, deepest + 1)]
    assert max(speeds) <= 1 if best == 0 else speeds[best - 1] == max(speeds) > 1


@given(COSTS, DEPTHS)
def test_break_even_is_a_root_and_parts_what_pays_from_what_does_not(costs, depth):
    even = costs.break_even(depth)
    if even is None:
        assert costs.speedup(1, depth) < 1
        return
    assert costs.speedup(even, depth) == pytest.approx(1, abs=1e-9)
    assert costs.speedup(even * 0.98, depth) <= 1 <= costs.speedup(even + 0.02 * (1 - even), depth) + 1e-12


def test_break_even_of_one_draft_is_what_it_costs():
    """1 + α = 1 + c + a."""
    assert Costs(0.2, 0.1).break_even(1) == pytest.approx(0.3)
    assert Costs(0, 0).break_even(4) == pytest.approx(0)
    assert Costs(0.5, 0.6).break_even(1) is None
    assert Costs(0.5, 0.5).break_even(7) == pytest.approx(1)


@given(st.floats(0.001, 0.6), st.floats(0, 0.39), DEPTHS)
def test_no_chain_exceeds_the_asymptote_and_long_ones_reach_it(draft, node, depth):
    costs = Costs(draft, node)
    assert costs.speedup(1, depth) <= costs.asymptote
    assert costs.speedup(1, 10**9) == pytest.approx(costs.asymptote, rel=1e-3)


def test_asymptote_of_what_is_free():
    assert Costs(0, 0).asymptote == math.inf
    assert Costs(0, 0.05).asymptote == pytest.approx(20)
    assert Costs(0.05, 0.5, 30).asymptote == pytest.approx(20), "a pass of so many nodes costs the same at every depth"
    assert Costs(0, 0.5, 30).asymptote == math.inf


@given(st.floats(0, 0.99), st.integers(1, 16))
def test_alpha_of_inverts_expected_tokens(alpha, depth):
    assert alpha_of(expected_tokens(alpha, depth), depth) == pytest.approx(alpha, abs=1e-9)


def test_alpha_of_what_no_chain_shows_is_the_nearer_end():
    assert alpha_of(0.4, 5) == pytest.approx(0)
    assert alpha_of(1, 5) == pytest.approx(0, abs=1e-12)
    assert alpha_of(7.5, 5) == 1


@settings(max_examples=50)
@given(ALPHAS, COSTS, DEPTHS, st.integers(1, 40))
def test_the_answer_is_valid_json_and_agrees_with_itself(alpha, costs, depth, deepest):
    found = json.loads(json.dumps(answer(alpha, costs, depth, deepest), allow_nan=False))
    assert found["speedup"] == pytest.approx(found["expected_tokens"] / found["cycle_in_steps"])
    assert found["break_even_tau"] == found["cycle_in_steps"]
    assert list(found["by_depth"]) == [str(each) for each in range(1, deepest + 1)]
    assert found["best_speedup"] == max(1, *found["by_depth"].values())
    if found["best_depth"]:
        assert found["by_depth"][str(found["best_depth"])] == found["best_speedup"]
    assume(found["break_even_alpha"] is not None)
    even = expected_tokens(found["break_even_alpha"], depth)
    assert even == pytest.approx(found["break_even_tau"], abs=1e-6)


# Reports


def test_a_report_fills_in_alpha_and_costs_and_gives_its_own_prediction_back(tmp_path, capsys):
    place = save(tmp_path / "run", report(entry()))
    found = answered(capsys, "--report", place)
    assert found["depth"] == 5
    assert found["expected_tokens"] == pytest.approx(2.5)
    assert found["cycle_in_steps"] == found["break_even_tau"] == pytest.approx(1.7)
    assert found["speedup"] == pytest.approx(entry()["speedup_model"]["predicted_here"])
    assert found["costs"] == {"draft": pytest.approx(0.05), "node": pytest.approx(0.09), "nodes": None}
    assert found["ceiling_free_drafts"] == pytest.approx(1 / 0.09)
    assert found["measured"]["name"] == "eagle3 chain-5"
    assert found["measured"]["speedup"] == 1.4
    by_file = answered(capsys, "--report", f"{place}/report.json")
    assert by_file == found


def test_the_command_line_replaces_what_was_measured(tmp_path, capsys):
    place = save(tmp_path / "run", report(entry()))
    words = ("--alpha", "0", "--cost", "0", "--node-cost", "0", "--depth", "2")
    found = answered(capsys, "--report", place, *words)
    assert (found["alpha"], found["depth"]) == (0, 2)
    assert found["costs"] == {"draft": 0, "node": 0, "nodes": None}
    assert found["measured"]["alpha"] > 0.5
    found = answered(capsys, "--report", place, "--nodes", "9")
    assert found["cycle_in_steps"] == pytest.approx(1 + 5 * 0.05 + 9 * 0.09)


def test_the_first_greedy_chain_is_taken_else_the_first_chain():
    tree, warm, greedy = entry(name="tree-3x2-6"), entry(name="chain-3", temperature=1.0), entry(name="chain-4")
    assert measured(report(tree, warm, greedy, entry())).name == "eagle3 chain-4"
    assert measured(report(tree, warm)).name == "eagle3 chain-3"
    with pytest.raises(UserError, match="no chain"):
        measured(report(tree))


def test_an_evaluated_run(model_dir, chats, tmp_path, capsys):
    run = tiny_run(model_dir, chats, tmp_path)
    for stage in (harvest, train, evaluate):
        stage(run)
    capsys.readouterr()
    written = read_report(run.directory)
    first = written["entries"][0]
    found = answered(capsys, "--report", str(run.directory))
    assert found["depth"] == first["shape"]["depth"]
    assert found["expected_tokens"] == pytest.approx(first["acceptance_length"])
    assert found["speedup"] == pytest.approx(first["speedup_model"]["predicted_here"])
    assert found["break_even_tau"] == pytest.approx(first["speedup_model"]["break_even_tau_here"])
    table = formula(written)
    assert table["speedup"] == pytest.approx(found["speedup"])
    assert list(table["by_depth"]) == [str(depth) for depth in range(1, 11)]
    assert formula(report(entry(name="tree-3x2-6"))) is None


def test_costs_below_a_plain_step_have_no_asymptote(tmp_path, capsys):
    """A pass that was measured a little faster than a plain one."""
    place = save(tmp_path / "run", report(entry(speedup_model=model(2.5, 0.1, 0.85, 0.02))))
    found = answered(capsys, "--report", place)
    assert found["speedup"] == pytest.approx(2.5 / 0.97)
    assert found["asymptote"] is None or found["asymptote"] > 0


# The command


def test_numbers_for_machines(capsys):
    found = answered(capsys, "--alpha", "0.8", "--cost", "0.05", "--depth", "8")
    assert found["speedup"] == found["best_speedup"] == pytest.approx(3.0921, abs=1e-3)
    assert found["asymptote"] == pytest.approx(20)
    assert found["ceiling_free_drafts"] is None
    assert "measured" not in found
    assert answered(capsys, "--alpha", "0.8", "--cost", "0")["asymptote"] is None
    assert len(answered(capsys, "--alpha", "0.8", "--cost", "0.05", "--deepest", "3")["by_depth"]) == 3
    assert answered(capsys, "--alpha", "0.8", "--cost", "0.05")["depth"] == 5


def test_a_table_for_people(tmp_path, capsys):
    main(["--alpha", "0.8", "--cost", "0.05", "--depth", "3"])
    shown = capsys.readouterr().out
    asked, best = (next(line for line in shown.splitlines() if word in line) for word in ("asked", "best"))
    assert [cell.strip() for cell in asked.split("│")[1:5]] == ["3", "2.952", "1.150", "2.567"]
    assert [cell.strip() for cell in best.split("│")[1:5]] == ["8", "4.329", "1.400", "3.092"]
    assert "depth 3: 2.57×; pays from α = 0.131, τ = 1.15" in shown
    assert "best depth 8: 3.09×" in shown
    assert "no chain exceeds 20.00×" in shown
    main(["--alpha", "0.99", "--cost", "0.01", "--depth", "40"])
    shown = capsys.readouterr().out
    assert "│ 40 " in shown, "the depth that was asked for is shown, however deep"
    main(["--alpha", "0.1", "--cost", "1.2"])
    shown = capsys.readouterr().out
    assert "does not pay even where every draft is accepted" in shown
    assert "no depth pays: do not speculate" in shown
    main(["--report", save(tmp_path / "run", report(entry()))])
    assert "measured: eagle3 chain-5, α = 0.624, 1.40× with the prefill" in capsys.readouterr().out


def test_what_is_called_a_ceiling_is_one(capsys):
    """At a draft step of two plain ones, S(1, 1) = 2/3 and S falls to 1/2."""
    assert Costs(2).speedup(1, 1) == pytest.approx(2 / 3)
    main(["--alpha", "1", "--cost", "2"])
    assert "no chain exceeds 0.50×" not in capsys.readouterr().out


BAD = {
    "--alpha 1.2 --cost 0.1": "--alpha 1.2",
    "--alpha -0.1 --cost 0.1": "--alpha -0.1",
    "--alpha nan --cost 0.1": "--alpha nan",
    "--alpha 0.5 --cost -1": "--cost -1",
    "--alpha 0.5 --cost inf": "--cost inf",
    "--alpha 0.5 --cost nan": "--cost nan",
    "--alpha 0.5 --cost 0.1 --depth -2": "--depth",
    "--alpha 0.5 --cost 0.1 --deepest 0": "--deepest",
    "--alpha 0.5 --cost 0.1 --nodes 0": "--nodes",
    "--alpha 0.5": "--cost",
    "--cost 0.5": "--alpha",
    "": "--report",
}
UNCHECKED = {
    "--alpha 0.5 --cost 0.1 --depth 0": "--depth",
    "--alpha 0.5 --cost 0.1 --node-cost -0.3": "--node-cost",
    "--alpha 0.5 --cost 0.1 --node-cost nan": "--node-cost",
}


@pytest.mark.parametrize("words", BAD)
def test_what_the_formulas_do_not_take_is_one_message(words, capsys):
    assert BAD[words] in refused(main, capsys, *words.split())


@pytest.mark.parametrize("words", UNCHECKED)
def test_more_that_the_formulas_do_not_take(words, capsys):
    assert UNCHECKED[words] in refused(main, capsys, *words.split())


def test_words_that_are_no_numbers(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--alpha", "much", "--cost", "0.1"])
    assert ended.value.code == 2
    assert "--alpha" in capsys.readouterr().err


def test_reports_that_cannot_be_read(tmp_path, capsys):
    old = report(entry()) | {"schema": "headwright.acceptance/0"}
    assert "headwright.acceptance/0" in refused(main, capsys, "--report", save(tmp_path / "old", old))
    assert "is missing" in refused(main, capsys, "--report", str(tmp_path))
    assert "is missing" in refused(main, capsys, "--report", str(tmp_path / "nowhere.json"))
    assert "not a report" in refused(main, capsys, "--report", save(tmp_path / "torn", '{"schema": '))
    assert "no chain" in refused(main, capsys, "--report", save(tmp_path / "t", report(entry(name="tree-3x2-6"))))
