"""A trained head, taken to another domain: what is kept, what is refused before anything is spent, what is told at the end."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from conftest import make_tokenizer, on_two_processes, tiny_run

from headwright.configs import UserError, dump
from headwright.configs.schema import LoraConfig, PromptSet, Source
from headwright.data.batch import Answer
from headwright.data.corpus import Document
from headwright.data.coverage import lint
from headwright.data.harvest import harvest
from headwright.data.store import read_manifest
from headwright.data.vet_corpus import refuse_script
from headwright.data.vocab import DraftVocab, full_vocab
from headwright.eval.compare import Line
from headwright.eval.records import read_report
from headwright.heads.saved import read_head
from headwright.train import adapt as adaptation
from headwright.train import before_after
from headwright.train.adapt import adapt, check_adaptation, main
from headwright.train.before_after import conditional, gain_intervals, gains
from headwright.train.launch import open_launch
from headwright.train.run import prepare, refuse_split, train
from headwright.train.trials import expected

RUSSIAN = ("Почему небо голубое?", "Сколько будет два и два?", "Расскажи о море.", "Как испечь хлеб?")


@pytest.fixture(scope="module")
def base(model_dir, chats, tmp_path_factory):
    """A finished training on general text."""
    run = tiny_run(model_dir, chats, tmp_path_factory.mktemp("base"))
    harvest(run)
    train(run)
    return run


@pytest.fixture(scope="module")
def russian(tmp_path_factory) -> Path:
    """Chats of another script, with answers of their own."""
    path = tmp_path_factory.mktemp("corpus") / "russian.jsonl"
    rows = []
    for number in range(24):
        asked = f"{RUSSIAN[number % len(RUSSIAN)]} {number}"
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": asked[::-1]}]})
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def adapted_run(base, model_dir, chats, russian, runs: Path, train_keys=None, **sections):
    """A run that takes the base's head to Russian."""
    whole = {
        "name": "adapted",
        "corpus": {
            "sources": [{"path": str(russian)}, {"path": str(chats), "general": True}],
            "held_out": 0.25,
            "max_length": 256,
        },
        "answers": {"by": "corpus"},
        "vocab": {"size": 60, "pin_bytes": False, "least": 0.0},
        "adapt": {"head": str(base.directory / "head"), "budget": 1.0},
    }
    run = tiny_run(model_dir, chats, runs, **(whole | sections))
    run.train = replace(run.train, **(train_keys or {}))
    return run


@pytest.fixture(scope="module")
def adapted(base, model_dir, chats, russian, tmp_path_factory):
    """The whole way."""
    run = adapted_run(base, model_dir, chats, russian, tmp_path_factory.mktemp("adapted"))
    adapt(run)
    return run


def test_both_heads_are_measured_in_the_same_turns(adapted, base):
    """Each group has both heads' τ over the same prompts; the report shows them."""
    found = json.loads((adapted.directory / "adaptation.json").read_text(encoding="utf-8"))
    groups = {(row["by"], row["group"], row["shape"]) for row in found["groups"]}
    assert {
        ("domain", "russian", "chain-3"),
        ("domain", "chats", "chain-3"),
        ("language", "Latin", "chain-3"),
    } <= groups
    report = read_report(adapted.directory)
    drafters = {entry["drafter"] for entry in report["entries"]}
    assert f"eagle3 {base.directory / 'head'}" in drafters
    whole = next(e for e in report["entries"] if e["drafter"] == "eagle3" and e["shape"]["name"] == "chain-3")
    mine = [row for row in whole["per_prompt"] if row["domain"] == "russian"]
    shown = next(r for r in found["groups"] if (r["group"], r["shape"]) == ("russian", "chain-3"))
    assert shown["prompts"] == len(mine) > 0
    assert shown["tau"] == sum(row["emitted"] for row in mine) / sum(row["cycles"] for row in mine)
    page = (adapted.directory / "report.html").read_text(encoding="utf-8")
    assert "Before and after" in page
    assert found["cost"]["training_seconds"] > 0


def test_the_vocabulary_is_extended_and_known_rows_are_carried_over(adapted, base):
    before, after = (read_head(run.directory / "head").vocab.ids_W.tolist() for run in (base, adapted))
    assert set(before) < set(after)
    assert len(after) == 60
    told = json.loads((adapted.directory / "adaptation.json").read_text(encoding="utf-8"))["coverage"]
    assert told["russian"]["after"] > told["russian"]["before"]


def test_an_adaptation_that_is_done_is_not_done_again(adapted):
    head = (adapted.directory / "head" / "model.safetensors").stat().st_mtime_ns
    adapt(adapted)
    assert (adapted.directory / "head" / "model.safetensors").stat().st_mtime_ns == head


def metrics_of(run):
    """The measurements of a training."""
    lines = (run.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "tau" in record]


def test_the_head_that_is_adapted_is_measured_first(adapted):
    """At step 0; τ of the domain and of general text apart."""
    first = metrics_of(adapted)[0]
    assert first["step"] == 0
    assert {"tau", "tau_general"} <= first.keys()


def test_no_head_beyond_the_budget_is_kept(base, model_dir, chats, russian, tmp_path, monkeypatch):
    """A training that ruins the head: the kept one is the best of those that have forgotten no more."""
    from headwright.train import loop

    run = adapted_run(base, model_dir, chats, russian, tmp_path)
    harvest(run)
    told = iter([(1.1, 2.0), (1.5, 1.1), (1.3, 1.9), (9.0, 1.0)])

    def measured(self, decoded):
        tau, general = next(told)
        return {"tau": tau, "tau_general": general}

    monkeypatch.setattr("headwright.train.measure.Measure.__call__", measured)
    monkeypatch.setattr("headwright.train.run.floor_of", lambda *_: 1.8)
    run.train = replace(run.train, evals=3)
    train(run)
    assert loop is not None
    assert json.loads((run.directory / "training.json").read_text(encoding="utf-8"))["best_tau"] == 1.3


@pytest.mark.parametrize(
    ("taus", "generals", "words"),
    [
        (
            (1.1, 1.5, 1.6, 1.7),
            [2.0, 1.1, 1.1, 1.1],
            "no trained head kept τ 1.800 on general text (adapt.budget 100%): the",
        ),
        (
            (1.1, 1.5, 1.6, 1.7),
            [1.1, 1.1, 1.1, 1.1],
            "no trained head kept τ 1.800 on general text (adapt.budget 100%): no",
        ),
        (
            (1.1, 1.0, 1.0, 1.0),
            [2.0, 2.0, 2.0, 2.0],
            "training made nothing better for the domain: the head that is kept",
        ),
        ((1.1, 1.5, 1.6, 1.7), [2.0, 2.0, 2.0, 2.0], None),
    ],
)
def test_it_is_said_when_no_trained_head_kept_the_budget(
    base, model_dir, chats, russian, tmp_path, monkeypatch, capsys, taus, generals, words
):
    run = adapted_run(base, model_dir, chats, russian, tmp_path)
    harvest(run)
    told = iter(zip(taus, generals))
    monkeypatch.setattr(
        "headwright.train.measure.Measure.__call__",
        lambda self, decoded: dict(zip(("tau", "tau_general"), next(told))),
    )
    monkeypatch.setattr("headwright.train.run.floor_of", lambda *_: 1.8)
    run.train = replace(run.train, evals=3)
    train(run)
    said = capsys.readouterr().out
    assert (words in " ".join(said.split())) if words else "is kept" not in said


@pytest.mark.parametrize("budget", [0.0, 0.25])
def test_the_floor_is_what_the_budget_leaves_of_the_heads_own_drafts(
    base, model_dir, chats, russian, tmp_path, monkeypatch, budget
):
    """With a kept vocabulary the head at step 0 is the head as it was: τ on general text is measured twice, and agrees."""
    section = {"head": str(base.directory / "head"), "vocab": "keep", "budget": budget}
    run, floors = adapted_run(base, model_dir, chats, russian, tmp_path, adapt=section), []
    harvest(run)

    def stopped(parts):
        tau = parts.callbacks.measure(False)["tau_general"]
        floors.append((parts.floor, tau))
        return "stopped"

    monkeypatch.setattr("headwright.train.run.fit", stopped)
    train(run)
    [(floor, tau)] = floors
    assert tau > 1
    assert floor == pytest.approx(1 + (1 - budget) * (tau - 1))


def test_low_rank_updates_of_a_kept_vocabulary(base, model_dir, chats, russian, tmp_path):
    """The kept head is the base and its adapter, and no more."""
    from safetensors.torch import load_file

    section = {"head": str(base.directory / "head"), "vocab": "keep", "budget": 1.0, "replay": 0.5}
    run = adapted_run(
        base, model_dir, chats, russian, tmp_path, {"lora": LoraConfig(rank=2), "lr": 1e-2}, adapt=section
    )
    harvest(run)
    train(run)
    before, after = read_head(base.directory / "head").tensors, read_head(run.directory / "head").tensors
    updates = load_file(run.directory / "adapter" / "adapter_model.safetensors")
    assert set(after) == set(before)
    for name, weight in after.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in updates:
            product = updates[f"{key}.lora_B.weight"] @ updates[f"{key}.lora_A.weight"]
            torch.testing.assert_close(weight, before[name] + 2 * product, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(weight, before[name]), name


# The command line


def test_a_head_and_a_corpus_are_enough(base, russian, tmp_path, capsys, monkeypatch):
    """The run that made the head says the rest: its corpus becomes the general text."""
    seen = []
    monkeypatch.setattr(adaptation, "adapt", lambda run, dry: seen.append(run))
    words = ["--head", str(base.directory / "head"), "--corpus", str(russian), f"runs={tmp_path}"]
    main(words)
    main([*words, "vocab.size=60"])
    run, other = seen
    assert (run.name, run.adapt.head, run.vocab.size) == ("tiny-adapted", str(base.directory / "head"), 48)
    assert other.vocab.size == 60
    assert [(source.path, source.general) for source in run.corpus.sources] == [
        (str(russian), False),
        (base.corpus.sources[0].path, True),
    ]
    assert run.head == base.head


def test_dry_run(base, model_dir, chats, russian, tmp_path):
    run = adapted_run(base, model_dir, chats, russian, tmp_path)
    adapt(run, dry_run=True)
    assert not run.directory.exists()


# Refusals


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"head": None}, "adapt.head is missing"),
        ({"head": "/none/such"}, "no such directory"),
    ],
)
def test_a_head_that_is_not_there(base, model_dir, chats, russian, tmp_path, section, words):
    with pytest.raises(UserError, match=words):
        check_adaptation(adapted_run(base, model_dir, chats, russian, tmp_path, adapt=section))


def test_sources_that_make_no_adaptation(base, model_dir, chats, russian, tmp_path):
    run = adapted_run(base, model_dir, chats, russian, tmp_path)
    both = run.corpus.sources
    run.corpus.sources = [both[0]]
    with pytest.raises(UserError, match=r"adapt\.replay 0\.25: no source of the corpus is general"):
        check_adaptation(run)
    run.corpus.sources = [Source(path=str(chats), general=True)]
    with pytest.raises(UserError, match="all are general"):
        check_adaptation(run)
    run.corpus.sources, run.train.warm_start = both, "elsewhere"
    with pytest.raises(UserError, match="both name a head to start from"):
        check_adaptation(run)


def test_vocabularies_that_cannot_be(base, model_dir, chats, russian, tmp_path):
    """Smaller than the head's own, and one that is full already."""
    run = adapted_run(base, model_dir, chats, russian, tmp_path / "a", vocab={"size": 10, "pin_bytes": False})
    harvest(run)
    with pytest.raises(UserError, match=r"vocab\.size 10: .* has 24 draft tokens already"):
        train(run)
    full = tiny_run(model_dir, chats, tmp_path / "b", vocab={"size": None})
    shutil.copytree(base.directory, full.directory)
    shutil.rmtree(full.directory / "checkpoints")
    shutil.rmtree(full.directory / "head")
    train(full)
    run.adapt.head, run.vocab.size = str(full.directory / "head"), 60
    with pytest.raises(UserError, match=r"adapt\.vocab extend: .* can say all 272 tokens"):
        train(run)


def test_a_head_section_of_another_head(base, model_dir, chats, russian, tmp_path):
    run = adapted_run(
        base,
        model_dir,
        chats,
        russian,
        tmp_path,
        head={"kind": "eagle3", "steps": 2, "fc_norm": False, "norm_before_fc": True},
    )
    harvest(run)
    with pytest.raises(
        UserError, match=r"its eagle3 head is not the eagle3 head of this run: input_norm\.weight would be new"
    ):
        train(run)


class Spoken:
    """Held-out answers, without features."""

    def __init__(self, *texts: str):
        self.texts = texts

    def answers(self):
        for text in self.texts:
            yield Answer("some", torch.tensor(TOKENIZER(text)["input_ids"]), torch.tensor([]).long())


TOKENIZER = make_tokenizer()
LATIN = DraftVocab(torch.tensor(sorted({*TOKENIZER("the sea is blue and so is the sky")["input_ids"], 258})), 272)


def test_a_vocabulary_that_cannot_say_a_script_is_refused(base):
    """Overridable; what is small is not judged."""
    run = replace(base, vocab=replace(base.vocab, least=0.3, coverage=0.9))
    both = Spoken("the sea is blue", "море синее, и небо тоже")
    with pytest.raises(UserError, match=r"of 1\d tokens can say .*% of the Cyrillic held-out .* vocab\.least=0"):
        list(lint(run, LATIN, both, TOKENIZER))
    run.vocab.least = 0.0
    told = " ".join(lint(run, LATIN, both, TOKENIZER))
    assert "Cyrillic held-out response tokens" in told
    assert "no head with this vocabulary exceeds τ" in told
    assert "pieces that spell single bytes are outside" in told
    assert list(lint(run, LATIN, Spoken("the sea is blue"), TOKENIZER)) == []
    run.vocab.least = 0.3
    small = Spoken("the sea is blue\n" * 200 + "да")
    assert not any("Cyrillic" in words for words in lint(run, LATIN, small, TOKENIZER))


# Before anything is spent


def harvests(monkeypatch) -> list:
    """Any harvest that is begun."""
    begun: list = []
    monkeypatch.setattr(adaptation, "harvest", begun.append)
    return begun


@pytest.mark.parametrize(
    ("vocab", "adapt_keys", "words"),
    [
        ({"size": 10, "pin_bytes": False, "least": 0.0}, {}, r"vocab\.size 10: .* has 24 draft tokens already"),
        ({"size": None, "pin_bytes": False, "least": 0.0}, {}, None),
        ({"size": 10, "pin_bytes": False, "least": 0.0}, {"vocab": "rebuild"}, None),
    ],
)
def test_vocabularies_are_judged_before_the_harvest(
    base, model_dir, chats, russian, tmp_path, monkeypatch, vocab, adapt_keys, words
):
    section = {"head": str(base.directory / "head"), "budget": 1.0} | adapt_keys
    run = adapted_run(base, model_dir, chats, russian, tmp_path, vocab=vocab, adapt=section)
    if words is None:
        adaptation.refuse(run)
        return
    begun = harvests(monkeypatch)
    with pytest.raises(UserError, match=words):
        adapt(run)
    assert not begun


def test_a_full_vocabulary_is_refused_before_the_harvest(base, model_dir, chats, russian, tmp_path, monkeypatch):
    run, begun = adapted_run(base, model_dir, chats, russian, tmp_path), harvests(monkeypatch)
    monkeypatch.setattr(adaptation, "load_head", lambda *_: type("Full", (), {"vocab": full_vocab(272)}))
    with pytest.raises(
        UserError, match=r"adapt\.vocab extend: .* can say all 272 tokens of the target: adapt\.vocab=keep"
    ):
        adapt(run)
    assert not begun


def test_a_script_without_pieces_is_refused_before_the_harvest(base, model_dir, chats, russian, tmp_path, monkeypatch):
    """The tiny tokenizer spells everything by the byte."""
    vocab = {"size": 60, "pin_bytes": False, "least": 0.3}
    run, begun = adapted_run(base, model_dir, chats, russian, tmp_path, vocab=vocab), harvests(monkeypatch)
    words = r"text is Cyrillic, for which the tokenizer of .* has no pieces \(single bytes for 100% .* vocab\.least=0"
    with pytest.raises(UserError, match=words):
        adapt(run)
    assert not begun


def test_words_are_pieces(base):
    """A tokenizer that has words, of which one script is unknown."""
    run = replace(base, vocab=replace(base.vocab, least=0.3))
    known = {"[UNK]": 0, "the": 1, "sea": 2, "is": 3, "blue": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    refuse_script(run, [Document("k", "s", "p", 1, text="the sea is blue")], tokenizer)
    with pytest.raises(UserError, match=r"text is Cyrillic.*100% unknown tokens"):
        refuse_script(run, [Document("k", "s", "p", 1, text="море синее")], tokenizer)
    run.vocab.least = 0.0
    refuse_script(run, [Document("k", "s", "p", 1, text="море синее")], tokenizer)


def test_an_empty_split_of_the_domain_is_refused_before_the_harvest(
    base, model_dir, chats, russian, tmp_path, monkeypatch
):
    """One text of the domain lies on one side alone."""
    path = tmp_path / "one.jsonl"
    path.write_text(russian.read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
    run, begun = adapted_run(base, model_dir, chats, path, tmp_path / "runs"), harvests(monkeypatch)
    with pytest.raises(UserError, match=r"corpus: no (training|held-out) document is of the domain"):
        adapt(run)
    assert not begun


def test_a_store_without_the_domain_held_out_is_refused(base, model_dir, chats, russian, tmp_path):
    """Also where it was harvested otherwise than by adapt."""
    run = adapted_run(base, model_dir, chats, russian, tmp_path)
    harvest(run)
    run.corpus.sources[0].general = True
    run.corpus.sources[1].general = False
    run.corpus.sources[1].name = "renamed"
    with pytest.raises(UserError, match="no held-out document is of the domain"):
        refuse_split(replace(run, corpus=replace(run.corpus, sources=run.corpus.sources[:1])), FakeReader(["russian"]))
    refuse_split(run, FakeReader(["russian", "chats"]))


class FakeReader:
    """Held-out documents by their sources."""

    root = "store"

    def __init__(self, names):
        self.names = names

    def sources(self):
        return self.names


def test_what_was_harvested_is_not_read_again(adapted, monkeypatch):
    """A corpus that has become features need not be there any more."""
    monkeypatch.setattr(adaptation, "refuse_corpus", lambda *_: pytest.fail("the corpus was read"))
    adaptation.refuse(adapted)


def test_general_text_and_domain_of_one_name(base, model_dir, chats, russian, tmp_path):
    run = adapted_run(base, model_dir, chats, russian, tmp_path)
    run.corpus.sources = [Source(path=str(russian), name="some"), Source(path=str(chats), name="some", general=True)]
    with pytest.raises(UserError, match=r"some is the name of general text and of the domain's: .*sources\.0\.name"):
        check_adaptation(run)


@pytest.mark.parametrize(
    ("text", "words"),
    [("adapt:\n", "target.model is empty"), ("corpus: {sources: [foo.jsonl]}\n", r"corpus\.sources\[1\] must be")],
)
def test_sections_that_are_empty_or_no_sections(base, russian, tmp_path, capsys, text, words):
    config = tmp_path / "run.yaml"
    config.write_text(f"name: some\n{text}", encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main(["--config", str(config), "--head", str(base.directory / "head"), "--corpus", str(russian), "--dry-run"])
    assert stop.value.code == 2
    assert re.search(words, capsys.readouterr().err)


# Trials, and what is told


@pytest.fixture(scope="module")
def searched(base, model_dir, chats, russian, tmp_path_factory):
    """The whole way, with a search and a curve."""
    section = {"head": str(base.directory / "head"), "budget": 1.0, "curve": [0.5]}
    section |= {"replay": "search", "shares": [0.0, 0.5], "trial": 0.5}
    run = adapted_run(base, model_dir, chats, russian, tmp_path_factory.mktemp("searched"), adapt=section)
    adapt(run)
    return run


def test_search_and_curve_are_in_the_report(searched):
    found = json.loads((searched.directory / "adaptation.json").read_text(encoding="utf-8"))
    assert found["adapt"]["replay"] in (0.0, 0.5)
    half, whole = found["curve"]["points"]
    assert 0 < half["rows"] < whole["rows"]
    assert whole["tau"] == pytest.approx(metrics_of(searched)[-1]["tau"])
    assert found["curve"]["twice"] == pytest.approx(
        expected([(p["rows"], p["tau"]) for p in (half, whole)], 2 * whole["rows"])
    )
    page = (searched.directory / "report.html").read_text(encoding="utf-8")
    assert f"{2 * whole['rows']}, not measured" in page
    assert "What it took:" in page
    made = read_manifest(searched.directory / "features")
    assert f"{made.response_tokens} response tokens, harvested in" in page
    assert "4 trials in" in page or "3 trials in" in page


def test_groups_have_rates_and_characters_of_both_heads(searched):
    """Each recomputed from the report's prompts."""
    found = json.loads((searched.directory / "adaptation.json").read_text(encoding="utf-8"))
    entries = read_report(searched.directory)["entries"]
    row = next(r for r in found["groups"] if (r["group"], r["shape"]) == ("russian", "chain-3"))
    for drafter, suffix in (("eagle3", ""), (f"eagle3 {searched.adapt.head}", "_base")):
        entry = next(e for e in entries if e["drafter"] == drafter and e["shape"]["name"] == "chain-3")
        mine = [prompt for prompt in entry["per_prompt"] if prompt["domain"] == "russian"]
        counts = [sum(column) for column in zip(*(prompt["histogram"] for prompt in mine))]
        assert sum(counts) == sum(prompt["cycles"] for prompt in mine)
        assert row[f"conditional{suffix}"][0] == pytest.approx(sum(counts[1:]) / sum(counts))
        timed = [prompt for prompt in mine if "plain_seconds_per_token" in prompt]
        speed = sum(p["characters"] for p in timed) / sum(p["seconds"] for p in timed) if timed else 0
        assert row[f"chars_per_second{suffix}"] == pytest.approx(speed)
    assert len(row["conditional_gain_ci95"]) == len(row["conditional"]) == 3
    for low_high, before, after in zip(row["conditional_gain_ci95"], row["conditional_base"], row["conditional"]):
        assert low_high[0] - 1e-9 <= after - before <= low_high[1] + 1e-9
    letters, tokens = (sum(prompt[key] for prompt in mine) for key in ("characters", "tokens"))
    assert row["chars_per_token"] == pytest.approx(letters / tokens)


def test_what_was_forgotten_is_told_of_all_general_text(searched):
    """τ - 1 after over before, over the prompts of general sources."""
    found = json.loads((searched.directory / "adaptation.json").read_text(encoding="utf-8"))
    entries = read_report(searched.directory)["entries"]
    taus = []
    for drafter in (f"eagle3 {searched.adapt.head}", "eagle3"):
        entry = next(e for e in entries if e["drafter"] == drafter and e["shape"]["name"] == "chain-3")
        mine = [prompt for prompt in entry["per_prompt"] if prompt["domain"] == "chats"]
        taus.append(sum(p["emitted"] for p in mine) / sum(p["cycles"] for p in mine))
    rows = [row for row in found["forgotten"] if row["shape"] == "chain-3"]
    assert [row["prompts"] for row in rows] == [len(mine)] * (taus[0] > 1)
    for row in rows:
        assert row["kept"] == pytest.approx((taus[1] - 1) / (taus[0] - 1))
        assert f"On {len(mine)} prompts of general text" in (searched.directory / "report.html").read_text(
            encoding="utf-8"
        )


def line_of_set(name: str, temperature: float, drafter: str, own: bool, emitted: int) -> Line:
    """One prompt of a set."""
    row = {"place": "p", "domain": "d", "language": "ru", "cycles": 2, "emitted": emitted, "histogram": [1, 1]}
    row |= {"characters": 10, "tokens": emitted, "seconds": 1.0, "accepted": emitted - 2}
    shape = {"name": "chain-1"}
    entry = {"prompt_set": name, "shape": shape, "temperature": temperature, "drafter": drafter, "per_prompt": [row]}
    return Line("run", entry, "stack", own)


def test_sets_are_pooled_and_temperatures_kept_apart(monkeypatch, base):
    """Two sets and two temperatures: two pairs of lines, each over the prompts of both sets."""
    head = str(base.adapt.head)
    lines = [
        line_of_set(name, temperature, f"eagle3 {head}" if old else "eagle3", not old, 2 + place + (not old))
        for place, name in enumerate(("one", "two"))
        for temperature in (0.0, 0.8)
        for old in (True, False)
    ]
    monkeypatch.setattr(before_after, "lines_of", lambda paths, wanted: lines)
    sides = before_after.sides_of(base)
    assert [before_after.named(after) for _, after in sides] == [
        {"shape": "chain-1", "temperature": 0.0},
        {"shape": "chain-1", "temperature": 0.8},
    ]
    [domain, language] = before_after.changes(*sides[1])
    assert (domain["by"], domain["group"], language["group"]) == ("domain", "d", "ru")
    assert (domain["prompts"], language["temperature"]) == (2, 0.8)
    assert (domain["tau_base"], domain["tau"]) == (5 / 4, 7 / 4)
    lines[:] = [line_of_set("one", 0.0, f"eagle3 {head}", False, 5), line_of_set("one", 0.0, "eagle3", True, 4)]
    monkeypatch.setattr(before_after, "general_sources", lambda corpus: {"d"})
    [row] = before_after.forgotten(base, *before_after.sides_of(base)[0])
    assert row == {"shape": "chain-1", "temperature": 0.0, "prompts": 1, "kept": 2 / 3, "kept_ci95": [2 / 3, 2 / 3]}
    other = replace(base, eval=replace(base.eval, sets=[PromptSet("held-out", name="one", general=True)]))
    monkeypatch.setattr(before_after, "general_sources", lambda corpus: set())
    assert before_after.forgotten(other, *before_after.sides_of(base)[0]) == [row]
    assert before_after.forgotten(base, *before_after.sides_of(base)[0]) == []
    lines.pop()
    with pytest.raises(UserError, match="both heads in the same shapes"):
        before_after.sides_of(base)


def test_conditional_rates():
    """6 cycles, of which 4 accept one draft, and 1 of these two."""
    assert conditional([{"histogram": [1, 2, 1]}, {"histogram": [1, 1, 0]}]) == [4 / 6, 1 / 4]
    assert conditional([{"histogram": [2, 0, 0]}]) == [0.0, 0.0]


def test_differences_of_rates_are_paired():
    """Two prompts that differ alike: no resampling changes the difference."""
    before, after = {"histogram": [3, 1, 0]}, {"histogram": [1, 2, 1]}
    pairs = [(before, after)] * 4
    assert gains(pairs) == [3 / 4 - 1 / 4, 1 / 3]
    for found, gain in zip(gain_intervals(pairs, 0), gains(pairs)):
        assert found == pytest.approx([gain, gain])


def test_a_training_that_is_stopped_is_not_evaluated(base, model_dir, chats, russian, tmp_path, monkeypatch):
    """It has a best head already, but it is not the run's."""
    run = adapted_run(base, model_dir, chats, russian, tmp_path)
    harvest(run)
    monkeypatch.setattr(
        "headwright.train.run.fit", lambda parts: (parts.callbacks.keep_best(parts.state), "stopped")[1]
    )
    monkeypatch.setattr(adaptation, "evaluate", lambda *_: pytest.fail("it was evaluated"))
    adapt(run)
    assert (run.directory / "head" / "head.json").is_file()
    assert not (run.directory / "adaptation.json").exists()


def test_new_weights_with_the_vocabulary_of_an_adaptation(base, model_dir, chats, russian, tmp_path, adapted):
    """Training from scratch, to compare with: the head's vocabulary, extended, and nothing of its weights."""
    section = {"head": str(base.directory / "head"), "budget": 1.0, "fresh": True}
    run = adapted_run(base, model_dir, chats, russian, tmp_path, {"epochs": 0.01}, adapt=section)
    harvest(run)
    lesson = prepare(run, open_launch(run.train))
    old, known = read_head(adapted.directory / "head"), read_head(base.directory / "head")
    assert lesson.head.vocab.ids_W.tolist() == old.vocab.ids_W.tolist()
    assert lesson.warmed is None
    assert not torch.equal(lesson.head.state_dict()["fc.weight"], known.tensors["fc.weight"])


# Several processes


@pytest.mark.slow
def test_two_processes_adapt_and_one_measures(base, model_dir, chats, russian, tmp_path):
    """Search, training and curve on both; speed is measured afterwards, by the same command in one."""
    section = {"head": str(base.directory / "head"), "budget": 1.0, "curve": [0.5]}
    section |= {"replay": "search", "shares": [0.0, 0.5], "trial": 0.5}
    run = adapted_run(base, model_dir, chats, russian, tmp_path / "runs", adapt=section)
    config = tmp_path / "run.yaml"
    config.write_text(dump(run), encoding="utf-8")
    script = f"from headwright.train.adapt import main\n\nmain(['--config', {str(config)!r}])\n"
    said = on_two_processes(tmp_path / "script.py", script)
    assert "a copy of the head on each of 2 processes" in said
    assert "trained. Speed is measured in one process" in said
    assert said.count("trials of replay") == 1
    kept = {path.stem: path.stat().st_mtime_ns for path in (run.directory / "trials").iterdir()}
    assert sorted(kept) == ["part-0.5", "replay-0", "replay-0.5", "whole"]
    assert not (run.directory / "adaptation.json").exists()
    main(["--config", str(config)])
    assert (run.directory / "adaptation.json").is_file()
    assert {path.stem: path.stat().st_mtime_ns for path in (run.directory / "trials").iterdir()} == kept
