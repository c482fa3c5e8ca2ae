"""A separate folder for the memory that the ranks of one job share on one machine.

Open MPI names the files by 16 bits of a hash of the job. One pair in 65,536 of the jobs that a
user runs on a machine would therefore read each other's messages, and hang, crash or compute with
them. A job that is killed leaves its files there, 16 MiB per rank: the next job of that user
removes them.
"""

import fcntl
import hashlib
import os
import shutil
from contextlib import suppress
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
    """Make a folder and claim it until this process ends; several processes may claim one.

    Returns None if it cannot be made. Removes the folders that no process claims any more.
    """
    folder = BASE / f"{_prefix()}{name}"
    _remove_unclaimed()
    for _ in range(TRIES):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            # The handle stays open until the process ends: the lock is the claim.
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(handle, fcntl.LOCK_SH)
            claimed, current = os.fstat(handle), folder.stat()
        except FileNotFoundError:  # it was removed before it was claimed
            continue
        except OSError:
            return None
        if claimed.st_uid != os.getuid():
            return None
        if claimed.st_ino == current.st_ino:
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
