"""Ranks that resume read each file of a checkpoint once, and send its tensors to the others."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from hvdtrain import transfer
from hvdtrain.checkpoint import restore, store
from hvdtrain.checkpoint.tensorfile import Entry, read_verified
from hvdtrain.engine.progress import Progress
from hvdtrain.engine.session import Session
from hvdtrain.host.activity import Activity
from hvdtrain.world import World
from tests.mpi.common import on_first

FILES = 5  # more than ranks, so that a rank reads several
PROGRESS = {**vars(Progress("hash")), "metrics_bytes": 0, "ledger": "", "ledger_bytes": 0}
Tensors = dict[str, np.ndarray]


def tensors_of(file: int) -> Tensors:
    random = np.random.default_rng(file)
    return {
        f"model/{file}.weight": random.standard_normal((3, 2 + file)).astype(np.float32),
        f"model/{file}.half": random.standard_normal(5).astype(ml_dtypes.bfloat16),
        f"optimizer/{file}.weight/step": np.array(file, np.int64),
        f"model/{file}.none": np.zeros((0, 4)),
        f"model/{file}.flags": np.array([True, False, True]),
        f"sync/{file}.residual": np.arange(3.0) + file,  # of one rank
    }


def write(folder: Path, damaged: int | None = None) -> Path:
    for file in range(FILES):
        store.write_part(folder, "step-00000003", file, tensors_of(file))
    path = store.commit(folder, "step-00000003", range(FILES), PROGRESS, {})
    if damaged is not None:
        part = path / f"part-{damaged:04d}.safetensors"
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    return path


def session_of(world: World) -> Session:
    activity = Activity(None, world.rank, 600, lambda line: None)
    return cast(Session, SimpleNamespace(world=world, activity=activity))


def test_every_file_is_read_once_and_every_rank_gets_what_it_holds(
    world: World, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: Path = world.broadcast(tmp_path_factory.mktemp("checkpoints"))
    path: Path = on_first(world, lambda: write(folder))
    opened: list[str] = []

    def counted(folder: Path, entry: Entry) -> Mapping[str, Any]:
        opened.append(entry.name)
        return read_verified(folder, entry)

    monkeypatch.setattr(restore, "read_verified", counted)
    session = session_of(world)
    checkpoint = restore._verify(path, session)
    assert isinstance(checkpoint, restore._Verified)
    # Each rank holds another part of the model, and some tensors are held by all.
    everything = {name: value for file in range(FILES) for name, value in tensors_of(file).items()}
    names = [name for name in everything if f"/{world.rank}." in name or "half" in name]
    monkeypatch.setattr(transfer, "PIECE", 16)
    held = restore._spread(checkpoint, names, session)
    assert held.keys() == set(names)
    for name, tensor in held.items():
        assert (tensor.dtype, tensor.shape) == (everything[name].dtype, everything[name].shape)
        assert tensor.tobytes() == everything[name].tobytes(), name
    together = [name for names in world.gather(opened) for name in names]
    assert sorted(together) == [f"part-{file:04d}.safetensors" for file in range(FILES)]


def test_damage_that_one_rank_reads_is_known_to_all(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = world.broadcast(tmp_path_factory.mktemp("checkpoints"))
    path: Path = on_first(world, lambda: write(folder, damaged=1))
    fault = restore._verify(path, session_of(world))
    assert "part-0001.safetensors is damaged" in str(fault)
