"""Files and folders that are written whole or not at all, and temporary folders of processes.

A temporary folder is removed by the next start after a kill. One kind is in shared memory, for
what the ranks of one job share on one machine. Open MPI names these files by 16 bits of a hash of
the job. One pair in 65,536 of the jobs that a user runs on a machine would therefore read each
other's messages, and hang, crash or compute with them. A job that is killed leaves its files
there, 16 MiB per rank.
"""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
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


SHARED_MEMORY = Path("/dev/shm")
SHARED_SETTINGS = (  # environment variables of Open MPI 5, and 4
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_btl_vader_backing_directory",
    "OMPI_MCA_osc_sm_backing_directory",
    "OMPI_MCA_osc_rdma_backing_directory",
)
TRIES = 10


def claim_for_ranks(job: str) -> Path | None:
    """Claim and return the folder of a job's ranks; None if none can be made.

    Every rank calls this.
    """
    servers = sorted(value for name, value in os.environ.items() if "PMIX_SERVER_URI" in name)
    return claim_folder(
        hashlib.blake2b("\n".join([job, *servers]).encode(), digest_size=8).hexdigest()
    )


def claim_folder(name: str) -> Path | None:
    """Make a folder in shared memory and claim it until this process ends; several may claim one.

    Returns None if it cannot be made.
    """
    folder = SHARED_MEMORY / f"{_prefix()}{name}"
    with suppress(OSError):
        _claim(folder)
        return folder
    return None


@contextmanager
def temporary_folder(base: Path | None = None) -> Iterator[Path]:
    """Yield a new folder that is removed after the block.

    Raises:
        OSError: if it cannot be made.
    """
    folder = (base or Path(tempfile.gettempdir())) / f"{_prefix()}{secrets.token_hex(8)}"
    handle = _claim(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _claim(folder: Path) -> int:
    """Make a folder, and return the handle that claims it while it is open.

    Removes the folders beside it that no process claims any more.

    Raises:
        OSError: if it cannot be made, or belongs to another user.
    """
    _remove_unclaimed(folder.parent)
    for _ in range(TRIES):
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            with suppress(OSError):  # a disk without locks, where nothing is removed either
                fcntl.flock(handle, fcntl.LOCK_SH)
            claimed, current = os.fstat(handle), folder.stat()
        except FileNotFoundError:  # it was removed before it was claimed
            continue
        if claimed.st_ino == current.st_ino and claimed.st_uid == os.getuid():
            return handle
    raise PermissionError(f"{folder} belongs to another process")


def _remove_unclaimed(base: Path) -> None:
    for folder in base.glob(f"{_prefix()}*"):
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.getuid():
                    shutil.rmtree(folder)
            finally:
                os.close(handle)


def _prefix() -> str:
    """Return how the names start: unlike those of --stage, which may be in shared memory too."""
    return f"hvdtrain-job-{os.getuid()}-"
