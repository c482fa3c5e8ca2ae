"""The interface between the training loop and a framework: PyTorch or Keras."""

import math
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import psutil

from hvdtrain.config import TrainConfig
from hvdtrain.data.order import Rows
from hvdtrain.data.shards import Index, Samples
from hvdtrain.host.activity import Activity
from hvdtrain.plan.plan import Plan
from hvdtrain.training.feed import Feed, Normalisation
from hvdtrain.world import World

if TYPE_CHECKING:
    from hvdtrain.planner.cost import Question

PROCESSOR_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """This rank's results of one step.

    Attributes:
        read_loss: returns the sum of the losses of `samples`; waits for a GPU.
        norm: of all gradients, if it was requested.
        is_bad: whether the update was skipped, because gradients are not finite or too large.
        exposed_seconds: waiting for reductions and transfers.
        communication_seconds: reductions and transfers, including those hidden by computing.
        bubble_seconds: waiting for the work of other stages.
        compute_seconds: forwards and backwards.
    """

    read_loss: Callable[[], float]
    samples: int
    norm: float
    is_bad: bool
    exposed_seconds: float
    communication_seconds: float
    bubble_seconds: float
    compute_seconds: float

    @property
    def waited_seconds(self) -> float:
        """Seconds of waiting for other ranks."""
        return self.exposed_seconds + self.bubble_seconds


class StepRecord(NamedTuple):
    """A record of a recent step: everything that is needed to run it again.

    Attributes:
        norm: of its gradients, if it was requested.
    """

    step: int
    position: int
    batch_size: int
    feed: Feed
    norm: float


@dataclass(frozen=True)
class Chosen:
    """A plan that was chosen automatically, and why.

    The other attributes are set on rank 0 only, if there was a choice.

    Attributes:
        remarks: notes on the choice, in words.
        predicted_seconds: per step.
        question: the model, batch and machine that the plan was chosen for.
    """

    plan: Plan
    remarks: tuple[str, ...] = ()
    predicted_seconds: float | None = None
    question: "Question | None" = None


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the parts of a step on this rank.

    Attributes:
        components: forward and backward, by name; empty if they are not measured.
        transfer: waiting for data that other ranks have sent already.
    """

    components: Mapping[str, float] = field(default_factory=dict)
    transfer: float = 0.0


@dataclass(kw_only=True)
class Session(ABC):
    """One rank's part of a run, ready to train.

    Attributes:
        plan: which ranks hold which components.
        shapes: of all parameters and buffers of the model, by name.
        parameters: their number.
        normalisation: mean and deviation per channel.
        train_rows, held_rows: of the train split, to train on and held out.
        chosen: the plan that training started with, if it was chosen automatically.
        verified: the result of --verify, in words.
        build_seconds: for building this rank's part of the plan.
        libraries: distributions whose versions affect the results.
    """

    config: TrainConfig
    world: World
    index: Index
    plan: Plan
    shapes: dict[str, Shape]
    parameters: int
    activity: Activity
    normalisation: Normalisation
    train_rows: Rows
    held_rows: Rows
    splits: Mapping[str, Samples]
    chosen: Chosen | None = None
    verified: str = ""
    build_seconds: float = 0.0
    libraries: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def device(self) -> str:
        """The device of the model: "cpu" or "cuda"."""

    @property
    @abstractmethod
    def accelerator(self) -> str | None:
        """The name of the GPU, None for a CPU."""

    @property
    def loss_delay(self) -> int:
        """Steps after which the loss is read, see `Control`."""
        return 0

    @property
    @abstractmethod
    def evaluation_images(self) -> int:
        """Images of a global batch in evaluation."""

    @property
    def devices(self) -> int:
        """Number of devices that this rank computes on."""
        return 1

    @abstractmethod
    def local_rows(self, batch: Rows, is_training: bool) -> tuple[Rows, Rows]:
        """Return the rows of a global batch whose images, and whose labels, this rank needs."""

    @abstractmethod
    def train(self, feed: Feed, position: int, batch_size: int, rate: float) -> Result:
        """Do one step of all ranks, on the global batch that starts at `position`. Collective."""

    @abstractmethod
    def evaluate(self, batches: Iterable[tuple[Feed, int]]) -> tuple[float, float]:
        """Return the sum of losses and the number of correct answers on this rank. Collective.

        Args:
            batches: this rank's samples, with the size of their global batch.
        """

    @abstractmethod
    def diagnose(self, record: StepRecord) -> str:
        """Run a step again without updates; return what is wrong with it. Collective."""

    def read_times(self) -> StepTimes:
        """Return the mean times of the parts of a step since the last call."""
        return StepTimes()

    def check_plan(self, plan: Plan) -> None:  # noqa: B027
        """Try out every batch size of the run under a plan.

        Raises:
            UsageError, ScheduleError: if one cannot be trained.
        """

    def change_plan(self, plan: Plan) -> None:
        """Continue under another plan with the same state. Collective; between two steps."""
        raise NotImplementedError("this framework has one plan per run")

    def align_clocks(self) -> None:  # noqa: B027
        """Compare the clocks of the hosts, if anything needs that. Collective."""

    def write_trace(self) -> None:  # noqa: B027
        """Write the file of --trace, if it is not yet written. Collective.

        Raises:
            UsageError: if the file cannot be written.
        """

    @abstractmethod
    def agree(self) -> None:
        """Give ranks that hold the same components the same weights. Collective."""

    @abstractmethod
    def start_from(self, path: Path) -> str:
        """Load the weights of a file into the model; return what was done, in words.

        Raises:
            UsageError, DataError: if the file does not exist, or is not of this model.
        """

    @abstractmethod
    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each parameter and buffer that this rank holds, by name."""

    @abstractmethod
    def fingerprints(self) -> dict[int, int]:
        """Return a checksum of each stage that this rank holds, by its number."""

    @abstractmethod
    def share(self) -> dict[str, np.ndarray]:
        """Return copies of the arrays that this rank writes to a checkpoint, by their names there.

        The next call uses the same memory again.
        """

    @abstractmethod
    def expected(self, was_updated: bool) -> dict[str, Shape]:
        """Return the shapes of the tensors that this rank reads from a checkpoint, by name.

        Args:
            was_updated: whether the checkpoint was made after the first update.
        """

    @abstractmethod
    def put(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load the arrays of a checkpoint into the model and the optimizer."""

    @abstractmethod
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks that compute each component, or each layer that has weights."""

    @abstractmethod
    def spoil(self, component: str, is_due: Callable[[], bool]) -> None:
        """Make a component emit NaN in training when `is_due` returns True.

        Nothing happens while this rank does not hold the component.
        """

    @abstractmethod
    def allocate_memory(self, count: int) -> None:
        """Allocate `count` bytes on the device of the model."""

    def memory_bytes(self) -> float:
        """Return the bytes allocated on the GPU, or the resident set of the process."""
        return float(psutil.Process().memory_info().rss)

    def peak_memory_bytes(self) -> int:
        """Return the largest `memory_bytes` so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def celsius(self) -> float:
        """Return the temperature of the GPU, or of the hottest CPU sensor; NaN if unknown."""
        with suppress(Exception):  # not on every system
            sensors = psutil.sensors_temperatures()
            for name in PROCESSOR_SENSORS:
                if sensors.get(name):
                    return max(sensor.current for sensor in sensors[name])
        return math.nan

    def close(self) -> None:
        """Free the memory and close the files of the data set."""
        self.activity.close()
        for samples in self.splits.values():
            samples.close()
