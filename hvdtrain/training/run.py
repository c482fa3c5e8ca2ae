"""The objects of one run, and how a run is opened or resumed."""

import math
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.replication import Replication, open_replication, refuse_to_start_over
from hvdtrain.checkpoint.restore import restore
from hvdtrain.checkpoint.saver import Saver
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.health import failure, starts
from hvdtrain.health.heartbeat import Heartbeat, suspects
from hvdtrain.health.inject import Injector, make_injector
from hvdtrain.health.stall import stalled
from hvdtrain.health.stragglers import Stragglers, peers
from hvdtrain.host import alert
from hvdtrain.host.activity import Activity
from hvdtrain.host.ownership import Owner, claim
from hvdtrain.host.stop import StopRequest
from hvdtrain.options.planrequest import ADAPTIVE
from hvdtrain.training import metrics
from hvdtrain.training.console import Console
from hvdtrain.training.control import Control
from hvdtrain.training.feed import READING
from hvdtrain.training.progress import Progress
from hvdtrain.training.session import Session, StepRecord
from hvdtrain.world import World, activity_path

if TYPE_CHECKING:
    from hvdtrain.training.adapting import Adapter

SECONDS_TO_LOOK = 5.0  # for reading the heartbeats, before the job is ended
SECONDS_TO_SHOW = 30.0  # until a network file system shows a new folder to other hosts


@dataclass
class Run:
    """A session, and what records and controls it.

    Attributes:
        records: on rank 0 only.
        interval: between checkpoints, in epochs, steps or minutes.
        step_records: the last steps.
        failed_saves: in a row.
        first_step: steps done when this process started.
        saved_best: the best epoch as of the last checkpoint that was committed.
        pending_best: the best epoch as of the last checkpoint that was started.
        saved_step: the step whose state is saved as it is now; 0 needs no checkpoint.
    """

    session: Session
    progress: Progress
    console: Console
    control: Control
    stop: StopRequest
    folder: metrics.RunFolder
    records: metrics.Records | None
    saver: Saver
    heartbeat: Heartbeat
    injector: Injector | None
    adapter: "Adapter | None"
    replication: Replication | None
    stragglers: Stragglers
    interval: tuple[float, str]
    step_records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=4))
    skipped_in_a_row: int = 0
    failed_saves: int = 0
    alerts: list[threading.Thread] = field(default_factory=list)
    ledger: list[str] = field(default_factory=list)
    startup_seconds: float = 0.0
    clock: float = field(default_factory=time.perf_counter)
    saved_at: float = field(default_factory=time.monotonic)
    first_step: int = 0
    saved_best: dict[str, Any] | None = None
    pending_best: dict[str, Any] | None = None
    saved_step: int | None = 0

    @property
    def activity(self) -> Activity:
        """The record of what this rank is doing."""
        return self.session.activity

    @property
    def owner(self) -> Owner:
        """The claim on the run folder."""
        return self.heartbeat.owner

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

    def step_record_at(self, step: int) -> StepRecord:
        """Return the record of one of the last steps."""
        return next(record for record in self.step_records if record.step == step)

    def record_fault(self, step: int, cause: str, message: str) -> None:
        """Write what went wrong to metrics.jsonl."""
        if self.records is not None:
            self.records.event("fault", step=step, cause=cause, message=message)

    def report(self, step: int, cause: str, message: str) -> None:
        """Report a fault that does not end the run: to the user, and by `--on-alert`."""
        self.record_fault(step, cause, message)
        self.console.say(message)
        if self.records is not None:
            command = self.session.config.on_alert
            self.alerts += alert.send(command, cause, message, str(self.folder.path))

    def close(self, summary: dict[str, Any] | None) -> None:
        """Write the records to the disk.

        Args:
            summary: None if the run is not over.

        Raises:
            UsageError: if the run folder belongs to another run by now.
        """
        self.saver.activity.close()
        self.heartbeat.close()
        with self.activity.doing("waiting for --on-alert", after_others=True):
            alert.wait(self.alerts)
        if self.records is not None:
            self.owner.check()
            self.records.close(summary)
        self.heartbeat.give_up()

    def count_seconds(self) -> None:
        """Add the time since the last count, or since the first step, to the run's seconds."""
        now = time.perf_counter()
        self.progress.seconds += now - self.clock
        self.clock = now


def open_run(session: Session, stop: StopRequest) -> Run:
    """Open or make the run folder of a session, and restore its newest checkpoint. Collective.

    Raises:
        UsageError, DataError: for every mistake of a user.
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
    owner, resumes = world.broadcast(_claim(config, folder, console) if world.rank == 0 else None)
    heartbeat = Heartbeat(
        *(folder.heartbeats, world.rank, session.device.memory_bytes),
        *(session.activity.now, owner),
    )
    try:
        config = replace(config, resume=resumes)
        return _open_owned(session, stop, config, folder, console, heartbeat, injector, adapter)
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
        starts.count(folder.path)
    except BaseException:
        owner.release()
        raise
    return owner, resumes


def _open_owned(
    session: Session,
    stop: StopRequest,
    config: TrainConfig,
    folder: metrics.RunFolder,
    console: Console,
    heartbeat: Heartbeat,
    injector: Injector | None,
    adapter: "Adapter | None",
) -> Run:
    """Return the run in a folder that this run has claimed. Collective."""
    world = session.world
    session.activity.on_stall = lambda line: _stalled(line, config, folder, world)
    kept = restore(session, folder, console) if config.resume else None
    progress = Progress.of(kept) if kept else Progress(session.index.hash)
    if kept is None and config.weights is not None:
        console.say(session.state.start_from(Path(config.weights)))
    session.state.agree()
    replication = open_replication(config, folder, world, console)
    records = None
    if world.rank == 0:
        records = metrics.Records(folder, config, kept or {})
    return Run(
        session=session,
        progress=progress,
        console=console,
        control=Control(world, session.device.loss_delay),
        stop=stop,
        folder=folder,
        records=records,
        saver=_saver(session, folder, heartbeat.owner.token),
        heartbeat=heartbeat,
        injector=injector,
        adapter=adapter,
        replication=replication,
        stragglers=Stragglers(peers(session.plan, world.size)),
        interval=config.checkpoint_interval(),
        first_step=progress.step,
        saved_step=progress.step,
        saved_best=progress.best,
    )


def _saver(session: Session, folder: metrics.RunFolder, token: str) -> Saver:
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


def _adapter(session: Session) -> "Adapter | None":
    """Return what replans, if --plan adaptive is set and there are several ranks."""
    migration = session.migration
    is_adaptive = session.config.plan_request == ADAPTIVE and session.world.size > 1
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
