"""When a run saves and how: copied at once on all ranks, written and committed beside training."""

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from hvdtrain import configfile
from hvdtrain.training.checkpoint import store
from hvdtrain.training.control import Agreed
from hvdtrain.training.metrics import Records
from hvdtrain.training.run import Run


def is_wanted(run: Run) -> bool:
    """Whether this rank asks all others to save: rank 0 does, by its clock."""
    number, unit = run.interval
    if unit != "minute" or run.session.world.rank != 0:
        return False
    return time.monotonic() - run.saved_at >= 60 * number


def is_due(run: Run, agreed: Agreed | None) -> bool:
    """Whether all ranks save after this step, inside an epoch."""
    number, unit = run.interval
    by_step = unit == "step" and run.progress.step % int(number) == 0
    return by_step or (agreed is not None and agreed.save)


def is_due_after_epoch(run: Run) -> bool:
    """Whether all ranks save after the epoch that was just trained."""
    number, unit = run.interval
    epoch_over = run.progress.position % len(run.session.train_rows) == 0
    epoch = run.progress.position // len(run.session.train_rows)
    return unit != "epoch" or not epoch_over or epoch % int(number) == 0 or run.trained


def begin(run: Run) -> None:
    """Copy the state on all ranks and start to write it. Collective; no agreement is under way."""
    finish(run)
    if run.records is not None:
        run.owner.check()
    session, config = run.session, run.session.config
    ledgers: list[str] = []
    if config.ledger:
        with run.activity.doing("gathering the ledger on rank 0"):
            ledgers = session.world.gather_on_first("".join(run.ledger))
    run.ledger.clear()
    run.count_seconds()
    run.saved_at = time.monotonic()
    name, commit = store.name_of(run.progress.step), None
    if run.records is not None:
        run.records.write_ledger(ledgers)
        run.records.event("checkpoint", step=run.progress.step, path=name)
        kept = asdict(run.progress) | run.records.sizes()
        commit = partial(_commit, run, run.records, name, kept)
    if run.replication is not None:
        run.replication.expect(name)
    run.saver.begin(name, session.share, partial(_settle, run, name, commit))


def follow(run: Run, agreed: Agreed) -> None:
    """Commit the pending checkpoint once all ranks have written their parts.

    Raises:
        DataError: if this rank could not write its own.
    """
    run.saver.check()
    if run.saver.pending and agreed.written == run.session.world.size:
        run.saver.settle()


def finish(run: Run) -> None:
    """Return once what was begun is a checkpoint. Collective; no agreement is under way."""
    _join_all(run)
    if run.saver.pending:
        run.saver.settle()
        _join_all(run)


def _join_all(run: Run) -> None:
    run.saver.join()
    with run.activity.doing("waiting for all ranks to be done with a checkpoint"):
        run.session.world.barrier()


def _settle(run: Run, name: str, commit: Callable[[], object] | None) -> None:
    """What this rank does in its thread once all parts of a checkpoint are written."""
    if commit is not None:
        commit()
    if run.replication is not None:
        run.replication.keep(name)


def _commit(run: Run, records: Records, name: str, kept: dict[str, Any]) -> None:
    """Make the checkpoint of what all ranks have written; on rank 0, in its thread."""
    session, folder = run.session, run.folder.checkpoints
    records.sync()
    writers = range(session.world.size)
    store.commit(folder, name, writers, kept, configfile.public(session.config), run.owner)
    best = kept["best"]
    if best is not None and (folder / store.name_of(best["step"])).is_dir():
        store.mark_best(folder, store.name_of(best["step"]), best["metric"], best["value"])
    store.prune(folder, session.config.keep_checkpoints)
