"""The commands for jobs and studies."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hvdtrain.commands import as_json, in_one_process
from hvdtrain.config import TrainConfig
from hvdtrain.jobs.options import JobOptions, SlurmOptions
from hvdtrain.options.parser import select_fields
from hvdtrain.study.options import PaperBOptions


def jobs_submit(arguments: Sequence[str], **values: Any) -> int:
    """Submit a run as a job of the cluster."""
    training, job = select_fields(TrainConfig, values).check(), select_fields(JobOptions, values)
    from hvdtrain.jobs.submit import submit

    print("\n".join(submit(training, job)))
    return 0


def jobs_sweep(arguments: Sequence[str], study: str, to: str, dry_run: bool, **values: Any) -> int:
    """Submit the runs of a study as jobs."""
    from hvdtrain.jobs import sweep

    slurm = select_fields(SlurmOptions, values)
    for line in sweep.sweep(sweep.load(study, to, slurm), to, dry_run):
        print(line, flush=True)
    return 0


def jobs_status(arguments: Sequence[str], runs: list[str], json: bool) -> int:
    """Print the state of the jobs of runs as a table."""
    from hvdtrain.jobs import record, watch

    rows = watch.rows(*record.runs_of(runs or ["runs"]))
    print(as_json([asdict(row) for row in rows]) if json else watch.as_text(rows))
    return 0


def jobs_logs(arguments: Sequence[str], run: str, rank: int, follow: bool) -> int:
    """Print the output of a rank of a run's newest job."""
    from hvdtrain.jobs import watch

    watch.show_logs(run, rank, follow)
    return 0


def jobs_cancel(arguments: Sequence[str], runs: list[str]) -> int:
    """Cancel the jobs of runs."""
    from hvdtrain.jobs import watch

    for line in watch.cancel(runs):
        print(line)
    return 0


def report(arguments: Sequence[str], runs: list[str], to: str, **options: Any) -> int:
    """Write a scaling report of finished runs."""
    from hvdtrain.study import report as reporting

    print(reporting.write(runs, to, **options))
    return 0


def reproduce_paper_a(
    arguments: Sequence[str], data: str, to: str, epochs: int, repeats: int, ranks: int
) -> int:
    """Train the runs of paper A, and write a report of their results."""
    from hvdtrain.study import paper_a

    print(paper_a.reproduce(data, to, epochs=epochs, repeats=repeats, ranks=ranks, say=_say))
    return 0


def reproduce_paper_b(arguments: Sequence[str], **values: Any) -> int:
    """Train the runs of paper B, predict its table, and write a report of both."""
    in_one_process("reproduce paper-b")
    options = PaperBOptions(**values).check()
    from hvdtrain.study.paper_b.report import reproduce

    print(reproduce(options, _say))
    return 0


def _say(line: str) -> None:
    print(line, flush=True)
