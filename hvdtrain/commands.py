"""The commands: one short function per command, and what several of them need."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain import launch, models
from hvdtrain.bench.options import LoaderConfig, NetworkConfig, StepConfig
from hvdtrain.config import TrainConfig
from hvdtrain.errors import CheckFailed, DataError, Interrupted, Preempted, UsageError
from hvdtrain.health import failure, monitor
from hvdtrain.health.failure import start_patience
from hvdtrain.host import alert, files, launchers
from hvdtrain.host.launchers import ALGORITHMS
from hvdtrain.host.process import StopRequest
from hvdtrain.jobs.options import JobOptions, SlurmOptions
from hvdtrain.launch import RanksStop
from hvdtrain.options.parser import select_fields
from hvdtrain.planner.options import PlanConfig
from hvdtrain.setup.run import SetupOptions
from hvdtrain.study.options import PaperBOptions

if TYPE_CHECKING:
    from hvdtrain.data.index import Resize
    from hvdtrain.use.trained import Which

_SHOWN = 20  # broken files
BATCHES_MADE = 8  # size of the temporary data set of a benchmark without --data


def started_ranks() -> launchers.Launch:
    """Return how this process was started, with what other ranks.

    Raises:
        UsageError: if the launcher's PMIx does not work with this MPI.
    """
    started = launchers.detect(os.environ)
    launchers.check_pmix(started, os.environ)
    return started


def in_one_process(command: str) -> None:
    """Refuse to run under a launcher."""
    if launchers.detect(os.environ).size != 1:
        raise UsageError(
            f"{command} runs in one process: start it without a launcher (--ranks sets the ranks "
            "of the plan)"
        )


def as_json(content: Any) -> str:
    """Return the content as JSON, for programs."""
    return json.dumps(content, indent=1)


def train(arguments: Sequence[str], **values: Any) -> int:
    """Train on the ranks that a launcher started, or start --ranks of them on this machine."""
    settings = select_fields(TrainConfig, values).check()
    settings = replace(settings, on_alert=os.environ.get(alert.COMMAND, settings.on_alert))
    started = started_ranks()
    if settings.restart_request.most and started.launcher != "none":
        raise UsageError(
            f"--restarts needs hvdtrain's own launcher (--ranks N), not {started.launcher}: "
            "leave it out, and let the scheduler requeue the job"
        )
    if started.size == 1 and ((settings.ranks or 1) > 1 or settings.restart_request.most):
        with RanksStop() as ranks_stop:
            from hvdtrain.training import starts
            from hvdtrain.training.starts import check_before_launch

            check_before_launch(settings)
            return starts.run(settings, arguments, ranks_stop)
    monitor.start(settings, started, start_patience(settings))
    # A signal is recorded from here on, also during the seconds in which torch and MPI start.
    with StopRequest() as stop:
        from hvdtrain.training.loop import train as run_training

        try:
            run_training(settings, stop)
        except (Interrupted, Preempted):
            raise
        except (Exception, KeyboardInterrupt) as error:
            failure.fail(error, failure.Listener(settings.on_alert, settings.run))
    return 0


def evaluate(
    arguments: Sequence[str],
    run: str,
    data: str | None,
    split: str,
    which: "Which",
    to: str | None,
    json: bool,
    trust: bool,
) -> int:
    """Print how well a run's model does on a data set."""
    in_one_process("evaluate")
    from hvdtrain.use import evaluate as evaluating

    result = evaluating.evaluate(run, data, split, which, to, trust=trust)
    print(as_json(result.as_json()) if json else result.as_text())
    if to is not None and not json:
        print(f"{to}: {', '.join(evaluating.FILES)}")
    return 0


def predict(
    arguments: Sequence[str],
    run: str,
    images: list[str],
    format: str,
    top: int,
    resize: "Resize | None",
    which: "Which",
    trust: bool,
) -> int:
    """Print the classes of images, in their order, once all of them are read."""
    in_one_process("predict")
    from hvdtrain.use import evaluate as predicting

    predictions = predicting.predict(run, images, top, which, resize, trust=trust)
    sys.stdout.write(predicting.as_table(predictions, format))
    return 0


def export(arguments: Sequence[str], run: str, file: str, which: "Which", trust: bool) -> int:
    """Write the model of a run, or its weights, for other programs."""
    in_one_process("export")
    from hvdtrain.use import trained as exporting

    checkpoint = exporting.export(run, file, which, trust=trust)
    what = "weights" if file.endswith(exporting.WEIGHTS) else "model"
    print(f"{file}: the {what} of {checkpoint}")
    return 0


def data_fetch(arguments: Sequence[str], name: str, to: str) -> int:
    """Download an official archive."""
    from hvdtrain import data

    print(data.fetch(name, to))
    return 0


def data_pack(arguments: Sequence[str], source: str, destination: str, **options: Any) -> int:
    """Pack images into shards."""
    from hvdtrain import data
    from hvdtrain.data.writer import PARTIAL_FOLDER

    left_out: list[str] = []
    try:
        index = data.pack(source, destination, report=left_out.append, **options)
    except KeyboardInterrupt:
        if (Path(destination) / PARTIAL_FOLDER).exists():
            raise Interrupted("interrupted: run the same command again to resume") from None
        raise
    for fault in left_out[:_SHOWN]:
        print(f"left out: {fault}", file=sys.stderr)
    if len(left_out) > _SHOWN:
        print(f"left out: {len(left_out) - _SHOWN:,} more", file=sys.stderr)
    return _print_index(index)


def data_synth(
    arguments: Sequence[str],
    destination: str,
    images: int,
    classes: int,
    size: int,
    seed: int,
    shard_mb: int,
) -> int:
    """Make a learnable data set from a seed."""
    from hvdtrain import data

    index = data.synth(destination, images, classes, size=size, seed=seed, shard_mb=shard_mb)
    return _print_index(index)


def data_verify(arguments: Sequence[str], destination: str) -> int:
    """Print every damaged shard and chunk."""
    from hvdtrain import data

    faults = data.verify(destination)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        print(f"{destination}: every shard is good")
    return DataError.exit_code if faults else 0


def data_info(arguments: Sequence[str], destination: str, json: bool) -> int:
    """Print what a data set holds."""
    from hvdtrain import data

    content = data.info(destination)
    if json:
        print(as_json(content))
        return 0
    _print_index(data.read_index(destination))
    for name, split in content["splits"].items():
        size = f"{split['bytes'] / 1e6:,.1f} MB in {split['shards']} shard(s)"
        print(f"{name}: {split['count']:,} samples, {size}, {split['chunk_rows']:,} per chunk")
    if content["class_names"]:
        print(f"classes: {', '.join(content['class_names'])}")
    for name, data_set in content.get("reference", {}).get("data_sets", {}).items():
        print(f"{name} inputs: {content['reference']['file']}:{data_set}")
    for name in ("mean", "std"):
        print(f"{name}: {', '.join(f'{value:.4f}' for value in content[name])}")
    print(f"encoding: {content['encoding']}\nhash: {content['hash']}")
    return 0


def _print_index(index: Any) -> int:
    """Print a line on a packed data set, and what was noted while it was packed."""
    counts = ", ".join(f"{split.count:,} {name}" for name, split in index.splits.items())
    height, width, _ = index.image_shape
    pixels = f"{height}x{width} pixels" + (" when decoded" if index.resize else "")
    kind = f"{index.classes} classes" if index.targets is None else f"targets {index.targets}"
    print(f"{index.folder}: {counts}, {kind}, {pixels}")
    for note in index.notes:
        print(f"note: {note}")
    return 0


def plan_show(arguments: Sequence[str], **values: Any) -> int:
    """Print the stages, memory and timeline of a plan for a model."""
    in_one_process("plan show")
    from hvdtrain.check import show

    config = PlanConfig(**values)
    description = show.show(config)
    if config.picture is not None:
        assert description.plan is not None
        from hvdtrain.study.plots import draw_strategies

        draw_strategies(description.plan, Path(config.picture))
    print(as_json(description.content) if config.json else description.text)
    return 0


def plan_simulate(arguments: Sequence[str], **values: Any) -> int:
    """Simulate a plan for a model with times measured on this machine."""
    in_one_process("plan simulate")
    from hvdtrain.check import show

    config = PlanConfig(**values)
    description = show.simulate(config)
    print(as_json(description.content) if config.json else description.text)
    return 0


def plan_check(arguments: Sequence[str], **values: Any) -> int:
    """Check that a plan computes the gradients of the serial step."""
    config = PlanConfig(**values)
    started = started_ranks()
    if started.size == 1 and config.ranks > 1:
        models.check_name(config.model)
        return launch.run(config.ranks, arguments)
    from hvdtrain.check import show

    parity = show.check(config)
    if started.rank == 0:
        names = show.component_names(config)
        text = as_json(parity.as_json(names)) if config.json else parity.as_text(names)
        print(text, flush=True)
    return 0 if parity.is_within else CheckFailed.exit_code


def doctor(arguments: Sequence[str], json: bool, job: bool) -> int:
    """Check this machine, or this job."""
    if job:
        started_ranks()
        from hvdtrain.doctor.probe import preflight

        return preflight(json)
    from hvdtrain.doctor import doctor as examine

    return examine(as_json=json)


def setup(arguments: Sequence[str], **values: Any) -> int:
    """Install mpi4py and Horovod for this environment."""
    in_one_process("setup")
    options = SetupOptions(**values).check()
    from hvdtrain.setup import run

    print(run.set_up(options))
    return 0


def bench_step(arguments: Sequence[str], **values: Any) -> int:
    """Measure images per second, the share of the matrix rate, and the parts of a step's time."""
    config = StepConfig(**values)
    config.training("")
    models.check_name(config.model)
    started = started_ranks()
    if config.data is None and started.size != 1:
        raise UsageError(
            "bench step under a launcher needs --data: make a data set with hvdtrain data synth"
        )
    with _data_for(config) as data:
        if started.size == 1 and (config.ranks or 1) > 1:
            return launch.run(config.ranks or 1, [*arguments, "--data", data])
        from hvdtrain.bench import step

        measurement = step.bench_step(config, data)
    if started.rank == 0:
        report = as_json(measurement.as_json()) if config.json else measurement.as_text()
        print(report, flush=True)
    return 0


def bench_loader(arguments: Sequence[str], **values: Any) -> int:
    """Measure the images per second that a data set is read with."""
    in_one_process("bench loader")
    config = LoaderConfig(**values).check()
    from hvdtrain.bench import loader

    measurement = loader.bench_loader(config)
    print(as_json(measurement) if config.json else loader.as_text(measurement))
    return 0


def bench_allreduce(arguments: Sequence[str], **values: Any) -> int:
    """Measure the seconds of an all-reduce by size, for each requested algorithm."""
    config = NetworkConfig(**values).check()
    if launchers.detect(os.environ).size != 1:
        if config.algorithm == "all":
            raise UsageError(
                "--algorithm all does not work under a launcher, since MPI reads its algorithm "
                "when it starts: name one"
            )
        return _print_table("allreduce", config)
    for algorithm in config.algorithms:
        if not config.json:
            print(f"all-reduce: {algorithm}", flush=True)
        words = [*arguments, "--algorithm", algorithm]
        outcome = launch.supervise(config.ranks or 2, words, ALGORITHMS[algorithm])
        if outcome.code:
            return outcome.code
    return 0


def bench_exchange(arguments: Sequence[str], **values: Any) -> int:
    """Measure the seconds of a transfer between ranks by size."""
    config = NetworkConfig(**values).check()
    if config.algorithm != "auto":
        raise UsageError(
            "--algorithm is not supported by bench exchange: leave it out, or use bench allreduce"
        )
    if launchers.detect(os.environ).size != 1:
        return _print_table("exchange", config)
    return launch.run(config.ranks or 2, arguments)


def _print_table(name: str, config: NetworkConfig) -> int:
    """Measure on the ranks of this job, and print the table on rank 0."""
    started = started_ranks()
    from hvdtrain.bench import collectives

    if name == "allreduce":
        table = collectives.bench_allreduce(config.largest, config.algorithm)
    else:
        table = collectives.bench_exchange(config.largest)
    if started.rank == 0:
        print(as_json(table.as_json()) if config.json else table.as_text(), flush=True)
    return 0


@contextmanager
def _data_for(config: StepConfig) -> Iterator[str]:
    """Yield the data set of a benchmark; without --data, a temporary one of a few batches."""
    if config.data is not None:
        yield config.data
        return
    from hvdtrain import data

    images, size = max(BATCHES_MADE * config.batch_size, 64), config.image_size or 32
    with files.temporary_folder() as folder:
        yield str(data.synth(f"{folder}/data", images, config.classes or 10, size=size).folder)


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
    from hvdtrain.jobs import watch

    rows = watch.rows(*watch.runs_of(runs or ["runs"]))
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
