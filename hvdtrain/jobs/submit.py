"""Making jobs of runs."""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain import configfile, files
from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError, UsageError
from hvdtrain.jobs import record, script, slurm, watch
from hvdtrain.jobs.estimate import estimate
from hvdtrain.jobs.options import JobOptions
from hvdtrain.jobs.record import LOGS, Record
from hvdtrain.jobs.site import Site, load
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


def submit(training: TrainConfig, job: JobOptions) -> list[str]:
    """Make the jobs of a run; what became of it, in lines.

    The same configuration gets the same folder, so that a run is recognised: it is not made
    again where it waits, runs or is done, and goes on where it was otherwise.

    Raises:
        UsageError: if job, site and cluster do not fit each other.
        DataError: if the run folder cannot be written.
    """
    run = run_folder(training)
    settled = replace(training, run=str(run), ranks=training.ranks or 1)
    request = Request((settled,), job, load(job.site), run / LOGS, run.name)
    check(request)
    if job.dry_run:
        return [dry_run(request), f"# time: {estimate(settled, job, run.parent)}"]
    if found := not_needed(settled):
        return [found]
    earlier = record.read(run)
    jobs: list[str] = []
    for _ in range(job.chain):
        # The next one runs if the one before had to leave before it was done.
        dependency = f"afternotok:{jobs[-1]}" if jobs else None
        jobs += make(request, dependency)
    said = f"{run} {'goes on as' if earlier else 'is'} job {', '.join(jobs)}"
    return [f"time: {estimate(settled, job, run.parent)}", said]


def run_folder(training: TrainConfig) -> Path:
    """The folder of a run: the one it names, else one that is the same for the same run."""
    if training.run is not None:
        return Path(training.run)
    content = asdict(replace(training, resume=False))
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    model = "".join(c if c.isalnum() or c in "-_" else "-" for c in training.model)
    return Path("runs") / f"{model}-{training.ranks or 1}-{digest[:8]}"


def check(request: Request) -> None:
    """Refuse what would fail in the job, or what the cluster would leave waiting for ever.

    Raises:
        UsageError: naming it.
    """
    job, site = request.job, request.site
    for training in request.runs:
        if training.restarts:
            raise UsageError("--restarts is for hvdtrain's own launcher: a job is requeued")
        if training.resume:
            raise UsageError("--resume is not needed: the same run goes on where it was")
        job.ranks_per_node(training)
    minutes = job.minutes()
    if job.cluster == "local":
        if job.chain > 1:
            raise UsageError("--chain is for a queue: leave it out with --cluster local")
        return
    known = slurm.partitions()
    default = next((name for name, found in known.items() if found.is_default), None)
    name = job.partition or site.partition or default
    if name is not None:
        if name not in known:
            raise UsageError(f"no partition {name} here: there are {', '.join(sorted(known))}")
        if (limit := known[name].minutes) is not None and minutes > limit:
            raise UsageError(f"--time {job.time} is above the limit of {name}, {limit} minutes")
        if job.nodes > known[name].nodes:
            raise UsageError(f"--nodes {job.nodes}, but {name} has {known[name].nodes} nodes")
    kinds = slurm.mpi_kinds()
    if site.mpi not in kinds:
        raise UsageError(
            f"this Slurm's srun knows no --mpi={site.mpi}: it knows {', '.join(kinds)}; "
            "put one of them as mpi into the site's file"
        )


def dry_run(request: Request) -> str:
    """The script that sbatch would be given."""
    if request.job.cluster == "local":
        return "\n".join(" ".join(("hvdtrain", *_arguments(run))) for run in request.runs)
    executor = _executor(request)
    if len(request.runs) > 1:
        executor.parameters["map_count"] = len(request.runs)
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


def not_needed(training: TrainConfig) -> str:
    """Why no job has to be made for a run; empty if one has to.

    Raises:
        UsageError: if its folder holds a run of another configuration.
    """
    run = Path(training.run or "")
    saved = run / "config.yaml"
    if not saved.exists():
        return ""
    old = configfile.load(saved)
    if changed := configfile.differences(old, training):
        raise UsageError(
            f"{run} holds a run of another configuration ({'; '.join(changed)}): "
            "choose another --run"
        )
    kept = record.read(run)
    states = watch.states(kept) if kept else {}
    if active := [number for number, state in states.items() if state.is_active]:
        return f"{run} is job {', '.join(active)} already"
    is_as_long = all(old.get(name) == getattr(training, name) for name in ("epochs", "max_steps"))
    if is_as_long and (run / "summary.json").exists():
        return f"{run} is done already"
    return ""


def make(request: Request, dependency: str | None = None) -> list[str]:
    """Submit the runs of a request and keep in each folder what was made; the jobs' numbers.

    Raises:
        UsageError: if Slurm refuses.
        DataError: if a run folder cannot be written.
    """
    for training in request.runs:
        _keep_configuration(training)
    jobs = _submitted(request, dependency)
    for place, training in enumerate(request.runs):
        run = Path(training.run or "")
        earlier = record.read(run)
        record.write(
            run,
            Record(
                cluster=request.job.cluster,
                jobs=(*(earlier.jobs if earlier else ()), jobs[min(place, len(jobs) - 1)]),
                arguments=_arguments(training),
                ranks=training.ranks or 1,
                nodes=request.job.nodes,
                logs=str(request.logs.absolute()),
                submitted=time.time(),
                version=record.code_version(run),
            ),
        )
    return jobs


def _keep_configuration(training: TrainConfig) -> None:
    """Write `config.yaml`, from which every rank reads it."""
    run = Path(training.run or "")
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{run} cannot be made: {error.strerror}") from None
    text = configfile.to_yaml(training)
    files.write_text(run / "config.yaml", text, "the configuration", DataError)


def _arguments(training: TrainConfig) -> tuple[str, ...]:
    """A run without a checkpoint begins with --resume, too: its folder is there."""
    run = str(training.run)
    return ("train", "--config", str(Path(run) / "config.yaml"), "--run", run, "--resume")


def _submitted(request: Request, dependency: str | None) -> list[str]:
    """Hand the runs to submitit; one number for each, or one for all on this machine."""
    import submitit

    executor = _executor(request)
    arguments = [_arguments(training) for training in request.runs]
    where = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    if request.job.cluster == "local":
        return [str(executor.submit(Trainings(tuple(arguments))).job_id)]
    if dependency is not None:
        executor.parameters["dependency"] = dependency
        executor.parameters["additional_parameters"]["kill-on-invalid-dep"] = "yes"
    try:
        with submitit.helpers.clean_env():
            os.environ |= where  # which is not that of a job that this is called in
            with executor.batch():
                jobs = [executor.submit(Training(words)) for words in arguments]
        return [str(job.job_id) for job in jobs]
    except submitit.core.utils.FailedJobError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UsageError(f"sbatch refused the job: {lines[-1]}") from None


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
    return on_slurm


def numbers_of(jobs: Sequence[str]) -> str:
    """The numbers of jobs in words; those of an array by its own."""
    return ", ".join(dict.fromkeys(job.partition("_")[0] for job in jobs))
