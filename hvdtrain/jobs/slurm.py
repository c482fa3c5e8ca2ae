"""Submit to Slurm through submitit, and query its jobs, partitions and kinds of MPI."""

import io
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.jobs.options import BLOCKED, JobOptions, Site, sbatch_parameters
from hvdtrain.options import requests
from hvdtrain.training.starts import SUBMISSION

ACTIVE = frozenset(
    {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD"}
    | {"RESIZING", "STAGE_OUT", "STOPPED", "SIGNALING", "SPECIAL_EXIT", "REQUEUE_FED"}
)
SECONDS = 60
POLL_SECONDS = 2
NO_ANSWER = "timed out|contact|transmitted"  # in sbatch's message: Slurm may accept the job later
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAFE_PATH = "PYTHONSAFEPATH"


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


# What to do about a job that ended in a state of Slurm's.
CURES = {
    "OUT_OF_MEMORY": "it needed more memory than it had requested: submit it with a larger --mem, "
    "more ranks, or a smaller --batch-size",
    "TIMEOUT": "its time was over: submit it again, with a longer --time or --chain, to resume it",
    "NODE_FAIL": "a node failed: submit it again, and it resumes",
    "BOOT_FAIL": "a node did not start: submit it again",
    "PREEMPTED": "a job of a higher priority took its nodes: submit it again, and it resumes",
    "CANCELLED": "it was cancelled: submit it again, and it resumes",
    "DEADLINE": "it could not end before its deadline",
}


def states(numbers: Sequence[str]) -> dict[str, State]:
    """Return the states of those of these jobs that Slurm still knows, by number.

    Slurm forgets a job minutes after its end, unless it keeps accounts, which sacct prints.

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
    if forgotten := sorted(requested - known.keys()):
        known |= _accounted(forgotten)
    return known


def _accounted(numbers: Sequence[str]) -> dict[str, State]:
    """Return what Slurm's accounts have of jobs, by number; nothing where it keeps none."""
    columns = "--format=JobID,State,NodeList,Elapsed,JobName"
    arguments = ("--allocations", "--noheader", "--parsable2", columns)
    try:
        lines = query("sacct", *arguments, f"--jobs={','.join(numbers)}").splitlines()
    except UsageError:
        return {}
    known = {}
    for line in lines:
        number, state, nodes, elapsed, name = line.split("|", 4)
        if number in numbers:
            # As in "CANCELLED by 1000".
            known[number] = State(state.split()[0], name, nodes, elapsed)
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
        by_name[name.rstrip("*")] = Partition(requests.minutes(limit), count, name.endswith("*"))
    return by_name


@dataclass(frozen=True)
class Request:
    """Runs of one size, which become one submission.

    Attributes:
        runs: configurations with their run folders.
        job: resources and limits of the jobs.
        site: settings of the site.
        logs: folder for the output of the jobs.
        name: name of the jobs.
        parallel: number of runs that may wait or run at the same time.
        submission: identifier shared by the jobs of one chain, to distinguish them from jobs that
            are submitted later.
    """

    runs: tuple[TrainConfig, ...]
    job: JobOptions
    site: Site
    logs: Path
    name: str
    parallel: int = 1
    submission: str = field(default_factory=lambda: secrets.token_hex(8))


def submit_request(request: Request, dependency: str | None) -> list[str]:
    """Submit the runs through submitit; return the job number of each run.

    The jobs execute a command line. submitit would pickle a function, and a pickle is a program
    that anyone who can write the file can replace.

    Raises:
        UsageError: if sbatch refuses the job.
    """
    import submitit

    executor = _executor(request)
    runs = [str(training.run) for training in request.runs]
    request.logs.mkdir(parents=True, exist_ok=True)
    if request.job.cluster == "local":
        with _detached(), _without_modules_of_the_current_folder():
            number = executor._submit_command(_local_command(runs)).job_id
        return [str(number)] * len(runs)
    if dependency is not None:
        executor.parameters["dependency"] = dependency
        executor.parameters["additional_parameters"]["kill-on-invalid-dep"] = "yes"
    try:
        # submitit prints the messages of sbatch a second time.
        with _outside_jobs(), redirect_stderr(io.StringIO()), _children_ignore_signals():
            number = executor._submit_command(_command(executor, runs)).job_id
    except submitit.core.utils.FailedJobError as error:
        with _children_ignore_signals():
            number = _accepted(request, str(error))
    return [f"{number}_{place}" for place in range(len(runs))] if len(runs) > 1 else [str(number)]


class NotKnown(UsageError):
    """Slurm may have a job that it did not confirm."""


def _accepted(request: Request, message: str) -> str:
    """Return the number of a job that Slurm has, although sbatch failed: as after a timeout.

    Raises:
        UsageError: if Slurm has no such job.
        NotKnown: if it does not answer.
    """
    lines = [line for line in message.splitlines() if line.strip()]
    reason = lines[-1] if lines else "it printed no reason"
    if lines and not re.search(NO_ANSWER, reason):
        raise UsageError(f"sbatch refused the job: {reason}") from None
    # Each script has a unique name; submitit renames that of a job whose number it knows.
    scripts = request.logs.glob(".submission_file_*.sh")
    script = max(scripts, key=lambda path: path.stat().st_mtime_ns).name
    arguments = ("--noheader", f"--user={os.getuid()}", "--states=all", "--format=%F|%o")
    until = time.monotonic() + SECONDS / 2
    while True:
        try:
            jobs = query("squeue", *arguments)
        except UsageError as silent:
            raise NotKnown(
                f"{reason}, and whether Slurm has the job is not known ({silent}): if squeue "
                f"lists a job {request.name}, cancel it before you submit again"
            ) from None
        for number, _, command in (line.strip().partition("|") for line in jobs.splitlines()):
            if script in command:
                return number
        if time.monotonic() >= until:
            raise UsageError(f"sbatch refused the job: {reason}") from None
        time.sleep(POLL_SECONDS)


def dry_run(request: Request) -> str:
    """Return the script that would be passed to sbatch.

    Raises:
        UsageError: with `--cluster local`, where there is no script.
    """
    if request.job.cluster == "local":
        raise UsageError(
            "--dry-run is not possible with --cluster local, which needs no script: leave it out"
        )
    executor = _executor(request)
    command = _command(executor, [str(training.run) for training in request.runs])
    text: str = executor._make_submission_file_text(command, "")
    return text


def task_command(mode: str) -> list[str]:
    """Return the command of `jobs.task`, without its run folders."""
    return [sys.executable, "-P", "-m", "hvdtrain.jobs.task", mode]


def _command(executor: Any, runs: Sequence[str]) -> str:
    """Return the command for srun; several runs become an array."""
    if len(runs) == 1:
        return f"{BLOCKED} {shlex.join([*task_command('rank'), *runs])}"
    executor.parameters["map_count"] = len(runs)
    executor.parameters["setup"].append(f"runs=({shlex.join(runs)})")
    return f'{BLOCKED} {shlex.join(task_command("rank"))} "${{runs[SLURM_ARRAY_TASK_ID]}}"'


def _local_command(runs: Sequence[str]) -> str:
    """Return the command for this machine, with the GPUs and paths that this process sees."""
    changes = []
    for name in ("CUDA_VISIBLE_DEVICES", SAFE_PATH):  # submitit hides all GPUs
        value = os.environ.get(name)
        changes += ["-u", name] if value is None else [f"{name}={value}"]
    changes.sort(key="=".__contains__)
    return shlex.join(["env", *changes, *task_command("runs"), *runs])


@contextmanager
def _without_modules_of_the_current_folder() -> Iterator[None]:
    """Keep programs that start within the context from importing out of their current folder."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


@contextmanager
def _children_ignore_signals() -> Iterator[None]:
    """Start programs with these signals blocked: a terminal sends Ctrl-C to all its programs."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _outside_jobs() -> Iterator[None]:
    """Remove the variables of an enclosing Slurm job from the environment within the context."""
    import submitit

    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
    kept = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    with submitit.helpers.clean_env():
        os.environ |= kept
        yield


@contextmanager
def _detached() -> Iterator[None]:
    """Keep programs that start within the context from holding the terminal or a pipe open."""
    saved = [os.dup(number) for number in (1, 2)]
    devnull = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(devnull, number)
    try:
        yield
    finally:
        for number, old in zip((1, 2), saved, strict=True):
            os.dup2(old, number)
            os.close(old)
        os.close(devnull)


def _executor(request: Request) -> Any:
    """Return submitit's executor for a request."""
    import submitit

    job, site = request.job, request.site
    if job.cluster == "local":
        executor = submitit.LocalExecutor(folder=request.logs)
        executor.update_parameters(
            timeout_min=job.minutes(),
            gpus_per_node=job.gpus_per_node,
            signal_delay_s=site.warning_seconds,
        )
        return executor
    ranks = job.ranks_per_node(request.runs[0])
    slurm_executor = submitit.SlurmExecutor(folder=request.logs)
    slurm_executor.update_parameters(
        **sbatch_parameters(job, site, ranks, request.name), array_parallelism=request.parallel
    )
    slurm_executor.parameters["setup"].append(f"export {SUBMISSION}={request.submission}")
    slurm_executor.parameters["wckey"] = None  # some sites refuse submitit's default
    return slurm_executor
