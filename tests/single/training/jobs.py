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

from tests import warm
from tests.conftest import program, program_environment, run_program

# For what takes a few, on a machine that is ten times slower; what hangs takes more, or for ever.
SOON_SECONDS = 100.0


def begin(
    options: Sequence[str],
    ready: Callable[[], object],
    cold: bool = False,
    launcher: Sequence[str] = (),
) -> "subprocess.Popen[str]":
    """Start a job; returns once `ready` is true."""
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
    """Return once it is so; fail if the job ends before."""
    while not is_so():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def saves(run: Path) -> bool:
    """Whether a run has begun to save its first checkpoint."""
    folder = run / "checkpoints"
    return folder.exists() and any(folder.iterdir())


def clients_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The processes that a job's mpirun has started, by rank, as far as they are there."""
    found = {}
    with suppress(psutil.Error):
        for child in warm.fork_of(psutil.Process(process.pid)).children(recursive=True):
            with suppress(psutil.Error, KeyError):
                found[int(child.environ()["OMPI_COMM_WORLD_RANK"])] = child
    return [found[rank] for rank in sorted(found)]


def ranks_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The processes in which a job's ranks compute, as far as they are there."""
    found = []
    for client in clients_of(process):
        with suppress(psutil.Error):
            found.append(warm.fork_of(client))
    return found


def members_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The ranks of a job, or the process that has no launcher, or not yet any ranks."""
    return ranks_of(process) or [warm.fork_of(psutil.Process(process.pid))]


def suspend(members: Sequence[psutil.Process]) -> None:
    """Return once these processes of a job have stopped, or ended."""
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.suspend()
    while not all(is_stopped(member) for member in members):
        time.sleep(0.01)


def is_stopped(process: psutil.Process) -> bool:
    """Whether a process is suspended, or has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return True


def resume(members: Sequence[psutil.Process]) -> None:
    """Let those of a job go on that are there."""
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.resume()


def alive(run: Path) -> list[int]:
    """Processes, launchers included, that still work on this run."""
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
    """The summary of a run that is over."""
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """What is started meanwhile has this umask."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def changeable_by_others(folder: Path) -> list[str]:
    """What others than its owner may write to, of a folder and all in it but symbolic links."""
    every = [path for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
    return [str(path) for path in every if path.stat().st_mode & 0o022]


@dataclass(frozen=True)
class Disk:
    """A small file system.

    Attributes:
        folder: where programs see it that are started by `launcher`.
        seen: where this process sees it.
    """

    folder: Path
    seen: Path
    launcher: tuple[str, ...] = ()

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run the program to its end where it sees the disk."""
        return run_program(*arguments, launcher=self.launcher, cold=bool(self.launcher))


@contextmanager
def small_disk(folder: Path, size: str, as_user: bool = False) -> Iterator[Disk]:
    """A file system of its own in a new folder; for users in a mount name space of their own."""
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
    """Each epoch of a ledger holds each sample once; so many has `small_set`."""
    for samples in samples_of(ledger, epochs):
        assert len(samples) == len(set(samples)) == count


def fill(path: Path) -> None:
    """Take all that is left of a disk."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(2**14)):
            pass


def events_of(run: Path, event: str) -> list[dict[str, Any]]:
    """The lines of this kind of a run's metrics; one that is being written is left out."""
    whole_lines = (run / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
    lines = map(json.loads, whole_lines)
    return [line for line in lines if line["event"] == event]


def samples_of(ledger: Path, epochs: int) -> list[list[str]]:
    """The samples of each epoch, in the order of the ledger."""
    rows = [line.split(",") for line in ledger.read_text().splitlines()[1:]]
    return [[row[3] for row in rows if int(row[0]) == epoch + 1] for epoch in range(epochs)]
