"""From a configuration to everything that a rank needs to run its first step."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from hvdtrain import models, world
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.shards import Index, Samples, open_split, read_index
from hvdtrain.errors import UsageError
from hvdtrain.models.component import Component, boundaries, build_component, parameter_count
from hvdtrain.parallel import plan as plans
from hvdtrain.parallel.plan import Cut, Plan, Stage
from hvdtrain.parallel.reduce import Gradients, SerialGradients, horovod_gradients
from hvdtrain.parallel.runtime import DTYPES, Images, Runtime, StageModel
from hvdtrain.training.optimizer import make_optimizer
from hvdtrain.world import World

# For each split: shared among the ranks of a node, but twice the window of the shuffle at least.
CACHE_BYTES_A_NODE = 4 * 2**30
SMALLEST_CACHE_BYTES = 512 * 2**20


@dataclass
class Session:
    """One rank's part of a run, ready to train."""

    config: TrainConfig
    world: World
    index: Index
    plan: Plan
    device: torch.device
    parameters: int
    model: StageModel
    optimizer: torch.optim.Optimizer
    runtime: Runtime
    train_rows: np.ndarray
    held_rows: np.ndarray
    splits: dict[str, Samples]

    @property
    def stage(self) -> Stage:
        """The stage that this rank holds."""
        return self.plan.stages[0]

    @cached_property
    def replica(self) -> int:
        """This rank's place among the replicas of its stage."""
        return self.stage.ranks.index(self.world.rank)

    def cut(self, batch_size: int) -> Cut:
        """This replica's part of a global batch of this size."""
        return _cut(self.stage, self.replica, batch_size, self.plan.microbatches)

    def close(self) -> None:
        """Let the data set's memory and files go."""
        for samples in self.splits.values():
            samples.close()


def open_session(config: TrainConfig, here: World) -> Session:
    """Check everything that can be checked before the first step, then build it.

    Raises:
        UsageError, DataError: for whatever a user can get wrong.
    """
    if config.ranks is not None and config.ranks != here.size:
        raise UsageError(
            f"--ranks {config.ranks}, but the launcher started {here.size}: leave --ranks out"
        )
    index = read_index(config.data)
    components = model_components(config, index)
    plan = plans.parse(
        config.plan, [part.name for part in components], here.size, config.microbatches
    )
    train_rows, held_rows = order.holdout(
        index.splits["train"].count, config.holdout, index.hash, config.seed
    )
    device = choose_device(config, here)
    torch.set_num_threads(here.threads)
    model = build_model(components, config, device)
    if not model.parameters():
        raise UsageError(f"model {config.model} has no parameters that are trained")
    splits = _open_splits(index, here)
    gradients = _gradients(model, here, device)
    optimizer = make_optimizer(config, model.parameters())
    images = Images(index, config.normalise, device, config.precision)
    return Session(
        config=config,
        world=here,
        index=index,
        plan=plan,
        device=device,
        parameters=parameter_count(components),
        model=model,
        optimizer=optimizer,
        runtime=Runtime(model, images, gradients, optimizer, config.precision),
        train_rows=train_rows,
        held_rows=held_rows,
        splits=splits,
    )


def model_components(config: TrainConfig, index: Index) -> list[Component]:
    """The components of the run's model, checked against the data set.

    Raises:
        UsageError: if images or classes of the data set are not those of the model.
    """
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
    components = models.components(config.model, index.classes, height, config.patch_size)
    boundaries(components, height, classes=index.classes, dtype=DTYPES[config.precision])
    return components


def choose_device(config: TrainConfig, here: World) -> torch.device:
    """The CPU, or the GPU of this rank: local rank modulo visible devices.

    Raises:
        UsageError: if cuda is asked for and there is none.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UsageError("--device cuda, but PyTorch sees no GPU here: use --device cpu")
    if config.device == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", here.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def build_model(
    components: list[Component], config: TrainConfig, device: torch.device
) -> StageModel:
    """Build the components with their weights in channels_last order."""
    dtype = DTYPES[config.precision]
    built = {part.name: build_component(part, config.seed, device, dtype) for part in components}
    for module in built.values():
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return StageModel(built)


def _open_splits(index: Index, here: World) -> dict[str, Samples]:
    """Both splits, in memory already where they fit: reading them is not a part of any step."""
    memory = max(SMALLEST_CACHE_BYTES, CACHE_BYTES_A_NODE // here.local_size)
    splits = {name: open_split(index, name, memory) for name in index.splits}
    for samples in splits.values():
        samples.load()
    return splits


def _gradients(model: StageModel, here: World, device: torch.device) -> Gradients:
    parameters = model.parameters()
    if here.size == 1:
        return SerialGradients(parameters)
    size = sum(value.numel() * value.element_size() for value in parameters.values())
    return horovod_gradients(parameters, model.statistics(), world.start_horovod(size))


@lru_cache(maxsize=64)
def _cut(stage: Stage, replica: int, batch_size: int, microbatches: int) -> Cut:
    return plans.cut(stage, replica, batch_size, microbatches)
