"""The commands that examine and measure a machine."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hvdtrain import launch, models
from hvdtrain.bench.options import LoaderConfig, NetworkConfig, StepConfig
from hvdtrain.commands import as_json, in_one_process, started_ranks
from hvdtrain.errors import UsageError
from hvdtrain.host import files, launchers
from hvdtrain.host.launchers import ALGORITHMS
from hvdtrain.setup.options import SetupOptions

BATCHES_MADE = 8  # size of the temporary data set of a benchmark without --data


def doctor(arguments: Sequence[str], json: bool, job: bool) -> int:
    """Check this machine, or this job."""
    if job:
        started_ranks()
        from hvdtrain.doctor.preflight import preflight

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
