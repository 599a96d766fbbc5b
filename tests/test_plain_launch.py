"""Processes that no launcher started: RANK and the like are enough, as SLURM's srun gives them (scripts/two_nodes.sbatch)."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from test_train import TRAIN, assert_same_bits, curve, last_checkpoint, write_config  # noqa: F401 (for make_run)

from headwright.train.run import train

LONG = {"epochs": 12, "evals": 2, "saves": 40, "decode": {"evals": 0}}


def start_both(config) -> list[subprocess.Popen]:
    """Two processes of one launch, each with the variables that srun gives it."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, str(ROOT / "train" / "eagle3.py"), "--config", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]


def ended(processes: list[subprocess.Popen]) -> list[str]:
    """What they have said, once both have ended well."""
    said = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    return said


@pytest.mark.slow
def test_usr1_stops_all_ranks_with_a_checkpoint_and_the_job_goes_on(make_run):
    """The signal that SLURM sends before the time is over; the queued job ends in the bits of one that was not stopped."""
    run, straight = make_run(**LONG), make_run(**LONG, accumulate=2)
    config = write_config(run)
    processes = start_both(config)
    limit = time.monotonic() + 150
    while not list((run.directory / "checkpoints").glob("step-*")):
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < limit
        time.sleep(0.01)
    for process in processes:
        process.send_signal(signal.SIGUSR1)
    first, _ = ended(processes)
    assert "a checkpoint is written. To continue:" in first
    assert "DistributedDataParallel: a copy of the head on each of 2 processes" in first
    assert not (run.directory / "training.json").exists()
    ended(start_both(config))
    train(straight)
    assert (run.directory / "training.json").exists()
    assert last_checkpoint(run).name == last_checkpoint(straight).name
    assert_same_bits(run, straight)
    assert curve(run) == curve(straight)
