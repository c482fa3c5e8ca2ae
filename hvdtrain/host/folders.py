"""Temporary folders of processes, which the next start removes after a kill.

One kind is in shared memory, for what the ranks of one job share on one machine. Open MPI names
these files by 16 bits of a hash of the job. One pair in 65,536 of the jobs that a user runs on a
machine would therefore read each other's messages, and hang, crash or compute with them. A job
that is killed leaves its files there, 16 MiB per rank.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BASE = Path("/dev/shm")
SETTINGS = (  # environment variables of Open MPI 5, and 4
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
    return claim(hashlib.blake2b("\n".join([job, *servers]).encode(), digest_size=8).hexdigest())


def claim(name: str) -> Path | None:
    """Make a folder in shared memory and claim it until this process ends; several may claim one.

    Returns None if it cannot be made.
    """
    folder = BASE / f"{_prefix()}{name}"
    with suppress(OSError):
        _claim(folder)
        return folder
    return None


@contextmanager
def temporary(base: Path | None = None) -> Iterator[Path]:
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
