"""Runs in the hands of submitit."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.jobs import script
from hvdtrain.jobs.options import JobOptions
from hvdtrain.jobs.site import Site
from hvdtrain.jobs.task import Training, Trainings


@dataclass(frozen=True)
class Request:
    """Runs of one size, which become one submission.

    Attributes:
        runs: configurations with their run folders.
        logs: folder of what their jobs print.
        name: of the jobs.
        parallel: how many of the runs may wait or run at a time.
    """

    runs: tuple[TrainConfig, ...]
    job: JobOptions
    site: Site
    logs: Path
    name: str
    parallel: int = 1


def submitted(request: Request, dependency: str | None) -> list[str]:
    """Hand the runs to submitit; the number of each one's job."""
    import submitit

    executor = _executor(request)
    arguments = [_arguments(training) for training in request.runs]
    if request.job.cluster == "local":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        with _detached():
            number = executor.submit(Trainings(tuple(arguments), visible)).job_id
        return [str(number)] * len(arguments)
    if dependency is not None:
        executor.parameters["dependency"] = dependency
        executor.parameters["additional_parameters"]["kill-on-invalid-dep"] = "yes"
    try:
        # submitit repeats what sbatch says.
        with _outside_jobs(), redirect_stderr(io.StringIO()), executor.batch():
            jobs = [executor.submit(Training(words)) for words in arguments]
        return [str(job.job_id) for job in jobs]
    except submitit.core.utils.FailedJobError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else "it does not say why"
        raise UsageError(f"sbatch refused the job: {reason}") from None


def dry_run(request: Request) -> str:
    """The script that sbatch would be given.

    Raises:
        UsageError: if there would be none.
    """
    if request.job.cluster == "local":
        raise UsageError("--dry-run shows the script of a job: with --cluster local there is none")
    executor = _executor(request)
    if len(request.runs) > 1:
        executor.parameters["map_count"] = len(request.runs)
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


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
    on_slurm.parameters["wckey"] = None  # some sites refuse the one that submitit gives
    return on_slurm


def _arguments(training: TrainConfig) -> tuple[str, ...]:
    """Return the command line of a job, which is the same each time the job is requeued."""
    run = str(training.run)
    return ("train", "--config", str(Path(run) / "config.yaml"), "--run", run, "--resume", "auto")
