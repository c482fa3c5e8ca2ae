"""A finished run that is started again: nothing in its folder changes."""

import subprocess
import sys
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain.launch import mpirun
from tests.conftest import Program, program_environment, run_program
from tests.single.training.jobs import summary_of

IN_A_JOB = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}  # requeued


def command(data: Path, run: Path) -> list[object]:
    return ["train", "--model", "cnn", "--data", data, "--epochs", 1, "--run", run]


def content(run: Path) -> dict[Path, tuple[int, bytes]]:
    """Return all of a folder: for each path when it changed, and its bytes."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in (run, *run.rglob("*"))
    }


@pytest.fixture(scope="module")
def finished(small_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    done = run_program(*command(small_set, run), "--ledger", run / "ledger.csv")
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.proves("A finished run that is started again changes nothing in its folder.")
@pytest.mark.parametrize(
    "way",
    [
        ("--resume",),
        ("--resume", "auto", "--ranks", 2, "--log-every", 1),
        ("--resume", "--ranks", 2, "--restarts", 1),
        ("--resume", "--max-steps", 3),
        "mpirun",
        "job",
    ],
    ids=str,
)
def test_nothing_changes(
    hvdtrain: Program, small_set: Path, finished: Path, way: str | tuple[object, ...]
) -> None:
    before, options = content(finished), [*command(small_set, finished), "--resume"]
    options += ["--ledger", finished / "ledger.csv"]
    if way == "mpirun":
        done = hvdtrain(*options, launcher=tuple(mpirun(2)))
    elif way == "job":
        words = [sys.executable, "-m", "hvdtrain.jobs.task", "rank", str(finished)]
        environment = program_environment() | IN_A_JOB
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
    else:
        done = hvdtrain(*options, *way)
    assert (done.returncode, done.stdout) == (0, f"{finished} is done already\n"), done.stderr
    assert content(finished) == before


def test_from_python_it_returns_the_summary(small_set: Path, finished: Path) -> None:
    before = content(finished)
    config = hvdtrain.TrainConfig(
        model="cnn", data=str(small_set), run=str(finished), epochs=1, resume="auto"
    )
    result = hvdtrain.train(config)
    assert (result, result.run) == (summary_of(finished), finished)
    assert content(finished) == before
