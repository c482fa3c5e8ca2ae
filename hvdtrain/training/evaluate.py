"""Evaluation by a forward-only schedule over a split, with exact counts on any number of ranks."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from hvdtrain.data import order
from hvdtrain.data.loader import Loader
from hvdtrain.engine.control import Flags, Stopped, Vitals
from hvdtrain.engine.feed import Feed, Feeder, requests, watched
from hvdtrain.engine.progress import Stopwatch
from hvdtrain.engine.session import PendingStep, StepOutcome
from hvdtrain.training.run import Run

# Always among the results; null where they are not measured.
MEASURED = ("val_loss", "val_accuracy", "test_loss", "test_accuracy")

NO_STEP = PendingStep(0, lambda: StepOutcome(0.0, False))  # of an agreement in an evaluation


def _until_stopped(run: Run, batches: Iterable[tuple[Feed, int]]) -> Iterator[tuple[Feed, int]]:
    """Yield the batches of an evaluation; after each, all ranks agree on whether to stop.

    Raises:
        Stopped: on all ranks after the same batch.
    """
    code = None
    for batch in batches:
        yield batch
        flags = Flags(
            interrupted=run.stop.interrupted,
            preempted=run.stop.preempted,
            written=run.saving.saver.written,
            failed=run.saving.saver.failed,
        )
        with run.activity.doing("agreeing with all ranks on an evaluation"):
            agreed, _ = run.control.post(NO_STEP, flags, Vitals(0.0, 0.0))
        if agreed is not None:
            run.saving.follow(agreed)
            code = agreed.stop
        if code is not None:
            break
    for agreed in run.drain():
        run.saving.follow(agreed)
        code = code or agreed.stop
    if code is not None:
        raise Stopped(code)


def evaluate(run: Run, split: str, rows: np.ndarray) -> dict[str, float]:
    """Return the means of the loss and its measures over `rows` of a split, by name.

    One rank counts each row, once.

    Raises:
        Stopped: on all ranks after the same batch, if any rank received a stop signal.
    """
    session = run.session
    slices = order.step_slices(len(rows), session.evaluation_images)
    sizes = [stop - start for start, stop in slices]
    row_requests = requests(rows, slices, partial(session.local_rows, is_training=False))
    with Loader(Feeder(session.splits[split]), row_requests) as loader:
        feeds = watched(loader, run.activity)
        local_sums = session.evaluate(_until_stopped(run, zip(feeds, sizes, strict=True)))
    with session.activity.doing("adding up an evaluation"):
        sums = np.sum(session.world.gather(local_sums), axis=0)
    names = ("loss", *session.measures)
    return {name: float(value) / len(rows) for name, value in zip(names, sums, strict=True)}


def end_epoch(run: Run, may_be_best: bool) -> None:
    """Evaluate after an epoch (or after the last step) if that is due; record it. Collective.

    Args:
        may_be_best: whether a checkpoint of this epoch is saved.

    Raises:
        Stopped: as `evaluate` does; nothing is recorded, so that a resumed run repeats all of it.
    """
    session, progress = run.session, run.progress
    counted = progress.epoch_samples  # none where every step was skipped
    others = [f"{split}_{name}" for split in ("val", "test") for name in session.measures]
    final: dict[str, Any] = dict.fromkeys((*MEASURED, *others))
    final["train_loss"] = progress.epoch_loss_sum / counted if counted else None
    if run.evaluation_due:
        final |= _measure(run)
    run.saving.saved_step = None
    progress.epoch_loss_sum, progress.epoch_samples = 0.0, 0
    _record(run, final)
    # Without a hold-out the training loss decides, never the test split.
    metric, sign = "train_loss", -1
    if len(session.held_rows):
        metric, sign = ("val_accuracy", 1) if "accuracy" in session.measures else ("val_loss", -1)
    best = progress.best
    is_candidate = may_be_best and final[metric] is not None
    if is_candidate and (best is None or sign * final[metric] > sign * best["value"]):
        progress.best = {"metric": metric, "value": final[metric], "step": progress.step}


def evaluate_end(run: Run) -> None:
    """Evaluate a run that had ended already, if that is due now and was not then. Collective."""
    final = run.progress.final
    if run.complete and run.evaluation_due and final.get("test_loss") is None:
        _record(run, final | _measure(run))


def _record(run: Run, final: dict[str, Any]) -> None:
    """Write the results of an epoch to the records and the console."""
    progress = run.progress
    progress.final = final
    run.clock.count()
    rate = progress.position / max(progress.train_seconds, 1e-9)
    run.journal.event(
        "epoch",
        step=progress.step,
        epoch=run.epoch,
        position=progress.position,
        seconds=progress.seconds,
        train_seconds=progress.train_seconds,
        images_per_second=rate,
        **final,
    )
    cells = {name.replace("_", " ").replace("accuracy", "acc"): final[name] for name in final}
    run.console.row(
        {**cells, "epoch": run.epoch, "loss": final["train_loss"], "images/s": rate}
        | {"seconds": progress.seconds}
    )


def _measure(run: Run) -> dict[str, float]:
    """Evaluate on the hold-out, if there is one, and on the test split. Collective."""
    session = run.session
    clock = Stopwatch(run.progress, "evaluation_seconds", session.device)
    held = evaluate(run, "train", session.held_rows) if len(session.held_rows) else {}
    tested = evaluate(run, "test", np.arange(session.index.splits["test"].count))
    clock.count()
    return {f"val_{name}": value for name, value in held.items()} | {
        f"test_{name}": value for name, value in tested.items()
    }
