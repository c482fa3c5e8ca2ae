"""Injection of the faults of `--inject`: real faults, in the requested rank and step."""

import ctypes
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from hvdtrain.checkpoint import store
from hvdtrain.engine.folders import RunFolder
from hvdtrain.engine.session import Session
from hvdtrain.errors import UsageError
from hvdtrain.options.requests import Fault, parse_faults
from hvdtrain.plan.plan import Plan
from hvdtrain.training.console import Console

MOST_FILLED = 2**30  # bytes: a larger free space is not filled, others may need it
MORE_THAN_THERE_IS = 2**60  # bytes
WAITING = ("corrupt", "kill", "segfault", "memory", "stop")  # wait for a checkpoint to corrupt


class Injector:
    """Injects this rank's faults. A fault that ends a run is injected once, despite restarts.

    Args:
        replan: requests another plan; None if the run does not change its plan.

    Raises:
        UsageError: if a fault cannot be injected in this run.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        session: Session,
        folder: RunFolder,
        replan: Callable[[], object] | None,
    ) -> None:
        self.session, self.folder = session, folder
        self.faults = [fault for fault in faults if fault.rank in (None, session.world.rank)]
        self._held: list[IO[bytes]] = []
        self._do: dict[str, Callable[[Fault], object]] = {
            "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
            "segfault": lambda fault: ctypes.string_at(0),
            "memory": lambda fault: self.session.faults.allocate_memory(MORE_THAN_THERE_IS),
            "stop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
            "corrupt": self._corrupt,
            "truncate": self._truncate,
            "fill": self._fill,
        }
        if replan is not None:
            self._do["replan"] = lambda fault: replan()
        for fault in faults:
            _check_component(fault, session)  # on every rank, so that all raise together
            if fault.kind == "replan" and replan is None:
                raise UsageError(
                    "--inject replan: this run does not change its plan; use --plan adaptive on 2 "
                    "ranks or more"
                )
        for fault in self.faults:
            if fault.kind == "nan":
                self._spoil(fault)
            if fault.kind == "fill":
                self._check_disk()

    def before(self, step: int, is_saving: bool) -> None:
        """Inject the faults that are due in this rank before it starts a step.

        Args:
            is_saving: whether a checkpoint is being written, or is written and not yet committed.
        """
        waits = False  # for the new checkpoint: then it is corrupted, and the rank ends after that
        for fault in self.faults:
            if fault.kind == "slow" and fault.step <= step < fault.step + fault.steps:
                time.sleep(fault.seconds)
            elif fault.kind in self._do and step >= fault.step:
                mark = self._place(f"{fault.kind}-step-{fault.step}-rank-{fault.rank}")
                waits |= fault.kind == "corrupt" and is_saving and not mark.exists()
                is_possible = fault.kind != "corrupt" or bool(self._newest_parts())
                if mark.exists() or not is_possible or (waits and fault.kind in WAITING):
                    continue
                mark.touch()
                self._do[fault.kind](fault)

    def _place(self, name: str) -> Path:
        folder = self.folder.path / "injected"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def _spoil(self, fault: Fault) -> None:
        """Let a component emit NaN for `fault.steps` steps, from `fault.step` onwards."""
        session, rank = self.session, self.session.world.rank
        steps = range(fault.step, fault.step + fault.steps)
        component = fault.component or _components(session, rank)[0]

        def is_due() -> bool:
            if session.activity.now()[0] not in steps:
                return False
            # Looked up each time: an adaptive plan moves components.
            return fault.rank is not None or _computing_ranks(session.plan)[component][0] == rank

        session.faults.spoil(component, is_due)

    def _newest_parts(self) -> list[Path]:
        newest = store.stored(self.folder.checkpoints)[-1:]
        return sorted(part for path in newest for part in path.glob("*.safetensors"))

    def _corrupt(self, fault: Fault) -> None:
        """Flip a bit of a checkpoint file of the newest checkpoint."""
        dice = random.Random(fault.seed)
        part = dice.choice(self._newest_parts())
        content = bytearray(part.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        part.write_bytes(content)

    def _truncate(self, fault: Fault) -> None:
        """Let this rank read a copy of the training set in which one shard is cut in half."""
        samples = self.session.splits["train"]
        index, folder = samples.index, self._place(f"rank-{fault.rank:04d}-data")
        victim = random.Random(fault.seed).choice(samples.split.shards)
        for shard in samples.split.shards:
            copy = folder / shard.file
            copy.parent.mkdir(parents=True, exist_ok=True)
            if shard != victim:
                with suppress(FileExistsError):
                    copy.symlink_to((index.folder / shard.file).resolve())
        shutil.copyfile(index.folder / victim.file, folder / victim.file)
        os.truncate(folder / victim.file, (folder / victim.file).stat().st_size // 2)
        samples.index = replace(index, folder=folder)
        samples.close()

    def _check_disk(self) -> None:
        path = self.folder.path
        existing = next(place for place in (path, *path.resolve().parents) if place.is_dir())
        free = shutil.disk_usage(existing).free
        if free > MOST_FILLED:
            raise UsageError(
                f"--inject fill: {free / 2**30:,.1f} GiB are free where {path} is, and others may "
                "need them: put --run on a small file system (mount -t tmpfs -o size=64m none DIR)"
            )

    def _fill(self, fault: Fault) -> None:
        """Write until the disk is full; the space is free again when this rank ends."""
        path = self._place("filling")
        file = path.open("wb", buffering=0)
        path.unlink()
        self._held.append(file)
        with suppress(OSError):
            while file.write(bytes(2**16)):
                pass


def _components(session: Session, rank: int | None) -> list[str]:
    """Return the components that a rank holds, or those of the model if `rank` is None."""
    holders = _computing_ranks(session.plan)
    return [name for name, ranks in holders.items() if rank is None or rank in ranks]


def _computing_ranks(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the ranks that compute each component."""
    return {
        name: tuple(rank for rank, share in zip(stage.ranks, stage.shares, strict=True) if share)
        for stage in plan.stages
        for name in stage.components
    }


def _check_component(fault: Fault, session: Session) -> None:
    held = _components(session, fault.rank)
    if fault.kind == "nan" and not held:
        raise UsageError(
            f"--inject nan: rank {fault.rank} computes nothing under this plan: name another rank"
        )
    if fault.component is not None and fault.component not in held:
        whose = "the model has" if fault.rank is None else f"rank {fault.rank} holds"
        raise UsageError(
            f"--inject nan: {whose} no component {fault.component!r}: use {', '.join(held)}"
        )


def make_injector(
    session: Session, folder: RunFolder, console: Console, replan: Callable[[], object] | None
) -> Injector | None:
    """Return the injector of `--inject`, or None without that option."""
    if not session.config.inject:
        return None
    faults = parse_faults(session.config.inject, session.world.size)
    for fault in faults:
        where = f"on rank {fault.rank}" if fault.rank is not None else f"in {fault.component}"
        console.say(f"injecting {fault.kind} at step {fault.step} {where}")
    return Injector(faults, session, folder, replan)
