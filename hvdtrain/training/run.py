"""The objects of one run, and how a run is opened, resumed and saved.

To save, all ranks copy their state at once, then write and commit while they train.
"""

import json
import math
import os
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from hvdtrain import configfile
from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.restore import (
    Replication,
    open_replication,
    refuse_to_start_over,
    restore,
)
from hvdtrain.checkpoint.store import Saver
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index, InputSize, Resize
from hvdtrain.engine.feed import READING, Normalisation
from hvdtrain.engine.folders import RunFolder
from hvdtrain.engine.progress import LOSS_SCALE, Agreed, Control, Progress, Stopwatch
from hvdtrain.engine.session import Session, StepInput, StepOutcome
from hvdtrain.errors import DataError, UsageError
from hvdtrain.health import failure
from hvdtrain.health.failure import stalled
from hvdtrain.health.heartbeat import Heartbeat, suspects
from hvdtrain.health.stragglers import Stragglers, Trends, groups_of_equal_work
from hvdtrain.host import alert, counters, files, records
from hvdtrain.host.activity import OTHERS_SAVE_FACTOR, SAVE_FACTOR, Activity
from hvdtrain.host.counters import Load, Meter, open_meter
from hvdtrain.host.launchers import detect
from hvdtrain.host.ownership import Owner, claim
from hvdtrain.host.process import StopRequest
from hvdtrain.options.requests import interval
from hvdtrain.training import metrics, starts
from hvdtrain.training.console import Callbacks, Console, Journal, followers
from hvdtrain.training.inject import Injector, make_injector
from hvdtrain.training.metrics import Records
from hvdtrain.world import World, activity_path

MOST_FAILED = 3  # checkpoints in a row
CHECKPOINTS_FREE = 3  # a disk with space for fewer is almost full
MIB = 2**20
PAUSE_SECONDS = 2.0  # before another attempt, if there is no step in between
SECONDS_TO_SHOW = 30.0  # until a network file system shows a new folder to other hosts


class Saving:
    """The checkpoints of a run, made by all ranks together.

    Attributes:
        saved_at: when the last checkpoint was started, by time.monotonic.
        saved_step: the step whose state is saved as it is now, None if no state is; 0 needs no
            checkpoint.
        saved_best: the best epoch as of the last checkpoint that was committed.
        pending_best: the best epoch as of the last checkpoint that was started.
        unreported: the step of the open checkpoint, until the callbacks have been called for it.
        failed: checkpoints in a row that could not be written.
        shortage: what to say of a disk that is almost full, on rank 0; empty if it is not.
    """

    def __init__(
        self,
        session: Session,
        progress: Progress,
        clock: Stopwatch,
        journal: Journal,
        owner: Owner,
        replication: Replication | None,
    ) -> None:
        self.session, self.progress, self.clock = session, progress, clock
        self.journal, self.owner, self.replication = journal, owner, replication
        self.saver = _saver(session, journal.folder, owner.token)
        self.interval = interval(session.config.checkpoint_every)
        self.saved_at = time.monotonic()
        self.saved_step: int | None = progress.step
        self.saved_best = self.pending_best = progress.best
        self.unreported: int | None = None
        self.writers: list[int] = []  # of the open checkpoint; on rank 0
        self.failed = 0
        self.shortage, self.was_short = "", False

    def is_wanted(self) -> bool:
        """Return whether this rank requests a checkpoint: only rank 0 does, by its clock."""
        number, unit = self.interval
        if unit != "minute" or self.session.world.rank != 0:
            return False
        return time.monotonic() - self.saved_at >= 60 * number

    def is_due(self, agreed: Agreed | None) -> bool:
        """Return whether all ranks save after this step, inside an epoch."""
        number, unit = self.interval
        by_step = unit == "step" and self.progress.step % int(number) == 0
        return by_step or (agreed is not None and agreed.save)

    def is_due_after_epoch(self, is_last: bool) -> bool:
        """Return whether all ranks save after the epoch that was just trained.

        Args:
            is_last: whether the run is trained to its end.
        """
        number, unit = self.interval
        epoch, rest = divmod(self.progress.position, len(self.session.train_rows))
        return unit != "epoch" or rest > 0 or epoch % int(number) == 0 or is_last

    def save(self) -> None:
        """Save, and return once the checkpoint is committed. Collective; no agreement is pending.

        Raises:
            DataError: on all ranks, if too many attempts fail.
        """
        self.finish()
        self.failed, best = 0, self.progress.best
        self.begin()
        while not self.finish():
            time.sleep(PAUSE_SECONDS)
            self.progress.best = best
            self.begin()

    def begin(self) -> None:
        """Copy the state on all ranks and start to write it. Collective; no agreement is pending.

        Raises:
            DataError: on all ranks, if too many checkpoints in a row could not be written.
        """
        self.finish()
        session, step, ledger = self.session, self.progress.step, self.journal.ledger
        ledgers: list[str] = []
        if session.config.ledger:
            with session.activity.doing("gathering the ledger on rank 0"):
                ledgers = session.world.gather_on_first("".join(ledger))
        ledger.clear()
        self.clock.count()
        self.saved_at, self.saved_step = time.monotonic(), step
        self.pending_best = self.progress.best
        name, commit, error = store.name_of(step), None, None
        self.unreported = step
        if (records := self.journal.records) is not None:
            try:
                records.write_ledger(ledgers)  # first: the gathered lines exist nowhere else
                records.event("checkpoint", step=step, path=name)
                self.owner.check()
                kept = asdict(self.progress) | records.sizes()
                commit = partial(self._commit, records, name, kept)
            except DataError as caught:
                error = caught
        if self.replication is not None:
            self.replication.expect(name)
        with session.activity.doing("copying the state for a checkpoint"):
            self.saver.begin(name, session.state.share, partial(self._settle, name, commit), error)
        writes = session.world.gather_on_first(self.saver.writes)
        self.writers = [rank for rank, has_a_file in enumerate(writes) if has_a_file]

    def follow(self, agreed: Agreed) -> None:
        """Commit the pending checkpoint once all ranks have written their files. Collective.

        Raises:
            DataError: on all ranks, if too many checkpoints in a row could not be written.
            UsageError: if the run folder is no longer this run's.
        """
        saver = self.saver
        saver.check()
        # A rank may report a failure again before it knows that all ranks have the report.
        if agreed.failed and saver.is_open:
            self._end()
        elif saver.pending and agreed.written == self.session.world.size:
            saver.settle()
        elif saver.settled:
            self._report_commit()

    def finish(self) -> bool:
        """Wait for the open checkpoint, and return whether it was made; True if none is open.

        Collective; no agreement is pending.

        Raises:
            DataError: on all ranks, if too many checkpoints in a row could not be written.
        """
        if not self.saver.is_open:
            return True
        if self.saver.pending and not self._faults():
            self.saver.settle()
        return self._end()

    def _end(self) -> bool:
        """Close the open checkpoint, and return whether it was made on all ranks. Collective."""
        faults, progress = self._faults(), self.progress
        if not faults:
            self._report_commit()
        self.saver.end()
        if not faults:
            self.failed, self.saved_best = 0, self.pending_best
            return True
        self.session.world.barrier()  # no rank starts its next attempt before all have cleaned up
        if progress.best == self.pending_best:  # otherwise it is of a later epoch, not yet saved
            progress.best = self.saved_best
        self.failed += 1
        self.saved_step = None
        if self.failed >= MOST_FAILED:
            raise DataError(
                f"{faults[0]}, {MOST_FAILED} checkpoints in a row: free space or repair the disk, "
                "then add --resume"
            )
        self.journal.report(
            progress.step,
            "checkpoint failed",
            f"{faults[0]}; the run continues without it and saves again at the next checkpoint",
        )
        return False

    def _report_commit(self) -> None:
        """Call the callbacks for the open checkpoint, once: it is committed."""
        step, self.unreported = self.unreported, None
        if step is not None:
            path = self.journal.folder.checkpoints / store.name_of(step)
            self.journal.followers.call("on_checkpoint", step, path)
            if self.shortage and not self.was_short:
                self.journal.report(step, "disk almost full", self.shortage)
            self.was_short = bool(self.shortage)

    def _faults(self) -> list[str]:
        """Return all ranks' messages of failed writes of the open checkpoint. Collective."""
        doing = self.session.activity.doing
        with doing("writing its part of a checkpoint", SAVE_FACTOR):
            self.saver.join()
        with doing("waiting for all ranks to be done with a checkpoint", OTHERS_SAVE_FACTOR):
            return [fault for fault in self.session.world.gather(self.saver.fault) if fault]

    def _settle(self, name: str, commit: Callable[[], object] | None) -> None:
        """Commit a checkpoint that all ranks have written, and make this rank's copies of it.

        Called in the thread of the saver.
        """
        if commit is not None:
            commit()
        if self.replication is not None:
            self.replication.keep(name)

    def _commit(self, records: Records, name: str, kept: dict[str, Any]) -> None:
        """Commit the checkpoint that all ranks have written. On rank 0, in the saver's thread."""
        config, folder = self.session.config, self.journal.folder.checkpoints
        records.sync()
        store.commit(folder, name, self.writers, kept, configfile.public(config), self.owner)
        best = kept["best"]
        if best is not None and (folder / store.name_of(best["step"])).is_dir():
            store.mark_best(folder, store.name_of(best["step"]), best["metric"], best["value"])
        store.prune(folder, config.keep_checkpoints, newest=name)
        self.shortage = ""
        with suppress(OSError):  # the checkpoint is committed: this is only a warning
            self.shortage = shortage(folder, name)


def shortage(folder: Path, name: str) -> str:
    """Return what to say if the disk of a checkpoint is almost full; empty if it is not.

    Raises:
        OSError: if the disk does not answer.
    """
    size = sum(path.stat().st_size for path in (folder / name).iterdir())
    free = shutil.disk_usage(folder).free
    if free >= CHECKPOINTS_FREE * size:
        return ""
    return (
        f"the disk of {folder} has {free / MIB:,.1f} MiB left, and a checkpoint takes "
        f"{size / MIB:,.1f}: free space, or lower --keep-checkpoints"
    )


def _saver(session: Session, folder: RunFolder, token: str) -> Saver:
    """Return the writer of this rank's checkpoint files. Collective.

    Raises:
        UsageError: if a rank does not see the run folder.
    """
    world = session.world
    listener = failure.Listener(session.config.on_alert, str(folder.path))
    # The thread that writes waits for no other rank, so its message names none.
    activity = Activity(
        None, world.rank, session.activity.limit, lambda line: stalled(line, "", listener)
    )
    return Saver(_shared(folder.checkpoints, world), world.rank, token, activity)


def _shared(folder: Path, world: World) -> Path:
    """Return the path of the folder that rank 0 has made, once all ranks see it. Collective.

    Raises:
        UsageError: if a rank does not see it.
    """
    path: Path = world.broadcast(folder.resolve())
    until = time.monotonic() + SECONDS_TO_SHOW
    while not path.is_dir() and time.monotonic() < until:
        time.sleep(0.1)
    missing = [
        host for host in world.gather("" if path.is_dir() else socket.gethostname()) if host
    ]
    if missing:
        raise UsageError(
            f"{path} does not exist on {missing[0]}: put --run on a disk that all ranks share"
        )
    return path


INPUTS = "inputs.json"
LARGEST_SIZE = 2**16  # pixels


@dataclass(frozen=True)
class Inputs:
    """The images that a model takes, and the classes that it returns.

    Attributes:
        image_size: of the model, in pixels.
        stored_size: that the data set's images were scaled to before their centre was cut out.
        resize: how image files get their size; None for a data set of pixels.
        class_names: by class; none for targets that are not class labels.
        outputs: of a model without classes.
        mean, std: per channel, of numbers / UNIT, to normalise by.
        shape: (channels, height, width) of inputs that are not square images of three channels.
        dtype: of the stored numbers.
    """

    image_size: int
    stored_size: int
    resize: Resize | None
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    outputs: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = "uint8"

    @property
    def size(self) -> InputSize:
        """The size of inputs, as a model's function gets it."""
        if not self.shape:
            return self.image_size
        channels, height, width = self.shape
        return channels, height, width

    @property
    def classes(self) -> int:
        """The number of classes, or of outputs, that the model's function gets."""
        return len(self.class_names) or self.outputs


def inputs_of(index: Index, normalisation: Normalisation) -> Inputs:
    """Return what the model of a run on a data set takes."""
    mean, std = normalisation
    size = index.input_size
    return Inputs(
        image_size=index.image_shape[0],
        shape=size if isinstance(size, tuple) else (),
        dtype=index.image_dtype,
        stored_size=min(index.stored_shape[:2]),
        resize=index.resize,
        class_names=index.class_names,
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
        outputs=0 if index.targets is None else index.classes,
    )


def save_inputs(inputs: Inputs, run: Path) -> None:
    """Write the record of a run.

    Raises:
        DataError: if it cannot be written.
    """
    text = json.dumps(asdict(inputs), indent=1) + "\n"
    files.write_text(run / INPUTS, text, "the record of the inputs", DataError, files.OWN)


def load_inputs(run: Path) -> Inputs | None:
    """Return the record of a run; None for a run of a version without one.

    Raises:
        DataError: if the file is damaged.
    """
    inputs = records.read(run / INPUTS, Inputs)
    if inputs is not None:
        sizes = inputs.image_size, inputs.stored_size
        channels = inputs.shape[0] if len(inputs.shape) == 3 else 3
        has_channels = len(inputs.mean) == len(inputs.std) == channels and min(inputs.std) > 0
        is_resized = inputs.resize in (None, *get_args(Resize))
        if not (0 < min(sizes) <= max(sizes) <= LARGEST_SIZE and has_channels and is_resized):
            raise DataError(f"{run / INPUTS} has a value that is out of range: restore it")
        if not inputs.classes > 0:
            raise DataError(f"{run / INPUTS} names no class: restore it")
    return inputs


if TYPE_CHECKING:
    from hvdtrain.training.adapting import Adapter

RECORDS_READ_LATER = 3  # steps whose records may be read after the agreement on a later one
SECONDS_TO_LOOK = 5.0  # for reading the heartbeats, before the job is ended


@dataclass(kw_only=True)
class Run:
    """A session, and what records and controls it.

    Attributes:
        clock: counts the seconds of the run.
        recent: the last steps, with the norms of their gradients if these were requested.
        skipped_in_a_row: bad steps since the last good one.
        step_ended: when the host had put the last step of the epoch into the device's queue, by
            the performance counter.
        before: the progress when this process started.
        peak_before: peak memory before the first step, in bytes.
        load: what was counted of the cores before the first step.
        reported_memory: whether an excess of the limit of --plan has been reported.
    """

    session: Session
    stop: StopRequest
    control: Control
    progress: Progress
    clock: Stopwatch
    journal: Journal
    saving: Saving
    heartbeat: Heartbeat
    stragglers: Stragglers
    trends: Trends
    injector: Injector | None
    adapter: "Adapter | None"
    before: Progress
    recent: deque[tuple[StepInput, float]]
    peak_before: int
    skipped_in_a_row: int = 0
    step_ended: float | None = None
    reported_memory: bool = False
    load: Load = field(init=False)

    @property
    def activity(self) -> Activity:
        """The record of what this rank is doing."""
        return self.session.activity

    @property
    def console(self) -> Console:
        """The output of rank 0."""
        return self.journal.console

    @property
    def trained(self) -> bool:
        """Return whether the configured epochs or steps are over."""
        length = len(self.session.train_rows)
        return self.progress.position >= self.session.config.total_samples(length)

    @property
    def epoch(self) -> int:
        """The number of the epoch that was trained last, from 1."""
        return math.ceil(self.progress.position / len(self.session.train_rows))

    @property
    def epoch_end_due(self) -> bool:
        """Return whether an epoch, or the last part of one, is trained but not yet recorded."""
        epoch_over = self.progress.position % len(self.session.train_rows) == 0
        return self.progress.epoch_samples > 0 and (epoch_over or self.trained)

    @property
    def evaluation_due(self) -> bool:
        """Return whether `--eval-every` requests an evaluation of the epoch trained last."""
        every = self.session.config.eval_every
        return every > 0 and (self.epoch % every == 0 or self.trained)

    @property
    def complete(self) -> bool:
        """Return whether there is nothing left to do."""
        return self.trained and not self.epoch_end_due

    def step_at(self, number: int) -> tuple[StepInput, float]:
        """Return one of the last steps, and the norm of its gradients."""
        return next((step, norm) for step, norm in self.recent if step.step == number)

    def restart_clock(self) -> None:
        """Count seconds, energy, and what else uses the cores, from now on."""
        self.load = counters.read_load()
        if self.heartbeat.meter is not None:
            self.heartbeat.meter.restart()
        self.clock.restart()

    def drain(self) -> list[Agreed]:
        """Return the ranks' agreements on all steps still under way, oldest first. Collective."""
        with self.activity.doing("agreeing with all ranks on the last steps"):
            agreements, outcomes = self.control.drain()
        self.count(outcomes)
        return agreements

    def count(self, outcomes: Iterable[StepOutcome]) -> None:
        """Count the seconds of steps that are over on the device."""
        for outcome in outcomes:
            self.progress.count(outcome.spent, self.session.device)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Write the records to the disk.

        Args:
            summary: None if the run is not over.

        Raises:
            UsageError: if the run folder belongs to another run by now.
        """
        self.saving.saver.activity.close()
        self.heartbeat.close()
        with self.activity.doing("waiting for --on-alert", after_others=True):
            alert.wait(self.journal.alerts)
        if self.journal.records is not None:
            self.heartbeat.owner.check()
            self.journal.records.finish(summary)
        self.heartbeat.give_up()


def _meter(session: Session) -> Meter | None:
    """Return the meter of this host on its first rank; that of rank 0 also asks Slurm."""
    world = session.world
    if world.local_rank:
        return None
    by_slurm = world.rank == 0 and world.launcher == "srun"
    return open_meter(session.device.is_gpu, detect(os.environ).job if by_slurm else None)


def open_run(session: Session, stop: StopRequest, callbacks: Callbacks = ()) -> Run:
    """Open or make the run folder of a session, and restore its newest checkpoint. Collective.

    Args:
        callbacks: called on rank 0.

    Raises:
        UsageError, DataError: if the options or the data are invalid.
    """
    config, world = session.config, session.world
    folder, resumes = world.broadcast(metrics.find_folder(config) if world.rank == 0 else None)
    if config.resume == "auto" and not resumes:
        refuse_to_start_over(config, folder, world)
    console = Console(world.rank, launched=world.size > 1 or activity_path() is not None)
    if config.stage is not None:
        console.say(f"reading the copy of {config.data} in {session.index.folder} on each host")
    adapter = _adapter(session)
    injector = make_injector(session, folder, console, adapter.force if adapter else None)
    meter = _meter(session)  # before the folder is claimed, since Slurm may answer late
    owner, resumes = world.broadcast(_claim(config, folder, console) if world.rank == 0 else None)
    heartbeat = Heartbeat(
        folder.heartbeats,
        world.rank,
        world.size,
        session.device.memory_bytes,
        session.activity.now,
        owner,
        meter,
    )
    try:
        session.activity.on_stall = partial(_stalled, config=config, folder=folder, world=world)
        config = replace(config, resume=resumes)
        progress, replication, records = _start_or_resume(session, config, folder, console)
        listener = failure.Listener(config.on_alert, str(folder.path))
        called = followers(callbacks, config.callback or (), world, listener)
        journal = Journal(config, folder, console, records, called)
        clock = Stopwatch(progress, "seconds", session.device)
        return Run(
            session=session,
            stop=stop,
            control=Control(world, session.device.loss_delay, config.steps_ahead),
            progress=progress,
            clock=clock,
            journal=journal,
            saving=Saving(session, progress, clock, journal, owner, replication),
            heartbeat=heartbeat,
            stragglers=Stragglers(groups_of_equal_work(session.plan, world.size)),
            trends=Trends(),
            injector=injector,
            adapter=adapter,
            before=replace(progress),
            peak_before=session.device.peak_memory_bytes(),
            recent=deque(maxlen=RECORDS_READ_LATER + config.steps_ahead),
        )
    except BaseException:
        heartbeat.give_up()
        raise


def _claim(config: TrainConfig, folder: metrics.RunFolder, console: Console) -> tuple[Owner, bool]:
    """Claim the run folder, and remove unfinished files of its last owner. On rank 0.

    Returns:
        The claim, and whether the run is resumed.

    Raises:
        UsageError: if the folder belongs to a run that is alive, or holds another run by now.
        RankError: if Slurm has started the run too often without progress.
        DataError: if the folder cannot be written to.
    """
    owner = claim(folder.path, folder.heartbeats, console.say)
    try:
        # Again, now that the folder is claimed: another run may have used it in between.
        _, resumes = metrics.find_folder(replace(config, run=str(folder.path)))
        # Before the search for checkpoints: after this a replaced owner cannot commit one.
        store.restore_replaced(folder.checkpoints)
        store.clean(folder.checkpoints)
        starts.count_start(folder.path)
    except BaseException:
        owner.release()
        raise
    return owner, resumes


def _start_or_resume(
    session: Session, config: TrainConfig, folder: metrics.RunFolder, console: Console
) -> tuple[Progress, Replication | None, metrics.Records | None]:
    """Restore the state of a run if it is resumed, and open its records. Collective.

    Args:
        config: the configuration, with `resume` as the claimed folder decides it.
    """
    kept = restore(session, folder, console.say) if config.resume else None
    scale = LOSS_SCALE if config.precision == "fp16" else 1.0
    progress = Progress.of(kept) if kept else Progress(session.index.hash, loss_scale=scale)
    if kept is None and config.weights is not None:
        console.say(session.state.start_from(Path(config.weights)))
    if kept is None:  # replicas with local steps have restored different weights
        session.state.agree()
    replication = open_replication(config, folder, session.world, console.say)
    if session.world.rank != 0:
        return progress, replication, None
    records = metrics.Records(folder, config, kept or {})
    save_inputs(inputs_of(session.index, session.normalisation), folder.path)
    return progress, replication, records


def _adapter(session: Session) -> "Adapter | None":
    """Return what replans, if --plan adaptive is set and there are several ranks."""
    migration = session.migration
    is_adaptive = session.config.is_adaptive and session.world.size > 1
    if migration is None or not is_adaptive:
        return None
    from hvdtrain.training.adapting import Adapter  # loads torch

    return Adapter(session, migration, migration.question, migration.building_seconds)


def _stalled(line: str, config: TrainConfig, folder: metrics.RunFolder, world: World) -> None:
    """End the job from the watchdog's thread, naming the ranks that do not respond."""
    silent: list[str] = []
    # In a thread with a time limit: the disk itself may hang.
    search = threading.Thread(
        target=lambda: silent.extend(
            suspects(folder.heartbeats, world.size, world.rank, ("", READING))
        ),
        daemon=True,
    )
    search.start()
    search.join(SECONDS_TO_LOOK)
    listener = failure.Listener(config.on_alert, str(folder.path))
    stalled(line, "; ".join(silent), listener)
