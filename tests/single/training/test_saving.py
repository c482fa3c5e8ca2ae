"""Checkpoints beside training, and the state after a kill at any moment."""

import functools
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from hvdtrain.checkpoint import store
from hvdtrain.plan.plan import Plan, Stage
from tests.conftest import Program
from tests.single.training.jobs import (
    SOON_SECONDS,
    assert_each_sample_once,
    begin,
    events_of,
    ranks_of,
    saves,
    small_disk,
    summary_of,
    wait_for,
)

EPOCHS = 15
KILLS = 5  # of one run, in a long series
STEP = re.compile(r"step-(\d+)")
RUNS = int(os.environ.get("HVDTRAIN_KILLS", "20")) // KILLS
LAYOUTS = {
    "pipeline": ("--ranks", 3, "--plan", "mp", "--microbatches", 3),
    "dp": ("--ranks", 2),
}


@pytest.mark.proves(
    "Checkpoints are saved as often, and kept as many, as the options say; other programs "
    "read their tensors by name."
)
@pytest.mark.parametrize(
    ("every", "steps"),
    [("4 steps", [4, 7, 8, 12, 14, 16, 20, 21]), ("2 epochs", [14, 21]), ("1 epoch", [7, 14, 21])],
)
def test_a_run_saves_as_often_as_it_is_told(
    hvdtrain: Program, small_set: Path, tmp_path: Path, every: str, steps: list[int]
) -> None:
    run = tmp_path / "run"
    done = hvdtrain(
        *("train", "--model", "cnn", "--data", small_set, "--batch-size", 100, "--epochs", 3),
        *("--run", run, "--checkpoint-every", every, "--keep-checkpoints", 3),
    )
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in events_of(run, "checkpoint")] == steps
    names = [path.name for path in store.stored(run / "checkpoints")]
    assert names[-3:] == [store.name_of(step) for step in steps[-3:]]
    assert len(names) <= 4, "the newest three and the best one"
    assert not list((run / "checkpoints").glob(".*"))


def test_a_run_saves_by_the_clock(hvdtrain: Program, small_set: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = hvdtrain(
        *("train", "--model", "cnn", "--data", small_set, "--batch-size", 10, "--epochs", 2),
        *("--run", run, "--checkpoint-every", "0.001 minutes", "--ranks", 2),
    )
    assert done.returncode == 0, done.stderr
    steps = [line["step"] for line in events_of(run, "checkpoint")]
    assert {61, 122} < set(steps), "inside the epochs, too"


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, hvdtrain: Program, small_set: Path
) -> Callable[[str], str]:
    """Return the hash of the weights that a layout ends with."""

    @functools.cache
    def find(layout: str) -> str:
        run = tmp_path_factory.mktemp("undisturbed") / layout
        done = hvdtrain(*command(layout, small_set, run))
        assert done.returncode == 0, done.stderr
        return str(summary_of(run)["weights_sha256"])

    return find


def command(layout: str, data: Path, run: Path) -> list[str]:
    options = ["train", "--model", "cnn", "--data", data, *LAYOUTS[layout]]
    options += ["--batch-size", 30, "--epochs", EPOCHS, "--augment", "crop-flip", "--run", run]
    options += ["--checkpoint-every", "3 steps", "--ledger", run.with_suffix(".csv")]
    return [str(option) for option in options]


def has_begun(run: Path, step: int) -> bool:
    """Return whether a checkpoint of this step or a later one exists or is being written."""
    return last_begun(run) >= step


def last_begun(run: Path) -> int:
    """Return the step of the newest checkpoint that exists or is being written."""
    names = [path.name for path in (run / "checkpoints").iterdir()]
    return max((int(match[1]) for name in names if (match := STEP.search(name))), default=0)


@pytest.mark.parametrize(
    ("seed", "kills"),
    [(0, 2), *(pytest.param(seed, KILLS, marks=pytest.mark.weekly) for seed in range(RUNS))],
)
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(
    hvdtrain: Program,
    small_set: Path,
    tmp_path: Path,
    undisturbed: Callable[[str], str],
    seed: int,
    kills: int,
) -> None:
    """Kill one rank at a time, at random moments of training and saving."""
    dice = random.Random(seed)
    layout, run = list(LAYOUTS)[seed % 2], tmp_path / "run"
    options = [*command(layout, small_set, run), "--restarts", str(kills)]
    process = begin(options, lambda: saves(run))
    for _ in range(kills):
        target = last_begun(run) + 3 * dice.randint(1, 10)
        wait_for(process, partial(has_begun, run, target))
        time.sleep(dice.uniform(0, 0.1))
        ranks = ranks_of(process)
        dice.choice(ranks).send_signal(signal.SIGKILL)
        assert not psutil.wait_procs(ranks, timeout=SOON_SECONDS)[1]
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert errors.count("was ended by signal 9") == errors.count("restarting") == kills
    assert summary_of(run)["weights_sha256"] == undisturbed(layout)
    assert_each_sample_once(run.with_suffix(".csv"), EPOCHS)


@pytest.mark.parametrize(("precision", "steps", "bound"), [("fp64", 65, 1e-10), ("fp32", 6, 1e-5)])
def test_a_run_goes_on_inside_an_epoch_under_another_plan_from_the_newest_that_verifies(
    hvdtrain: Program, small_set: Path, tmp_path: Path, precision: str, steps: int, bound: float
) -> None:
    """Compare 61 steps after it in fp64, under mixed plans, and two steps after it in fp32."""
    serial, run = tmp_path / "serial", tmp_path / "run"
    ledger = tmp_path / "ledger.csv"
    common = ["train", "--model", "cnn", "--data", small_set, "--batch-size", 50, "--epochs", 5]
    common += ["--precision", precision, "--log-every", 1, "--checkpoint-every", "2 steps"]
    common += ["--max-steps", steps]
    assert hvdtrain(*common, "--run", serial).returncode == 0
    common += ["--run", run, "--ledger", ledger]
    first: tuple[object, ...] = ("--ranks", 2)
    then: tuple[object, ...] = ("--ranks", 2, "--plan", "mp")
    if precision == "fp64":
        dense = (Stage(("dense", "head"), (ranks - 1,), (1,)) for ranks in (3, 2))
        for one, ranks in zip(dense, (3, 2), strict=True):
            everybody = Stage(("conv1", "conv2"), tuple(range(ranks)), (1,) * ranks)
            (tmp_path / f"{ranks}.json").write_text(
                json.dumps(Plan((everybody, one), microbatches=2).to_json())
            )
        first, then = (("--ranks", n, "--plan", tmp_path / f"{n}.json") for n in (3, 2))
    done = hvdtrain(*common, *first, "--max-steps", 5)
    assert done.returncode == 0, done.stderr
    damaged = run / "checkpoints" / "step-00000005" / "part-0001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0\0")
    done = hvdtrain(*common, *then, "--resume")
    assert done.returncode == 0, done.stderr
    assert "skipped checkpoint step-00000005, renamed to damaged-step-00000005: " in done.stdout
    assert "resumed after step 4" in done.stdout
    ours, theirs = events_of(run, "step"), events_of(serial, "step")
    assert [line["step"] for line in ours] == list(range(1, steps + 1))
    for line, other in zip(ours, theirs, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=bound), line["step"]
    if precision == "fp64":
        assert events_of(run, "epoch")[-1]["test_loss"] == pytest.approx(
            events_of(serial, "epoch")[-1]["test_loss"], rel=bound
        )
        assert_each_sample_once(ledger, 5)


@pytest.mark.proves(
    "A full disk ends the run in one line after three failed checkpoints, and the last "
    "checkpoint is whole."
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_fills_ends_the_run_with_its_last_checkpoint(
    small_set: Path, tmp_path: Path, ranks: int
) -> None:
    """The disk holds one checkpoint of the CNN, and not two."""
    with small_disk(tmp_path / "disk", "1536k") as disk:
        run = disk.folder / "run"
        done = disk.run(
            *("train", "--model", "cnn", "--data", small_set, "--run", run, "--ranks", ranks),
            *("--checkpoint-every", "3 steps"),
        )
        assert done.returncode == 3
        assert len(done.stderr.splitlines()) == 1, done.stderr
        why = "cannot be written: No space left on device"
        assert f"{why}, 3 checkpoints in a row: free space or repair" in done.stderr
        assert done.stdout.count(f"{why}; the run continues without it") == 2
        assert re.search(r"the disk of .* has 0\.\d MiB left, and a checkpoint takes", done.stdout)
        newest, path, skipped = store.load_newest(disk.seen / "run" / "checkpoints")
        assert newest is not None
        assert path is not None
        assert path.name == "step-00000003"
        assert skipped == []


def test_a_loss_that_is_no_number_does_not_cost_the_checkpoint_before(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = hvdtrain(
        *("train", "--model", "cnn", "--data", small_set, "--run", run, "--ranks", 2),
        *("--optimizer", "sgd", "--lr", "1e30", "--checkpoint-every", "1 step"),
    )
    assert done.returncode == 1
    assert "the loss became nan at step 2" in done.stderr
    assert [path.name for path in store.stored(run / "checkpoints")] == ["step-00000001"]
