"""The training engine as a run uses it: what trades memory and time changes no value, and long or bad documents are handled."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from test_train import TRAIN, assert_same_bits, curve, straight  # noqa: F401 (for the fixtures)

import headwright.heads.fused as fused
from headwright.configs import UserError
from headwright.data.store import FeatureReader
from headwright.heads.layers import GatedFunction, NormFunction
from headwright.heads.rotary import TurnFunction
from headwright.train.run import train

SIDE = ROOT / "scripts" / "bench_sides" / "ours.py"


def test_recomputed_steps_end_in_the_same_bits(straight, make_run):  # noqa: F811
    run = make_run(recompute=True)
    train(run)
    assert_same_bits(run, straight)
    assert curve(run) == curve(straight)


def test_small_chunks_change_no_more_than_rounding(straight, make_run):  # noqa: F811
    run = make_run(loss_mib=0.01)
    train(run)
    for ours, theirs in zip(curve(run), curve(straight), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-4)


def test_split_documents_train_like_whole_ones(make_run):
    """One batch per step would differ; all documents in one step are the same sum, whole or in parts."""
    curves = []
    for long in ("split", "whole"):
        run = make_run(long_documents=long, tokens_per_batch=8, accumulate=400, epochs=2)
        train(run)
        curves.append([record for record in curve(run) if "loss_0" in record])
    assert len(curves[0]) == 2
    for ours, theirs in zip(*curves, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-4)


def test_long_documents_are_refused_by_name(make_run):
    run = make_run(long_documents="refuse", tokens_per_batch=8)
    with pytest.raises(UserError, match=r"longer than train\.tokens_per_batch \(8\), first document \d+ \(.+:\d+"):
        train(run)
    assert not (run.directory / "checkpoints").exists()


class Poisoned(FeatureReader):
    """A store whose first document turns out to hold an infinity."""

    def __getitem__(self, document: int):
        found = super().__getitem__(document)
        if document == 0 and self.root.name == "features":
            found.taps_TKD = found.taps_TKD.clone()
            found.taps_TKD[1, 0, 0] = float("inf")
        return found


def test_a_bad_document_stops_the_run_or_is_left_out(make_run, monkeypatch, capsys):
    monkeypatch.setattr("headwright.data.harvest.FeatureReader", Poisoned)
    with pytest.raises(UserError, match=r"document 0 \(.+\): NaN or infinite feature: taps of row 1"):
        train(make_run())
    run = make_run(bad_documents="skip")
    train(run)
    assert "left out: document 0" in capsys.readouterr().out
    assert json.loads((run.directory / "training.json").read_text())["skipped"] == 1
    assert all(record["loss_0"] > 0 for record in curve(run) if "loss_0" in record)


# torch.compile of small functions


@pytest.fixture
def compiling():
    """Fused functions compiled, for one test."""
    fused.switch("on", torch.device("cpu"))
    yield
    fused.switch("off", torch.device("cpu"))


def test_auto_compiles_on_gpus_only():
    for mode, device, wanted in (
        ("auto", "cpu", False),
        ("auto", "cuda", True),
        ("on", "cpu", True),
        ("off", "cuda", False),
    ):
        fused.switch(mode, torch.device(device))
        assert fused.State.on is wanted
    fused.switch("off", torch.device("cpu"))


def test_where_compiling_fails_the_plain_function_goes_on(compiling, monkeypatch, capsys):
    def broken(function, dynamic):
        def call(*arguments):
            raise RuntimeError("no compiler here")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    double = fused.fused(lambda x: 2 * x)
    assert double(torch.tensor(4.0)) == 8
    assert double(torch.tensor(5.0)) == 10
    assert capsys.readouterr().out.count("torch.compile is off from here on: RuntimeError: no compiler here") == 1
    assert not fused.State.on


@pytest.mark.slow
def test_compiled_functions_are_the_plain_ones(compiling):
    """Forward and backward at several numbers of rows; needs a C++ compiler, and says so where it falls back."""
    for rows in (1, 5, 64):
        for function, shapes, rest in (
            (NormFunction.apply, [(rows, 48), (48,)], (1e-5,)),
            (GatedFunction.apply, [(rows, 40), (rows, 40), (24, 40)], ()),
            (TurnFunction.apply, [(rows, 3, 16), (rows, 1, 8), (rows, 1, 8)], ()),
        ):
            inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
            found = []
            for on in (True, False):
                fused.State.on = on and fused.State.on
                out = function(*inputs, *rest)
                grads = torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)
                found.append([out, *(grad for grad in grads if grad is not None)])
                fused.State.on = True
            for ours, theirs in zip(*found):
                assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


# The step of the benchmarks


@pytest.mark.parametrize("share", [pytest.param("1.0", marks=pytest.mark.slow), "0.3"])
def test_the_timed_step_is_the_plain_one(share):
    line = [sys.executable, str(SIDE), "--check", "--sequence", "48", "--share", share]
    found = json.loads(subprocess.check_output(line, text=True))
    assert found["loss"] < 1e-5
    assert found["gradient"] < 1e-5


@pytest.mark.slow
def test_a_long_document_with_few_answers_fits_in_8_gib():
    """32 768 tokens of which the last 5 % are learned, at the shapes of a 135 M target, optimizer included."""
    line = [sys.executable, str(SIDE), "--sequence", "32768", "--share", "0.05"]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert json.loads(process.stdout.readline())["ready"]
    before = resident(process.pid)
    for order in ("step check\n", "step\n"):
        process.stdin.write(order)
        process.stdin.flush()
        step = json.loads(process.stdout.readline())
    process.kill()
    assert step["loss"] > 0
    assert before + step["peak"] < 8 * 2**30


def resident(pid: int) -> int:
    """Bytes of memory of a process."""
    with open(f"/proc/{pid}/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmRSS:"))
