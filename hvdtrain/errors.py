"""The errors that a user can cause, with their exit codes.

Everything that a user can get wrong is raised as one of these, with a message of one line that
says what is wrong and what to do; the command line prints it without a traceback. Any other
exception is a fault of hvdtrain or of the machine and keeps its traceback.
"""

import sysconfig
from pathlib import Path
from traceback import walk_tb

EXIT_INTERNAL = 1
MOST_CHARACTERS = 2000  # limit for a message that is passed to another program


class HvdtrainError(Exception):
    """Base of all errors that end a command with one line and with `exit_code`."""

    exit_code = EXIT_INTERNAL


class CheckFailed(HvdtrainError):
    """A check ran and found a fault: `doctor`, `plan check`, replicas that differ."""

    exit_code = EXIT_INTERNAL


class UsageError(HvdtrainError):
    """Wrong usage or configuration."""

    exit_code = 2


class DataError(HvdtrainError):
    """A data set, shard, archive or checkpoint that is missing, damaged or cannot be written."""

    exit_code = 3


class RankError(HvdtrainError):
    """A rank of the job failed."""

    exit_code = 4


class Preempted(HvdtrainError):
    """The job was requested to stop and has saved its state."""

    exit_code = 75


class Interrupted(HvdtrainError):
    """The user ended the command with Ctrl-C."""

    exit_code = 130


# The exit code of a program that failed selects the error.
BY_CODE: dict[int, type[HvdtrainError]] = {
    kind.exit_code: kind
    for kind in (CheckFailed, UsageError, DataError, RankError, Preempted, Interrupted)
}


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return `text`, with its end cut off if it has more characters than `most`."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def on_one_line(text: object, most: int = 80) -> str:
    """Return the start of a user's text, without line breaks."""
    return " ".join(str(text)[:most].split())


def one_line(error: BaseException) -> str:
    """Return the type of `error` and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def users_line(error: BaseException) -> str:
    """Return the last line of a user's file that `error` passed, such as ` (own.py, line 3)`."""
    paths = sysconfig.get_paths()
    libraries = [paths[key] for key in ("stdlib", "purelib", "platlib")]
    lines = [
        f" ({frame.f_code.co_filename.removeprefix(f'{Path.cwd()}/')}, line {number})"
        for frame, number in walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(("<", str(Path(__file__).parent), *libraries))
    ]
    return lines[-1] if lines else ""
