"""The errors a user can cause, and the exit code that each ends with.

Everything that a user can get wrong is raised as one of these, with a message of one line that
says what is wrong and what to do; the command line prints it without a traceback. Any other
exception is a fault of hvdtrain or of the machine and keeps its traceback.
"""

EXIT_INTERNAL = 1
MOST_CHARACTERS = 2000  # of a message that is handed on to another program


class HvdtrainError(Exception):
    """Base of all errors that end a command with one line; `exit_code` is what it ends with."""

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
    """The job was asked to leave and has saved its state."""

    exit_code = 75


class Interrupted(HvdtrainError):
    """The user ended the command with Ctrl-C."""

    exit_code = 130


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return `text`, its end cut off where it has more characters than `most`."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def on_one_line(text: object, most: int = 80) -> str:
    """Return the start of a user's text, without line breaks."""
    return " ".join(str(text)[:most].split())


def one_line(error: BaseException) -> str:
    """Return type and first line of the message of `error`."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
