"""The interface between the training loop and a framework: PyTorch or Keras."""

import math
import resource
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index
from hvdtrain.data.order import Rows
from hvdtrain.data.shards import Samples
from hvdtrain.engine.feed import Feed, Normalisation
from hvdtrain.host.activity import Activity
from hvdtrain.plan.plan import Plan
from hvdtrain.world import World

if TYPE_CHECKING:
    from hvdtrain.parallel.exchange import Exchange
    from hvdtrain.planner.cost import Question

Shape = tuple[int, ...]
_Seconds = TypeVar("_Seconds", float, NDArray[np.float64])


class Spent(NamedTuple):
    """Seconds of this rank in one step.

    Attributes:
        exposed: waiting for reductions and transfers.
        communication: reductions and transfers, including those hidden by computing.
        bubble: waiting for the work of other stages.
        compute: forwards and backwards.
        work: of the device, without waiting for other ranks; None: the host's time says that.
    """

    exposed: float = 0.0
    communication: float = 0.0
    bubble: float = 0.0
    compute: float = 0.0
    work: float | None = None

    @property
    def waited(self) -> float:
        """Seconds of waiting for other ranks."""
        return self.exposed + self.bubble


class StepInput(NamedTuple):
    """Everything that is needed to run a step.

    Attributes:
        step: its number in the run, from 1.
        position: samples of the run before it.
        batch_size: samples over all ranks.
        feed: this rank's samples.
        rate: learning rate.
        loss_scale: factor of its loss.
    """

    step: int
    position: int
    batch_size: int
    feed: Feed
    rate: float
    loss_scale: float


class StepOutcome(NamedTuple):
    """A step of a rank whose device is done with it.

    Attributes:
        loss_sum: of its samples.
        is_bad: whether an update was skipped because of bad gradients.
        spent: where the time went.
    """

    loss_sum: float
    is_bad: bool
    spent: Spent = Spent()


@dataclass(frozen=True)
class PendingStep:
    """A step that the host has started: its device may still compute.

    Attributes:
        samples: of this rank.
        outcome: waits for the device, and returns what came out.
        norm: of all gradients, if it was requested.
        is_bad: whether the host knows already that an update was skipped.
    """

    samples: int
    outcome: Callable[[], StepOutcome]
    norm: float = math.nan
    is_bad: bool = False


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the parts of a step on this rank.

    Attributes:
        components: forward and backward, by name; empty if they are not measured.
        transfer: waiting for data that other ranks have sent already.
    """

    components: Mapping[str, float] = field(default_factory=dict)
    transfer: float = 0.0


def _resident_bytes() -> float:
    return float(psutil.Process().memory_info().rss)


def _peak_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class Device:
    """The device that a rank computes on; by default the CPU.

    Attributes:
        kind: "cpu" or "cuda".
        accelerator: name of the GPU, None for a CPU.
        count: number of devices of this rank.
        notice: printed first by a run whose device is modelled.
        dilation: real seconds per second on the device's clock, above 1 if it is modelled.
        loss_delay: steps after which the loss is read, see `Control`.
        memory_bytes: returns the bytes allocated on the GPU, or the resident set of the process.
        peak_memory_bytes: returns the largest `memory_bytes` so far.
        report: returns what a summary has to say of a modelled device, by key. Collective. Its
            arguments are mean seconds per step of the run, the steps since the last start, and
            their seconds without this rank's waits.
    """

    kind: str = "cpu"
    accelerator: str | None = None
    count: int = 1
    notice: str = ""
    dilation: float = 1.0
    loss_delay: int = 0
    memory_bytes: Callable[[], float] = _resident_bytes
    peak_memory_bytes: Callable[[], int] = _peak_resident_bytes
    report: Callable[[float, int, float], dict[str, Any]] = lambda *_: {}

    def seconds(self, real: _Seconds) -> _Seconds:
        """Return real seconds on the clock of the device."""
        return real / self.dilation

    @property
    def is_gpu(self) -> bool:
        """Return whether it is a GPU."""
        return self.kind == "cuda"


@dataclass(kw_only=True)
class State(ABC):
    """The weights, statistics and optimizer state that this rank holds.

    Attributes:
        plan: which ranks hold which components.
        shapes: of all parameters and buffers of the model, by name.
    """

    plan: Plan
    shapes: dict[str, Shape]

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

        Collective: replicas with local steps contribute to the average that a checkpoint holds.
        The next call uses the same memory again.
        """

    @abstractmethod
    def expected(self, was_updated: bool, saved: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the shapes of the tensors that this rank reads from a checkpoint, by name.

        Args:
            was_updated: whether the checkpoint was made after the first update.
            saved: shapes of all tensors of the checkpoint, by name.
        """

    @abstractmethod
    def put(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load the arrays of a checkpoint into the model and the optimizer."""


class Faults(ABC):
    """The faults of `--inject` that need the framework."""

    @abstractmethod
    def spoil(self, component: str, is_due: Callable[[], bool]) -> None:
        """Make a component emit NaN in training when `is_due` returns True.

        Nothing happens while this rank does not hold the component.
        """

    @abstractmethod
    def allocate_memory(self, count: int) -> None:
        """Allocate `count` bytes on the device of the model."""


@dataclass(kw_only=True)
class Migration(ABC):
    """The change of plans during a run, and the measurements on which it rests.

    Attributes:
        question: the model, batch and machine that the plan was chosen for, on rank 0 only.
        building_seconds: for building this rank's part of the plan.
    """

    question: "Question | None"
    building_seconds: float

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Try out every batch size of the run under a plan.

        Raises:
            UsageError, ScheduleError: if one cannot be trained.
        """

    @abstractmethod
    def change(self, plan: Plan) -> None:
        """Continue under another plan with the same state. Collective; between two steps."""

    @abstractmethod
    def read_times(self) -> StepTimes:
        """Return the mean times of the parts of a step since the last call."""

    @abstractmethod
    def exchange(self) -> "Exchange":
        """Return transfers between all ranks, to measure their links. Collective."""


class Timeline(ABC):
    """The events of all ranks on one clock."""

    @abstractmethod
    def align(self) -> None:
        """Compare the clocks of the hosts, if there are several ranks. Collective."""

    @abstractmethod
    def write(self) -> None:
        """Write the file of --trace, if it is requested and not yet written. Collective.

        Raises:
            UsageError: if the file cannot be written.
        """


@dataclass(kw_only=True)
class Session(ABC):
    """One rank's part of a run, ready to train.

    Attributes:
        parameters: number of the model's parameters.
        normalisation: mean and deviation per channel.
        train_rows, held_rows: of the train split, to train on and held out.
        is_resident: whether this rank's device holds the training images.
        remarks: notes on the plan and the result of --verify, in words.
        predicted_seconds: per step, on rank 0 only, if the planner chose anything.
        predicted_bytes: that a rank sends per step to agree, as `predicted_seconds`.
        migration, timeline: only of a framework that has them.
        libraries: distributions whose versions affect the results.
    """

    config: TrainConfig
    world: World
    activity: Activity
    device: Device
    state: State
    faults: Faults
    parameters: int
    index: Index
    normalisation: Normalisation
    train_rows: Rows
    held_rows: Rows
    splits: Mapping[str, Samples]
    is_resident: bool = False
    remarks: tuple[str, ...] = ()
    predicted_seconds: float | None = None
    predicted_bytes: float | None = None
    migration: Migration | None = None
    timeline: Timeline | None = None
    libraries: ClassVar[tuple[str, ...]]

    @property
    def plan(self) -> Plan:
        """The plan of this run: which ranks hold which components."""
        return self.state.plan

    @property
    def replicas_agree(self) -> bool:
        """Return whether ranks that hold the same components hold the same weights now."""
        return True

    def meet(self) -> None:
        """Let replicas with local steps agree, before an evaluation. Collective."""
        return

    def counted(self) -> Mapping[str, float]:
        """Return what this rank has counted since the start, by name, such as bytes sent."""
        return {}

    def summed_by(self) -> str | None:
        """Return the library that sums gradients, None if nothing is summed. Collective."""
        return None

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of what evaluations measure besides the loss."""
        return ("accuracy",)

    @property
    @abstractmethod
    def evaluation_images(self) -> int:
        """Images of a global batch in evaluation."""

    @abstractmethod
    def local_rows(self, batch: Rows, is_training: bool) -> tuple[Rows, Rows]:
        """Return the rows of a global batch whose images, and whose labels, this rank needs."""

    @abstractmethod
    def train(self, step: StepInput) -> PendingStep:
        """Start one step of all ranks. Collective.

        In PyTorch (`hvdtrain.backends.pytorch.session`): `plan.schedule.program_of` gives this
        rank's actions, `parallel.runtime.Runtime` runs them, with `parallel.runtime.update` in
        each STEP, between calls of `sync.local.Meetings`. In TensorFlow: `KerasSession`.
        """

    @abstractmethod
    def evaluate(self, batches: Iterable[tuple[Feed, int]]) -> list[float]:
        """Return the sums of the loss and of each measure on this rank. Collective.

        Args:
            batches: this rank's samples, with the size of their global batch.
        """

    @abstractmethod
    def diagnose(self, step: StepInput) -> str:
        """Run a step again without updates; return what is wrong with it. Collective."""

    def close(self) -> None:
        """Free the memory and close the files of the data set."""
        self.activity.close()
        for samples in self.splits.values():
            samples.close()
