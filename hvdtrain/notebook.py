"""Functions that run on ranks from a notebook or a script, and return rank 0's value.

`python -m hvdtrain.notebook FOLDER` is one rank: it runs the function that the folder holds.
"""

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import cloudpickle
from typing_extensions import override

from hvdtrain.errors import (
    HvdtrainError,
    Interrupted,
    Preempted,
    RankError,
    UsageError,
    one_line,
)
from hvdtrain.health import failure
from hvdtrain.host import files, launchers
from hvdtrain.host.process import STOP_SIGNALS, end_with_parent
from hvdtrain.launch import supervise

Value = TypeVar("Value")
CALL, RESULT, FAILED = "call", "result", "failed"  # files in the folder of a call


class RankTraceback(Exception):
    """The traceback on the rank that failed: the cause of the exception that comes back."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    @override
    def __str__(self) -> str:
        return f"\n{self.text}"


def notebook_launch(
    function: Callable[..., Value], *arguments: Any, ranks: int = 2, **options: Any
) -> Value:
    """Call a function on new ranks of this machine, and return the value of rank 0.

    The ranks are new processes: they see none of this process's variables but those that the
    function uses, and what they change is lost, except for the value that rank 0 returns. Each
    rank prints to this process's output. Call `hvdtrain.train` in the function, or
    `hvdtrain.torch.start` for a training loop of your own.

    Ctrl-C, or the stop button of a notebook, ends the ranks; `train` saves its state before that.

    Args:
        function: may be defined in a notebook; sent to the ranks by cloudpickle.
        arguments: for the function; sent along.
        ranks: how many.
        options: keyword arguments for the function.

    Returns:
        What the function returned on rank 0.

    Raises:
        Exception: the first one that a rank raised, with that rank's traceback as its cause.
        RankError: if a rank died.
        Interrupted, Preempted: after Ctrl-C or a signal of a scheduler.
        UsageError: if this process is a rank itself, or the function cannot be sent.
    """
    if launchers.detect(os.environ).size != 1:
        raise UsageError(
            "notebook_launch starts ranks itself: call the function directly in a script that "
            "mpirun or srun starts"
        )
    if not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"ranks must be a whole number above 0, not {ranks!r}")
    with files.temporary_folder() as folder:
        (folder / CALL).write_bytes(_packed(function, arguments, options))
        outcome = supervise(ranks, [str(folder)], module="hvdtrain.notebook")
        if (folder / FAILED).is_file():
            _raise_from_rank((folder / FAILED).read_bytes(), outcome.code)
        if outcome.code == Interrupted.exit_code:
            raise Interrupted("Ctrl-C ended the ranks")
        if outcome.code == Preempted.exit_code:
            raise Preempted("a signal ended the ranks")
        if outcome.code or not (folder / RESULT).is_file():
            raise RankError(outcome.message or "the ranks ended without a result")
        value: Value = pickle.loads((folder / RESULT).read_bytes())
        return value


def _packed(function: object, arguments: object, options: object) -> bytes:
    """Return the call, after what is needed to read it."""
    try:
        call = cloudpickle.dumps((function, arguments, options))
    except Exception as error:
        raise UsageError(
            f"{getattr(function, '__name__', function)} cannot be sent to the ranks "
            f"({one_line(error)}): create open files, locks and connections inside the function"
        ) from error
    return pickle.dumps((sys.path, call))


def _raise_from_rank(content: bytes, code: int) -> NoReturn:
    """Raise the exception of a rank; RankError if it cannot be sent.

    Args:
        content: of the file that the rank wrote.
        code: exit code of the job; ranks cannot tell Ctrl-C from another signal.
    """
    rank, text, pickled = pickle.loads(content)
    try:
        error: BaseException = pickle.loads(pickled)
    except Exception:
        error = RankError(f"rank {rank} failed: {text.strip().splitlines()[-1]}")
    if isinstance(error, Preempted) and code == Interrupted.exit_code:
        error = Interrupted(str(error))
    if isinstance(error, HvdtrainError):
        raise error  # its message says all
    error.add_note(f"on rank {rank}")
    raise error from RankTraceback(text)


def main(folder: Path) -> None:
    """Run the function on this rank, and write the value of rank 0."""
    # The launcher blocks these signals for mpirun, and with it for its ranks. They end a function
    # that does not handle them, also when mpirun dies; `train` saves its state on them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    end_with_parent(signal.SIGTERM)
    failure.record_with(lambda error, text: _record(folder, error, text))
    rank = launchers.detect(os.environ).rank
    try:
        path, call = pickle.loads((folder / CALL).read_bytes())
        sys.path[:] = path
        function, arguments, options = pickle.loads(call)
        value = function(*arguments, **options)
        if rank == 0:
            (folder / RESULT).write_bytes(_packed_value(value))
    except (Interrupted, Preempted) as stopped:
        for number in STOP_SIGNALS:  # all ranks end this way, and need no further signal
            signal.signal(number, signal.SIG_IGN)
        if rank == 0:
            _record(folder, stopped, str(stopped))
        sys.exit(stopped.exit_code)
    except BaseException as error:
        if launchers.detect(os.environ).size == 1:
            _record(folder, error, "".join(traceback.format_exception(error)))
            sys.exit(RankError.exit_code)  # the launcher has nothing to add to it
        failure.fail(error)


def _packed_value(value: object) -> bytes:
    try:
        return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    except Exception as error:
        raise UsageError(
            f"the value of rank 0, a {type(value).__name__}, cannot be sent back "
            f"({one_line(error)}): return numbers, arrays or text"
        ) from error


def _record(folder: Path, error: BaseException, text: str) -> None:
    """Write what ended the job for `notebook_launch`."""
    try:
        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = b""
    partial = folder / f"{FAILED}.partial"
    partial.write_bytes(pickle.dumps((launchers.detect(os.environ).rank, text, pickled)))
    partial.replace(folder / FAILED)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
