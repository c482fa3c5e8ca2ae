"""Evaluation: a forward-only schedule over a split, with exact counts at any number of ranks."""

import math
from typing import Any

import numpy as np
import torch

from hvdtrain.data import order
from hvdtrain.data.loader import Loader
from hvdtrain.parallel.step import Step
from hvdtrain.training.feed import Feeder, requests
from hvdtrain.training.run import Run
from hvdtrain.training.setup import Session, evaluation_plan

EVALUATION_IMAGES = 256  # a replica and a forward pass


def evaluate(session: Session, split: str, rows: np.ndarray) -> tuple[float, float]:
    """Mean loss and accuracy over `rows` of a split, each row counted once on one rank."""
    plan = evaluation_plan(session.plan)
    replicas = max(len(stage.ranks) for stage in plan.stages)
    slices = order.step_slices(len(rows), EVALUATION_IMAGES * replicas * plan.microbatches)
    totals = torch.zeros(2, dtype=torch.float64, device=session.device)
    feeder = Feeder(session.splits[split])
    with Loader(feeder, requests(session, rows, slices, is_training=False)) as feeds:
        for (start, stop), feed in zip(slices, feeds, strict=True):
            program = session.program(stop - start, is_training=False)
            step = session.runtime.evaluate(program, Step(feed.images, feed.labels))
            if step.loss_sum is not None and step.correct is not None:
                totals += torch.stack([step.loss_sum.double(), step.correct.double()])
    assert session.runtime.activity is not None
    with session.runtime.activity.doing("adding up an evaluation"):
        loss_sum, correct = np.sum(session.world.gather(totals.cpu().numpy()), axis=0)
    return float(loss_sum) / len(rows), round(correct) / len(rows)


def evaluate_epoch(run: Run, may_be_best: bool) -> None:
    """Evaluate after an epoch (or after the last step), record it, and remember the best.

    Args:
        may_be_best: whether a checkpoint of this epoch is saved.
    """
    session, progress = run.session, run.progress
    final: dict[str, Any] = dict.fromkeys(("val_loss", "val_accuracy"))
    counted = progress.epoch_samples  # none where every step was skipped
    final["train_loss"] = progress.epoch_loss_sum / counted if counted else None
    if len(session.held_rows):
        final["val_loss"], final["val_accuracy"] = evaluate(session, "train", session.held_rows)
    test_rows = np.arange(session.index.splits["test"].count)
    final["test_loss"], final["test_accuracy"] = evaluate(session, "test", test_rows)
    progress.final = final
    progress.epoch_loss_sum, progress.epoch_samples = 0.0, 0
    run.count_seconds()
    epoch = math.ceil(progress.position / len(session.train_rows))
    rate = progress.position / max(progress.train_seconds, 1e-9)
    if run.records is not None:
        run.records.event(
            "epoch",
            step=progress.step,
            epoch=epoch,
            position=progress.position,
            seconds=progress.seconds,
            train_seconds=progress.train_seconds,
            images_per_second=rate,
            **final,
        )
    cells = {name.replace("_", " ").replace("accuracy", "acc"): final[name] for name in final}
    run.console.row(
        {**cells, "epoch": epoch, "loss": final["train_loss"], "images/s": rate}
        | {"seconds": progress.seconds}
    )
    # Without a hold-out the training loss decides: never the test split.
    metric, sign = ("val_accuracy", 1) if len(session.held_rows) else ("train_loss", -1)
    best = progress.best
    is_candidate = may_be_best and final[metric] is not None
    if is_candidate and (best is None or sign * final[metric] > sign * best["value"]):
        progress.best = {"metric": metric, "value": final[metric], "step": progress.step}
