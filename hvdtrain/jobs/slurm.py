"""Query Slurm for jobs, partitions and kinds of MPI, without sacct."""

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
    """A job as Slurm reports it.

    Attributes:
        state: Slurm's name of the state, such as PENDING.
        name: name of the job. It distinguishes the job from one that had the same number before
            Slurm was set up again.
        nodes: Slurm's list of its nodes.
        elapsed: run time as Slurm prints it.
        reason: why it waits or ended.
    """

    state: str
    name: str = ""
    nodes: str = ""
    elapsed: str = ""
    reason: str = ""

    @property
    def is_active(self) -> bool:
        """Return whether the job is waiting or running."""
        return self.state in ACTIVE


def query(command: str, *arguments: str, with_stderr: bool = False) -> str:
    """Run one of Slurm's commands; return its output, with standard error if `with_stderr`.

    Raises:
        UsageError: if Slurm is not available, does not answer, or refuses.
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
            f"Slurm is not available ({command} is not in PATH): use a login node of the "
            "cluster, or --cluster local"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"Slurm did not answer {command} within {SECONDS} s: try again later"
        ) from None
    if done.returncode != 0:
        lines = [*done.stderr.strip().splitlines(), *done.stdout.strip().splitlines()]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise UsageError(f"{command} failed: {reason.removeprefix(f'{command}: ')}")
    return done.stdout + (done.stderr if with_stderr else "")


def states(numbers: Sequence[str]) -> dict[str, State]:
    """Return the states of those of these jobs that Slurm still knows, by number.

    Raises:
        UsageError: as `query`.
    """
    known = {}
    requested = set(numbers)
    if not requested:
        return {}
    columns = "%i|%T|%N|%M|%r|%j"
    user = f"--user={os.getuid()}"
    lines = query("squeue", "--noheader", user, "--states=all", "--array", f"--format={columns}")
    for line in lines.splitlines():
        number, state, nodes, elapsed, reason, name = line.strip().split("|", 5)
        if number in requested:
            known[number] = State(state, name, nodes, elapsed, "" if reason == "None" else reason)
    return known


def cancel(numbers: Sequence[str]) -> None:
    """Cancel these jobs, waiting or running.

    Raises:
        UsageError: as `query`.
    """
    query("scancel", *numbers)


def mpi_kinds() -> list[str]:
    """Return the values that `srun --mpi` accepts; none if its list cannot be parsed.

    Raises:
        UsageError: as `query`.
    """
    printed = query("srun", "--mpi=list", with_stderr=True)
    text = re.sub(r"^srun: ", "", printed, flags=re.MULTILINE)
    versions = re.findall(r"versions available: (.*)$", text, re.MULTILINE)
    kinds = re.findall(r"^\s*([a-z]\w*)$", text, re.MULTILINE)
    return [*kinds, *(name for line in versions for name in re.split(r"[,\s]+", line) if name)]


@dataclass(frozen=True)
class Partition:
    """A partition: time limit in minutes (None: no limit), nodes, whether it is the default."""

    minutes: int | None
    nodes: int
    is_default: bool


def partitions() -> dict[str, Partition]:
    """Return the partitions by name.

    Raises:
        UsageError: as `query`.
    """
    by_name: dict[str, Partition] = {}
    for line in query("sinfo", "--all", "--noheader", "--format=%P|%l|%D").splitlines():
        name, limit, nodes = line.strip().split("|")
        known = by_name.get(name.rstrip("*"))
        count = int(nodes) + (known.nodes if known else 0)
        by_name[name.rstrip("*")] = Partition(timelimit.minutes(limit), count, name.endswith("*"))
    return by_name
