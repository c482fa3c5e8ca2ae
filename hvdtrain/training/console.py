"""Everything that a run reports: output of rank 0, records and alerts."""

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from hvdtrain.config import TrainConfig
from hvdtrain.engine.folder import RunFolder
from hvdtrain.host import alert, output
from hvdtrain.plan.plan import Plan
from hvdtrain.training.callbacks import Followers
from hvdtrain.training.metrics import Records

FORMS = {"epoch": "d", "images/s": ",.0f", "seconds": ",.1f"}  # of other columns: .4f


class Console:
    """Prints on rank 0, is silent elsewhere."""

    def __init__(self, rank: int, launched: bool) -> None:
        self.speaks = rank == 0
        # mpirun gives each rank a terminal of its own: only our launcher knows the real one.
        columns = os.environ.get("HVDTRAIN_TERMINAL_COLUMNS")
        terminal = self.speaks and (columns is not None if launched else sys.stdout.isatty())
        width = int(columns) if columns else None
        self.rich = output.console(force_terminal=terminal, width=width)
        self.progress: Progress | None = None
        if terminal:
            self.progress = Progress(
                "{task.description}",
                BarColumn(),
                MofNCompleteColumn(),
                "loss {task.fields[loss]:.4f}",
                TimeRemainingColumn(),
                console=self.rich,
                transient=True,
            )
        self.task: Any = None
        self.columns: tuple[str, ...] = ()

    def say(self, text: str) -> None:
        """Print one line."""
        if not self.speaks:
            return
        if self.progress is not None:
            self.rich.print(text, soft_wrap=True)
        else:
            print(text, flush=True)

    def say_plan(self, plan: Plan) -> None:
        """Print one line per stage, if there are several."""
        if len(plan.stages) == 1:
            return
        self.say(f"{plan.schedule}, up to {plan.microbatches} micro-batches")
        for number, stage in enumerate(plan.stages):
            names = stage.components
            held = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            self.say(f"stage {number} on rank {', '.join(map(str, stage.ranks))}: {held}")

    @contextmanager
    def bar(self, title: str, steps: int) -> Iterator[None]:
        """Show a progress bar of `steps` steps inside of the context."""
        if self.progress is None:
            yield
            return
        self.task = self.progress.add_task(title, total=steps, loss=float("nan"))
        with self.progress:
            yield
        self.progress.remove_task(self.task)

    def step(self, loss: float) -> None:
        """Advance the progress bar by one step."""
        if self.progress is not None:
            self.progress.update(self.task, advance=1, loss=loss)

    def header(self, measures: Iterable[str]) -> None:
        """Print the names of the columns that `row` fills.

        Args:
            measures: what is measured besides the loss.
        """
        names = ["loss", *(name.replace("_", " ").replace("accuracy", "acc") for name in measures)]
        splits = [f"{split} {name}" for split in ("val", "test") for name in names]
        self.columns = ("epoch", "loss", *splits, "images/s", "seconds")
        self.say("  ".join(f"{name:>9}" for name in self.columns))

    def row(self, values: dict[str, Any]) -> None:
        """Print one line of the epoch table, with "-" for missing values."""
        cells = [
            "-" if values.get(name) is None else format(values[name], FORMS.get(name, ".4f"))
            for name in self.columns
        ]
        widths = [max(9, len(name)) for name in self.columns]
        self.say("  ".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))


@dataclass
class Journal:
    """The reports of a run.

    Attributes:
        records: on rank 0 only.
        followers: the callbacks; none on other ranks than 0.
        ledger: lines of this rank that are not yet in a checkpoint.
    """

    config: TrainConfig
    folder: RunFolder
    console: Console
    records: Records | None
    followers: Followers
    ledger: list[str] = field(default_factory=list)
    alerts: list[threading.Thread] = field(default_factory=list)

    def event(self, event: str, **values: Any) -> None:
        """Append a line to metrics.jsonl, and call the callbacks of steps and epochs.

        Nothing happens on other ranks than 0.
        """
        if self.records is not None:
            self.records.event(event, **values)
        if event in ("step", "epoch"):
            self.followers.call(f"on_{event}", values)

    def fault(self, step: int, cause: str, message: str) -> None:
        """Write what went wrong to metrics.jsonl."""
        self.event("fault", step=step, cause=cause, message=message)

    def report(self, step: int, cause: str, message: str) -> None:
        """Report a fault that does not end the run: to the user, and by `--on-alert`."""
        self.fault(step, cause, message)
        self.console.say(message)
        if self.records is not None:
            folder = str(self.folder.path)
            self.alerts += alert.send(self.config.on_alert, cause, message, folder)
