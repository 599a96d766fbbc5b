"""Which strategy a launch asks for. DeepSpeed and FSDP are imported only where they are used."""

from headwright.configs.schema import TrainConfig
from headwright.heads.base import DraftHead
from headwright.train.launch import Launch
from headwright.train.strategy import DataParallel, Strategy


def spread(head: DraftHead, config: TrainConfig, launch: Launch) -> Strategy:
    """The head over the processes of a launch."""
    if launch.strategy == "single":
        return Strategy(head, config, launch)
    if launch.strategy == "ddp":
        return DataParallel(head, config, launch)
    if launch.strategy == "fsdp2":
        from headwright.train.fsdp import FullyShard

        return FullyShard(head, config, launch)
    from headwright.train.zero import Zero

    return Zero(head, config, launch)
