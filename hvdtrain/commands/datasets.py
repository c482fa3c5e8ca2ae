"""The commands for data sets."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.commands import as_json, as_lines
from hvdtrain.errors import DataError, Interrupted

_SHOWN = 20  # broken files


def data_fetch(arguments: Sequence[str], name: str, to: str) -> int:
    """Download an official archive."""
    from hvdtrain import data

    print(data.fetch(name, to))
    return 0


def data_pack(arguments: Sequence[str], source: str, destination: str, **options: Any) -> int:
    """Pack images into shards."""
    from hvdtrain import data
    from hvdtrain.data.writer import PARTIAL_FOLDER

    left_out: list[str] = []
    try:
        index = data.pack(source, destination, report=left_out.append, **options)
    except KeyboardInterrupt:
        if (Path(destination) / PARTIAL_FOLDER).exists():
            raise Interrupted("interrupted: run the same command again to resume") from None
        raise
    for fault in left_out[:_SHOWN]:
        print(f"left out: {fault}", file=sys.stderr)
    if len(left_out) > _SHOWN:
        print(f"left out: {len(left_out) - _SHOWN:,} more", file=sys.stderr)
    return _print_index(index)


def data_synth(
    arguments: Sequence[str],
    destination: str,
    images: int,
    classes: int,
    size: int,
    seed: int,
    shard_mb: int,
) -> int:
    """Make a learnable data set from a seed."""
    from hvdtrain import data

    index = data.synth(destination, images, classes, size=size, seed=seed, shard_mb=shard_mb)
    return _print_index(index)


def data_verify(arguments: Sequence[str], destination: str) -> int:
    """Print every damaged shard and chunk."""
    from hvdtrain import data

    faults = data.verify(destination)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        print(f"{destination}: every shard is good")
    return DataError.exit_code if faults else 0


def data_info(arguments: Sequence[str], destination: str, json: bool) -> int:
    """Print what a data set holds."""
    from hvdtrain import data

    content = data.info(destination)
    print(as_json(content) if json else as_lines(content))
    return 0


def _print_index(index: Any) -> int:
    counts = ", ".join(f"{split.count:,} {name}" for name, split in index.splits.items())
    height, width, _ = index.image_shape
    pixels = f"{height}x{width} pixels" + (" when decoded" if index.resize else "")
    kind = f"{index.classes} classes" if index.targets is None else f"targets {index.targets}"
    print(f"{index.folder}: {counts}, {kind}, {pixels}")
    for note in index.notes:
        print(f"note: {note}")
    return 0
