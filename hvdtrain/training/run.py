"""A run under way: what it consists of, and how it is opened or resumed."""

import math
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain import alert, failure, world
from hvdtrain.activity import Activity
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.ownership import Owner, claim
from hvdtrain.stop import StopRequest
from hvdtrain.training import metrics, starts
from hvdtrain.training.checkpoint import store
from hvdtrain.training.console import Console
from hvdtrain.training.control import Control
from hvdtrain.training.feed import READING
from hvdtrain.training.health import Stragglers, peers
from hvdtrain.training.heartbeat import Heartbeat, suspects
from hvdtrain.training.inject import Injector, make_injector
from hvdtrain.training.progress import Progress
from hvdtrain.training.replication import Replication, open_replication, refuse_to_start_over
from hvdtrain.training.restore import restore
from hvdtrain.training.saver import Saver
from hvdtrain.training.session import Session, Taken
from hvdtrain.training.stall import stalled
from hvdtrain.world import World

if TYPE_CHECKING:
    from hvdtrain.training.adapting import Adapter

SECONDS_TO_LOOK = 5.0  # at the heartbeats, before the job is ended
SECONDS_TO_SHOW = 30.0  # in which a network file system shows a new folder to other hosts


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
    saver: Saver
    heartbeat: Heartbeat
    injector: Injector | None
    replication: Replication | None
    stragglers: Stragglers
    interval: tuple[float, str]  # between checkpoints, in epochs, steps or minutes
    adapter: "Adapter | None" = None
    taken: deque[Taken] = field(default_factory=lambda: deque(maxlen=4))  # the last steps
    skipped_in_a_row: int = 0
    failed_saves: int = 0  # in a row
    alerts: list[threading.Thread] = field(default_factory=list)
    ledger: list[str] = field(default_factory=list)
    startup_seconds: float = 0.0
    clock: float = field(default_factory=time.perf_counter)
    saved_at: float = field(default_factory=time.monotonic)
    first_step: int = 0  # steps done when this process began
    saved_best: dict[str, Any] | None = None  # of the last checkpoint that was made
    begun_best: dict[str, Any] | None = None  # of the last one that was begun
    saved_step: int | None = 0  # after which the state as it is was saved; 0 needs no checkpoint

    @property
    def activity(self) -> Activity:
        """Where this rank notes what it does."""
        return self.session.activity

    @property
    def owner(self) -> Owner:
        """The claim on the run folder."""
        return self.heartbeat.owner

    @property
    def trained(self) -> bool:
        """Whether the configured epochs or steps are over."""
        length = len(self.session.train_rows)
        return self.progress.position >= self.session.config.total_samples(length)

    @property
    def epoch(self) -> int:
        """The number of the epoch that was trained last, from 1."""
        return math.ceil(self.progress.position / len(self.session.train_rows))

    @property
    def epoch_end_due(self) -> bool:
        """Whether an epoch, or the last part of one, is trained but not yet recorded."""
        epoch_over = self.progress.position % len(self.session.train_rows) == 0
        return self.progress.epoch_samples > 0 and (epoch_over or self.trained)

    @property
    def evaluation_due(self) -> bool:
        """Whether `--eval-every` asks for an evaluation of the epoch that was trained last."""
        every = self.session.config.eval_every
        return every > 0 and (self.epoch % every == 0 or self.trained)

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self.trained and not self.epoch_end_due

    def taken_at(self, step: int) -> Taken:
        """One of the last steps."""
        return next(taken for taken in self.taken if taken.step == step)

    def record_fault(self, step: int, cause: str, message: str) -> None:
        """Let metrics.jsonl say what went wrong."""
        if self.records is not None:
            self.records.event("fault", step=step, cause=cause, message=message)

    def report(self, step: int, cause: str, message: str) -> None:
        """Tell the user, and whom `--on-alert` tells, of something that does not end the run."""
        self.record_fault(step, cause, message)
        self.console.say(message)
        if self.records is not None:
            command = self.session.config.on_alert
            self.alerts += alert.send(command, cause, message, str(self.folder.path))

    def close(self, summary: dict[str, Any] | None) -> None:
        """Bring the records to the disk; `summary` is None where the run is not over.

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
        """Add the time since the last count, or since the first step, to the run's."""
        now = time.perf_counter()
        self.progress.seconds += now - self.clock
        self.clock = now


def open_run(session: Session, stop: StopRequest) -> Run:
    """Open or make the run folder of a session, and restore what it holds. Collective.

    Raises:
        UsageError, DataError: for whatever a user can get wrong.
    """
    config, here = session.config, session.world
    folder, resumes = here.broadcast(metrics.find_folder(config) if here.rank == 0 else None)
    if config.resume == "auto" and not resumes:
        refuse_to_start_over(config, folder, here)
    console = Console(here.rank, launched=here.size > 1 or world.activity_path() is not None)
    if config.stage is not None:
        console.say(f"reading the copy of {config.data} in {session.index.folder} of each host")
    injector = make_injector(session, folder, console)
    owner, resumes = here.broadcast(_own(config, folder, console) if here.rank == 0 else None)
    heartbeat = Heartbeat(
        *(folder.heartbeats, here.rank, session.memory_bytes, session.celsius),
        *(session.activity.now, owner),
    )
    try:
        config = replace(config, resume=resumes)
        return _open_owned(session, stop, config, folder, console, heartbeat, injector)
    except BaseException:
        heartbeat.give_up()
        raise


def _own(config: TrainConfig, folder: metrics.RunFolder, console: Console) -> tuple[Owner, bool]:
    """Take the run folder, and remove what its last owner left; whether it is resumed. On rank 0.

    Raises:
        UsageError: if it belongs to a run that lives, or now holds another one.
        RankError: if Slurm has started it too often without progress.
        DataError: if it cannot be written to.
    """
    owner = claim(folder.path, folder.heartbeats, console.say)
    try:
        # Now for certain: another run may have come and gone since.
        _, resumes = metrics.find_folder(replace(config, run=str(folder.path)))
        # Before any checkpoint is looked for: an owner that was replaced finishes none after this.
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
) -> Run:
    """The run in a folder that is its own. Collective."""
    here = session.world
    session.activity.on_stall = lambda line: _stalled(line, config, folder, here)
    kept = restore(session, folder, console) if config.resume else None
    progress = Progress.of(kept) if kept else Progress(session.index.hash)
    if kept is None and config.weights is not None:
        console.say(session.start_from(Path(config.weights)))
    session.agree()
    replication = open_replication(config, folder, here, console)
    records = None
    if here.rank == 0:
        records = metrics.Records(folder, config, kept or {})
    return Run(
        session,
        progress,
        console,
        Control(here, session.loss_delay),
        stop,
        folder,
        records,
        _saver(session, folder, heartbeat.owner.token),
        heartbeat,
        injector,
        replication,
        Stragglers(peers(session.plan, here.size)),
        config.checkpoint_interval(),
        _adapter(session),
        first_step=progress.step,
        saved_step=progress.step,
        saved_best=progress.best,
    )


def _saver(session: Session, folder: metrics.RunFolder, token: str) -> Saver:
    """What writes this rank's part of checkpoints. Collective.

    Raises:
        UsageError: if a rank does not see the run folder.
    """
    here = session.world
    listener = failure.Listener(session.config.on_alert, str(folder.path))
    # The thread that writes waits for no rank: no other one is named.
    activity = Activity(
        None, here.rank, session.activity.limit, lambda line: stalled(line, "", listener)
    )
    return Saver(_shared(folder.checkpoints, here), here.rank, token, activity)


def _adapter(session: Session) -> "Adapter | None":
    """Who changes the plan, where that is asked for and there is more than one."""
    if session.config.plan != "adaptive" or session.world.size == 1:
        return None
    from hvdtrain.training.adapting import Adapter  # which loads torch

    assert session.chosen is not None
    return Adapter(session, session.chosen.question, session.build_seconds)


def _stalled(line: str, config: TrainConfig, folder: metrics.RunFolder, here: World) -> None:
    """End the job from the watchdog's thread, naming whoever does not answer."""
    who: list[str] = []
    # The disk may be what everybody waits for.
    look = threading.Thread(
        target=lambda: who.extend(
            suspects(folder.heartbeats, here.size, here.rank, ("", READING))
        ),
        daemon=True,
    )
    look.start()
    look.join(SECONDS_TO_LOOK)
    listener = failure.Listener(config.on_alert, str(folder.path))
    stalled(line, "; ".join(who), listener)


def _shared(folder: Path, here: World) -> Path:
    """The folder that rank 0 has made, as all ranks see it. Collective.

    Raises:
        UsageError: if a rank does not see it.
    """
    path: Path = here.broadcast(folder.resolve())
    until = time.monotonic() + SECONDS_TO_SHOW
    while not path.is_dir() and time.monotonic() < until:
        time.sleep(0.1)
    blind = [host for host in here.gather("" if path.is_dir() else socket.gethostname()) if host]
    if blind:
        raise UsageError(
            f"{path} is not there on {blind[0]}: --run must be on a disk that all ranks share"
        )
    return path
