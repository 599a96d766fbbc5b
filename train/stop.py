"""Signals that ask a training to end: Ctrl-C, SIGTERM, and SIGUSR1, which SLURM sends where `--signal=USR1@120` asks for it."""

import os
import signal
import sys
import time
from types import FrameType

SIGNALS = [signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGUSR1") if name in signal.Signals.__members__]
SAME = 2.0  # seconds: launchers hand on what the terminal has sent already


class Stop:
    """Notes that the training is to end after the step at hand; a second signal ends the process at once."""

    def __init__(self) -> None:
        self.wanted = False
        self.since = 0.0
        self.before = {number: signal.getsignal(number) for number in SIGNALS}

    def __enter__(self) -> "Stop":
        for number in SIGNALS:
            signal.signal(number, self.ask)
        return self

    def __exit__(self, *_: object) -> None:
        """Give back the handlers that were there before, however the loop ends."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if not self.wanted:
            self.wanted, self.since = True, time.monotonic()
            os.write(2, b"\nstopping after this step, with a checkpoint; a second signal stops at once\n")
        elif time.monotonic() - self.since > SAME:
            os.write(2, b"\nstopped at once; the last checkpoint is whole\n")
            sys.stdout.flush()
            os._exit(128 + number)
