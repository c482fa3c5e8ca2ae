"""Making jobs of runs."""

import hashlib
import json
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from hvdtrain import configfile, files
from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError, Interrupted, UsageError
from hvdtrain.jobs import record, slurm, watch
from hvdtrain.jobs.estimate import estimate
from hvdtrain.jobs.executor import Request, dry_run, submitted
from hvdtrain.jobs.options import JobOptions
from hvdtrain.jobs.record import LOGS, Record
from hvdtrain.jobs.site import load
from hvdtrain.jobs.undisturbed import one_at_a_time, undisturbed
from hvdtrain.training.metrics import holds_run

SUMMARY_BEFORE = "summary-before.json"


def submit(training: TrainConfig, job: JobOptions) -> list[str]:
    """Make the jobs of a run; what became of it, in lines.

    The same configuration gets the same folder, so that a run is recognised: it is not made
    again where it waits, runs or is done, and goes on where it was otherwise.

    Raises:
        UsageError: if job, site and cluster do not fit each other.
        DataError: if the run folder cannot be written.
    """
    run = run_folder(training)
    settled = configfile.as_begun(
        replace(
            training,
            run=str(run),
            ranks=training.ranks or 1,
            threads=training.threads or job.cpus_per_rank,
        )
    )
    request = Request((settled,), job, load(job.site), run / LOGS, run.name)
    check([request])
    check_runs([settled])
    time_needed = estimate(settled, job, run.parent)
    if job.dry_run:
        chain = f"# and {job.chain - 1} more, each of which waits for those before it to leave\n"
        return [dry_run(request), f"{chain if job.chain > 1 else ''}# time: {time_needed}"]
    with one_at_a_time(run.absolute().parent):
        (reason,) = not_needed([settled])
        if reason:
            return [reason]
        is_known = record.read(run) is not None
        jobs = make(request, chain=job.chain)
    said = f"{run} {'goes on as' if is_known else 'is'} job {', '.join(jobs)}"
    return [f"time: {time_needed}", said]


def run_folder(training: TrainConfig) -> Path:
    """The folder of a run: the one it names, else one that is the same for the same run."""
    if training.run is not None:
        return Path(training.run)
    # How often it is looked at makes no other run of it; nor does an option of a later version.
    content = asdict(replace(training, resume=False, eval_every=1))
    del content["verify"]
    for name in ("no_decay", "change_batch_norm"):
        if content[name] == getattr(TrainConfig, name):
            del content[name]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return Path("runs") / f"{files.plain_name(training.model)}-{training.ranks or 1}-{digest[:8]}"


def check(requests: Sequence[Request]) -> None:
    """Refuse what would fail in a job, or what the cluster would leave waiting for ever.

    Raises:
        UsageError: naming it.
    """
    for request in requests:
        _check_job(request)
        _check_folders(request)
    queued = [request for request in requests if request.job.cluster == "slurm"]
    if not queued:
        return
    partitions, kinds = slurm.partitions(), slurm.mpi_kinds()
    for request in queued:
        _check_partition(request, partitions)
        if kinds and request.site.mpi not in kinds:
            raise UsageError(
                f"this Slurm's srun knows no --mpi={request.site.mpi}: it knows "
                f"{', '.join(kinds)}; put one of them as mpi into the site's file"
            )


def check_runs(runs: Iterable[TrainConfig]) -> None:
    """Refuse what their ranks would refuse; after `check`, since it takes seconds.

    Raises:
        UsageError, DataError: naming it.
    """
    from hvdtrain.training.submission import check_before_submission

    check_before_submission(runs)


def _check_job(request: Request) -> None:
    job, site = request.job, request.site
    for training in request.runs:
        if training.restarts:
            raise UsageError("--restarts is for hvdtrain's own launcher: a job is requeued")
        if training.resume is True:
            raise UsageError("--resume is not needed: the same run goes on where it was")
        job.ranks_per_node(training)
    if site.warning_seconds > 30 * job.minutes():
        raise UsageError(
            f"--time {job.time} is too short: it is {job.minutes()} min, and a job is told to "
            f"save {site.warning_seconds} s before its end; give more, or a smaller "
            "warning_seconds in the site's file"
        )
    if "gres" in job.sbatch_options() and job.gpus_per_node and site.gpus.startswith("gres"):
        raise UsageError(
            "--sbatch gres would replace the GPUs of --gpus-per-node, which this site requests by "
            "gres: leave --gpus-per-node out and name the GPUs in --sbatch gres too"
        )
    if job.cluster == "local" and job.chain > 1:
        raise UsageError("--chain is for a queue: leave it out with --cluster local")


def _check_folders(request: Request) -> None:
    """Refuse folders that would be taken for patterns, or that other users may change."""
    logs = str(request.logs.absolute())
    if "%" in logs or "\\" in logs:
        raise UsageError(
            f"{request.logs.parent}: Slurm and submitit replace % and \\ in names of log files: "
            "choose a folder whose path has neither"
        )
    for folder in (request.logs, *(Path(training.run or "") for training in request.runs)):
        if not folder.exists():
            continue
        if fault := files.fault_of_owner(folder):
            raise UsageError(f"{fault}; a job executes what is in it")


def _check_partition(request: Request, known: Mapping[str, slurm.Partition]) -> None:
    job = request.job
    default = next((name for name, found in known.items() if found.is_default), "")
    for name in (job.partition or request.site.partition or default).split(","):
        if not name:
            continue
        if name not in known:
            raise UsageError(f"no partition {name} here: there are {', '.join(sorted(known))}")
        limit = known[name].minutes
        if limit is not None and job.minutes() > limit:
            raise UsageError(f"--time {job.time} is above the limit of {name}, {limit} minutes")
        if job.nodes > known[name].nodes:
            raise UsageError(f"--nodes {job.nodes}, but {name} has {known[name].nodes} nodes")


def not_needed(
    runs: Sequence[TrainConfig], may_change: frozenset[str] = configfile.MAY_CHANGE_ON_RESUME
) -> list[str]:
    """Why no job has to be made for each of the runs; empty for those that need one.

    Args:
        may_change: in what a run may differ from the one in its folder.

    Raises:
        UsageError: if a folder holds a run of another configuration.
    """
    active = watch.active(Path(run.run or "") for run in runs)
    return [_not_needed(run, active[Path(run.run or "")], may_change) for run in runs]


def _not_needed(training: TrainConfig, active: Sequence[str], may_change: frozenset[str]) -> str:
    run = Path(training.run or "")
    saved = run / "config.yaml"
    if not holds_run(run):
        return ""
    old = configfile.load(saved)
    if changed := configfile.differences(old, training, may_change):
        raise UsageError(
            f"{run} holds a run of another configuration ({'; '.join(changed)}): "
            "choose another folder"
        )
    if active:
        return f"{run} is job {', '.join(active)} already"
    is_as_long = all(old.get(name) == getattr(training, name) for name in ("epochs", "max_steps"))
    if is_as_long and (run / "summary.json").exists():
        return f"{run} is done already"
    return ""


def make(request: Request, dependency: str | None = None, chain: int = 1) -> list[str]:
    """Submit the runs of a request and keep in each folder what was made; the jobs' numbers.

    Args:
        dependency: in sbatch's words.
        chain: jobs of each run; each runs if those before it left before the run was done.

    Raises:
        UsageError: if Slurm refuses.
        DataError: if a run folder cannot be written.
        Interrupted: if a signal asked to stop; what was made is kept.
    """
    with files.writable_by_owner_alone():
        return _make(request, dependency, chain)


def _make(request: Request, dependency: str | None, chain: int) -> list[str]:
    version, patch = record.code_version()
    made: list[list[str]] = []  # of each link of the chain, the number of each run
    with undisturbed() as received:
        try:
            with ExitStack() as undo:
                for training in request.runs:
                    _write_configuration(training, patch, undo)
                while len(made) < chain and not received:
                    made.append(submitted(request, dependency))
                    undo.pop_all()
                    # All: a job cancelled because the run is done did not end well either.
                    before = ":".join(numbers_of(numbers) for numbers in made)
                    dependency = f"afternotok:{before}"
        finally:
            if made:
                for training, jobs in zip(request.runs, zip(*made, strict=True), strict=True):
                    _keep_record(request, training, jobs, version)
    if received:
        raise _interrupted(request, made)
    return [number for numbers in made for number in numbers]


def _interrupted(request: Request, made: Sequence[Sequence[str]]) -> Interrupted:
    if not made:
        return Interrupted("interrupted; no job was made")
    numbers = ", ".join(number for link in made for number in link)
    runs = " ".join(str(training.run) for training in request.runs)
    return Interrupted(
        f"interrupted, but job {numbers} was made already: hvdtrain jobs cancel {runs} ends it"
    )


def _keep_record(
    request: Request, training: TrainConfig, jobs: Sequence[str], version: str
) -> None:
    run = Path(training.run or "")
    earlier = record.read(run)
    record.write(
        run,
        Record(
            cluster=request.job.cluster,
            host=socket.gethostname(),
            name=request.name,
            jobs=(*(earlier.jobs if earlier else ()), *jobs),
            ranks=training.ranks or 1,
            nodes=request.job.nodes,
            logs=str(request.logs.absolute()),
            submitted=time.time(),
            version=version,
        ),
    )


def _write_configuration(training: TrainConfig, patch: str, undo: ExitStack) -> None:
    """Write `config.yaml`, from which every rank reads it; `undo` gives the folder back as it was.

    The summary of a run that goes on is not its summary: it would count as done.
    """
    run = Path(training.run or "")
    saved, summary = run / "config.yaml", run / "summary.json"
    try:
        if not run.exists():
            undo.callback(shutil.rmtree, run, ignore_errors=True)
        run.mkdir(parents=True, exist_ok=True)
        if saved.exists():
            old, mode = saved.read_bytes(), stat.S_IMODE(saved.stat().st_mode)
            undo.callback(files.write_whole, saved, lambda file: file.write(old), mode)
        if summary.exists():
            summary.replace(run / SUMMARY_BEFORE)
            undo.callback((run / SUMMARY_BEFORE).replace, summary)
    except OSError as error:
        raise DataError(f"{run} cannot be made or changed: {error.strerror}") from None
    configfile.save(training, saved)
    if patch:
        files.write_text(run / record.PATCH, patch, "the patch", DataError, files.PRIVATE)


def numbers_of(jobs: Sequence[str]) -> str:
    """The numbers of jobs as Slurm lists them; those of an array by its own."""
    return ":".join(dict.fromkeys(job.partition("_")[0] for job in jobs))
