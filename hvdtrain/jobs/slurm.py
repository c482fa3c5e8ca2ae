"""What Slurm says of jobs and of itself; sacct is not needed."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.errors import UsageError

ACTIVE = frozenset(
    {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD"}
    | {"RESIZING", "STAGE_OUT", "STOPPED", "SIGNALING", "SPECIAL_EXIT", "REQUEUE_FED"}
)
SECONDS = 60


@dataclass(frozen=True)
class State:
    """A job as Slurm sees it: its state in Slurm's words, its nodes, and why it waits or ended."""

    state: str
    nodes: str = ""
    elapsed: str = ""
    reason: str = ""

    @property
    def is_active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in ACTIVE


def ask(command: str, *arguments: str) -> str:
    """What one of Slurm's commands prints.

    Raises:
        UsageError: if there is no Slurm, or it refuses.
    """
    try:
        done = subprocess.run(
            [command, *arguments],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            errors="replace",
        )
    except FileNotFoundError:
        raise UsageError(
            f"there is no Slurm here ({command} is not in PATH): go to a login node of the "
            "cluster, or give --cluster local"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"Slurm has not answered {command} for {SECONDS} s: try later") from None
    if done.returncode != 0:
        lines = [*done.stderr.strip().splitlines(), *done.stdout.strip().splitlines()]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise UsageError(f"{command} failed: {reason.removeprefix(f'{command}: ')}")
    return done.stdout


def states(numbers: Sequence[str]) -> dict[str, State]:
    """The state of each of these jobs that Slurm still knows.

    Raises:
        UsageError: as `ask`.
    """
    found = {}
    wanted = set(numbers)
    if not wanted:
        return {}
    columns = "%i|%T|%N|%M|%r"
    lines = ask("squeue", "--noheader", "--states=all", "--array", f"--format={columns}")
    for line in lines.splitlines():
        number, state, nodes, elapsed, reason = line.strip().split("|", 4)
        if number in wanted:
            found[number] = State(state, nodes, elapsed, "" if reason == "None" else reason)
    return found


def cancel(numbers: Sequence[str]) -> None:
    """End these jobs, waiting or running.

    Raises:
        UsageError: as `ask`.
    """
    ask("scancel", *numbers)


def mpi_kinds() -> list[str]:
    """The kinds that `srun --mpi` takes.

    Raises:
        UsageError: as `ask`.
    """
    return re.findall(r"^\s+([a-z]\w*)$", ask("srun", "--mpi=list"), re.MULTILINE)


@dataclass(frozen=True)
class Partition:
    """Its longest time in minutes (None: any), its nodes, and whether jobs go there by default."""

    minutes: int | None
    nodes: int
    is_default: bool


def partitions() -> dict[str, Partition]:
    """The partitions by name.

    Raises:
        UsageError: as `ask`.
    """
    found: dict[str, Partition] = {}
    for line in ask("sinfo", "--noheader", "--format=%P|%l|%D").splitlines():
        name, limit, nodes = line.strip().split("|")
        known = found.get(name.rstrip("*"))
        count = int(nodes) + (known.nodes if known else 0)
        found[name.rstrip("*")] = Partition(_minutes(limit), count, name.endswith("*"))
    return found


def _minutes(limit: str) -> int | None:
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if match is None:
        return None  # infinite, or not set
    days, hours, minutes, _ = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + minutes
