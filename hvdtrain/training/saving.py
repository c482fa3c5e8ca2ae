"""Saving a run: all ranks copy their state at once, then write and commit while they train."""

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from hvdtrain.checkpoint import store
from hvdtrain.errors import DataError
from hvdtrain.health.stall import OTHERS_SAVE_FACTOR, SAVE_FACTOR
from hvdtrain.options import configfile
from hvdtrain.training.control import Agreed
from hvdtrain.training.metrics import Records
from hvdtrain.training.run import Run

MOST_FAILED = 3  # checkpoints in a row
PAUSE_SECONDS = 2.0  # before another attempt, if there is no step in between


def is_wanted(run: Run) -> bool:
    """Return whether this rank requests a checkpoint: only rank 0 does, by its clock."""
    number, unit = run.interval
    if unit != "minute" or run.session.world.rank != 0:
        return False
    return time.monotonic() - run.saved_at >= 60 * number


def is_due(run: Run, agreed: Agreed | None) -> bool:
    """Return whether all ranks save after this step, inside an epoch."""
    number, unit = run.interval
    by_step = unit == "step" and run.progress.step % int(number) == 0
    return by_step or (agreed is not None and agreed.save)


def is_due_after_epoch(run: Run) -> bool:
    """Return whether all ranks save after the epoch that was just trained."""
    number, unit = run.interval
    epoch_over = run.progress.position % len(run.session.train_rows) == 0
    epoch = run.progress.position // len(run.session.train_rows)
    return unit != "epoch" or not epoch_over or epoch % int(number) == 0 or run.trained


def save(run: Run) -> None:
    """Save, and return once the checkpoint is committed. Collective; no agreement is pending.

    Raises:
        DataError: on all ranks, if too many attempts fail.
    """
    finish(run)
    run.failed_saves, best = 0, run.progress.best
    begin(run)
    while not finish(run):
        time.sleep(PAUSE_SECONDS)
        run.progress.best = best
        begin(run)


def begin(run: Run) -> None:
    """Copy the state on all ranks and start to write it. Collective; no agreement is pending.

    Raises:
        DataError: on all ranks, if too many checkpoints in a row could not be written.
    """
    finish(run)
    session, config = run.session, run.session.config
    ledgers: list[str] = []
    if config.ledger:
        with run.activity.doing("gathering the ledger on rank 0"):
            ledgers = session.world.gather_on_first("".join(run.ledger))
    run.ledger.clear()
    run.count_seconds()
    run.saved_at, run.saved_step = time.monotonic(), run.progress.step
    run.pending_best = run.progress.best
    name, commit, error = store.name_of(run.progress.step), None, None
    if run.records is not None:
        try:
            run.records.write_ledger(ledgers)  # first: the gathered lines exist nowhere else
            run.records.event("checkpoint", step=run.progress.step, path=name)
            run.owner.check()
            kept = asdict(run.progress) | run.records.sizes()
            commit = partial(_commit, run, run.records, name, kept)
        except DataError as caught:
            error = caught
    if run.replication is not None:
        run.replication.expect(name)
    run.saver.begin(name, session.state.share, partial(_settle, run, name, commit), error)


def follow(run: Run, agreed: Agreed) -> None:
    """Commit the pending checkpoint once all ranks have written their files. Collective.

    Raises:
        DataError: on all ranks, if too many checkpoints in a row could not be written.
        UsageError: if the run folder is no longer this run's.
    """
    run.saver.check()
    # A rank may report a failure again before it knows that all ranks have received the report.
    if agreed.failed and run.saver.is_open:
        _end(run)
    elif run.saver.pending and agreed.written == run.session.world.size:
        run.saver.settle()


def finish(run: Run) -> bool:
    """Wait for the open checkpoint, and return whether it was made; True if none is open.

    Collective; no agreement is pending.

    Raises:
        DataError: on all ranks, if too many checkpoints in a row could not be written.
    """
    if not run.saver.is_open:
        return True
    if run.saver.pending and not _faults(run):
        run.saver.settle()
    return _end(run)


def _end(run: Run) -> bool:
    """Close the open checkpoint, and return whether it was made on all ranks. Collective."""
    faults = _faults(run)
    run.saver.end()
    if not faults:
        run.failed_saves, run.saved_best = 0, run.pending_best
        return True
    run.session.world.barrier()  # no rank starts its next attempt before all have cleaned up
    if run.progress.best == run.pending_best:  # otherwise it is of a later epoch, not yet saved
        run.progress.best = run.saved_best
    run.failed_saves += 1
    run.saved_step = None
    if run.failed_saves >= MOST_FAILED:
        raise DataError(
            f"{faults[0]}, {MOST_FAILED} checkpoints in a row: free space or repair the disk, "
            "then add --resume"
        )
    run.report(
        run.progress.step,
        "checkpoint failed",
        f"{faults[0]}; the run continues without it and saves again at the next checkpoint",
    )
    return False


def _faults(run: Run) -> list[str]:
    """Return all ranks' messages of failed writes of the open checkpoint. Collective."""
    with run.activity.doing("writing its part of a checkpoint", SAVE_FACTOR):
        run.saver.join()
    waiting = "waiting for all ranks to be done with a checkpoint"
    with run.activity.doing(waiting, OTHERS_SAVE_FACTOR):
        return [fault for fault in run.session.world.gather(run.saver.fault) if fault]


def _settle(run: Run, name: str, commit: Callable[[], object] | None) -> None:
    """Commit a checkpoint that all ranks have written, and make this rank's copies of it.

    Called in the thread of the saver.
    """
    if commit is not None:
        commit()
    if run.replication is not None:
        run.replication.keep(name)


def _commit(run: Run, records: Records, name: str, kept: dict[str, Any]) -> None:
    """Commit the checkpoint that all ranks have written. On rank 0, in the saver's thread."""
    session, folder = run.session, run.folder.checkpoints
    records.sync()
    writers = range(session.world.size)
    store.commit(folder, name, writers, kept, configfile.public(session.config), run.owner)
    best = kept["best"]
    if best is not None and (folder / store.name_of(best["step"])).is_dir():
        store.mark_best(folder, store.name_of(best["step"]), best["metric"], best["value"])
    store.prune(folder, session.config.keep_checkpoints, newest=name)
