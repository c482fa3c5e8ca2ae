"""What each command does: one short function a command, in the order of a user's day."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from hvdtrain import failure, launch, launchers, models
from hvdtrain.bench.options import LoaderConfig, StepConfig
from hvdtrain.config import TrainConfig
from hvdtrain.errors import CheckFailed, DataError, Interrupted, Preempted, UsageError
from hvdtrain.jobs.options import JobOptions
from hvdtrain.planner.options import PlanConfig
from hvdtrain.training.stop import StopRequest

Options = TypeVar("Options", TrainConfig, JobOptions)
BATCHES_MADE = 8  # for a benchmark without a data set


def doctor(arguments: Sequence[str], json: bool, job: bool) -> int:
    """Is this machine fit, or this job?"""
    if job:
        launchers.check_pmix(launchers.detect(os.environ), os.environ)
        from hvdtrain.doctor.preflight import preflight

        return preflight(json)
    from hvdtrain.doctor import doctor as examine

    return int(examine(as_json=json))


def data_fetch(arguments: Sequence[str], name: str, to: str) -> int:
    """Download an official archive."""
    from hvdtrain import data

    print(data.fetch(name, to))
    return 0


def data_pack(arguments: Sequence[str], source: str, destination: str, shard_mb: int) -> int:
    """Turn official binary files into shards."""
    from hvdtrain import data

    return _say_index(data.pack(source, destination, shard_mb=shard_mb))


def data_synth(
    arguments: Sequence[str],
    destination: str,
    images: int,
    classes: int,
    size: int,
    seed: int,
    shard_mb: int,
) -> int:
    """Make a learnable set from a seed."""
    from hvdtrain import data

    index = data.synth(destination, images, classes, size=size, seed=seed, shard_mb=shard_mb)
    return _say_index(index)


def data_verify(arguments: Sequence[str], destination: str) -> int:
    """Name every bad shard and chunk."""
    from hvdtrain import data

    faults = data.verify(destination)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        print(f"{destination}: every shard is good")
    return DataError.exit_code if faults else 0


def data_info(arguments: Sequence[str], destination: str, json: bool) -> int:
    """What a data set holds."""
    from hvdtrain import data

    content = data.info(destination)
    print(_as_json(content) if json else _as_lines(content))
    return 0


def train(arguments: Sequence[str], **values: Any) -> int:
    """Train on the ranks of the launcher, or start --ranks of them here."""
    settings = _of(TrainConfig, values).check()
    started = launchers.detect(os.environ)
    launchers.check_pmix(started, os.environ)
    if settings.restarts and started.launcher != "none":
        raise UsageError(
            f"--restarts needs hvdtrain's own launcher (--ranks N), not {started.launcher}: "
            "leave it out, and let the scheduler start the job again"
        )
    if started.size == 1 and ((settings.ranks or 1) > 1 or settings.restarts):
        from hvdtrain.training.precheck import check_before_launch

        check_before_launch(settings)
        from hvdtrain.training import restarts

        return restarts.run(settings, arguments)
    # Before the seconds in which torch and MPI start: a signal is remembered from here on.
    with StopRequest() as stop:
        from hvdtrain.training.loop import train as run_training

        try:
            run_training(settings, stop)
        except (Interrupted, Preempted):
            raise
        except (Exception, KeyboardInterrupt) as error:
            failure.fail(error, failure.Listener(settings.on_alert, settings.run))
    return 0


def jobs_submit(arguments: Sequence[str], **values: Any) -> int:
    """Make a run a job of the cluster."""
    training, job = _of(TrainConfig, values).check(), _of(JobOptions, values)
    job.ranks_per_node(training)
    from hvdtrain.jobs.submit import submit
    from hvdtrain.training.submission import check_before_submission

    check_before_submission(training)

    print("\n".join(submit(training, job)))
    return 0


def jobs_sweep(arguments: Sequence[str], study: str, to: str, dry_run: bool) -> int:
    """Make the runs of a study jobs."""
    from hvdtrain.jobs import grid, sweep
    from hvdtrain.training.submission import check_before_submission

    found = grid.load(study, to)
    for cell in found.cells:
        check_before_submission(cell.runs[0])
    for line in sweep.sweep(found, to, dry_run):
        print(line, flush=True)
    return 0


def jobs_status(arguments: Sequence[str], runs: list[str], json: bool) -> int:
    """How the jobs of runs fare, as a table."""
    from hvdtrain.jobs import table, watch

    rows = watch.rows(watch.runs_of(runs or ["runs"]))
    print(_as_json([asdict(row) for row in rows]) if json else table.as_text(rows))
    return 0


def jobs_logs(arguments: Sequence[str], run: str, rank: int, follow: bool) -> int:
    """What a rank of a run's newest job has printed."""
    from hvdtrain.jobs import logs

    logs.show(run, rank, follow)
    return 0


def jobs_cancel(arguments: Sequence[str], runs: list[str]) -> int:
    """End the jobs of runs."""
    from hvdtrain.jobs import cancel

    for line in cancel.cancel(runs):
        print(line)
    return 0


def report(
    arguments: Sequence[str], runs: list[str], to: str, efficiency: float, price: float | None
) -> int:
    """Make a scaling report of finished runs."""
    if not 0 < efficiency <= 1:
        raise UsageError(f"--efficiency must be above 0 and at most 1, not {efficiency}")
    if price is not None and not 0 <= price < float("inf"):
        raise UsageError(f"--price must be 0 or more, not {price}")
    from hvdtrain.study import report as reporting

    print(reporting.write(runs, to, efficiency, price))
    return 0


def plan_show(arguments: Sequence[str], **values: Any) -> int:
    """What a plan means for a model."""
    _in_one_process("plan show")
    from hvdtrain.training import plancommands

    found = plancommands.show(PlanConfig(**values))
    print(_as_json(found.as_json()) if values["json"] else found.as_text())
    return 0


def plan_simulate(arguments: Sequence[str], **values: Any) -> int:
    """What a plan means for a model, with times measured here."""
    _in_one_process("plan simulate")
    from hvdtrain.training import plancommands

    found = plancommands.simulate(PlanConfig(**values))
    print(_as_json(found.as_json()) if values["json"] else found.as_text())
    return 0


def plan_check(arguments: Sequence[str], **values: Any) -> int:
    """Does a plan compute the gradients of the serial step?"""
    config = PlanConfig(**values)
    started = launchers.detect(os.environ)
    launchers.check_pmix(started, os.environ)
    if started.size == 1 and config.ranks > 1:
        models.check_name(config.model)
        return launch.run(config.ranks, arguments)
    from hvdtrain.training import plancommands

    parity = plancommands.check(config)
    if started.rank == 0:
        names = plancommands.component_names(config)
        as_json = config.json
        print(
            _as_json(plancommands.parity_as_json(parity, names))
            if as_json
            else plancommands.parity_as_text(parity, names),
            flush=True,
        )
    return 0 if parity.is_within else CheckFailed.exit_code


def export(arguments: Sequence[str], run: str, file: str, which: Literal["best", "last"]) -> int:
    """The weights of a run as a file that torchvision reads."""
    from hvdtrain.training import export as exporting

    print(f"{file}: the weights of {exporting.export(run, file, which)}")
    return 0


def bench_step(arguments: Sequence[str], **values: Any) -> int:
    """Images a second, part of the matrix rate, and where a step's time goes."""
    config = StepConfig(**values)
    config.training("")
    models.check_name(config.model)
    started = launchers.detect(os.environ)
    launchers.check_pmix(started, os.environ)
    if config.data is None and started.size != 1:
        raise UsageError("bench step under a launcher needs --data: hvdtrain data synth makes one")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        data = config.data or _made_for(config, Path(folder))
        if started.size == 1 and (config.ranks or 1) > 1:
            return launch.run(config.ranks or 1, [*arguments, "--data", data])
        from hvdtrain.bench import report, step

        found = step.bench_step(config, data)
    if started.rank == 0:
        print(
            _as_json(report.as_json(found)) if config.json else report.as_text(found), flush=True
        )
    return 0


def bench_loader(arguments: Sequence[str], **values: Any) -> int:
    """Images a second that a data set can be fed with."""
    _in_one_process("bench loader")
    config = LoaderConfig(**values).check()
    from hvdtrain.bench import loader

    found = loader.bench_loader(config)
    print(_as_json(found) if config.json else loader.as_text(found))
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "doctor": doctor,
    "data fetch": data_fetch,
    "data pack": data_pack,
    "data synth": data_synth,
    "data verify": data_verify,
    "data info": data_info,
    "train": train,
    "export": export,
    "jobs submit": jobs_submit,
    "jobs sweep": jobs_sweep,
    "jobs status": jobs_status,
    "jobs logs": jobs_logs,
    "jobs cancel": jobs_cancel,
    "report": report,
    "plan show": plan_show,
    "plan simulate": plan_simulate,
    "plan check": plan_check,
    "bench step": bench_step,
    "bench loader": bench_loader,
}


def _of(kind: type[Options], values: dict[str, Any]) -> Options:
    """The part of a command's values that a dataclass holds."""
    return kind(**{item.name: values[item.name] for item in fields(kind)})


def _made_for(config: StepConfig, folder: Path) -> str:
    """A data set of a few batches, for a benchmark that was given none."""
    from hvdtrain import data

    images, size = max(BATCHES_MADE * config.batch_size, 64), config.image_size or 32
    return str(data.synth(folder / "data", images, config.classes or 10, size=size).folder)


def _in_one_process(command: str) -> None:
    if launchers.detect(os.environ).size != 1:
        raise UsageError(
            f"{command} runs in one process: leave the launcher out; --ranks is the plan's"
        )


def _say_index(index: Any) -> int:
    counts = ", ".join(f"{split.count:,} {name}" for name, split in index.splits.items())
    height, width, _ = index.image_shape
    print(f"{index.folder}: {counts}, {index.classes} classes, {height}x{width} pixels")
    for note in index.notes:
        print(f"note: {note}")
    return 0


def _as_json(content: Any) -> str:
    return json.dumps(content, indent=1)


def _as_lines(content: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in content.items())
