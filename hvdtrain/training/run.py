"""A run under way: what it consists of, how it is opened, resumed and saved."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hvdtrain import world
from hvdtrain.activity import Activity
from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError, UsageError
from hvdtrain.models import weights
from hvdtrain.parallel.actions import COMPUTE
from hvdtrain.parallel.step import Step
from hvdtrain.training import checkpoint, metrics
from hvdtrain.training.console import Console
from hvdtrain.training.control import Control
from hvdtrain.training.layout import agree_on_weights, gather_state, put_state, put_tensors
from hvdtrain.training.setup import Session, open_session
from hvdtrain.training.stop import StopRequest

CHECKPOINTS_KEPT = 2


@dataclass
class Progress:
    """Where training stands; all of it is saved with a checkpoint.

    Attributes:
        step: steps done. position: samples consumed, over all epochs and ranks.
        epoch_loss_sum, epoch_samples: of the epoch under way.
        seconds: since the first step, of all parts of the run. train_seconds: steps only.
        exposed_seconds, communication_seconds: of this rank's reductions and exchanges.
        compute_seconds: of this rank's forwards and backwards.
        bubble_seconds: in which this rank waited for the work of other stages.
        best: metric, value and checkpoint of the best epoch so far.
        final: losses and accuracies of the last evaluation.
    """

    index_hash: str
    step: int = 0
    position: int = 0
    epoch_loss_sum: float = 0.0
    epoch_samples: int = 0
    seconds: float = 0.0
    train_seconds: float = 0.0
    exposed_seconds: float = 0.0
    communication_seconds: float = 0.0
    bubble_seconds: float = 0.0
    compute_seconds: float = 0.0
    best: dict[str, Any] | None = None
    final: dict[str, Any] = field(default_factory=dict)

    def count(self, step: Step) -> None:
        """Add what a step waited for."""
        self.exposed_seconds += step.reduction.exposed + step.waited.transfer
        self.communication_seconds += step.reduction.total + step.waited.transfer
        self.bubble_seconds += step.waited.bubble
        self.compute_seconds += sum(step.seconds[kind] for kind in COMPUTE)


@dataclass
class Run:
    """A session and what it is recorded with; `records` on rank 0 alone."""

    session: Session
    progress: Progress
    console: Console
    control: Control
    stop: StopRequest
    folder: metrics.RunFolder
    records: metrics.Records | None
    ledger: list[str] = field(default_factory=list)
    startup_seconds: float = 0.0
    clock: float = field(default_factory=time.perf_counter)
    first_step: int = 0  # steps done when this process began

    @property
    def activity(self) -> Activity:
        """Where this rank notes what it does."""
        assert self.session.runtime.activity is not None
        return self.session.runtime.activity

    @property
    def trained(self) -> bool:
        """Whether the configured epochs or steps are over."""
        length = len(self.session.train_rows)
        return self.progress.position >= self.session.config.total_samples(length)

    @property
    def evaluation_due(self) -> bool:
        """Whether an epoch, or the last part of one, is trained but not yet evaluated."""
        epoch_over = self.progress.position % len(self.session.train_rows) == 0
        return self.progress.epoch_samples > 0 and (epoch_over or self.trained)

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self.trained and not self.evaluation_due

    def count_seconds(self) -> None:
        """Add the time since the last count, or since the first step, to the run's."""
        now = time.perf_counter()
        self.progress.seconds += now - self.clock
        self.clock = now


def open_run(config: TrainConfig, stop: StopRequest) -> Run:
    """Build the session, open or make the run folder, and restore what it holds."""
    here = world.current()
    session = open_session(config, here)
    found = metrics.find_folder(config) if here.rank == 0 else None
    folder = metrics.RunFolder(here.broadcast(found.path if found else None))
    console = Console(here.rank, launched=here.size > 1)
    saved = _restore(session, folder, console) if config.resume else None
    kept = saved.progress if saved else {}
    progress = Progress(session.index.hash)
    if saved is not None:
        progress = Progress(**{name: kept[name] for name in Progress.__dataclass_fields__})
    if saved is None and config.weights is not None:
        _start_from(session, Path(config.weights), console)
    agree_on_weights(session)
    records = metrics.Records(folder, config, kept) if here.rank == 0 else None
    control = Control(here, session.device)
    return Run(
        *(session, progress, console, control, stop, folder, records), first_step=progress.step
    )


def save(run: Run) -> None:
    """Bring ledger and records to the disk, then commit a checkpoint."""
    ledgers: list[str] = []
    if run.session.config.ledger:
        ledgers = run.session.world.gather_on_first("".join(run.ledger))
    run.ledger.clear()
    run.count_seconds()
    session = run.session
    tensors, optimizer = gather_state(session.plan, session.parts, session.world)
    if run.records is not None:
        run.records.write_ledger(ledgers)
        _save_checkpoint(run, run.records, tensors, optimizer)
    run.session.world.barrier()


def _save_checkpoint(
    run: Run,
    records: metrics.Records,
    tensors: dict[str, Tensor],
    optimizer: dict[str, dict[str, Tensor]],
) -> None:
    progress, folder = run.progress, run.folder.checkpoints
    name = checkpoint.name_of(progress.step)
    records.event("checkpoint", step=progress.step, path=name)
    state = checkpoint.Checkpoint(tensors, optimizer, asdict(progress) | records.commit())
    checkpoint.save(folder, state)
    if progress.best is not None and progress.best["step"] == progress.step:
        checkpoint.mark_best(folder, name, progress.best["metric"], progress.best["value"])
    checkpoint.prune(folder, CHECKPOINTS_KEPT)


def _start_from(session: Session, path: Path, console: Console) -> None:
    """Put the weights of a file into the model, on each rank what it holds.

    Raises:
        UsageError, DataError: if the file is not there, or not of this model.
    """
    last = session.plan.stages[-1].components[-1]
    found, other = weights.read(path, session.config.model, session.shapes, last)
    put_tensors(session, found)
    console.say(f"started from {path}" + (f"; {last} starts anew" if other else ""))


def _restore(
    session: Session, folder: metrics.RunFolder, console: Console
) -> checkpoint.Checkpoint | None:
    """Put the newest checkpoint that verifies into model and optimizer, the same on all ranks.

    Raises:
        UsageError: if it is of another data set or another model.
        DataError: if none verifies, or ranks read different ones.
    """
    here = session.world
    saved, path = None, None
    skipped: list[str] = []
    if here.rank == 0:
        saved, path, skipped = checkpoint.load_newest(folder.checkpoints)
    for line in skipped:
        console.say(f"skipped a checkpoint: {line}")
    if skipped and path is None:
        raise DataError(f"{folder.checkpoints} holds no checkpoint that verifies: {skipped[0]}")
    path = here.broadcast(path)
    if path is None:
        return None
    saved = saved or checkpoint.load(path)
    if len(set(here.gather(checkpoint.identity(path)))) > 1:
        raise DataError(f"{path} is not the same on all ranks: it must lie on a shared disk")
    if saved.progress["index_hash"] != session.index.hash:
        raise UsageError(f"{session.config.data} is not the data set that this run was trained on")
    if session.shapes != {name: tuple(value.shape) for name, value in saved.tensors.items()}:
        raise UsageError(f"{path} holds the parameters of another model")
    put_state(session, saved.tensors, saved.optimizer)
    return saved
