"""Checking a packed data set from end to end, and describing it."""

from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.index import Index, Shard, Split, parse_index, read_index, size_fault
from hvdtrain.data.shardfile import chunk_faults, read_shard, shard_sha256
from hvdtrain.errors import DataError


def verify(folder: Path | str) -> list[str]:
    """Return one line per damaged shard and per damaged chunk; an empty list if all are intact.

    Every shard is compared with its SHA-256 in the index, and each chunk of a shard that differs
    is read. Raises DataError for a missing or broken index.
    """
    index = parse_index(folder)
    faults: list[str] = []
    ids = []
    for split in index.splits.values():
        for shard in split.shards:
            shard_faults = _shard_faults(index, split, shard)
            faults += shard_faults
            if not shard_faults:
                try:
                    ids.append(read_shard(index, split, shard).ids)
                except DataError as error:
                    faults.append(str(error))
    if not faults and len(np.unique(np.concatenate(ids))) != sum(map(len, ids)):
        faults.append(f"{folder}: two samples have the same id; pack the data set again")
    return faults


def _shard_faults(index: Index, split: Split, shard: Shard) -> list[str]:
    fault = size_fault(index.folder, shard)
    if fault:
        return [fault]
    try:
        digest = shard_sha256(index, shard)
    except DataError as error:
        return [str(error)]
    if digest == shard.sha256:
        return []
    damaged = chunk_faults(index, split, shard)
    chunks = "its damaged chunks follow" if damaged else "but the checksums of its chunks match"
    return [
        f"{index.folder / shard.file}: shard differs from the index (another SHA-256); {chunks}",
        *damaged,
    ]


def info(folder: Path | str) -> dict[str, Any]:
    """Return a description of the data set, ready for JSON; raise DataError as read_index does."""
    index = read_index(folder)
    splits = {
        name: {
            "count": split.count,
            "shards": len(split.shards),
            "bytes": sum(shard.bytes for shard in split.shards),
            "chunk_rows": split.chunk_rows,
        }
        for name, split in index.splits.items()
    }
    return {
        "folder": str(index.folder),
        "format_version": index.format_version,
        "hash": index.hash,
        "classes": index.classes,
        "class_names": list(index.class_names),
        "image_shape": list(index.image_shape),
        "mean": list(index.mean),
        "std": list(index.std),
        "notes": list(index.notes),
        "splits": splits,
    }
