"""Compares the step time of --reduce-with mpi with horovod, and of --shard-optimizer without.

    python benchmarks/reduce_with.py [--model cnn] [--images 32] [--rounds 5] [--allreduce auto]
                                     [--shard]

Both sides are whole jobs of hvdtrain on the same images, with one thread per rank. A round is one
job of each side, in turns; the first steps of a job do not count. Without --shard the sides are
MPI's non-blocking all-reduces and Horovod, with SGD. With --shard they are an optimizer that is
divided among the replicas and one that is not, both with Adam and MPI; the bytes of the state per
rank are printed, too. The ratio is above 1 if the first side is faster.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import common
from comparison import compare

WARM_UP = 3  # steps of each job that do not count
LIBRARIES = (("mpi", "--reduce-with mpi"), ("horovod", "--reduce-with horovod"))
OPTIMIZERS = (
    ("divided", "--reduce-with mpi --optimizer adam --shard-optimizer"),
    ("whole", "--reduce-with mpi --optimizer adam"),
)


def main() -> None:
    """Compare the seconds per step of both sides."""
    options = _options()
    images = options.ranks * options.images
    sides = OPTIMIZERS if options.shard else LIBRARIES
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        from hvdtrain.data import synth

        synth(data, images * (options.steps + 1), common.CLASSES, size=common.SIZE)

        def side(name: str, words: str) -> Callable[[int], float]:
            return lambda number: _job(options, words, data, Path(folder) / f"{name}{number}")

        title = f"{options.model}, {options.ranks} ranks x 1 thread, {images} images per step"
        compare(title, "s", {name: side(name, words) for name, words in sides}, options.rounds)
        for name, _ in sides:
            print(f"{name:>32}: {_peak(Path(folder) / f'{name}0'):.0f} MiB per rank at most")
    if options.shard:
        print(f"     bytes: {_state_bytes(options.model, options.ranks)}")


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--images", type=int, default=32, help="images per rank and step")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--allreduce", default="auto")
    parser.add_argument("--shard", action="store_true", help="compare optimizers, not libraries")
    parser.add_argument("--steps", type=int, default=12, help="steps per job")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(arguments)


def _job(options: argparse.Namespace, words: str, data: Path, run: Path) -> float:
    """Return the median seconds per step of a job."""
    images = options.ranks * options.images
    arguments = f"--model {options.model} --threads 1 --ranks {options.ranks}"
    arguments += f" --batch-size {images} --max-steps {options.steps} --log-every 1"
    arguments += f" --allreduce {options.allreduce}"
    # The last value of an option counts.
    command = [*common.training(arguments, data, run), *words.split()]
    common.run_all([command], threads=1)
    return statistics.median(common.step_seconds(run, images)[WARM_UP:])


def _peak(run: Path) -> float:
    """Return the peak memory of a run's ranks, in MiB."""
    summary = json.loads((run / "summary.json").read_text())
    return float(max(summary["peak_memory_bytes"])) / 2**20


def _state_bytes(model: str, ranks: int) -> str:
    """Return the bytes of Adam's state per rank in words: two numbers per weight, or a share."""
    from hvdtrain import models
    from hvdtrain.models.component import parameter_count

    whole = 8 * parameter_count(models.components(model, common.CLASSES, common.SIZE))
    return f"{whole / ranks:,.0f} of Adam's state per rank instead of {whole:,}"


if __name__ == "__main__":
    main()
