"""Train the CNN on CIFAR-10 with one rank and with one rank per core, and compare the two runs.

    python tools/demo.py            (`make demo` sets everything up first)

CIFAR-10 comes from the folder in CIFAR_DIR (the archive or its .bin files), else from the data set
that an earlier demo packed, else from the network; without any of these a synthetic data set is
used. Everything is kept under .venv/demo: data sets are reused, earlier runs are replaced.

Exit code: that of the first step that failed, else 0.
"""

import argparse
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ("--model", "cnn", "--optimizer", "adam", "--lr", "0.001", "--batch-size", "64")
BATCH_SIZE = 64
MOST_RANKS = 8
SYNTHETIC_IMAGES = 50_000  # as many as CIFAR-10 has
EXIT_DATA = 3
POINTS_PER_EPOCH = 40  # points of the loss curve


@dataclass(frozen=True)
class Trained:
    """A finished run: its label, summary.json, and the lines of metrics.jsonl."""

    label: str
    summary: dict[str, Any]
    events: list[dict[str, Any]]

    def curve(self, event: str, horizontal: str, vertical: str) -> tuple[list[float], list[float]]:
        """Return two values of each event of a kind, as coordinates."""
        chosen = [line for line in self.events if line["event"] == event]
        return [line[horizontal] for line in chosen], [line[vertical] for line in chosen]


def main() -> None:
    """Get the data, train on one rank and on several, and show a table and curves."""
    options = parse_arguments()
    folder = options.to.resolve()
    data = data_set(folder, options.images)
    cores = len(os.sched_getaffinity(0))
    sizes = [1, min(max(2, cores), MOST_RANKS)]
    if missing := missing_for_several_ranks():
        say(f"NOTICE: {' and '.join(missing)} missing: one rank only (make setup builds the rest)")
        sizes = [1]
    runs = [train(folder, data, ranks, max(1, cores // ranks), options.epochs) for ranks in sizes]
    compared = " against ".join(run.label for run in runs)
    same = f", the same {count(cores, 'core')} divided differently" if len(runs) > 1 else ""
    say(f"\n{data.name}, {count(options.epochs, 'epoch')}: {compared}{same}")
    Console().print(table(runs))
    path = folder / "curves.png"
    draw(runs, path)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    say(f"curves of loss and accuracy: {shown}")


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line; --help prints this module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--to", type=Path, default=ROOT / ".venv" / "demo", help="folder of the demo"
    )
    parser.add_argument("--epochs", type=int, default=2, help="epochs of each run")
    parser.add_argument(
        "--images", type=int, help="train on this number of synthetic images instead"
    )
    return parser.parse_args()


def data_set(folder: Path, images: int | None) -> Path:
    """Return the packed data set to train on, after making it if it is missing or damaged."""
    if images is not None:
        return synthetic(folder, images)
    packed, noted = folder / "cifar10", folder / "cifar10.source"
    cifar_dir = os.environ.get("CIFAR_DIR")
    source = cifar_files(Path(cifar_dir).resolve()) if cifar_dir else None
    known = noted.read_text() if noted.exists() else None
    if known is not None and source in (None, Path(known)) and is_good(packed):
        say(f"CIFAR-10 is packed already, from {known}")
        return packed
    if source is None:
        say("CIFAR_DIR is not set: fetching CIFAR-10 (170 MB)")
        archives = folder / "archives"
        code = hvdtrain("data", "fetch", "cifar10", "--to", archives)
        if code == EXIT_DATA:
            say(
                "NOTICE: CIFAR-10 could not be fetched, so a synthetic set of its size is used: "
                "the times hold for both, the accuracy is not that of CIFAR-10"
            )
            return synthetic(folder, SYNTHETIC_IMAGES)
        end_if_failed(code)
        source = archives
    noted.unlink(missing_ok=True)
    shutil.rmtree(packed, ignore_errors=True)
    end_if_failed(hvdtrain("data", "pack", source, packed))
    noted.write_text(str(source))
    return packed


def cifar_files(folder: Path) -> Path:
    """Return CIFAR-10 in a folder that may also hold CIFAR-100."""
    for name in ("cifar-10-batches-bin", "cifar-10-binary.tar.gz"):
        if (folder / name).exists():
            return folder / name
    return folder


def synthetic(folder: Path, images: int) -> Path:
    """Return a synthetic data set of `images` images and 10 classes, after making it if needed."""
    packed = folder / f"synthetic-{images}"
    if not is_good(packed):
        shutil.rmtree(packed, ignore_errors=True)
        end_if_failed(hvdtrain("data", "synth", packed, "--images", images, "--classes", 10))
    return packed


def is_good(packed: Path) -> bool:
    """Return whether the data set exists and all its shards are intact."""
    return (packed / "index.json").exists() and hvdtrain("data", "verify", packed) == 0


def missing_for_several_ranks() -> list[str]:
    """Return the names of missing programs and packages that several ranks need."""
    missing = [] if importlib.util.find_spec("mpi4py") else ["mpi4py"]
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if not any(shutil.which(name, path=programs) for name in ("mpirun", "mpiexec")):
        missing.append("mpirun")
    return missing


def train(folder: Path, data: Path, ranks: int, threads: int, epochs: int) -> Trained:
    """Train in a fresh run folder, streaming the program's own output."""
    run = folder / f"ranks-{ranks}"
    shutil.rmtree(run, ignore_errors=True)
    label = f"{count(ranks, 'rank')} x {count(threads, 'thread')}"
    say(f"\ntraining with {label}")
    images = json.loads((data / "index.json").read_text())["splits"]["train"]["count"]
    log_every = max(1, math.ceil(images / BATCH_SIZE) // POINTS_PER_EPOCH)
    size = ("--epochs", epochs, "--ranks", ranks, "--threads", threads, "--log-every", log_every)
    end_if_failed(hvdtrain("train", *SETTINGS, *size, "--data", data, "--run", run))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((run / "summary.json").read_text())
    return Trained(label, summary, [json.loads(line) for line in lines])


def hvdtrain(*arguments: object) -> int:
    """Run the program as a user does, with its output on this terminal; return its exit code."""
    command = [sys.executable, "-m", "hvdtrain", *map(str, arguments)]
    with leaving_interrupts_to_the_program():
        code = subprocess.call(command, cwd=ROOT)
    return code if code >= 0 else 128 - code


@contextmanager
def leaving_interrupts_to_the_program() -> Iterator[None]:
    """Ignore Ctrl-C in the block: the program receives it too, and ends its ranks."""
    previous = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def end_if_failed(code: int) -> None:
    """Exit with the exit code of a step that failed; the program has printed the reason."""
    if code:
        sys.exit(code)


def table(runs: Sequence[Trained]) -> Table:
    """Return a table that compares the runs."""
    first = runs[0].summary
    rows = {
        "training": lambda it: f"{it['train_seconds']:.1f} s",
        "with evaluation": lambda it: f"{it['seconds']:.1f} s",
        "images/s": lambda it: f"{it['images_per_second']:,.0f}",
        "speed-up": lambda it: f"{it['images_per_second'] / first['images_per_second']:.2f}",
        "test accuracy": lambda it: f"{it['final']['test_accuracy']:.4f}",
        # A run fails if its ranks end with different weights.
        "weights, equal on all ranks": lambda it: it["weights_sha256"][:12],
    }
    shown = Table()
    shown.add_column("")
    for run in runs:
        shown.add_column(run.label, justify="right")
    for name, cell in rows.items():
        shown.add_row(name, *(cell(run.summary) for run in runs))
    return shown


def draw(runs: Sequence[Trained], path: Path) -> None:
    """Draw training loss by step and test accuracy by epoch into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, (loss, accuracy) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    # The runs nearly coincide: the second is dashed, so that the first stays visible.
    for run, style, marker in zip(runs, ("-", "--"), ("o", "x"), strict=False):
        loss.plot(*run.curve("step", "step", "loss"), style, label=run.label)
        accuracy.plot(
            *run.curve("epoch", "epoch", "test_accuracy"), style, marker=marker, label=run.label
        )
    loss.set(xlabel="step", ylabel="training loss")
    accuracy.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1))
    accuracy.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss, accuracy):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 rank` or `2 ranks`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def say(text: str) -> None:
    """Print a line at once, so that it precedes the output of the next program."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
