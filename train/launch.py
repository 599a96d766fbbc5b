"""What was launched: how many processes, on what, and how they share the training. The one place that reads launchers.

`accelerate launch` and torchrun say what they want by environment variables; Accelerate's own classes read them, and this
file turns them into a `Launch`, or refuses what would silently be something else. Measured with Accelerate 1.15: on CPUs
`--cpu --num_processes 2` starts one process, FSDP becomes two heads that share nothing, and DeepSpeed two processes of
which each believes to be alone.
"""

import itertools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch import Tensor

from headwright.configs import UserError
from headwright.configs.load import read_yaml
from headwright.configs.schema import StrategyName, TrainConfig

Precision = Literal["no", "bf16", "fp16"]
SPARE_MINUTES = 2  # a collective gives up this long after the watch (watch.py), which says more


@dataclass(frozen=True)
class Launch:
    """The processes of a training, seen from one of them.

    options: of the strategy, as Accelerate's plugin holds them. Sums over ranks are what a training exchanges besides
    gradients.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    strategy: StrategyName = "single"
    precision: Precision = "no"
    options: Any = None

    @property
    def main(self) -> bool:
        """Whether it is the process that writes and speaks."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Over all ranks, on the launch's device."""
        if self.world == 1:
            return value.to(self.device)
        value = value.to(self.device, copy=True)
        dist.all_reduce(value)
        return value

    def wait(self) -> None:
        """Until every rank is here."""
        if self.world > 1:
            dist.barrier()


def open_launch(config: TrainConfig) -> Launch:
    """The launch that this process belongs to; joins its process group.

    Raises UserError where it is not what the run, or the launcher's own command line, asks for.
    """
    refuse_lonely()
    several = "RANK" in os.environ
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    on_cpu = flag("ACCELERATE_USE_CPU") or (several and not has_accelerator())
    waiting = {"timeout": timedelta(minutes=config.hang_minutes + SPARE_MINUTES)} if several else {}
    if several:  # torch's own wrappers call what torch deprecates, in every step
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    state = PartialState(cpu=on_cpu, **waiting)
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    strategy, options = launched_strategy(world)
    precision = choose_precision(config, state.device)
    check(config, world, strategy, options)
    return Launch(rank, world, torch.device(state.device.type, state.device.index), strategy, precision, options)


def close_launch() -> None:
    """Leave the process group, at the end of a process: its threads would otherwise be cut off, which aborts the process now
    and then.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def has_accelerator() -> bool:
    """Whether processes have devices that can talk to each other."""
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type not in ("cpu", "mps") and torch.accelerator.is_available()


def launched_strategy(world: int) -> tuple[StrategyName, Any]:
    """How the launcher wants the head to be spread, and its options."""
    if flag("ACCELERATE_USE_DEEPSPEED"):
        plugin = DeepSpeedPlugin()
        return zero_stage(plugin.deepspeed_config), plugin.deepspeed_config
    if flag("ACCELERATE_USE_FSDP"):
        sharding = FullyShardedDataParallelPlugin()
        if sharding.fsdp_version != 2:
            raise UserError("the launch asks for FSDP 1, which is not supported: --fsdp_version 2 (fsdp_version: 2)")
        return "fsdp2", sharding
    return ("ddp" if world > 1 else "single"), None


def flag(name: str) -> bool:
    """A switch of the environment."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes")


def zero_stage(config: dict[str, Any]) -> StrategyName:
    """The stage of a DeepSpeed config."""
    stages: dict[int, StrategyName] = {1: "zero1", 2: "zero2", 3: "zero3"}
    stage = int(config.get("zero_optimization", {}).get("stage", 0))
    if stage not in stages:
        raise UserError(
            f"the launch asks for DeepSpeed with ZeRO stage {stage}: give 1, 2 or 3, or launch without DeepSpeed"
        )
    return stages[stage]


def choose_precision(config: TrainConfig, device: torch.device) -> Precision:
    """The run's precision, or the launcher's where the run leaves it open."""
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    chosen = asked if config.mixed_precision == "auto" else config.mixed_precision
    if asked not in ("no", chosen):
        raise UserError(
            f"the launch asks for {asked} and the run for train.mixed_precision={config.mixed_precision}: let them agree, "
            "or set train.mixed_precision=auto"
        )
    if chosen not in ("no", "bf16", "fp16"):
        raise UserError(f"mixed precision {chosen}: give no, bf16 or fp16")
    if chosen == "fp16" and device.type == "cpu":
        raise UserError(
            "mixed precision fp16 needs a GPU, and this launch has none: use no, or bf16 where the CPU has it"
        )
    return chosen  # type: ignore[return-value]


def check(config: TrainConfig, world: int, strategy: StrategyName, options: Any) -> None:
    """What the run file and the launch must agree on."""
    if config.strategy not in ("auto", strategy):
        raise UserError(
            f"train.strategy is {config.strategy}, but what was launched is {strategy} ({plural(world)}): "
            f"accelerate launch --config_file configs/accelerate-{config.strategy}.yaml …"
        )
    if config.processes not in (None, world):
        raise UserError(f"train.processes is {config.processes}, but {plural(world)} were launched")
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps not in ("1", "auto", str(config.accumulate)):
        raise UserError(
            f"the launch asks for gradient_accumulation_steps {steps} and the run for train.accumulate={config.accumulate}: "
            "leave it to the run"
        )
    if isinstance(options, dict):
        check_deepspeed(config, options, world)


def check_deepspeed(config: TrainConfig, options: dict[str, Any], world: int) -> None:
    """A DeepSpeed config may say how the head is sharded; what is trained is the run's to say."""
    for section in ("optimizer", "scheduler"):
        if section in options:
            raise UserError(
                f"the DeepSpeed config has a section {section!r}: remove it, the run's train section says that"
            )
    said = {
        "gradient_accumulation_steps": config.accumulate,
        "gradient_clipping": config.clip,
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": world * config.accumulate,
    }
    for key, ours in said.items():
        theirs = options.get(key, "auto")
        if theirs not in ("auto", ours):
            raise UserError(f"the DeepSpeed config has {key} {theirs}, the run makes it {ours}: set it to auto")
    for section in ("fp16", "bf16", "bfloat16"):
        if options.get(section, {}).get("enabled") is True and "ACCELERATE_MIXED_PRECISION" not in os.environ:
            raise UserError(f"the DeepSpeed config enables {section}: use train.mixed_precision instead")


def plural(world: int) -> str:
    """Processes, counted."""
    return "one process" if world == 1 else f"{world} processes"


def refuse_lonely() -> None:
    """`accelerate launch` starts one process where it is told to use CPUs, however many it is asked for, and says nothing."""
    if "RANK" in os.environ:
        return
    asked = asked_processes(parents_command())
    if asked > 1:
        raise UserError(
            f"accelerate launch was asked for {asked} processes and started one, as it does with --cpu or use_cpu. For "
            f"several on CPUs: accelerate launch --multi_gpu --num_processes {asked} …"
        )


def parents_command() -> list[str]:
    """The command line of the process that started this one."""
    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []


def asked_processes(command: Sequence[str]) -> int:
    """The number of processes that an `accelerate launch` was asked for."""
    words = [Path(word).name for word in command]
    launches = {("accelerate", "launch")} & set(itertools.pairwise(words))
    if not launches and not {"accelerate-launch", "accelerate.commands.launch"} & set(words):
        return 1
    given = [word.partition("=") for word in command]
    for place, (key, _, value) in enumerate(given):
        value = value or (command[place + 1] if place + 1 < len(command) else "")
        if key in ("--num_processes", "--num-processes") and value.isdecimal():
            return int(value)
        if key in ("--config_file", "--config-file") and Path(value).is_file() and Path(value).suffix != ".json":
            return int(read_yaml(Path(value)).get("num_processes") or 1)
    return 1
