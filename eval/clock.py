"""Where the time of decoding goes: phases that cut the wall time into pieces, one after the other."""

import os
import platform
import time

import torch

PHASES = ("prefill", "draft", "verify", "select", "commit", "other")


class Clock:
    """A stopwatch with laps. Each lap charges all that has passed since the lap before to one phase, so that nothing
    counts twice and nothing is left out.

    On a GPU laps are events in its stream, read when the clock stops: a phase pays for its own kernels, and nobody waits for
    them meanwhile.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.names: list[str] = []
        self.marks = [self.mark()]
        self.begun = time.perf_counter()

    def mark(self) -> float | torch.cuda.Event:
        """Now."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, phase: str) -> None:
        """The time since the last lap belongs to `phase`."""
        self.names.append(phase)
        self.marks.append(self.mark())

    def stop(self) -> tuple[dict[str, float], float]:
        """Seconds of each phase, and of all by an independent watch."""
        self.lap("other")
        if self.cuda:
            torch.cuda.synchronize()
        wall = time.perf_counter() - self.begun
        phases = dict.fromkeys(PHASES, 0.0)
        for name, before, after in zip(self.names, self.marks, self.marks[1:]):
            phases[name] += between(before, after)
        return phases, wall


def between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    """Seconds between two marks."""
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    assert isinstance(before, torch.cuda.Event)
    return before.elapsed_time(after) / 1000  # type: ignore[arg-type]


def device_name(device: torch.device) -> str:
    """What the numbers were measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = open("/proc/cpuinfo", encoding="utf-8").read().splitlines()  # noqa: SIM115
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"
