"""A training that is not well says so: steps that are not finite are left out and named, runs that cannot learn are told."""

import copy
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_run
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from headwright.configs import UserError
from headwright.configs.schema import TrainConfig
from headwright.data.batch import DocumentFeatures, last_rows
from headwright.data.harvest import store_path
from headwright.data.store import FeatureReader
from headwright.data.stream import FeatureStream
from headwright.eval.metrics import read_metrics
from headwright.train import health
from headwright.train.health import CAUSES, CHECKED_AT, EARLIEST, MARGIN, Finite, Lagged, Learning, chance
from headwright.train.launch import Launch
from headwright.train.run import train
from headwright.train.strategy import Strategy

TRAIN = {
    "epochs": 2,
    "tokens_per_batch": 256,
    "lr": 3e-3,
    "log_every": 1,
    "evals": 2,
    "saves": 4,
    "decode": {"evals": 0},
}


# Values of the step before


def test_on_a_cpu_nothing_is_late():
    lagged = Lagged(torch.device("cpu"))
    for step in range(4):
        values = torch.tensor([float(step), 0.5])
        found = lagged.read(step, values)
        values.zero_()
        assert found == (step, [float(step), 0.5])


# Which documents a step reads


class Shelf:
    """Documents of given lengths without any states, which notes what is read."""

    root, manifest = Path("shelf"), None

    def __init__(self, lengths: list[int]):
        self.sizes, self.seen = lengths, []

    def __len__(self) -> int:
        return len(self.sizes)

    def lengths(self) -> list[int]:
        return self.sizes

    def loss_rows(self) -> list[int]:
        return [len(last_rows(self.mask(document))) for document in range(len(self))]

    def mask(self, document: int) -> Tensor:
        """All but the first two tokens are an answer; every fifth document has none."""
        mask_T = torch.arange(self.sizes[document]) >= 2
        return torch.zeros_like(mask_T) if document % 5 == 4 else mask_T

    def place(self, document: int) -> str:
        return f"file.jsonl:{document + 1}"

    def read(self, documents) -> list[DocumentFeatures]:
        self.seen += documents
        return [self.document(number) for number in documents]

    def document(self, number: int) -> DocumentFeatures:
        mask_T = self.mask(number)
        rows = len(last_rows(mask_T))
        length = self.sizes[number]
        states = torch.zeros(length, 1, 1), torch.zeros(rows, 1)
        return DocumentFeatures(
            torch.full((length,), number), mask_T, *states, torch.zeros(rows).long(), torch.zeros(rows)
        )


@given(
    st.lists(st.integers(4, 30), min_size=1, max_size=24),
    st.integers(8, 48),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 5),
    st.sampled_from(["split", "whole"]),
)
@settings(max_examples=80, deadline=None)
def test_documents_of_a_step_are_those_it_really_reads(lengths, budget, world, accumulate, seed, long):
    """For every rank, over the ends of epochs. A batch that is only there to fill a step is not among them."""
    shelves = [Shelf(lengths) for _ in range(world)]
    streams = [
        FeatureStream(shelf, budget, accumulate, rank, world, seed, long=long) for rank, shelf in enumerate(shelves)
    ]
    count = 2 * streams[0].steps_per_epoch() + 3
    read: Counter = Counter()
    for shelf, stream in zip(shelves, streams):
        for step, batches in enumerate(stream.steps(0, count)):
            bearing = [sorted(set(batch.ids_T[batch.learn_T].tolist())) for batch in batches]
            said = stream.documents(step)
            assert sorted(set(said)) == sorted({document for batch in bearing for document in batch})
            filled = sum(not batch.learn_T.any() for batch in batches)
            if filled == 0:
                assert said == shelf.seen
            else:  # the batches that fill the step come last
                assert said == shelf.seen[: len(said)]
            read.update(said if step < streams[0].steps_per_epoch() else [])
            shelf.seen.clear()
    assert read.keys() == {document for document, rows in enumerate(shelves[0].loss_rows()) if rows}


@given(st.integers(0, 30), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_a_step_is_named_alike_however_one_arrives_there(step, world, accumulate):
    """Ranks share the documents of a step; one rank that accumulates as much reads them all."""
    lengths = [4 + (7 * i) % 23 for i in range(23)]
    ranks = [FeatureStream(Shelf(lengths), 40, accumulate, rank, world).documents(step) for rank in range(world)]
    alone = FeatureStream(Shelf(lengths), 40, accumulate * world).documents(step)
    assert [document for rank in ranks for document in rank] == alone
    assert Counter(alone) == Counter(
        FeatureStream(Shelf(lengths), 40, 1, 0, accumulate * world).documents(step)
    ) + Counter(
        document
        for rank in range(1, accumulate * world)
        for document in FeatureStream(Shelf(lengths), 40, 1, rank, accumulate * world).documents(step)
    )


def test_documents_of_a_store_are_named_by_their_places(model_dir, chats, harvested):
    """The file and line that a user can look at."""
    reader = FeatureReader(store_path(tiny_run(model_dir, chats, harvested), "train"))
    stream = FeatureStream(reader, 256)
    said = Finite(TrainConfig(), Launch(), stream).documents(3)
    found = stream.documents(3)
    assert said.startswith("rank 0 read documents ")
    for document in found[:6]:
        assert f"{document} ({reader.place(document)})" in said
    assert said.endswith("…") == (len(found) > 6)
    assert "chats.jsonl" in said


# Steps that are not finite


class Named:
    """A stream that only knows its documents."""

    reader = SimpleNamespace(place=lambda document: f"line {document}")

    def documents(self, step: int) -> list[int]:
        return [10 * step, 10 * step + 1]


def make_finite(limit: int, rank: int = 0, world: int = 1) -> Finite:
    return Finite(TrainConfig(bad_steps=limit), Launch(rank=rank, world=world), Named())


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_it_ends_after_so_many_bad_steps_in_a_row_and_not_before(flags, limit):
    finite, row, total = make_finite(limit), 0, 0
    for step, bad in enumerate(flags):
        row = row + 1 if bad else 0
        total += bad
        if row == limit:
            with pytest.raises(UserError, match=f"{limit} steps in a row"):
                finite.look(step, bad, False)
            return
        finite.look(step, bad, False)
        assert (finite.total, finite.in_a_row) == (total, row)


def test_the_end_names_what_to_look_at():
    finite = make_finite(2)
    finite.look(4, True, True)
    with pytest.raises(UserError) as caught:
        finite.look(5, True, True)
    for words in ("train.bad_steps", "train.lr", "rank 0 read documents 50 (line 50), 51 (line 51)"):
        assert words in str(caught.value)


def test_the_rank_whose_loss_it_was_names_its_documents(capsys):
    """Others are silent, but for the main one, which tells of a gradient that was not finite."""
    make_finite(9, rank=2, world=3).look(7, True, True)
    assert "step 7: the loss is not finite" in (said := capsys.readouterr().err)
    assert "rank 2 read documents 70 (line 70), 71 (line 71)" in said
    make_finite(9, rank=1, world=3).look(7, True, False)
    assert capsys.readouterr().err == ""
    make_finite(9, rank=0, world=3).look(7, True, False)
    assert "step 7: the gradient is not finite" in (said := capsys.readouterr().err)
    assert "documents" not in said
    make_finite(9).look(7, False, False)
    assert capsys.readouterr().err == ""


def test_all_ranks_end_at_the_same_step():
    """Whosever the fault is: else the others would wait for ever."""
    ends = []
    for rank in range(3):
        finite = make_finite(3, rank, 3)
        for step in range(9):
            try:
                finite.look(step, step >= 4, here=rank == 1)
            except UserError:
                ends.append(step)
                break
    assert ends == [6, 6, 6]


def poison(monkeypatch, bad: set[int]) -> None:
    """Let the loss of some steps be no number."""
    real, count = Strategy.loss, iter(range(10**6))

    def loss(self, batch, target):
        total, metrics = real(self, batch, target)
        wrong = next(count) in bad
        return (
            (total * math.nan, {k: (a * math.nan, b) for k, (a, b) in metrics.items()}) if wrong else (total, metrics)
        )

    monkeypatch.setattr(Strategy, "loss", loss)


def weights_of(run) -> dict[str, Tensor]:
    """Of the last checkpoint."""
    [folder] = (run.directory / "checkpoints").glob("step-*")
    return load_file(folder / "model.safetensors")


def test_a_run_leaves_bad_steps_out_and_says_how_many(monkeypatch, make_run, capsys):
    """Two apart and two in a row: none is trained, all are named, and no metric is spoiled."""
    run = make_run(bad_steps=3)
    with monkeypatch.context() as patch:
        poison(patch, {2, 5, 6})
        train(run)
    said = capsys.readouterr()
    assert [line.split(":")[0] for line in said.err.splitlines() if "not finite" in line] == [
        "step 2",
        "step 5",
        "step 6",
    ]
    assert "3 steps were left out" in said.out
    told = json.loads((run.directory / "training.json").read_text(encoding="utf-8"))
    assert told["left_out"] == 3
    assert told["step"] == told["total"]
    assert all(value.isfinite().all() for value in weights_of(run).values())
    records = read_metrics(run.directory / "metrics.jsonl")
    assert all(math.isfinite(record["loss_0"]) for record in records if "loss_0" in record)
    assert {r["step"] for r in records if "lr" in r} - {r["step"] for r in records if "loss_0" in r} == {3, 6, 7}


def test_a_run_ends_where_nothing_is_finite_and_keeps_what_it_had(monkeypatch, make_run, capsys):
    """The checkpoint of before is whole, its weights those before the fault; with the fault away the run goes on."""
    run, stopped = make_run(bad_steps=3, saves=100), make_run(bad_steps=9, saves=100)
    with monkeypatch.context() as patch:
        poison(patch, set(range(4, 99)))
        with pytest.raises(UserError, match=r"3 steps in a row \(train\.bad_steps\)"):
            train(run)
    with monkeypatch.context() as patch:
        poison(patch, set(range(4, 99)))
        with pytest.raises(UserError, match="9 steps in a row"):
            train(stopped)
    ours, theirs = weights_of(run), weights_of(stopped)  # saved after two bad steps, and after eight
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not (run.directory / "training.json").exists()
    capsys.readouterr()
    train(run)
    assert "2 steps were left out" in capsys.readouterr().out  # the third ended the run before it was saved
    assert all(value.isfinite().all() for value in weights_of(run).values())


# Does it learn?


@given(st.lists(st.integers(0, 30), max_size=60), st.sets(st.integers(0, 30), min_size=1))
@settings(max_examples=150, deadline=None)
def test_chance_is_a_count(tokens, ids):
    """The share of the draft vocabulary's most frequent token in the text, counted by hand."""
    found = chance(torch.tensor(tokens, dtype=torch.long), torch.tensor(sorted(ids)))
    often = max(Counter(token for token in tokens if token in ids).values(), default=0)
    assert found == pytest.approx(often / max(len(tokens), 1), abs=1e-7)


def when(total: int) -> int:
    """The step from which on it is known."""
    return min(CHECKED_AT, max(total // 2, EARLIEST))


@given(
    st.integers(1, 4000),
    st.integers(1, 120),
    st.floats(0.01, 0.9),
    st.sampled_from([0.0, 0.5, 1.0, 1.05, 1.15, 2.0]),
)
@settings(max_examples=200, deadline=None)
def test_a_hopeless_run_is_told_once_at_its_time(total, every, by_chance, times):
    """At the first log line from then on; whatever comes later is not looked at."""
    learning, said, agree = Learning(total, by_chance), [], times * by_chance
    spoken: list[str] = []
    before, health.say = health.say, spoken.append
    try:
        for step in range(every, total + 1, every):
            if learning.look(step, {"agree_0": agree}):
                said.append(step)
    finally:
        health.say = before
    first = next((step for step in range(every, total + 1, every) if step >= when(total)), None)
    hopeless = times < MARGIN and first is not None
    assert said == ([first] if hopeless else [])
    assert len(spoken) == len(said)
    assert all(f"After {first} steps" in words and f"{by_chance:.1%}" in words for words in spoken)


def test_the_time_is_half_of_a_run_or_500_steps():
    assert [Learning(total, 0.1).at for total in (120, 400, 999, 1001, 10**6)] == [60, 200, 499, 500, 500]
    assert Learning(2, 0.1).at > 2  # too short a run says nothing


def test_what_was_good_in_time_is_not_told_later(capsys):
    learning = Learning(200, 0.2)
    assert not learning.look(100, {"agree_0": 0.3})
    assert not learning.look(110, {"agree_0": 0.0})
    assert capsys.readouterr().out == ""


def test_lines_without_a_guess_are_passed_over(capsys):
    """A log line whose steps were all left out."""
    learning = Learning(200, 0.2)
    assert not learning.look(100, {})
    assert learning.look(101, {"agree_0": 0.1})
    assert not learning.look(102, {"agree_0": 0.1})
    assert capsys.readouterr().out.count("does not learn") == 1


def test_the_warning_lists_the_causes(capsys):
    Learning(100, 0.2).look(60, {"agree_0": 0.1})
    said = " ".join(capsys.readouterr().out.split())
    assert all(cause in said for cause in CAUSES.values())
    Learning(100, 0.2, ("rate",)).look(60, {"agree_0": 0.1})
    said = " ".join(capsys.readouterr().out.split())
    assert CAUSES["rate"] in said
    assert CAUSES["tap"] not in said


LONG = {"epochs": 14, "log_every": 10, "evals": 1, "saves": 1}


def test_a_run_that_cannot_learn_is_warned(make_run, capsys):
    train(make_run(**LONG, lr=1e-12))
    assert capsys.readouterr().out.count("this run does not learn") == 1


def test_a_run_on_noise_is_warned(make_run, capsys, monkeypatch):
    """States that say nothing of the text."""
    real, generator = FeatureReader.read, torch.Generator().manual_seed(0)

    def noise(self, documents):
        found = copy.copy(real(self, documents))
        return [
            replace(
                d,
                taps_TKD=torch.randn(d.taps_TKD.shape, generator=generator),
                last_RD=torch.randn(d.last_RD.shape, generator=generator),
            )
            for d in found
        ]

    monkeypatch.setattr(FeatureReader, "read", noise)
    train(make_run(**LONG, lr=1e-3))
    assert capsys.readouterr().out.count("this run does not learn") == 1


def test_an_ordinary_run_is_not_warned(make_run, capsys):
    train(make_run(**LONG, lr=1e-2))
    assert "does not learn" not in capsys.readouterr().out


def test_a_short_run_is_not_warned(make_run, capsys):
    train(make_run(lr=1e-12))
    assert "does not learn" not in capsys.readouterr().out
