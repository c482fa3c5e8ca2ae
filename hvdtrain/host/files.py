"""Output files that a user names: refused before the work, and written whole or not at all."""

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
# Modes of files and folders, before the umask applies.
ANY, OWN, PRIVATE = 0o666, 0o644, 0o600
OWN_FOLDER, PRIVATE_FOLDER = 0o755, 0o700


def plain_name(text: str) -> str:
    """Return a text as a part of a file name, without characters that are special in a shell."""
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
        raise UsageError(f"{option} {path}: its folder does not exist: create it first")
    if not os.access(target.absolute().parent, os.W_OK):
        raise UsageError(f"{option} {path}: its folder is not writable: choose another one")


def ownership_problem(path: Path, follow: bool = True) -> str | None:
    """Return how another user could change a file or folder, and the fix; None if nobody can.

    The superuser always can. With access control lists, the bits of the group are their upper
    bound.

    Args:
        follow: accept a symbolic link whose target nobody else can change.

    Raises:
        OSError: if the path does not exist.
    """
    status = path.stat() if follow else path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link: remove it, or choose another folder"
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user (uid {status.st_uid}): choose another folder"
    if status.st_mode & OTHERS_MAY_WRITE:
        return (
            f"{path} can be changed by other users: check its content, then run chmod go-w {path}"
        )
    return None


def make_own_folder(path: Path, option: str) -> None:
    """Create a folder that only this user can read, unless it exists.

    The names of such folders are predictable, so another user may have created them.

    Args:
        option: the option that names the parent folder, for an error.

    Raises:
        UsageError: if another user could change its content.
        OSError: if it cannot be created.
    """
    path.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    if fault := ownership_problem(path, follow=False):
        raise UsageError(f"{option}: {fault}")


@contextmanager
def only_owner_may_write() -> Iterator[None]:
    """Make files created inside the block writable by their owner only, whatever the umask."""
    before = os.umask(OTHERS_MAY_WRITE)
    os.umask(before | OTHERS_MAY_WRITE)
    try:
        yield
    finally:
        os.umask(before)


def write_text(
    path: Path, text: str, what: str, kind: type[HvdtrainError] = UsageError, mode: int = ANY
) -> None:
    """Write a file completely, or leave it as it was.

    Args:
        what: description of the content, for an error.
        kind: type of the error.
        mode: mode of the file, before the umask applies.

    Raises:
        UsageError, or the type `kind`: if the file cannot be written.
    """
    try:
        write_whole(path, lambda file: file.write(text.encode()), mode)
    except OSError as error:
        raise kind(f"{what} {path} cannot be written: {error.strerror}") from None


def write_whole(path: Path, write: Callable[[IO[bytes]], object], mode: int = ANY) -> None:
    """Replace a file so that no reader, and no crash, ever sees half of it.

    On return the file and its name are on the disk.

    Raises:
        OSError, or the error of `write`: then no temporary file is left behind.
    """
    temporary = path.with_name(f".{path.name[:50]}.{os.getpid()}")  # of at most 255 bytes
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process, with another mode
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
            write(file)
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk, if its file system supports that.

    Raises:
        OSError: if the disk fails.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder that is writable but not readable
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folders(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its parents, and flush their names to the disk.

    Args:
        mode: mode of the folder itself, before the umask applies.

    Raises:
        OSError: if it cannot be created.
    """
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(mode, exist_ok=True)
        sync(path.parent)
