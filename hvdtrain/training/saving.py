"""Saving a run: all ranks copy their state at once, then write and commit while they train."""

import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain import configfile
from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.restore import Replication
from hvdtrain.checkpoint.store import Saver
from hvdtrain.engine.control import Agreed
from hvdtrain.engine.folders import RunFolder
from hvdtrain.engine.progress import Progress, Stopwatch
from hvdtrain.engine.session import Session
from hvdtrain.errors import DataError, UsageError
from hvdtrain.health import failure
from hvdtrain.health.failure import stalled
from hvdtrain.host.activity import OTHERS_SAVE_FACTOR, SAVE_FACTOR, Activity
from hvdtrain.host.ownership import Owner
from hvdtrain.options.requests import interval
from hvdtrain.training.console import Journal
from hvdtrain.training.metrics import Records
from hvdtrain.world import World

MOST_FAILED = 3  # checkpoints in a row
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
