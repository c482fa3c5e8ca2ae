"""Making jobs of runs."""

import hashlib
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hvdtrain import configfile, files
from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError, UsageError
from hvdtrain.jobs import record, slurm, watch
from hvdtrain.jobs.estimate import estimate
from hvdtrain.jobs.executor import Request, arguments_of, dry_run, submitted
from hvdtrain.jobs.options import JobOptions
from hvdtrain.jobs.record import LOGS, Record
from hvdtrain.jobs.site import load

# Of two runs of one study: where they are, and what they write.
MAY_DIFFER = frozenset({"run", "resume", "log_every", "keep_checkpoints", "on_alert"})


def submit(training: TrainConfig, job: JobOptions) -> list[str]:
    """Make the jobs of a run; what became of it, in lines.

    The same configuration gets the same folder, so that a run is recognised: it is not made
    again where it waits, runs or is done, and goes on where it was otherwise.

    Raises:
        UsageError: if job, site and cluster do not fit each other.
        DataError: if the run folder cannot be written.
    """
    run = run_folder(training)
    settled = replace(
        training,
        run=str(run),
        ranks=training.ranks or 1,
        threads=training.threads or job.cpus_per_rank,
    )
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
    if site.warning_seconds > 30 * minutes:
        raise UsageError(
            f"--time {job.time} is too short: a job is told to save {site.warning_seconds} s "
            "before its end; give more, or a smaller warning_seconds in the site's file"
        )
    if job.cluster == "local":
        if job.chain > 1:
            raise UsageError("--chain is for a queue: leave it out with --cluster local")
        return
    known = slurm.partitions()
    default = next((name for name, found in known.items() if found.is_default), "")
    for name in (job.partition or site.partition or default).split(","):
        if name and name not in known:
            raise UsageError(f"no partition {name} here: there are {', '.join(sorted(known))}")
        limit = known[name].minutes if name else None
        if limit is not None and minutes > limit:
            raise UsageError(f"--time {job.time} is above the limit of {name}, {limit} minutes")
        if name and job.nodes > known[name].nodes:
            raise UsageError(f"--nodes {job.nodes}, but {name} has {known[name].nodes} nodes")
    kinds = slurm.mpi_kinds()
    if kinds and site.mpi not in kinds:
        raise UsageError(
            f"this Slurm's srun knows no --mpi={site.mpi}: it knows {', '.join(kinds)}; "
            "put one of them as mpi into the site's file"
        )


def not_needed(training: TrainConfig, is_exact: bool = False) -> str:
    """Why no job has to be made for a run; empty if one has to.

    Args:
        is_exact: whether the run of the folder must not differ even in what may change when a run
            goes on, such as its plan: a study would show one for the other.

    Raises:
        UsageError: if its folder holds a run of another configuration.
    """
    run = Path(training.run or "")
    saved = run / "config.yaml"
    if not saved.exists():
        return ""
    old = configfile.load(saved)
    changed = configfile.differences(old, training)
    if is_exact:
        now = asdict(training)
        changed = [
            f"{name} was {old[name]!r}, is {now[name]!r}"
            for name in now
            if name not in MAY_DIFFER and name in old and old[name] != now[name]
        ]
    if changed:
        raise UsageError(
            f"{run} holds a run of another configuration ({'; '.join(changed)}): "
            f"choose another {'--to' if is_exact else '--run'}"
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
    jobs = submitted(request, dependency)
    for place, training in enumerate(request.runs):
        run = Path(training.run or "")
        earlier = record.read(run)
        record.write(
            run,
            Record(
                cluster=request.job.cluster,
                host=socket.gethostname(),
                name=request.name,
                jobs=(*(earlier.jobs if earlier else ()), jobs[min(place, len(jobs) - 1)]),
                arguments=arguments_of(training),
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
    # The summary of a run that goes on is not its summary: it would count as done.
    if (run / "summary.json").exists():
        (run / "summary.json").replace(run / "summary-before.json")
    text = configfile.to_yaml(training)
    files.write_text(run / "config.yaml", text, "the configuration", DataError)


def numbers_of(jobs: Sequence[str]) -> str:
    """The numbers of jobs in words; those of an array by its own."""
    return ", ".join(dict.fromkeys(job.partition("_")[0] for job in jobs))
