"""What Slurm says of jobs and of itself; sacct is not needed."""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain import timelimit
from hvdtrain.errors import UsageError

ACTIVE = frozenset(
    {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD"}
    | {"RESIZING", "STAGE_OUT", "STOPPED", "SIGNALING", "SPECIAL_EXIT", "REQUEUE_FED"}
)
SECONDS = 60


@dataclass(frozen=True)
class State:
    """A job as Slurm sees it: its state in Slurm's words, its nodes, and why it waits or ended.

    `name` tells it from a job that had the same number before Slurm was set up anew.
    """

    state: str
    name: str = ""
    nodes: str = ""
    elapsed: str = ""
    reason: str = ""

    @property
    def is_active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in ACTIVE


def ask(command: str, *arguments: str, errors_too: bool = False) -> str:
    """What one of Slurm's commands prints, on standard error too if asked.

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
    return done.stdout + (done.stderr if errors_too else "")


def states(numbers: Sequence[str]) -> dict[str, State]:
    """The state of each of these jobs that Slurm still knows.

    Raises:
        UsageError: as `ask`.
    """
    found = {}
    wanted = set(numbers)
    if not wanted:
        return {}
    columns = "%i|%T|%N|%M|%r|%j"
    whose = f"--user={os.getuid()}"
    lines = ask("squeue", "--noheader", whose, "--states=all", "--array", f"--format={columns}")
    for line in lines.splitlines():
        number, state, nodes, elapsed, reason, name = line.strip().split("|", 5)
        if number in wanted:
            why = "" if reason == "None" else reason
            found[number] = State(state, name, nodes, elapsed, why)
    return found


def cancel(numbers: Sequence[str]) -> None:
    """End these jobs, waiting or running.

    Raises:
        UsageError: as `ask`.
    """
    ask("scancel", *numbers)


def mpi_kinds() -> list[str]:
    """The kinds that `srun --mpi` takes; none where its list is not understood.

    Raises:
        UsageError: as `ask`.
    """
    text = re.sub(r"^srun: ", "", ask("srun", "--mpi=list", errors_too=True), flags=re.MULTILINE)
    versions = re.findall(r"versions available: (.*)$", text, re.MULTILINE)
    kinds = re.findall(r"^\s*([a-z]\w*)$", text, re.MULTILINE)
    return [*kinds, *(name for line in versions for name in re.split(r"[,\s]+", line) if name)]


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
    for line in ask("sinfo", "--all", "--noheader", "--format=%P|%l|%D").splitlines():
        name, limit, nodes = line.strip().split("|")
        known = found.get(name.rstrip("*"))
        count = int(nodes) + (known.nodes if known else 0)
        found[name.rstrip("*")] = Partition(timelimit.minutes(limit), count, name.endswith("*"))
    return found
