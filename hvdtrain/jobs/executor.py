"""Runs in the hands of submitit."""

import io
import os
import secrets
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.jobs import script
from hvdtrain.jobs.options import JobOptions
from hvdtrain.jobs.site import Site
from hvdtrain.jobs.undisturbed import deaf_children
from hvdtrain.training.starts import SUBMISSION

SAFE_PATH = "PYTHONSAFEPATH"


@dataclass(frozen=True)
class Request:
    """Runs of one size, which become one submission.

    Attributes:
        runs: configurations with their run folders.
        logs: folder of what their jobs print.
        name: of the jobs.
        parallel: how many of the runs may wait or run at a time.
        submission: tells the jobs of a chain from those that are made later.
    """

    runs: tuple[TrainConfig, ...]
    job: JobOptions
    site: Site
    logs: Path
    name: str
    parallel: int = 1
    submission: str = field(default_factory=lambda: secrets.token_hex(8))


def submitted(request: Request, dependency: str | None) -> list[str]:
    """Hand the runs to submitit; the number of each one's job.

    What the jobs execute is a command line. submitit would pickle a function, and a pickle is a
    program that whoever can write the file can replace.
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
        # submitit repeats what sbatch says.
        with _outside_jobs(), redirect_stderr(io.StringIO()), deaf_children():
            number = executor._submit_command(_command(executor, runs)).job_id
    except submitit.core.utils.FailedJobError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else "it does not say why"
        raise UsageError(f"sbatch refused the job: {reason}") from None
    return [f"{number}_{place}" for place in range(len(runs))] if len(runs) > 1 else [str(number)]


def dry_run(request: Request) -> str:
    """The script that sbatch would be given.

    Raises:
        UsageError: if there would be none.
    """
    if request.job.cluster == "local":
        raise UsageError("--dry-run shows the script of a job: with --cluster local there is none")
    executor = _executor(request)
    command = _command(executor, [str(training.run) for training in request.runs])
    text: str = executor._make_submission_file_text(command, "")
    return text


def _task(how: str) -> list[str]:
    return [sys.executable, "-P", "-m", "hvdtrain.jobs.task", how]


def _command(executor: Any, runs: Sequence[str]) -> str:
    """What srun starts, in the script of these runs; several are an array."""
    if len(runs) == 1:
        return f"{script.BLOCKED} {shlex.join([*_task('rank'), *runs])}"
    executor.parameters["map_count"] = len(runs)
    executor.parameters["setup"].append(f"runs=({shlex.join(runs)})")
    return f'{script.BLOCKED} {shlex.join(_task("rank"))} "${{runs[SLURM_ARRAY_TASK_ID]}}"'


def _local_command(runs: Sequence[str]) -> str:
    """What submitit starts on this machine, with the GPUs and the paths that are seen here."""
    changes = []
    for name in ("CUDA_VISIBLE_DEVICES", SAFE_PATH):  # submitit hides all GPUs
        value = os.environ.get(name)
        changes += ["-u", name] if value is None else [f"{name}={value}"]
    changes.sort(key="=".__contains__)
    return shlex.join(["env", *changes, *_task("runs"), *runs])


@contextmanager
def _without_modules_of_the_current_folder() -> Iterator[None]:
    """What is started meanwhile imports nothing from the folder that it is started in."""
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
def _outside_jobs() -> Iterator[None]:
    """Without what a job that this is called in has put into the environment."""
    import submitit

    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
    where = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    with submitit.helpers.clean_env():
        os.environ |= where
        yield


@contextmanager
def _detached() -> Iterator[None]:
    """What is started meanwhile does not hold the terminal, or a pipe, open."""
    kept = [os.dup(number) for number in (1, 2)]
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nothing, number)
    try:
        yield
    finally:
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)
        os.close(nothing)


def _executor(request: Request) -> Any:
    """submitit's executor for a request."""
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
    each = job.ranks_per_node(request.runs[0])
    on_slurm = submitit.SlurmExecutor(folder=request.logs)
    on_slurm.update_parameters(
        **script.parameters(job, site, each, request.name), array_parallelism=request.parallel
    )
    on_slurm.parameters["setup"].append(f"export {SUBMISSION}={request.submission}")
    on_slurm.parameters["wckey"] = None  # some sites refuse the one that submitit gives
    return on_slurm
