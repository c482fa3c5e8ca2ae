"""A copy of a data set on a disk of the host, which is complete and checked before it is read."""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from hvdtrain.data.index import INDEX_FILE, RESTORE, Index, Shard, parse_index, size_fault
from hvdtrain.data.shardfile import shard_sha256
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host.files import make_own_folder

_BLOCK_BYTES = 4 * 2**20
_PREFIX = ".staging-"
_ABANDONED_SECONDS = 3600.0


def staged_folder(index: Index, directory: str) -> Path:
    """Return the folder of a data set's copy under a directory, after expanding its $VARIABLES.

    Raises:
        UsageError: if a variable is not set on this host.
    """
    expanded = os.path.expandvars(directory)
    if "$" in expanded:
        raise UsageError(
            f"--stage {directory}: a variable in it is not set on {os.uname().nodename}"
        )
    # Other users can neither read nor replace this user's copy.
    return Path(expanded) / f"hvdtrain-{os.getuid()}-{index.hash[:16]}"


def stage(index: Index, directory: str) -> int:
    """Copy the files that are missing, the index last, and return the bytes copied.

    Existing shards are compared with the SHA-256 in the index, and copied again if they differ.
    Processes that copy the same data set at the same time do not disturb each other.

    Raises:
        DataError: if a shard of the source is damaged, or the copy cannot be written.
        UsageError: as in `staged_folder`, or if another user could change the copy.
    """
    folder = staged_folder(index, directory)
    copied = 0
    try:
        make_own_folder(folder, "--stage")
        _remove_abandoned(folder)
        for split in index.splits.values():
            for shard in split.shards:
                if not _is_whole(folder, index, shard):
                    _copy(index.folder / shard.file, folder / shard.file, shard.sha256)
                    copied += shard.bytes
        if not _has_index(folder, index):
            with _new_file(folder / INDEX_FILE) as file:
                file.write((index.folder / INDEX_FILE).read_bytes())
    except OSError as error:
        raise DataError(
            f"{index.folder} cannot be copied to {folder} on {os.uname().nodename} "
            f"({error.strerror}): leave --stage out, or choose another folder"
        ) from None
    return copied


def _is_whole(folder: Path, index: Index, shard: Shard) -> bool:
    copy = replace(index, folder=folder)
    return size_fault(folder, shard) is None and shard_sha256(copy, shard) == shard.sha256


def _has_index(folder: Path, index: Index) -> bool:
    try:
        return parse_index(folder).hash == index.hash
    except DataError:
        return False


def _copy(source: Path, target: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    with source.open("rb") as file, _new_file(target) as copy:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            copy.write(block)
        if digest.hexdigest() != sha256:
            raise DataError(f"{source}: shard differs from the index (another SHA-256); {RESTORE}")


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file; rename it once it is complete, and remove it after an error."""
    with NamedTemporaryFile(dir=path.parent, prefix=_PREFIX, delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(file.name).unlink()
            raise


def _remove_abandoned(folder: Path) -> None:
    """Remove the files of processes that were killed while they copied."""
    for path in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                path.unlink()
