"""Ownership of a run folder: one run at a time, and a run that lost it cannot get it back.

`owner.json` names the run that writes to a folder. A second run is refused while the first one
gives signs of life. An owner that is known to have ended is replaced at once, any other owner
after STALE_SECONDS without a heartbeat. Each owner has its own token. The token is part of the
names of unfinished files, and is compared again right before they become final, so that a run that
was replaced while it was suspended or disconnected commits and removes nothing.

Times are those of files on the same disk: the clocks of nodes and of file servers differ.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files, records

NAME = "owner.json"
LOCK = ".owner.lock"
LAUNCH = "HVDTRAIN_LAUNCH"  # ID:NUMBER, set by a launcher that restarts its ranks
LAUNCHED = "HVDTRAIN_LAUNCHED"  # when it was started, in seconds since boot
BEAT_SECONDS = 2.0
STALE_SECONDS = 20.0
LOOK_SECONDS = 0.2
READS = 3  # attempts to read an owner file before it counts as unreadable


@dataclass(frozen=True)
class Claimant:
    """A process that owns a folder or file, or wants to.

    Attributes:
        token: unique to this claimant.
        place: the scope in which `pid` is unique: a boot of a host, and a process namespace.
        started: when the process started, in clock ticks since that boot. It distinguishes the
            process from a later one with the same number.
        starts: the number of earlier starts by the Slurm job or launcher, by its name. A later
            start by the same one means that this claimant has ended.
    """

    token: str
    host: str
    place: str
    pid: int
    started: str
    starts: dict[str, int]

    def __str__(self) -> str:
        by = next((f"{name}, " for name in self.starts if name.startswith("Slurm")), "")
        return f"{by}process {self.pid} on {self.host}"

    def is_over(self, by: "Claimant") -> bool:
        """Return whether the claimant `by`, on this host, knows that this one has ended."""
        if any(self.starts.get(name, number) < number for name, number in by.starts.items()):
            return True
        return bool(self.place) and self.place == by.place and _start(self.pid) != self.started


@dataclass(frozen=True)
class Owner:
    """The claim of a run on its folder, the same on all ranks."""

    path: Path
    token: str

    def holds(self) -> bool:
        """Return whether the folder still belongs to this run.

        Raises:
            DataError: if the owner file cannot be read.
        """
        return _token(_read_surely(self.path)) == self.token

    def check(self) -> None:
        """Refuse to write to a folder that no longer belongs to this run.

        Raises:
            UsageError: if the folder belongs to another run now, or to none.
            DataError: if the owner file cannot be read.
        """
        claimant = _read_surely(self.path)
        if _token(claimant) == self.token:
            return
        now = "is gone" if claimant is None else f"names {claimant} now"
        raise UsageError(
            f"{self.path.parent} no longer belongs to this run ({self.path.name} {now}): another "
            "start took it over, or it was removed; this run ends and leaves it unchanged"
        )

    def release(self) -> None:
        """Remove the owner file if the folder belongs to this run."""
        with suppress(OSError, DataError):
            if self.holds():
                self.path.unlink()


def claim(
    folder: Path,
    beats: Path,
    say: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Owner:
    """Make this process the owner of a folder, which is created if it does not exist.

    Args:
        beats: a folder whose files are replaced regularly while the owner is alive.
        say: called with a message if this process has to wait.

    Raises:
        UsageError: if another owner is alive.
        DataError: if the disk cannot be written to.
    """
    path, claimant = folder / NAME, _this_process()
    content = (json.dumps(asdict(claimant), indent=1) + "\n").encode()
    first: tuple[str, int] | None = None
    try:
        files.make_folders(beats)
        while True:
            with alone(folder / LOCK):
                held, newest = _read(path), _newest(path, beats)
                sign = (_token(held), newest)
                is_first = first is None
                if is_first:  # from now on use the process's clock: the disk's may be changed
                    age = max(0.0, _disk_time(folder, claimant.token) - newest / 1e9)
                    first, silent_since = sign, clock() - age
                is_stale = sign == first and clock() - silent_since > STALE_SECONDS
                if not path.exists() or is_stale or (held is not None and held.is_over(claimant)):
                    files.write_whole(path, lambda file: file.write(content))
                    return Owner(path, claimant.token)
            if sign != first:
                raise UsageError(
                    f"{folder} is in use by {held or 'another run'}, which is alive: wait until "
                    "it ends, or choose another --run (a run that was killed on another host "
                    f"counts as ended {STALE_SECONDS:.0f} s after its last heartbeat)"
                )
            if is_first:
                age = clock() - silent_since
                say(
                    f"{folder} belongs to {held or 'another run'}, last seen {age:.0f} s ago: "
                    f"waiting up to {STALE_SECONDS - age:.0f} s to see whether it is alive"
                )
            sleep(LOOK_SECONDS)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None


@contextmanager
def alone(path: Path, say: Callable[[str], object] | None = None) -> Iterator[None]:
    """Hold a lock file inside the block, after waiting for other processes that hold it.

    The file is removed if its process is known to have ended, or has not touched it for
    STALE_SECONDS.

    Args:
        say: called with a message that names the holder, if this process has to wait.

    Raises:
        OSError: if the file cannot be created.
    """
    claimant = _this_process()
    _make_alone(path, claimant, say)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, name="hvdtrain-alone", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        Owner(path, claimant.token).release()


def _make_alone(path: Path, claimant: Claimant, say: Callable[[str], object] | None) -> None:
    seen, since, is_said = (-1, ""), time.monotonic(), False
    while True:
        if _made(path, claimant):
            return
        held = _read(path)
        with suppress(FileNotFoundError):
            now = (path.stat().st_mtime_ns, _token(held))
            if now != seen:
                seen, since = now, time.monotonic()
            if (held and held.is_over(claimant)) or time.monotonic() - since > STALE_SECONDS:
                _remove(path, seen[1], claimant.token)
                continue
        if say is not None and not is_said:
            say(f"waiting for {held or 'another process'}, which holds {path}")
            is_said = True
        time.sleep(LOOK_SECONDS / 2)


def _made(path: Path, claimant: Claimant) -> bool:
    """Create a claimant's file, unless there is one, and leave none that could not be written."""
    try:
        file = path.open("x")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(json.dumps(asdict(claimant)))
    except OSError:  # as on a full disk
        with suppress(OSError):
            path.unlink()
        raise
    return True


def _remove(path: Path, token: str, own_token: str) -> None:
    """Remove the file of a claimant that ended, unless another claimant holds it by now."""
    aside = path.with_name(f"{path.name}.{own_token}")
    with suppress(FileNotFoundError):
        path.rename(aside)
        held = _read(aside)
        if _token(held) != token:  # also if it is just being written
            with suppress(OSError):  # a third process was faster
                os.link(aside, path)
        aside.unlink()


def _this_process() -> Claimant:
    starts = {}
    if job := os.environ.get("SLURM_JOB_ID"):
        number = os.environ.get("SLURM_RESTART_COUNT", "0")
        starts[f"Slurm job {job}"] = int(number) if number.isdecimal() else 0
    launch, _, number = os.environ.get(LAUNCH, "").partition(":")
    if launch and number.isdecimal():
        starts[f"launcher {launch}"] = int(number)
    pid, host = os.getpid(), socket.gethostname()
    return Claimant(secrets.token_hex(8), host, _place(host), pid, _start(pid), starts)


def _place(host: str) -> str:
    """Return this boot of the host and its process namespace; empty if they are not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{host} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start(pid: int) -> str:
    """Return when a process of this host started, in ticks since boot; empty if it has ended."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else others[18]


def _token(claimant: Claimant | None) -> str:
    return claimant.token if claimant else ""


def _read_surely(path: Path) -> Claimant | None:
    """Return the claimant that a file names, None if there is no file.

    Raises:
        DataError: if the file cannot be read.
    """
    for number in range(READS):
        try:
            return _parse(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = error.strerror
        time.sleep(LOOK_SECONDS * number)
    raise DataError(f"{path} cannot be read: {reason}")


def _read(path: Path) -> Claimant | None:
    """Return the claimant that a file names, None if that is not known."""
    with suppress(OSError):
        return _parse(path)
    return None


def _parse(path: Path) -> Claimant | None:
    text = records.content(path)
    with suppress(ValueError):
        return records.parse(text, Claimant)
    return None


def _newest(path: Path, beats: Path) -> int:
    """Return the disk's time in ns of the newest heartbeat, 0 if there is none."""
    times = [0]
    for file in (path, *beats.glob("rank-*.json")):
        with suppress(OSError), file.open("rb") as opened:
            # Opening a file makes a network file system query its server.
            times.append(os.fstat(opened.fileno()).st_mtime_ns)
    return max(times)


def _disk_time(folder: Path, token: str) -> float:
    """Return the current time, in seconds, of the clock that stamps the files of this folder."""
    path = folder / f".clock-{token}"
    try:
        with path.open("xb") as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime
    finally:
        with suppress(OSError):
            path.unlink()


def process_start() -> float:
    """Return when this process was started, in seconds since boot: that clock is never set.

    Not by psutil, whose value is up to a second too early, and which a launcher does not load.
    """
    ticks = _start(os.getpid())
    return int(ticks) / os.sysconf("SC_CLK_TCK") if ticks else since_boot()


def since_boot() -> float:
    """Return the seconds since this machine started, the same for all of its processes."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
