"""Files that a user asks for by name: refused before the work, and written whole or not at all."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from hvdtrain.errors import HvdtrainError, UsageError


def plain_name(text: str) -> str:
    """A text as a part of a file's name that no shell minds."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text)


def check_target(path: str, option: str) -> None:
    """Refuse, before the work, a file that could not be written after it.

    Raises:
        UsageError: naming the option.
    """
    target = Path(path)
    if not path or (target.exists() and not target.is_file()):
        raise UsageError(f"{option} {path!r} is not a file: give the name of one")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: there is no such folder; make it first")
    if not os.access(target.absolute().parent, os.W_OK):
        raise UsageError(f"{option} {path}: the folder cannot be written to")


def write_text(path: Path, text: str, what: str, kind: type[HvdtrainError] = UsageError) -> None:
    """Write a file, which is there whole or as it was before.

    Args:
        what: what the file holds, for an error.
        kind: of the error.

    Raises:
        UsageError, or what `kind` says: if it cannot be written.
    """
    try:
        write_whole(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise kind(f"{what} {path} cannot be written: {error.strerror}") from None


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace a file so that no reader, and no crash, ever sees half of it.

    Raises:
        OSError, or what `write` raises: nothing is left behind then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
