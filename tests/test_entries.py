"""Whole evaluations: several prompt sets and heads in one run, numbers that follow from each other, going on after a kill."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from conftest import Interrupted, make_model, make_room, make_tiny_head, make_tokenizer, tiny_run
from safetensors.torch import load_file, save_file

import headwright.eval.acceptance as acceptance
import headwright.eval.sides as sides
from headwright.configs import UserError
from headwright.configs.schema import PromptSet, ShapeConfig
from headwright.data.chat import Renderer
from headwright.data.harvest import harvest, store_path
from headwright.data.store import FeatureReader
from headwright.data.target import Target
from headwright.eval.acceptance import by_set, evaluate, sides_of, split
from headwright.eval.decode import decode_plain
from headwright.eval.entries import Part, Plain, ratio
from headwright.eval.kept import Kept
from headwright.eval.metrics import as_others_count
from headwright.eval.prompts import Prompt, read_sets
from headwright.eval.report import write_html
from headwright.eval.settings import PLAIN, Generation, Settings
from headwright.eval.sides import Contest, Side, Spoken
from headwright.heads.draft_tree import TreeShape
from headwright.heads.export import export_run
from headwright.heads.saved import load_head, save_head
from headwright.train.run import train

CLOCK = re.compile("second|speed|_ms$|load|^date$")
TALKS = [
    {"category": "writing", "turns": ["Write of rain", "Shorter"]},
    {"category": "письмо", "turns": ["Напиши о дожде", "Короче", "Ещё короче"]},
    {"category": "письмо", "turns": ["Напиши о снеге", "Короче"]},
]


def without_clock(found):
    """A part of a report without what a clock has said."""
    if isinstance(found, dict):
        return {key: without_clock(value) for key, value in found.items() if not CLOCK.search(key)}
    return [without_clock(value) for value in found] if isinstance(found, list) else found


@pytest.fixture(scope="module")
def run(model_dir, chats, tmp_path_factory):
    """Trained, with checkpoints; two sets; beside its own head a checkpoint and another head."""
    folder = tmp_path_factory.mktemp("entries")
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TALKS), encoding="utf-8")
    run = tiny_run(model_dir, chats, folder / "runs")
    run.train.saves, run.train.keep = 4, 9
    harvest(run)
    train(run)
    target = Target.load(run.target, run.harvest.taps)
    save_head(make_tiny_head(target, 60), folder / "other")
    run.eval.sets = [PromptSet("held-out", prompts=3), PromptSet(path=str(folder / "talks.jsonl"))]
    run.eval.heads = [str(checkpoints(run)[0]), str(folder / "other")]
    run.eval.shapes, run.eval.max_new_tokens = [ShapeConfig(depth=3)], 8
    return run


def checkpoints(run) -> list[Path]:
    """Oldest first."""
    return sorted(path.parent for path in run.directory.rglob("progress.json"))


def report_of(run) -> dict:
    """What the last evaluation has written."""
    return json.loads((run.directory / "report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def without_page():
    """Plots take longer than all else; the page is made once, below."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "write_html", lambda directory, report: None)
        yield


@pytest.fixture(scope="module")
def report(run) -> dict:
    evaluate(run)
    return report_of(run)


# One run, several sets and heads


def test_every_side_has_an_entry_for_every_set(run, report):
    kinds = ["eagle3", *(f"eagle3 {place}" for place in run.eval.heads), "prompt-lookup"]
    found = [(entry["drafter"], entry["prompt_set"]) for entry in report["entries"]]
    assert found == [(kind, name) for kind in kinds for name in ("held-out", "talks")]
    assert [pooled["drafter"] for pooled in report["pooled"]] == kinds
    assert "3 held-out prompts of chats; 3 talks prompts of writing, письмо" in report["answers"]["data"]


def test_prompts_of_a_set_and_their_kinds(report):
    """Timed ones first; domains in turn; scripts where no language is said."""
    for entry in report["entries"]:
        rows, held_out = entry["per_prompt"], entry["prompt_set"] == "held-out"
        assert [row["turns"] for row in rows] == ([1, 1, 1] if held_out else [2, 3, 2])
        assert [row["domain"] for row in rows] == (["chats"] * 3 if held_out else ["writing", "письмо", "письмо"])
        assert [row["language"] for row in rows] == (["Latin"] * 3 if held_out else ["Latin", "Cyrillic", "Cyrillic"])
        assert ["plain_seconds_per_token" in row for row in rows] == [True, True, False]
        assert entry["turns"] == sum(row["turns"] for row in rows)
        assert entry["timed_prompts"] == 2


def check_group(group: dict, rows: list[dict]) -> None:
    """A group's numbers follow from its prompts."""
    compared = [row for row in rows if "plain_seconds_per_token" in row]
    timed = [(row["plain_seconds_per_token"], row["seconds"] / row["tokens"]) for row in compared]
    assert group["prompts"] == len(rows)
    assert group["acceptance_length"] == sum(row["emitted"] for row in rows) / sum(row["cycles"] for row in rows)
    seconds = sum(row["seconds"] for row in rows)
    assert group["tokens_per_second"] == pytest.approx(sum(row["tokens"] for row in rows) / seconds)
    assert group["chars_per_second"] == pytest.approx(sum(row["characters"] for row in rows) / seconds)
    assert group["timed_prompts"] == len(timed)
    if not timed:
        assert group["speedup"] is group["speedup_ci95"] is None
    else:
        assert group["speedup"] == pytest.approx(sum(a for a, _ in timed) / sum(b for _, b in timed))
        low, high = group["speedup_ci95"]
        assert low <= group["speedup"] * 1.0001
        assert high >= group["speedup"] * 0.9999


def test_numbers_follow_from_the_prompts(report):
    """τ, speeds and speed-up of an entry, and of its domains and languages."""
    for entry in report["entries"]:
        rows = entry["per_prompt"]
        check_group(entry | {"prompts": 3}, rows)
        assert entry["cycles"] == sum(row["cycles"] for row in rows)
        assert entry["accepted"] == sum(row["accepted"] for row in rows)
        taus = [row["emitted"] / row["cycles"] for row in rows if row["cycles"]]
        assert entry["acceptance_length_macro"] == pytest.approx(sum(taus) / len(taus))
        each = [row["plain_seconds_per_token"] * row["tokens"] / row["seconds"] for row in rows[:2]]
        assert entry["speedup_per_prompt"]["mean"] == pytest.approx(sum(each) / 2)
        assert entry["speedup_per_prompt"]["p50"] == pytest.approx(sum(each) / 2)
        for kind in ("domain", "language"):
            groups = entry[f"by_{kind}"]
            assert list(groups) == list(dict.fromkeys(row[kind] for row in rows))
            for name, group in groups.items():
                check_group(group, [row for row in rows if row[kind] == name])
        for row in rows:
            assert row["tokens"] == row["emitted"] + row["turns"]  # the first token of a turn is the prefill's
            assert row["cycles"] <= row["emitted"]
            assert row["accepted"] <= row["emitted"]


def test_pooled_numbers_follow_from_all_prompts(report):
    """Over all sets; sets, domains and languages."""
    for pooled in report["pooled"]:
        mine = [entry for entry in report["entries"] if entry["drafter"] == pooled["drafter"]]
        rows = [row | {"set": entry["prompt_set"]} for entry in mine for row in entry["per_prompt"]]
        for kind in ("set", "domain", "language"):
            assert Counter(row[kind] for row in rows) == {
                name: group["prompts"] for name, group in pooled[f"by_{kind}"].items()
            }
            for name, group in pooled[f"by_{kind}"].items():
                its = [row for row in rows if row[kind] == name]
                tau = sum(row["emitted"] for row in its) / sum(row["cycles"] for row in its)
                assert group["acceptance_length"] == pytest.approx(tau)
                assert group["timed_prompts"] == sum("plain_seconds_per_token" in row for row in its)


def test_conversations_are_lossless_turn_by_turn(report):
    for entry in report["entries"]:
        lossless = entry["lossless"]
        assert (lossless["prompts"], lossless["identical"], lossless["divergences"]) == (3, 3, [])


def test_coverage_is_counted_in_the_targets_own_answers(run, report):
    """By hand: plain decoding of every prompt, turn by turn."""
    target = Target.load(run.target, run.harvest.taps)
    known = set(load_head(run.directory / "head", target).vocab.ids_W.tolist())
    renderer, counts = Renderer(target.tokenizer), {"Latin": Counter(), "Cyrillic": Counter()}
    for prompt in read_sets(run, target, FeatureReader(store_path(run, "held-out"))):
        messages: list[dict] = []
        for number in range(max(1, len(prompt.rounds))):
            if prompt.rounds:
                messages += prompt.rounds[number]
            ids = renderer.prompt_ids(messages) if messages else prompt.ids
            said = decode_plain(target, ids, 8).tokens
            counts[prompt.language].update(token in known for token in said)
            spoken = said[:-1] if said[-1] in target.spec.eos_token_ids else said
            messages.append({"role": "assistant", "content": target.tokenizer.decode(spoken)})
    for language, count in counts.items():
        found = report["coverage"][language]
        assert (found["tokens"], found["inside"]) == (count.total(), count[True])
        assert found["coverage"] == count[True] / count.total()


def test_further_heads_are_those_that_were_named(run, report):
    """Each τ is that of the head, decoded by itself. The checkpoint's weights are not the best head's."""
    target = Target.load(run.target, run.harvest.taps)
    prompts = [p for p in read_sets(run, target, FeatureReader(store_path(run, "held-out"))) if p.set == "held-out"]
    first = load_file(checkpoints(run)[0] / "model.safetensors")
    best = load_file(run.directory / "head" / "model.safetensors")
    assert any(not torch.equal(value, best[name]) for name, value in first.items())
    for place in run.eval.heads:
        side = Side("x", load_head(Path(place), target).eval(), Settings(TreeShape.chain(3), 8))
        runs = [side.decode(target, prompt.ids, 8, 0) for prompt in prompts]
        [entry] = [e for e in report["entries"] if e["drafter"].endswith(place) and e["prompt_set"] == "held-out"]
        assert entry["cycles"] == sum(len(each.emitted) for each in runs)
        assert entry["accepted"] == sum(sum(each.accepted) for each in runs)


def test_a_checkpoint_loads_as_a_head(run, tmp_path):
    """Its weights, with the config and the vocabulary of the run's best head."""
    target = Target.load(run.target, run.harvest.taps)
    best = load_head(run.directory / "head", target)
    for folder in checkpoints(run):
        head = load_head(folder, target)
        weights = load_file(folder / "model.safetensors")
        assert head.config == best.config
        assert head.vocab.ids_W.tolist() == best.vocab.ids_W.tolist()
        assert all(torch.equal(value, weights[name]) for name, value in head.state_dict().items())
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c" / "progress.json").write_text("{}")
    with pytest.raises(UserError, match="no head there"):
        load_head(tmp_path / "a" / "b" / "c", target)


def test_figures_of_others_are_of_every_turn(run, report):
    """Recomputed from what was kept."""
    lines = (run.directory / "eval.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    parts = {line["name"]: line["value"] for line in map(json.loads, lines)}
    entry = report_of(run)["entries"][1]  # the times of the same evaluation
    said = lambda key: [Spoken.read(v) for name, v in parts.items() if name.startswith(f"{key} | talks")]  # noqa: E731
    mine, theirs = said("eagle3 chain-3 T=0"), said("transformers plain T=0")
    assert (len(mine), len(theirs)) == (3, 2)
    speeds = [[len(each.whole.tokens) / each.whole.seconds for each in group] for group in (mine[:2], theirs)]
    wanted = as_others_count([turn for spoken in mine for turn in spoken.turns], *speeds)
    for project, figures in wanted.items():
        assert entry["compatible"][project] == pytest.approx(figures, nan_ok=True), project


def test_page_of_several_sets(run, report):
    """All sets, domains and languages are on it."""
    write_html(run.directory, report)
    page = (run.directory / "report.html").read_text(encoding="utf-8")
    for word in ("held-out", "talks", "письмо", "Cyrillic", *run.eval.heads):
        assert word in page, word


# Again, and after a kill


def test_evaluating_what_is_kept_changes_nothing(run, report, monkeypatch):
    """Not even a time; nothing is decoded."""
    before = report_of(run)

    def refuse(*_, **__):
        raise AssertionError("decoded again")

    for place, name in ((sides, "generate_one"), (acceptance, "generate"), (Target, "generate_hf")):
        monkeypatch.setattr(place, name, refuse)
    evaluate(run)
    after = report_of(run)
    assert {key for key in after if after[key] != before[key]} <= {"date", "load_average"}


def test_evaluation_from_scratch_that_is_killed_twice(run, report, monkeypatch):
    """Among timed prompts, then among the others: what was finished is kept and not done again, and the report is the same to
    the last digit.
    """
    (run.directory / "eval.jsonl").unlink()
    before = (run.directory / "report.json").read_bytes()
    real, done, deaths = sides.converse, [], [14, 29]

    def dying(target, side, prompt, room, seed):
        if deaths and len(done) == deaths[0]:
            deaths.pop(0)
            raise Interrupted
        spoken = real(target, side, prompt, room, seed)
        done.append((side.key, prompt.set, prompt.place))
        return spoken

    monkeypatch.setattr(sides, "converse", dying)
    for count in (14, 29):
        with pytest.raises(Interrupted):
            evaluate(run)
        assert len(done) == count
        assert (run.directory / "report.json").read_bytes() == before
        lines = (run.directory / "eval.jsonl").read_text(encoding="utf-8").splitlines()[1:]
        assert sum(json.loads(line)["name"] != "plain texts" for line in lines) == count
    evaluate(run)
    assert (
        len(done) == len(set(done)) == 4 * (2 + 4) + 2 * 4
    )  # timed: four sides and two baselines; the rest: four sides
    assert without_clock(report_of(run)) == without_clock(report)


@pytest.mark.parametrize(
    ("key", "value"), [("max_new_tokens", 5), ("rounds", 2), ("ignore_eos", True), ("timed_prompts", 1)]
)
def test_other_settings_are_measured_anew(run, report, monkeypatch, key, value):
    """Nothing that was said under others is taken."""
    target = Target.load(run.target, run.harvest.taps)
    prompts = [Prompt([65], "s", "p")]
    before = acceptance.identity(run, target, prompts)
    monkeypatch.setattr(run.eval, key, value)
    assert acceptance.identity(run, target, prompts) != before


def test_what_measurements_belong_to(run, monkeypatch):
    """Prompts with all their turns, this machine, the seed; not what only the report is made with."""
    target = Target.load(run.target, run.harvest.taps)
    turn = lambda text: [{"role": "user", "content": text}]  # noqa: E731
    asked = [Prompt([65], "s", "p", rounds=[turn("A"), turn("B")])]
    before = acceptance.identity(run, target, asked)
    for other in (
        [Prompt([66], "s", "p", rounds=asked[0].rounds)],
        [Prompt([65], "s", "p", rounds=[turn("A"), turn("C")])],
    ):
        assert acceptance.identity(run, target, other) != before
    monkeypatch.setattr(run.eval, "gpu_ceiling", (0.5, 2.0))
    assert acceptance.identity(run, target, asked) == before
    with monkeypatch.context() as patch:
        patch.setattr(run, "seed", 7)
        assert acceptance.identity(run, target, asked) != before
    monkeypatch.setattr(acceptance, "stack", lambda target: "another machine")
    assert acceptance.identity(run, target, asked) != before


def test_another_draft_model_is_measured_anew(run, model_dir, tmp_path, monkeypatch):
    make_model(seed=5).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    target, found = Target.load(run.target, run.harvest.taps), []
    monkeypatch.setattr(run.eval, "heads", [])
    for place in (model_dir, tmp_path):
        monkeypatch.setattr(run.eval, "draft_model", str(place))
        side = sides_beside(run, [], target)[-1]
        assert side.name == "draft-model"
        found.append((acceptance.identity(run, target, [Prompt([65], "s", "p")]), side.key, side.mark))
    assert found[0] != found[1]


class Watched(Contest):
    """Notes how it is run."""

    runs: ClassVar[list] = []

    def run(self, sides, prompts, what):
        """All say the same."""
        self.runs.append(([side.name for side in sides], len(prompts), self.rounds, self.first))
        return {side.key: [spoken(1.0, 3)] * len(prompts) for side in sides}


def test_further_prompts_are_decoded_once_and_by_the_sides_alone(run, tiny, tmp_path, monkeypatch):
    """Rounds are for what is timed; random numbers go on with the prompts."""
    monkeypatch.setattr(acceptance, "plain_texts", lambda contest, prompts, wanted: [[[9]]] * len(prompts))
    monkeypatch.setattr(Watched, "runs", [])
    contest = Watched(tiny, make_room(tiny), Kept(tmp_path / "kept.jsonl", {}), rounds=3)
    mine, prompts = Side("mine", None, Settings(TreeShape.chain(2))), [Prompt([1], "s", f"p{i}") for i in range(5)]
    said, plain = acceptance.play(run, contest, [mine], prompts[:2], prompts[2:])
    assert Watched.runs == [(["plain", "transformers", "mine"], 2, 3, 0), (["mine"], 3, 1, 2)]
    assert list(said) == [mine.key]
    assert len(said[mine.key]) == len(plain.texts) == 5
    assert (len(plain.ours), len(plain.theirs)) == (2, 2)
    assert plain.texts == [[[0, 1, 2]]] * 2 + [[[9]]] * 3


def test_a_target_that_says_nothing_cannot_be_sped_up(run, tiny, tmp_path, monkeypatch):
    """All answers end at their first token."""
    contest = Contest(tiny, make_room(tiny), Kept(tmp_path / "kept.jsonl", {}))
    monkeypatch.setattr(Contest, "run", lambda self, sides, prompts, what: {s.key: [spoken(1.0, 1)] for s in sides})
    with pytest.raises(UserError, match="the first 1 answers at their first token: there is nothing to speed up"):
        acceptance.play(run, contest, [Side("mine", None, Settings(PLAIN))], [Prompt([1], "s", "p")], [])


def test_equal_work_in_a_whole_evaluation(run, report, monkeypatch):
    """All texts have max_new_tokens, by every side."""
    monkeypatch.setattr(run.eval, "sets", run.eval.sets[1:])
    monkeypatch.setattr(run.eval, "ignore_eos", True)
    monkeypatch.setattr(run.eval, "heads", [])
    files = [run.directory / name for name in ("report.json", "eval.jsonl")]
    before = [path.read_bytes() for path in files]
    try:
        evaluate(run)
        found = report_of(run)
    finally:
        for path, content in zip(files, before):
            path.write_bytes(content)
    for entry in found["entries"]:
        assert [row["tokens"] for row in entry["per_prompt"]] == [8 * row["turns"] for row in entry["per_prompt"]]
        assert entry["lossless"]["greedy_identity"] == 1.0
    assert "end tokens ignored" in found["answers"]["data"]


# Mistakes


def test_a_further_head_that_is_none(run, tmp_path, monkeypatch):
    """Said before anything is measured."""
    for place, message in ((tmp_path / "nothing", "no head there"), (tmp_path, "no head there")):
        monkeypatch.setattr(run.eval, "heads", [str(place)])
        with pytest.raises(UserError, match=message) as error:
            evaluate(run)
        assert str(place) in str(error.value)


def test_a_further_head_of_another_target(run, tmp_path, monkeypatch):
    save_head(make_tiny_head(Target.load(run.target, (1, 2, 3))), tmp_path / "taps")
    monkeypatch.setattr(run.eval, "heads", [str(tmp_path / "taps")])
    with pytest.raises(UserError, match=r"trained on taps \[1, 2, 3\], the target gives"):
        evaluate(run)


def test_sets_are_checked_before_anything_is_loaded(run, monkeypatch):
    monkeypatch.setattr(run.eval, "sets", [PromptSet("mt-bnech")])
    monkeypatch.setattr(acceptance, "open_store", None)
    for dry in (True, False):
        with pytest.raises(UserError, match="did you mean mt-bench"):
            evaluate(run, dry_run=dry)


def sides_beside(run, heads: list[Path], target: Target | None = None) -> list[Side]:
    """The run's head and further ones."""
    target = target or Target.load(run.target, run.harvest.taps)
    head = load_head(run.directory / "head", target).eval()
    run.eval.heads = [str(place) for place in heads]
    return list(sides_of(run, target, head, [TreeShape.chain(3)], [Settings(PLAIN).policy]))


def test_an_export_is_a_further_head(run, report, monkeypatch):
    """A directory that engines load drafts as the head does."""
    monkeypatch.setattr(run.eval, "heads", [])
    export_run(run)
    target = Target.load(run.target, run.harvest.taps)
    ours, exported, _ = sides_beside(run, [run.directory / "export" / "portable"], target)
    runs = [side.decode(target, [65, 66, 67], 8, 0) for side in (ours, exported)]
    assert runs[0].emitted == runs[1].emitted
    assert exported.mark
    assert not ours.mark


def test_a_further_head_in_other_files(run, report, monkeypatch, tmp_path):
    """load_head reads any *.safetensors of a directory that engines load."""
    monkeypatch.setattr(run.eval, "heads", [])
    export_run(run)
    portable = run.directory / "export" / "portable"
    for path in portable.iterdir():
        if path.is_file() and path.name != "model.safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(load_file(portable / "model.safetensors"), tmp_path / "weights.safetensors", {"format": "pt"})
    load_head(tmp_path, Target.load(run.target, run.harvest.taps))
    assert len(sides_beside(run, [tmp_path])) == 3


# Parts, by hand


def spoken(seconds: float, tokens: int) -> Spoken:
    """An answer of so many tokens."""
    return Spoken(
        [Generation(list(range(tokens)), [0] * (tokens - 1), [1] * (tokens - 1), [3] * (tokens - 1), seconds)]
    )


def part_of(names: str, timed: int) -> Part:
    """Prompts of the sets of these letters, of which the first are timed."""
    prompts = [Prompt([place], "s", f"{name}{place}", name, domain=name) for place, name in enumerate(names)]
    said = [spoken(1.0 + place, 10) for place in range(len(names))]
    ours = [spoken(2.0 + place, 10) for place in range(timed)]
    theirs = [spoken(3.0 - 2 * place, 10) for place in range(timed)]
    texts = [[[place]] for place in range(len(names))]
    return Part(None, None, None, None, prompts, said, Plain(ours, theirs, texts))


def test_parts_of_sets_keep_prompts_and_baselines_together():
    """Timed prompts come first, of all sets."""
    whole = part_of("abaab", 3)
    first, second = by_set(whole)
    assert [prompt.place for prompt in first.prompts] == ["a0", "a2", "a3"]
    assert [prompt.place for prompt in second.prompts] == ["b1", "b4"]
    assert [each.whole.seconds for each in first.said] == [1.0, 3.0, 4.0]
    assert [each.whole.seconds for each in first.plain.ours] == [2.0, 4.0]
    assert [each.whole.seconds for each in second.plain.ours] == [3.0]
    assert first.plain.texts == [[[0]], [[2]], [[3]]]
    assert second.plain.texts == [[[1]], [[4]]]


def test_baseline_is_the_faster_of_the_two():
    """Per token, over all timed prompts together."""
    slow, fast = [spoken(4.0, 10), spoken(2.0, 2)], [spoken(5.0, 10), spoken(1.0, 2)]
    assert Plain(slow, fast, []).best is fast
    assert Plain(fast, slow, []).best is fast
    assert ratio([(1.0, 2.0), (3.0, 2.0)]) == 1.0
    assert ratio([(1.0, 1.0), (9.0, 3.0)]) == 2.5  # of sums: the mean of ratios were 2


def test_first_prompts_of_each_set_are_timed(run):
    """As many of each; the others keep their order."""
    prompts = [Prompt([1], "s", f"{name}{place}", name) for place, name in enumerate("abbaabb")]
    timed, rest = split(run, prompts)
    assert [prompt.place for prompt in timed] == ["a0", "a3", "b1", "b2"]
    assert [prompt.place for prompt in rest] == ["a4", "b5", "b6"]
