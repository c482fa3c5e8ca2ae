"""Files that a user asks for by name: refused before the work, and written whole or not at all."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from hvdtrain.errors import HvdtrainError, UsageError

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Modes of files and folders, of which the umask takes away what it takes.
ANY, OWN, PRIVATE = 0o666, 0o644, 0o600
OWN_FOLDER, PRIVATE_FOLDER = 0o755, 0o700


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


def fault_of_owner(path: Path, follow: bool = True) -> str | None:
    """Say how another user could change a file or what is in a folder, and the cure; None if none.

    The superuser can anyway. Where there are access control lists, the bits of the group are their
    upper bound.

    Args:
        follow: whether it may be a symbolic link to one that nobody else can change.

    Raises:
        OSError: if it is not there.
    """
    found = path.stat() if follow else path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a symbolic link: remove it, or choose another folder"
    if found.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user (uid {found.st_uid}): choose another folder"
    if found.st_mode & OTHERS_MAY_WRITE:
        return (
            f"{path} can be changed by other users: look at what it holds, then chmod go-w {path}"
        )
    return None


def make_own_folder(path: Path, option: str) -> None:
    """Make a folder that this user alone can look into, where it is not there yet.

    The names of such folders can be foreseen, so another user may have made them.

    Args:
        option: which names the folder it is in, for an error.

    Raises:
        UsageError: if another user could change what is in it.
        OSError: if it cannot be made.
    """
    path.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    if fault := fault_of_owner(path, follow=False):
        raise UsageError(f"{option}: {fault}")


@contextmanager
def writable_by_owner_alone() -> Iterator[None]:
    """Whatever the umask, what is made meanwhile can be changed by its owner alone."""
    before = os.umask(OTHERS_MAY_WRITE)
    os.umask(before | OTHERS_MAY_WRITE)
    try:
        yield
    finally:
        os.umask(before)


def write_text(
    path: Path, text: str, what: str, kind: type[HvdtrainError] = UsageError, mode: int = ANY
) -> None:
    """Write a file, which is there whole or as it was before.

    Args:
        what: what the file holds, for an error.
        kind: of the error.
        mode: of the file, of which the umask takes away what it takes.

    Raises:
        UsageError, or what `kind` says: if it cannot be written.
    """
    try:
        write_whole(path, lambda file: file.write(text.encode()), mode)
    except OSError as error:
        raise kind(f"{what} {path} cannot be written: {error.strerror}") from None


def write_whole(path: Path, write: Callable[[IO[bytes]], object], mode: int = ANY) -> None:
    """Replace a file so that no reader, and no crash, ever sees half of it.

    On return the file and its name are on the disk.

    Raises:
        OSError, or what `write` raises: nothing is left behind then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # of a killed process, with another mode
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk, where its file system can be asked for that.

    Raises:
        OSError: if the disk fails.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder to write to, and not to read
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folders(path: Path, mode: int = 0o777) -> None:
    """Make a folder, and those that it lies in, and bring their names to the disk.

    Args:
        mode: of the folder itself, of which the umask takes away what it takes.

    Raises:
        OSError: if it cannot be made.
    """
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(mode, exist_ok=True)
        sync_folder(path.parent)
