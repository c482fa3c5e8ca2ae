"""A folder of its own for what the ranks of one job share in memory on one machine.

Open MPI names the files by 16 bits of a hash of the job: one pair of jobs in 65,536 that one user
runs on a machine would read each other's messages, and hang, crash or compute with them. A job
that is killed leaves its files there, 16 MiB a rank: the next job of that user removes them.
"""

import fcntl
import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path

BASE = Path("/dev/shm")
SETTINGS = (  # of Open MPI 5, and 4
    *("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory"),
    *("OMPI_MCA_osc_sm_backing_directory", "OMPI_MCA_osc_rdma_backing_directory"),
)
TRIES = 10


def of_ranks(job: str) -> Path | None:
    """The folder of the ranks of a job, for each of them to ask for; None where there is none."""
    servers = sorted(value for name, value in os.environ.items() if "PMIX_SERVER_URI" in name)
    return claim(hashlib.blake2b("\n".join([job, *servers]).encode(), digest_size=8).hexdigest())


def claim(name: str) -> Path | None:
    """Make a folder that is this process's until it ends, and that of others that claim it too.

    None where none can be made. What no process claims any more is removed.
    """
    folder = BASE / f"{_prefix()}{name}"
    _remove_unclaimed()
    for _ in range(TRIES):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            # Not closed before the process ends: the lock is the claim.
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(handle, fcntl.LOCK_SH)
            claimed, there = os.fstat(handle), folder.stat()
        except FileNotFoundError:  # it was removed before it was claimed
            continue
        except OSError:
            return None
        if claimed.st_uid != os.getuid():
            return None
        if claimed.st_ino == there.st_ino:
            return folder
    return None


def _remove_unclaimed() -> None:
    for folder in BASE.glob(f"{_prefix()}*"):
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)


def _prefix() -> str:
    return f"hvdtrain-{os.getuid()}-"
