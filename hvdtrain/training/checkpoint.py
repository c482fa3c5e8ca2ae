"""Checkpoints: tensors by parameter name in HDF5, so that nothing in a file is ever executed.

A checkpoint is a folder `step-00000123` with `state.h5` and `manifest.json`. It is written under
a temporary name, flushed to disk and renamed: what carries the final name is whole.
"""

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain import files
from hvdtrain.errors import DataError

FORMAT_VERSION = 1
NAME = re.compile(r"step-(\d{8,})")
UNFINISHED = ".unfinished-"
STATE, MANIFEST, BEST = "state.h5", "manifest.json", "best.json"


@dataclass(frozen=True)
class Checkpoint:
    """A training state.

    Attributes:
        tensors: parameters and buffers by name.
        optimizer: the optimizer's tensors by parameter name and by their own.
        progress: position, counts and sizes, as the loop keeps them.
    """

    tensors: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    progress: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into `folder` and return its path.

    Raises:
        DataError: if the disk is full or not writable; what was there before is untouched.
    """
    final = folder / name_of(checkpoint.progress["step"])
    temporary = folder / f"{UNFINISHED}{final.name}"
    replaced = folder / f"{UNFINISHED}replaced-{final.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        content = _encode(checkpoint)
        _write_synced(temporary / STATE, content)
        _write_synced(temporary / MANIFEST, _manifest(content, checkpoint.progress))
        _sync_folder(temporary)
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        _sync_folder(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise DataError(f"the checkpoint {final} cannot be written: {error.strerror}") from None
    return final


def mark_best(folder: Path, name: str, metric: str, value: float) -> None:
    """Point `best.json` at the checkpoint `name`."""
    write_whole(folder / BEST, json.dumps({"checkpoint": name, "metric": metric, "value": value}))


def prune(folder: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` checkpoints and the best one, and what a kill left."""
    for path in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)
    kept = {path.name for path in stored(folder)[-keep_last:]}
    if (marked := best(folder)) is not None:
        kept.add(marked.name)
    for path in stored(folder):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def best(folder: Path) -> Path | None:
    """The checkpoint that `best.json` points at, None where it points at none."""
    try:
        name = str(json.loads((folder / BEST).read_text())["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder / name if NAME.fullmatch(name) and (folder / name).is_dir() else None


def stored(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def load_newest(folder: Path) -> tuple[Checkpoint | None, Path | None, list[str]]:
    """The newest checkpoint that verifies, its path, and a line for each newer one that fails."""
    skipped: list[str] = []
    for path in reversed(stored(folder)):
        try:
            return load(path), path, skipped
        except DataError as error:
            skipped.append(str(error))
    return None, None, skipped


def load(path: Path) -> Checkpoint:
    """Read and verify one checkpoint.

    Raises:
        DataError: if a file is missing, differs from its hash, or holds something else.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {manifest['format_version']}, "
                f"and this hvdtrain reads {FORMAT_VERSION}"
            )
        if _sha256(path / STATE) != manifest["sha256"]:
            raise DataError(f"{path / STATE} is damaged: its SHA-256 is not that of the manifest")
        return _read_state(path / STATE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no whole checkpoint: {' '.join(str(error).split())}") from None


def name_of(step: int) -> str:
    """The folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def identity(path: Path) -> str:
    """The hash of a checkpoint that has been loaded."""
    return str(json.loads((path / MANIFEST).read_text())["sha256"])


def write_whole(path: Path, text: str) -> None:
    """Replace a small file so that no reader, and no crash, ever sees half of it."""
    try:
        files.write_whole(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None


def _encode(checkpoint: Checkpoint) -> memoryview:
    """The HDF5 file, made in memory: HDF5 cannot be closed cleanly on a disk that fills."""
    import h5py

    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        for name, tensor in checkpoint.tensors.items():
            _write_tensor(file, f"model/{name}", tensor)
        for name, entries in checkpoint.optimizer.items():
            for key, tensor in entries.items():
                _write_tensor(file, f"optimizer/{name}/{key}", tensor)
        file.attrs["progress"] = json.dumps(checkpoint.progress)
    return content.getbuffer()


def _write_tensor(file: Any, name: str, tensor: Tensor) -> None:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:  # NumPy has no such type: store its bits
        file[name] = tensor.view(torch.int16).numpy()
        file[name].attrs["bits_of"] = "bfloat16"
    else:
        file[name] = tensor.numpy()


def _read_state(path: Path) -> Checkpoint:
    import h5py

    with h5py.File(path, "r", locking=False) as file:
        optimizer = {
            name: {key: _read_tensor(dataset) for key, dataset in group.items()}
            for name, group in file.get("optimizer", {}).items()
        }
        tensors = {name: _read_tensor(dataset) for name, dataset in file["model"].items()}
        return Checkpoint(tensors, optimizer, json.loads(file.attrs["progress"]))


def _read_tensor(dataset: Any) -> Tensor:
    tensor = torch.from_numpy(dataset[...]) if dataset.shape else torch.tensor(dataset[()])
    return tensor.view(torch.bfloat16) if "bits_of" in dataset.attrs else tensor


def _manifest(content: memoryview, progress: Mapping[str, Any]) -> bytes:
    manifest = {
        "format_version": FORMAT_VERSION,
        "step": progress["step"],
        "position": progress["position"],
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    return json.dumps(manifest, indent=1).encode()


def _write_synced(path: Path, content: bytes | memoryview) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
