"""Callbacks: a user's own code that a run calls on rank 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.health import failure
from hvdtrain.models.find import find_function
from hvdtrain.world import World


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
