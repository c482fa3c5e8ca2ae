"""Runs whose gradients MPI sums, with the optimizer divided among the replicas."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.launch import mpirun
from tests.conftest import ROOT, Program, program_environment
from tests.single.training.jobs import summary_of

OPTIONS = ("train", "--model", "cnn", "--batch-size", 50, "--optimizer", "adam", "--lr", 0.001)
ALGORITHM = """
import sys
from dataclasses import replace
import numpy
from hvdtrain import world
current = world.start(sys.argv[1], threads=1)
from tests.mpi.test_sums import CONFIG, parity_of
parity = parity_of(current, "dp", replace(CONFIG, reduce_with="mpi", allreduce=sys.argv[1]))
assert parity.is_within, parity
values = numpy.full(2**16, (0.1, 1e8 + 0.3, -1e8)[current.rank])
current.communicator.Iallreduce(world.mpi().IN_PLACE, values).Wait()
if current.rank == 0:
    print(len(numpy.unique(values)), "different sums")
world.stop()
"""


def test_a_run_is_resumed_with_a_divided_optimizer_and_without(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = [*OPTIONS, "--data", small_set, "--run", run, "--reduce-with", "mpi"]
    for epochs, ranks, more in (
        (1, 2, ["--shard-optimizer"]),
        (2, 3, ["--shard-optimizer", "--resume"]),
        (3, 1, ["--resume"]),
        (4, 2, ["--shard-optimizer", "--resume"]),
    ):
        done = hvdtrain(*options, "--epochs", epochs, "--ranks", ranks, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        assert summary_of(run)["ranks"] == ranks
    assert summary_of(run)["epochs"] == 4


def test_several_ranks_train_where_horovod_is_not_installed(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    # It hides the real one; whoever imports it fails.
    hidden = tmp_path / "packages" / "horovod" / "__init__.py"
    hidden.parent.mkdir(parents=True)
    hidden.write_text('raise AssertionError("Horovod was imported")\n')
    path = f"{hidden.parents[1]}{os.pathsep}{ROOT}"
    options = [*OPTIONS, "--data", small_set, "--epochs", 1, "--ranks", 2]
    done = hvdtrain(*options, "--run", tmp_path / "run", cold=True, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Horovod is not installed on all ranks: MPI sums") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--allreduce", "hierarchical", "--reduce-with", "mpi"), "--reduce-with horovod"),
        (("--allreduce", "ring", "--shard-optimizer"), "leave one of them out"),
    ],
)
def test_an_algorithm_that_is_not_possible_is_refused(
    hvdtrain: Program, small_set: Path, words: tuple[str, ...], message: str
) -> None:
    done = hvdtrain(*OPTIONS, "--data", small_set, *words)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("algorithm", ["ring", "recursive-doubling", "rabenseifner", "tree"])
def test_each_algorithm_trains_as_the_serial_run(algorithm: str) -> None:
    done = subprocess.run(
        [*mpirun(3), sys.executable, "-c", ALGORITHM, algorithm],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=program_environment(),
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Rounding depends on the order: a ring starts each part of the buffer at another rank.
    differing = int(done.stdout.split()[0])
    assert (differing > 1) == (algorithm == "ring")
