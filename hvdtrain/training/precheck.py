"""Checks before the ranks are started; this module does not load torch."""

from importlib.util import find_spec
from pathlib import Path

from hvdtrain import models
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index, read_index
from hvdtrain.errors import UsageError
from hvdtrain.options.planrequest import check_one_rank
from hvdtrain.training.metrics import holds_run, no_run
from hvdtrain.world import World

NO_TENSORFLOW = "TensorFlow is not installed: pip install tensorflow-cpu, or leave --framework out"


def check_before_launch(config: TrainConfig) -> None:
    """Find mistakes of the user in one process, as far as it needs no torch.

    Raises:
        UsageError, DataError: as the ranks would.
    """
    if config.min_ranks is not None and not config.restarts:
        raise UsageError("--min-ranks has no effect without --restarts: give --restarts too")
    models.check_name(config.model)
    if config.framework == "tensorflow" and find_spec("tensorflow") is None:
        raise UsageError(NO_TENSORFLOW)
    read_index(config.data)
    check_one_rank(config.plan, config.ranks or 1)
    # With --replicate the ranks search for copies of a run whose folder is lost.
    may_resume = config.resume and (config.replicate or holds_run(Path(config.run or "")))
    if config.weights is not None and not may_resume and not Path(config.weights).exists():
        raise UsageError(f"--weights {config.weights}: there is no such file")
    if config.resume is True and not may_resume:
        raise no_run(Path(config.run or ""))


def check_started(config: TrainConfig, world: World) -> None:
    """Raise UsageError unless the launcher started the requested number of ranks."""
    if config.ranks is not None and config.ranks != world.size:
        raise UsageError(
            f"--ranks {config.ranks}, but the launcher started {world.size}: leave --ranks out"
        )


def check_images(config: TrainConfig, index: Index) -> None:
    """Raise UsageError unless images are square, have 3 channels, and have the requested size."""
    height, width, channels = index.image_shape
    if channels != 3 or height != width:
        raise UsageError(
            f"{config.data} holds images of {height}x{width}x{channels}: "
            "models need square images of 3 channels"
        )
    if config.image_size not in (None, height):
        raise UsageError(
            f"--image-size {config.image_size}, but the images of {config.data} are {height}"
        )
