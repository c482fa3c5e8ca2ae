"""What can be checked before ranks are started: nothing here loads torch."""

from pathlib import Path

from hvdtrain import models
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import read_index
from hvdtrain.errors import UsageError


def check_before_launch(config: TrainConfig) -> None:
    """Refuse in one process what needs no torch to be seen to be wrong.

    Raises:
        UsageError, DataError: as the ranks would.
    """
    if config.min_ranks is not None and not config.restarts:
        raise UsageError("--min-ranks says how to start again: give --restarts too")
    models.check_name(config.model)
    read_index(config.data)
    if config.plan == "single" and (config.ranks or 1) > 1:
        raise UsageError(f"--plan single runs on one rank, not on {config.ranks}: use --plan dp")
    if config.weights is not None and not config.resume and not Path(config.weights).exists():
        raise UsageError(f"--weights {config.weights}: there is no such file")
    if config.resume and not config.replicate and not Path(config.run or "").is_dir():
        raise UsageError(f"{config.run} holds no run to resume")
