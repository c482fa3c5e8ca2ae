"""Evaluation: a forward-only schedule over a split, with exact counts at any number of ranks."""

from functools import partial
from typing import Any

import numpy as np

from hvdtrain.data import order
from hvdtrain.data.loader import Loader
from hvdtrain.training.feed import Feeder, requests
from hvdtrain.training.run import Run
from hvdtrain.training.session import Session

MEASURED = ("val_loss", "val_accuracy", "test_loss", "test_accuracy")


def evaluate(session: Session, split: str, rows: np.ndarray) -> tuple[float, float]:
    """Mean loss and accuracy over `rows` of a split, each row counted once on one rank."""
    slices = order.step_slices(len(rows), session.evaluation_images)
    sizes = [stop - start for start, stop in slices]
    asked = requests(rows, slices, partial(session.own_rows, is_training=False))
    with Loader(Feeder(session.splits[split]), asked) as feeds:
        own = session.evaluate(zip(feeds, sizes, strict=True))
    with session.activity.doing("adding up an evaluation"):
        loss_sum, correct = np.sum(session.world.gather(own), axis=0)
    return float(loss_sum) / len(rows), round(correct) / len(rows)


def end_epoch(run: Run, may_be_best: bool) -> None:
    """Evaluate after an epoch (or after the last step) if that is due; record it. Collective.

    Args:
        may_be_best: whether a checkpoint of this epoch is saved.
    """
    session, progress = run.session, run.progress
    counted = progress.epoch_samples  # none where every step was skipped
    final: dict[str, Any] = dict.fromkeys(MEASURED)
    final["train_loss"] = progress.epoch_loss_sum / counted if counted else None
    if run.evaluation_due:
        final |= _measure(session)
    progress.final, run.saved_step = final, None
    progress.epoch_loss_sum, progress.epoch_samples = 0.0, 0
    run.count_seconds()
    rate = progress.position / max(progress.train_seconds, 1e-9)
    if run.records is not None:
        run.records.event(
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
    # Without a hold-out the training loss decides: never the test split.
    metric, sign = ("val_accuracy", 1) if len(session.held_rows) else ("train_loss", -1)
    best = progress.best
    is_candidate = may_be_best and final[metric] is not None
    if is_candidate and (best is None or sign * final[metric] > sign * best["value"]):
        progress.best = {"metric": metric, "value": final[metric], "step": progress.step}


def _measure(session: Session) -> dict[str, float]:
    """Evaluate on the hold-out, if there is one, and on the test split. Collective."""
    found: dict[str, float] = {}
    if len(session.held_rows):
        found["val_loss"], found["val_accuracy"] = evaluate(session, "train", session.held_rows)
    test_rows = np.arange(session.index.splits["test"].count)
    found["test_loss"], found["test_accuracy"] = evaluate(session, "test", test_rows)
    return found
