"""A rank that hangs is named. Without this, all others wait for it in a collective, and nobody says why.

Every rank's thread writes a beat into the key-value store that the process group was built on: a counter, and where its
training stands. A rank whose training has not moved for too long looks at the others' beats, says what it sees, and ends
the process, so that the launcher ends the rest and a checkpoint can be resumed.
"""

import json
import os
import socket
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

from headwright.train.launch import Launch

PERIOD = 10.0  # seconds between beats, at most
EXIT = 75  # EX_TEMPFAIL: try again


class Watch:
    """Runs beside the loop, which says where it is by `at`."""

    def __init__(self, launch: Launch, minutes: float):
        self.launch, self.limit = launch, 60 * minutes
        self.period = min(PERIOD, self.limit / 5)
        self.place, self.moved, self.count = "starting", time.monotonic(), 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.work, name="headwright-watch", daemon=True)

    def __enter__(self) -> "Watch":
        if self.launch.world > 1:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()

    def at(self, place: str) -> None:
        """The training has come to `place`."""
        self.place, self.moved = place, time.monotonic()

    def work(self) -> None:
        """Beat until the training is over."""
        self.beat()
        while not self.over.wait(self.period):
            self.beat()
            if time.monotonic() - self.moved > self.limit:
                self.give_up()

    def beat(self) -> None:
        """Tell the others."""
        self.count += 1
        beat = {"count": self.count, "place": self.place, "host": socket.gethostname(), "pid": os.getpid()}
        store().set(key(self.launch.rank), json.dumps(beat))

    def read(self) -> dict[int, dict[str, Any]]:
        """The last beat of every rank; none of one that never had one."""
        beats = {}
        for rank in range(self.launch.world):
            if store().check([key(rank)]):
                beats[rank] = json.loads(store().get(key(rank)))
        return beats

    def give_up(self) -> None:
        """Find out who is to blame, say so once, and end."""
        before = self.read()
        for _ in range(3):
            time.sleep(self.period)
            self.beat()
        now = self.read()
        mute = {rank for rank in range(self.launch.world) if now.get(rank) == before.get(rank)}
        if self.launch.rank == min(set(range(self.launch.world)) - mute):
            print(self.explain(now, mute), file=sys.stderr, flush=True)
        time.sleep(self.period)  # the launcher ends all as soon as one has ended: let the message come first
        os._exit(EXIT)

    def explain(self, beats: dict[int, dict[str, Any]], mute: set[int]) -> str:
        """One line for every rank."""
        lines = [
            f"error: no step was finished for {self.limit / 60:g} minutes (train.hang_minutes); the training ends; the same "
            "command continues from the last checkpoint. The ranks:"
        ]
        for rank in range(self.launch.world):
            beat = beats.get(rank)
            where = f"process {beat['pid']} on {beat['host']}, {beat['place']}" if beat else "never started"
            lines.append(
                f"  rank {rank}: {where}{' – does not answer: stopped, or its machine is' if rank in mute else ''}"
            )
        return "\n".join(lines)


def key(rank: int) -> str:
    """Of a rank's beat."""
    return f"headwright/beat/{rank}"


def store() -> Any:
    """The store of the process group."""
    return dist.distributed_c10d._get_default_store()
