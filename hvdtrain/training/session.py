"""What a run asks of the framework that computes it: the loop knows nothing else of it."""

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

from hvdtrain.activity import Activity
from hvdtrain.config import TrainConfig
from hvdtrain.data.order import Rows
from hvdtrain.data.shards import Index, Samples
from hvdtrain.parallel.plan import Plan
from hvdtrain.training.feed import Feed
from hvdtrain.training.normalise import Normalisation
from hvdtrain.world import World

if TYPE_CHECKING:
    from hvdtrain.planner.tables import Question

PROCESSOR_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """What this rank knows of a step that it has made.

    Attributes:
        read_loss: gives the sum of the losses of `samples`; a GPU is waited for.
        norm: of all gradients, where it was asked for.
        is_bad: an update was left out, because the gradients are not what they may be.
        exposed_seconds: waited for reductions and transfers.
        communication_seconds: of these, with what computing hid.
        bubble_seconds: waited for the work of other stages.
        compute_seconds: of forwards and backwards.
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
        """For other ranks."""
        return self.exposed_seconds + self.bubble_seconds


class Taken(NamedTuple):
    """A step that was taken a moment ago: what it takes to run it again."""

    step: int
    position: int
    batch_size: int
    feed: Feed
    norm: float  # of its gradients, where it was asked for


@dataclass(frozen=True)
class Chosen:
    """A plan and how it came about.

    Attributes:
        remarks: in words. predicted_seconds: of a step.
        question: what it was chosen for. All of them on rank 0, where there was a choice.
    """

    plan: Plan
    remarks: tuple[str, ...] = ()
    predicted_seconds: float | None = None
    question: "Question | None" = None


@dataclass(frozen=True)
class StepTimes:
    """What a step takes on this rank, in seconds.

    Attributes:
        components: forward and backward, by name; empty where they are not watched.
        transfer: waiting for what other ranks have sent already.
    """

    components: Mapping[str, float] = field(default_factory=dict)
    transfer: float = 0.0


@dataclass(kw_only=True)
class Session(ABC):
    """One rank's part of a run, ready to train.

    Attributes:
        plan: which ranks hold which components.
        shapes: of all parameters and buffers of the model, by name.
        parameters: how many there are.
        normalisation: what is taken away from each channel, and what it is divided by.
        train_rows, held_rows: of the train split, to train on and held out.
        chosen: the plan that training began with, if it was chosen here.
        verified: what --verify found, in words.
        build_seconds: what building this rank's part of the plan took.
        libraries: distributions whose versions decide what is computed.
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
        """Where the model is: "cpu" or "cuda"."""

    @property
    @abstractmethod
    def accelerator(self) -> str | None:
        """The name of the GPU, None for a CPU."""

    @property
    def loss_delay(self) -> int:
        """As in `Control`."""
        return 0

    @property
    @abstractmethod
    def evaluation_images(self) -> int:
        """Of an evaluation's global batch."""

    @property
    def devices(self) -> int:
        """That this rank computes on."""
        return 1

    @abstractmethod
    def own_rows(self, batch: Rows, is_training: bool) -> tuple[Rows, Rows]:
        """The samples of a global batch whose images, and those whose labels this rank needs."""

    @abstractmethod
    def train(self, feed: Feed, position: int, batch_size: int, rate: float) -> Result:
        """One step of all ranks, on a global batch that begins at `position`. Collective."""

    @abstractmethod
    def evaluate(self, batches: Iterable[tuple[Feed, int]]) -> tuple[float, float]:
        """Sum of losses, and number of right answers, of this rank's samples. Collective.

        Each batch comes with the size of the global one.
        """

    @abstractmethod
    def diagnose(self, taken: Taken) -> str:
        """Run a step again without updating anything; what is wrong with it. Collective."""

    def read_times(self) -> StepTimes:
        """What the parts of a step have taken since this was asked for before, on average."""
        return StepTimes()

    def check_plan(self, plan: Plan) -> None:  # noqa: B027
        """Try out every batch size of the run under a plan.

        Raises:
            UsageError, ScheduleError: if one cannot be trained.
        """

    def change_plan(self, plan: Plan) -> None:
        """Go on under another plan with the same state. Collective; between two steps."""
        raise NotImplementedError("this framework has one plan a run")

    def align_clocks(self) -> None:  # noqa: B027
        """Compare the clocks of the hosts, where that is of use. Collective."""

    def write_trace(self) -> None:  # noqa: B027
        """Write what --trace asks for, if it is not yet written. Collective.

        Raises:
            UsageError: if the file cannot be written.
        """

    @abstractmethod
    def agree(self) -> None:
        """Give ranks that hold the same components the same weights. Collective."""

    @abstractmethod
    def start_from(self, path: Path) -> str:
        """Put the weights of a file into the model; what was done, in words.

        Raises:
            UsageError, DataError: if the file is not there, or not of this model.
        """

    @abstractmethod
    def digests(self) -> dict[str, str]:
        """SHA-256 of each parameter and buffer that this rank holds, by name."""

    @abstractmethod
    def fingerprints(self) -> dict[int, int]:
        """A checksum of each stage that this rank holds, by its number."""

    @abstractmethod
    def share(self) -> dict[str, np.ndarray]:
        """A copy of what this rank writes of a checkpoint, by the names that it has there.

        Its memory is used again by the next call.
        """

    @abstractmethod
    def expected(self, was_updated: bool) -> dict[str, Shape]:
        """What this rank needs of a checkpoint, made before or after the first update."""

    @abstractmethod
    def put(self, found: Mapping[str, np.ndarray]) -> None:
        """Go on with what was read of a checkpoint."""

    @abstractmethod
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The ranks that compute each component, or each layer that has weights."""

    @abstractmethod
    def spoil(self, component: str, is_due: Callable[[], bool]) -> None:
        """Let a component emit what is no number, in training, when that is due.

        Nothing happens while this rank does not hold it.
        """

    @abstractmethod
    def ask_for_memory(self, count: int) -> None:
        """Allocate so many bytes where the model is."""

    def memory_bytes(self) -> float:
        """Allocated on the GPU, or the resident set of the process."""
        return float(psutil.Process().memory_info().rss)

    def peak_memory_bytes(self) -> int:
        """The most of it so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def celsius(self) -> float:
        """The temperature of the GPU, or of the processor's hottest sensor; nan if not known."""
        with suppress(Exception):  # not on every system
            found = psutil.sensors_temperatures()
            for name in PROCESSOR_SENSORS:
                if found.get(name):
                    return max(sensor.current for sensor in found[name])
        return math.nan

    def close(self) -> None:
        """Let the data set's memory and files go."""
        self.activity.close()
        for samples in self.splits.values():
            samples.close()
