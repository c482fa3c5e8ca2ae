"""What becomes of a rank that stands still."""

import socket

from hvdtrain import failure, world
from hvdtrain.config import TrainConfig
from hvdtrain.errors import RankError

# Libraries load, and checkpoints are written and read, from disks that others use too.
START_FACTOR, SAVE_FACTOR = 5.0, 5.0
OTHERS_SAVE_FACTOR = 6.0  # for whoever waits for it: the rank that is slow is to be named


def patience(config: TrainConfig) -> float:
    """Seconds that an action may take: the first of each kind may compile its components."""
    return config.stall_timeout * (10 if config.compile else 1)


def start_patience(config: TrainConfig) -> float:
    """Seconds that anything may take before the first step; --stage may copy for hours."""
    return patience(config) * START_FACTOR * (10 if config.stage else 1)


def stalled(line: str, suspects: str = "", listener: failure.Listener | None = None) -> None:
    """End the job from the watchdog's thread.

    Args:
        suspects: the ranks that this one may be waiting for, where that is known.
    """
    rank, host = world.current().rank, socket.gethostname()
    advice = suspects or "look at the ranks or the disk it waits for, or allow more"
    failure.fail(
        RankError(
            f"rank {rank} on {host} has been stuck for longer than --stall-timeout allows, in "
            f"{line}: {advice}"
        ),
        listener,
    )
