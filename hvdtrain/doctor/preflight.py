"""The checks of `doctor --job`, in which the ranks of a job examine the allocation together."""

import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain import __version__, world
from hvdtrain.doctor.check import Check, is_fit, report_as_json, show
from hvdtrain.doctor.probe import median_milliseconds
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host.launchers import has_horovod
from hvdtrain.world import World

SECONDS_TO_SHOW = 10.0  # limit until a network file system shows another host's file
ELEMENTS = 25_000_000 // 4  # size of the timed all-reduce: a small ResNet's gradients
ROUNDS = 5
MEGA = 2**20


@dataclass(frozen=True)
class Seen:
    """The properties of one rank and its host, as the rank sees them."""

    host: str
    cores: tuple[int, ...]
    threads: int
    gpus: int
    shared_memory: int
    versions: str
    folder_seconds: float | None


def preflight(as_json: bool) -> int:
    """Examine the ranks of this job, and print the results on rank 0. Collective.

    Returns:
        The exit code: 0 if the allocation is fit, 1 if a check failed.

    Raises:
        UsageError: outside a job of several ranks, or if its ranks cannot connect.
        DataError: if the current folder cannot be written to.
    """
    current = world.start()
    if current.size == 1:
        raise UsageError(
            "doctor --job checks the ranks of a job: start it as you start train, such as "
            "srun --mpi=pmix hvdtrain doctor --job"
        )
    checks = job_checks(current.launcher, current.gather(_look(current)))
    if current.rank == 0 and not as_json:
        # Printed before the all-reduce, which may hang if the network is at fault.
        show(
            checks, {}, f"Running an all-reduce of {4 * ELEMENTS / MEGA:.0f} MiB on all ranks ..."
        )
    checks.append(_sum(current))
    world.stop()
    if current.rank == 0:
        faults = [check.name for check in checks if check.state == "fault"]
        closing = f"This job has faults: {', '.join(faults)}." if faults else "This job is fit."
        print(report_as_json(checks, {})) if as_json else show(checks[-1:], {}, closing)
    return 0 if is_fit(checks) else 1


def job_checks(launcher: str, seen: Sequence[Seen]) -> list[Check]:
    """Return the checks that follow from the properties of the ranks."""
    hosts = Counter(one.host for one in seen)
    places = ", ".join(f"{count} on {host}" for host, count in hosts.items())
    versions = Counter(one.versions for one in seen)
    same = Check("versions", "ok", f"{seen[0].versions} on all ranks")
    if len(versions) > 1:
        text = "; ".join(f"{value} on {count} rank(s)" for value, count in versions.items())
        same = Check("versions", "fault", text, "use one environment on all nodes")
    least = min(seen, key=lambda one: one.shared_memory)
    text = f"{least.shared_memory / MEGA:,.0f} MiB free in /dev/shm of {least.host}"
    memory = Check("shared memory", "ok", text)
    if least.shared_memory < 64 * MEGA:
        memory = Check("shared memory", "fault", text, "MPI needs it: ask the site, or free it")
    ranks = Check("ranks", "ok", f"{len(seen)} by {launcher}: {places}")
    return [ranks, same, _affinity(seen), _gpus(seen), memory, _folder(seen)]


def _look(current: World) -> Seen:
    from hvdtrain.device import gpu_count

    memory = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return Seen(
        host=socket.gethostname(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        threads=current.threads,
        gpus=gpu_count(),
        shared_memory=memory.f_bavail * memory.f_frsize if memory else 0,
        versions=f"hvdtrain {__version__}, Python {sys.version.split()[0]}",
        folder_seconds=_see_folder(current),
    )


def _see_folder(current: World) -> float | None:
    """Return the seconds until this rank sees a new file of rank 0 in the current folder.

    None if it does not see the file within SECONDS_TO_SHOW.
    """
    path = current.broadcast(Path.cwd() / f".hvdtrain-doctor-{os.getpid()}")
    fault = ""
    if current.rank == 0:
        try:
            path.touch()
        except OSError as error:
            fault = f"{Path.cwd()} is not writable ({error.strerror}): work in another folder"
    if fault := current.broadcast(fault):
        raise DataError(fault)
    start = time.monotonic()
    while not (is_seen := path.exists()) and time.monotonic() - start < SECONDS_TO_SHOW:
        time.sleep(0.05)
    late = time.monotonic() - start
    current.barrier()
    if current.rank == 0:
        path.unlink()
    return late if is_seen else None


def _sum(current: World) -> Check:
    """Return the check of an all-reduce by Horovod, or MPI if a rank has none, with its time."""
    import torch

    values = torch.full((ELEMENTS,), float(current.rank))
    sums: list[Any] = []
    if by_horovod := all(current.gather(has_horovod())):
        horovod = world.start_horovod(4 * ELEMENTS)

    def add() -> None:
        if by_horovod:
            sums.append(horovod.allreduce(values, op=horovod.Sum, name="preflight"))
            return
        assert current.communicator is not None
        sums.append(torch.empty_like(values))
        current.communicator.Allreduce(values.numpy(), sums[-1].numpy())

    milliseconds = median_milliseconds(add, ROUNDS)
    expected = current.size * (current.size - 1) / 2
    if not all(current.gather(all(bool((total == expected).all()) for total in sums))):
        return Check("all-reduce", "fault", "the sum is wrong", "ask the site about its MPI")
    slowest, size = max(current.gather(milliseconds)), 4 * ELEMENTS / MEGA
    rate = 1e3 * size / slowest
    return Check("all-reduce", "ok", f"{size:.0f} MiB in {slowest:.1f} ms, {rate:,.0f} MiB/s")


def _affinity(seen: Sequence[Seen]) -> Check:
    """Return the check that each rank has enough cores, and cores that no other rank uses."""
    crowded = []
    for host in dict.fromkeys(one.host for one in seen):
        ranks = [one for one in seen if one.host == host]
        cores = {core for one in ranks for core in one.cores}
        threads = sum(one.threads for one in ranks)
        if threads > len(cores):
            crowded.append(f"{threads} threads on {len(cores)} cores of {host}")
    numbers = sorted({one.threads for one in seen})
    text = f"{' or '.join(map(str, numbers))} thread(s) per rank"
    if crowded:
        cure = "request more CPUs per task (--cpus-per-task), or fewer ranks"
        return Check("cores", "note", f"{text}: {'; '.join(crowded)}", cure)
    return Check("cores", "ok", text)


def _gpus(seen: Sequence[Seen]) -> Check:
    having = [one for one in seen if one.gpus]
    if not having:
        return Check("GPUs", "ok", "none: ranks train on CPUs")
    if len(having) < len(seen):
        hosts = ", ".join(sorted({one.host for one in seen if not one.gpus}))
        return Check("GPUs", "fault", f"none on {hosts}", "request GPUs on every node")
    ranks = Counter(one.host for one in seen)
    crowded = sorted({one.host for one in seen if ranks[one.host] > one.gpus > 1})
    if crowded:
        text = f"fewer GPUs than ranks on {', '.join(crowded)}"
        return Check("GPUs", "note", text, "request one GPU per rank (--gpus-per-node)")
    return Check("GPUs", "ok", f"{having[0].gpus} seen by each rank of {having[0].host}")


def _folder(seen: Sequence[Seen]) -> Check:
    blind = sorted({one.host for one in seen if one.folder_seconds is None})
    name = "file system"
    if blind:
        text = f"{Path.cwd()} is not the same folder on {', '.join(blind)}"
        return Check(name, "fault", text, "work in a folder that all nodes share")
    late = max(one.folder_seconds or 0.0 for one in seen)
    return Check(name, "ok", f"all ranks see {Path.cwd()}, a new file within {late:.1f} s")
