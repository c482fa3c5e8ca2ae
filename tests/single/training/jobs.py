"""Jobs of several ranks that tests disturb."""

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from hvdtrain.study import results
from tests import warm
from tests.conftest import program, program_environment, run_program

# For actions that take a few seconds, on a machine that is ten times slower.
SOON_SECONDS = 100.0


def begin(
    options: Sequence[str],
    ready: Callable[[], object],
    cold: bool = False,
    launcher: Sequence[str] = (),
) -> "subprocess.Popen[str]":
    """Start a job, and return once `ready` is true."""
    process = start(options, cold, launcher)
    wait_for(process, ready)
    return process


def start(
    options: Sequence[str],
    cold: bool = False,
    launcher: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> "subprocess.Popen[str]":
    """Start a job."""
    return subprocess.Popen(
        [*launcher, *program(*options, cold=cold)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**program_environment(), **environment},
    )


def wait_for(process: "subprocess.Popen[str]", is_so: Callable[[], object]) -> None:
    """Return once `is_so` is true; fail if the job ends before."""
    while not is_so():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def saves(run: Path) -> bool:
    """Return whether a run has started to save its first checkpoint."""
    folder = run / "checkpoints"
    return folder.exists() and any(folder.iterdir())


def clients_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Return the processes that a job's mpirun has started so far, by rank."""
    clients = {}
    with suppress(psutil.Error):
        for child in warm.fork_of(psutil.Process(process.pid)).children(recursive=True):
            with suppress(psutil.Error, KeyError):
                clients[int(child.environ()["OMPI_COMM_WORLD_RANK"])] = child
    return [clients[rank] for rank in sorted(clients)]


def ranks_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Return the processes in which a job's ranks compute, as far as they have started."""
    processes = []
    for client in clients_of(process):
        with suppress(psutil.Error):
            processes.append(warm.fork_of(client))
    return processes


def members_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Return a job's ranks, or its only process if it has no launcher or no ranks yet."""
    return ranks_of(process) or [warm.fork_of(psutil.Process(process.pid))]


def assert_adaptive(run: Path) -> None:
    """Fail unless a run of two ranks compared its components and changed its plan when forced."""
    changes = [line for line in events_of(run, "plan") if line.get("decision") == "change"]
    assert any(line["cause"] == "--inject replan" for line in changes), changes
    assert all(line["change_seconds"] > 0 for line in changes)
    profiles = events_of(run, "profile")
    assert profiles
    assert results.read(run).model == "cnn"  # a report of a run with all of these events
    for line in profiles:
        assert any(rank["times_predicted"] for rank in line["ranks"])
        assert all(
            ratio > 0 for rank in line["ranks"] for ratio in rank["times_predicted"].values()
        )


def suspend(members: Sequence[psutil.Process]) -> None:
    """Return once these processes of a job have stopped, or ended."""
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.suspend()
    while not all(is_stopped(member) for member in members):
        time.sleep(0.01)


def is_stopped(process: psutil.Process) -> bool:
    """Return whether a process is suspended, or has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return True


def resume(members: Sequence[psutil.Process]) -> None:
    """Continue these processes of a job, unless they have ended."""
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.resume()


def alive(run: Path) -> list[int]:
    """Return the processes, launchers included, that still work on this run."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(run) in " ".join(process.info["cmdline"] or []) and process.pid != os.getpid()
    ]


def wait_for_end(run: Path) -> None:
    """Return once nothing works on a run any more."""
    deadline = time.monotonic() + SOON_SECONDS
    while alive(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(run)


def summary_of(run: Path) -> dict[str, Any]:
    """Return the summary of a finished run."""
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Set the umask, also for processes that are started meanwhile."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def changeable_by_others(folder: Path) -> list[str]:
    """Return the paths in a folder, but no symbolic links, that other users can write to."""
    every = [path for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
    return [str(path) for path in every if path.stat().st_mode & 0o022]


@dataclass(frozen=True)
class Disk:
    """A small file system.

    Attributes:
        folder: its path for programs that `launcher` starts.
        seen: its path for this process.
    """

    folder: Path
    seen: Path
    launcher: tuple[str, ...] = ()

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run the program to its end, with access to the disk."""
        return run_program(*arguments, launcher=self.launcher, cold=bool(self.launcher))


@contextmanager
def small_disk(folder: Path, size: str, as_user: bool = False) -> Iterator[Disk]:
    """Mount a file system in a new folder; for users in a separate mount name space."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if not as_user and subprocess.run(mount, capture_output=True).returncode == 0:
        try:
            yield Disk(folder, folder)
        finally:
            subprocess.run(["umount", folder], check=True)
        return
    script = f"{shlex.join(mount)} && echo mounted && exec cat"
    with subprocess.Popen(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        if not holder.stdout.readline():
            pytest.skip("neither root nor a user who may have name spaces")
        enter = ("nsenter", f"--target={holder.pid}", "--user", "--mount")
        seen = Path(f"/proc/{holder.pid}/root{folder}")
        try:
            yield Disk(folder, seen, (*enter, "--preserve-credentials"))
        finally:
            holder.stdin.close()


def assert_each_sample_once(ledger: Path, epochs: int, count: int = 601) -> None:
    """Check that each epoch of a ledger holds each sample of `small_set` once."""
    for samples in samples_of(ledger, epochs):
        assert len(samples) == len(set(samples)) == count


def fill(path: Path) -> None:
    """Fill a disk."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(2**14)):
            pass


def events_of(run: Path, event: str) -> list[dict[str, Any]]:
    """Return the lines of this kind in a run's metrics, but one that is being written."""
    whole_lines = (run / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
    lines = map(json.loads, whole_lines)
    return [line for line in lines if line["event"] == event]


def samples_of(ledger: Path, epochs: int) -> list[list[str]]:
    """Return the samples of each epoch, in the order of the ledger."""
    rows = [line.split(",") for line in ledger.read_text().splitlines()[1:]]
    return [[row[3] for row in rows if int(row[0]) == epoch + 1] for epoch in range(epochs)]
