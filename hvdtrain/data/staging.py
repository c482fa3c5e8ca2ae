"""A copy of a data set on a disk of the host, which is complete and checked before it is read."""

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from hvdtrain.data.index import INDEX_FILE, RESTORE, Index, Shard, parse_index, size_fault
from hvdtrain.data.shardfile import shard_sha256
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host.files import PRIVATE, make_own_folder, write_whole

_BLOCK_BYTES = 4 * 2**20
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
    copy = replace(index, folder=folder)
    copied = 0
    try:
        make_own_folder(folder, "--stage")
        for path in folder.glob(".*"):  # of processes that were killed while they copied
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
        for split in index.splits.values():
            for shard in split.shards:
                if size_fault(folder, shard) or shard_sha256(copy, shard) != shard.sha256:
                    _copy(index.folder, folder, shard)
                    copied += shard.bytes
        try:
            is_whole = parse_index(folder).hash == index.hash
        except DataError:
            is_whole = False
        if not is_whole:
            content = (index.folder / INDEX_FILE).read_bytes()
            write_whole(folder / INDEX_FILE, lambda file: file.write(content), PRIVATE)
    except OSError as error:
        raise DataError(
            f"{index.folder} cannot be copied to {folder} on {os.uname().nodename} "
            f"({error.strerror}): leave --stage out, or choose another folder"
        ) from None
    return copied


def _copy(source: Path, target: Path, shard: Shard) -> None:
    def copy(to: IO[bytes]) -> None:
        digest = hashlib.sha256()
        with (source / shard.file).open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                to.write(block)
        if digest.hexdigest() != shard.sha256:
            raise DataError(
                f"{source / shard.file}: shard differs from the index (another SHA-256); {RESTORE}"
            )

    write_whole(target / shard.file, copy, PRIVATE)
