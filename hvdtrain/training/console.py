"""Everything that a run reports: output of rank 0, a user's callbacks, records and alerts."""

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from hvdtrain.config import TrainConfig
from hvdtrain.engine.folders import RunFolder
from hvdtrain.errors import UsageError
from hvdtrain.health import failure
from hvdtrain.host import alert, output
from hvdtrain.models.find import find_function
from hvdtrain.plan.plan import Plan
from hvdtrain.training.metrics import Records
from hvdtrain.world import World

FORMS = {"epoch": "d", "images/s": ",.0f", "seconds": ",.1f"}  # of other columns: .4f


class Callback:
    """A base class for code that follows a run, such as a logger: override what you need.

    All methods are called on rank 0 alone, between two steps. An exception ends the job on all
    ranks, with its traceback.
    """

    def on_start(self, config: Mapping[str, Any], run: Path) -> None:
        """Start to follow a run, before the first step of this process.

        Args:
            config: the resolved options of `train`.
            run: the run folder.
        """

    def on_resume(self, step: int) -> None:
        """Follow a run that resumes after this step; called after `on_start`.

        Lines of later steps, which an earlier process may have sent, come again.
        """

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """Follow the last `log_every` steps; metrics.jsonl keeps the same values."""

    def on_epoch(self, metrics: Mapping[str, Any]) -> None:
        """Follow an epoch and its evaluation; metrics.jsonl keeps the same values."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Follow a checkpoint that was committed; a later one may remove its folder."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Finish, with the content of summary.json; not called if the run stops earlier."""


Callbacks = Callback | Sequence[Callback]


@dataclass(frozen=True)
class Followers:
    """The callbacks of a run on this rank; none on other ranks than 0.

    Attributes:
        listener: receives the alert if one of them fails.
    """

    callbacks: tuple[Callback, ...]
    world: World
    listener: failure.Listener

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of every callback.

        An exception ends the job: on one rank it is raised, and on several ranks it ends all of
        them at once, because the others wait for this rank.
        """
        for callback in self.callbacks:
            try:
                getattr(callback, method)(*arguments)
            except (Exception, SystemExit) as error:
                error.add_note(f"in {method} of the callback {type(callback).__name__}")
                if self.world.size > 1:
                    failure.fail(error, self.listener)
                raise


def callback_class(reference: str) -> type[Callback]:
    """Return the class that a value of `--callback` names.

    Raises:
        UsageError: if there is none.
    """
    found: object = find_function(reference, "callback")
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise UsageError(
            f"--callback {reference} is no class of callbacks: derive it from hvdtrain.Callback"
        )
    return found


def followers(
    callbacks: Callbacks, references: Sequence[str], world: World, listener: failure.Listener
) -> Followers:
    """Return the callbacks that this rank calls.

    Args:
        references: the values of `--callback`, whose classes are called without arguments.

    Raises:
        TypeError: if one of them is not a Callback.
        UsageError: if there is no such class.
    """
    listed = (callbacks,) if isinstance(callbacks, Callback) else tuple(callbacks)
    classes = [callback_class(reference) for reference in references]
    if world.rank == 0:
        listed += tuple(kind() for kind in classes)
    for callback in listed:
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callbacks holds a {type(callback).__name__}: derive its class from "
                "hvdtrain.Callback, and pass an object of it"
            )
    return Followers(listed if world.rank == 0 else (), world, listener)


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
