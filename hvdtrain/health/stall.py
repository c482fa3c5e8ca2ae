"""The limits of --stall-timeout, and the end of a job in which a rank exceeds one."""

from hvdtrain import world
from hvdtrain.config import TrainConfig
from hvdtrain.errors import RankError
from hvdtrain.health import failure
from hvdtrain.host.activity import stuck

# Loading libraries, and reading and writing checkpoints, takes longer on disks that are shared.
START_FACTOR, SAVE_FACTOR = 5.0, 5.0
OTHERS_SAVE_FACTOR = 6.0  # for ranks that wait: the slow rank reaches its limit first


def patience(config: TrainConfig) -> float:
    """Return the seconds that an action may take, including the compilation of components."""
    return config.stall_timeout * (10 if config.compile else 1)


def start_patience(config: TrainConfig) -> float:
    """Return the seconds that an action before the first step may take.

    `--stage` may copy for hours.
    """
    return patience(config) * START_FACTOR * (10 if config.stage else 1)


def stalled(line: str, suspects: str = "", listener: failure.Listener | None = None) -> None:
    """End the job from the watchdog's thread.

    Args:
        suspects: the ranks that this one may be waiting for, if they are known.
    """
    advice = suspects or "check the ranks or the disk it waits for, or raise --stall-timeout"
    failure.fail(RankError(f"{stuck(world.current().rank, line)}: {advice}"), listener)
