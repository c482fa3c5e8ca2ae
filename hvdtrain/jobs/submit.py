"""Submit runs as jobs."""

import hashlib
import json
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from hvdtrain import configfile
from hvdtrain.config import TrainConfig
from hvdtrain.errors import BY_CODE, CheckFailed, DataError, Interrupted, UsageError
from hvdtrain.host import files
from hvdtrain.host.ownership import alone
from hvdtrain.jobs import slurm, watch
from hvdtrain.jobs.estimate import estimate
from hvdtrain.jobs.options import JobOptions, load_site
from hvdtrain.jobs.slurm import (
    ENDING_SIGNALS,
    NotKnown,
    Request,
    dry_run,
    submit_request,
    task_command,
)
from hvdtrain.jobs.watch import LOGS, Record
from hvdtrain.training.metrics import holds_run

SUMMARY_BEFORE = "summary-before.json"
LOCK = ".submitting.lock"


def submit(training: TrainConfig, job: JobOptions) -> list[str]:
    """Submit the jobs of a run; return the lines to print.

    The same configuration gets the same run folder, so that a run is recognised. A run that is
    waiting, running or done is not submitted again; any other run resumes.

    Raises:
        UsageError: if job, site and cluster do not match.
        DataError: if the run folder cannot be written.
    """
    run = run_folder(training)
    settled = replace(
        training,
        run=str(run),
        ranks=training.ranks or 1,
        threads=training.threads or job.cpus_per_rank,
    )
    request = Request(
        runs=(settled,), job=job, site=load_site(job.site), logs=run / LOGS, name=run.name
    )
    check([request])
    check_runs([settled])
    time_needed = estimate(settled, job, run.parent)
    if job.dry_run:
        chain = f"# and {job.chain - 1} more; each starts after the jobs before it have ended\n"
        return [dry_run(request), f"{chain if job.chain > 1 else ''}# time: {time_needed}"]
    with submission_lock(run.absolute().parent):
        (reason,) = reasons_to_skip([settled])
        if reason:
            return [reason]
        is_known = watch.read(run) is not None
        jobs = submit_and_record(request, chain=job.chain)
    outcome = f"{run} {'resumes as' if is_known else 'is'} job {', '.join(jobs)}"
    return [f"time: {time_needed}", outcome]


def run_folder(training: TrainConfig) -> Path:
    """Return the folder that a run names, else a folder derived from its configuration."""
    if training.run is not None:
        return Path(training.run)
    content = json.dumps(configfile.identity(training), sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return Path("runs") / f"{files.plain_name(training.model)}-{training.ranks or 1}-{digest[:8]}"


def check(requests: Sequence[Request]) -> None:
    """Refuse requests that would fail in a job, or that would wait in the queue indefinitely.

    Raises:
        UsageError: with the option that is wrong.
    """
    for request in requests:
        _check_request(request)
    queued = [request for request in requests if request.job.cluster == "slurm"]
    if not queued:
        return
    partitions, kinds = slurm.partitions(), slurm.mpi_kinds()
    for request in queued:
        _check_partition(request, partitions)
        if kinds and request.site.mpi not in kinds:
            raise UsageError(
                f"srun does not support --mpi={request.site.mpi}: set mpi in the site's file to "
                f"one of {', '.join(kinds)}"
            )


def check_runs(runs: Iterable[TrainConfig]) -> None:
    """Refuse runs that their ranks would refuse; call it after `check`, as it takes seconds.

    Raises:
        UsageError, DataError: with the reason.
    """
    # In a process of its own, since it loads torch, and may load a model of the user's.
    done = subprocess.run(
        task_command("check"),
        input=json.dumps([asdict(run) for run in runs]),
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        reason = (done.stdout.splitlines() or ["the check of the run failed, see above"])[-1]
        raise BY_CODE.get(done.returncode, CheckFailed)(reason)


def _check_request(request: Request) -> None:
    """Refuse options and folders that no job can have."""
    job, site = request.job, request.site
    for training in request.runs:
        if training.restart_request.most:
            raise UsageError(
                "--restarts is not possible for a job, which is requeued instead: leave it out"
            )
        if training.resume is True:
            raise UsageError(
                "--resume is not needed for a job, which resumes its run by itself: leave it out"
            )
        job.ranks_per_node(training)
    if site.warning_seconds > 30 * job.minutes():
        raise UsageError(
            f"--time {job.time} ({job.minutes()} min) is too short for a job that has to save "
            f"{site.warning_seconds} s before its end: give more time, or a smaller "
            "warning_seconds in the site's file"
        )
    if "gres" in job.sbatch_options() and job.gpus_per_node and site.gpus.startswith("gres"):
        raise UsageError(
            "--sbatch gres would replace the GPUs of --gpus-per-node, which this site requests by "
            "gres: leave --gpus-per-node out and name the GPUs in --sbatch gres too"
        )
    if job.cluster == "local" and job.chain > 1:
        raise UsageError(
            "--chain is not possible with --cluster local, which has no queue: leave it out"
        )
    logs = str(request.logs.absolute())
    if "%" in logs or "\\" in logs:
        raise UsageError(
            f"{request.logs.parent} contains % or \\, which Slurm and submitit replace in names "
            "of log files: choose a folder whose path has neither"
        )
    for folder in (request.logs, *(run_folder(training) for training in request.runs)):
        if folder.exists() and (fault := files.ownership_problem(folder)):
            raise UsageError(f"{fault}; a job executes what is in it")


def _check_partition(request: Request, known: Mapping[str, slurm.Partition]) -> None:
    job = request.job
    default = next((name for name, partition in known.items() if partition.is_default), "")
    for name in (job.partition or request.site.partition or default).split(","):
        if not name:
            continue
        if name not in known:
            raise UsageError(
                f"partition {name} does not exist: use one of {', '.join(sorted(known))}"
            )
        limit = known[name].minutes
        if limit is not None and job.minutes() > limit:
            raise UsageError(
                f"--time {job.time} is above the limit of partition {name}: give at most {limit} "
                "(minutes), or another --partition"
            )
        nodes = known[name].nodes
        if job.nodes > nodes:
            raise UsageError(
                f"--nodes {job.nodes} is more than partition {name} has: give at most {nodes}, or "
                "another --partition"
            )


def reasons_to_skip(
    runs: Sequence[TrainConfig], may_change: frozenset[str] = configfile.MAY_CHANGE_ON_RESUME
) -> list[str]:
    """Return why each of the runs needs no job; an empty string for a run that needs one.

    Args:
        may_change: options in which a run may differ from the run in its folder.

    Raises:
        UsageError: if a folder holds a run of another configuration.
    """
    active, reasons = watch.active(run_folder(run) for run in runs), []
    for training in runs:
        run, reason = run_folder(training), ""
        if holds_run(run):
            old = configfile.load(run / "config.yaml")
            if changed := configfile.differences(old, training, may_change):
                raise UsageError(
                    f"{run} holds a run of another configuration ({'; '.join(changed)}): "
                    "choose another folder"
                )
            length = ("epochs", "max_steps")
            is_as_long = all(old.get(name) == getattr(training, name) for name in length)
            if active[run]:
                reason = (
                    f"{run} is job {', '.join(active[run])} already, as it was submitted; for "
                    f"other options of the job cancel it first: hvdtrain jobs cancel {run}"
                )
            elif is_as_long and (run / "summary.json").exists():
                reason = f"{run} is done already"
        reasons.append(reason)
    return reasons


def submit_and_record(
    request: Request, dependency: str | None = None, chain: int = 1
) -> list[str]:
    """Submit the runs of a request and write their job records; return the job numbers.

    Args:
        dependency: value for sbatch's --dependency.
        chain: jobs per run; each starts if the jobs before it ended before the run was done.

    Raises:
        UsageError: if Slurm refuses.
        DataError: if a run folder cannot be written.
        Interrupted: on a signal to stop; jobs that were submitted by then are recorded.
    """
    version, patch = watch.code_version()
    links: list[list[str]] = []  # of the chain: the job number of each run
    with files.only_owner_may_write(), _defer_signals() as received:
        try:
            with ExitStack() as undo:
                for training in request.runs:
                    _write_configuration(training, patch, undo)
                while len(links) < chain and not received:
                    try:
                        links.append(submit_request(request, dependency))
                    except NotKnown:
                        undo.pop_all()  # a job may need the folders
                        raise
                    undo.pop_all()
                    # Depend on all earlier jobs: one that was cancelled because the run is done
                    # counts as "not ok" for the job after it.
                    before = ":".join(joined_numbers(numbers) for numbers in links)
                    dependency = f"afternotok:{before}"
        finally:
            if links:
                for training, jobs in zip(request.runs, zip(*links, strict=True), strict=True):
                    _write_record(request, training, jobs, version)
    numbers = [number for link in links for number in link]
    if received and not numbers:
        raise Interrupted("interrupted before a job was submitted")
    if received:
        runs = " ".join(str(training.run) for training in request.runs)
        raise Interrupted(
            f"interrupted after job {', '.join(numbers)} was submitted: end it with hvdtrain jobs "
            f"cancel {runs}"
        )
    return numbers


def _write_record(
    request: Request, training: TrainConfig, jobs: Sequence[str], version: str
) -> None:
    run = run_folder(training)
    earlier = watch.read(run)
    watch.write(
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
    """Write `config.yaml`, which every rank reads; add to `undo` what restores the folder.

    An earlier `summary.json` is renamed, because a run with that file counts as done.
    """
    run = run_folder(training)
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
        raise DataError(f"{run} cannot be created or changed: {error.strerror}") from None
    configfile.save(training, saved)
    if patch:
        files.write_text(run / watch.PATCH, patch, "the patch", DataError, files.PRIVATE)


def joined_numbers(jobs: Sequence[str]) -> str:
    """Return job numbers joined by colons, as in a dependency; an array has a single number."""
    return ":".join(dict.fromkeys(job.partition("_")[0] for job in jobs))


@contextmanager
def submission_lock(folder: Path) -> Iterator[None]:
    """Be the only process that submits jobs for runs in a folder; wait for any other one.

    Raises:
        DataError: if the folder cannot be written to.
    """
    try:
        files.make_folders(folder, files.OWN_FOLDER)
        with alone(folder / LOCK, _say):
            yield
    except OSError as error:
        raise DataError(f"{folder} cannot be written to: {error.strerror}") from None


@contextmanager
def _defer_signals() -> Iterator[list[int]]:
    """Defer signals that would end this process; yield a list that grows as they arrive."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if not received:
            _say("stopping once Slurm has answered, so that no job is lost")
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    held = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in held:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number in held:
            signal.signal(number, before[number])


def _say(line: str) -> None:
    # Not sys.stderr, which is redirected while submitit runs.
    print(f"hvdtrain: {line}", file=sys.__stderr__, flush=True)
