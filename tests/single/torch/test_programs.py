"""Users' own PyTorch programs on several ranks: as examples, as `train`, stopped, and mistaken."""

import difflib
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from hvdtrain.launch import mpirun
from tests import warm
from tests.conftest import ROOT, Program, program_environment
from tests.single.training.jobs import summary_of

Done = subprocess.CompletedProcess[str]
START = """
import sys
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional
import hvdtrain.torch as distributed

rank = distributed.start()
"""
LOOP = (
    START
    + """
folder, save_to, epochs = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(768, 16), nn.Tanh(), nn.Linear(16, 5)).double()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
model, optimizer = distributed.prepare(model, optimizer)
loaded = distributed.load(save_to)
data = distributed.loader(folder, 50, seed=1)
if rank.is_first:
    print("from", loaded and loaded.name, flush=True)
for epoch in range(data.epoch, epochs):
    for number, (images, labels) in enumerate(distributed.steps(data, save_to)):
        optimizer.zero_grad()
        functional.cross_entropy(model(images.double()), labels).backward()
        optimizer.step()
        if len(sys.argv) > 4 and (epoch, number) == (1, 4) and rank.rank == rank.size - 1:
            import os, signal
            os.kill(os.getpid(), signal.SIGUSR1)
if rank.is_first:
    torch.save(model.state_dict(), save_to / "weights.pt")
"""
)


TORCHRUN = ("torchrun", "--no-python", "--nproc-per-node", "2")


def run_script(
    ranks: int,
    text: str,
    *arguments: object,
    launcher: Sequence[str] | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program as `python -c TEXT ARGUMENTS` on ranks of a launcher, or alone."""
    if launcher is None:
        launcher = mpirun(ranks) if ranks > 1 else []
    return subprocess.run(
        [*launcher, warm.python(), "-c", text, *map(str, arguments)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        env=program_environment() | environment,
    )


def lines_of(done: Done) -> list[str]:
    """Return the lines that hvdtrain printed on standard error.

    mpirun writes a zero byte after its own message on an abort, and on a busy machine that message
    comes first: the byte then stands at the start of hvdtrain's line.
    """
    lines = done.stderr.replace("\0", "").splitlines()
    return [line for line in lines if line.startswith("hvdtrain: ")]


def example(name: str) -> str:
    """Return the text of an example, for three epochs of images of 5 classes."""
    return (ROOT / "examples" / name).read_text()


@pytest.mark.parametrize(
    "launcher", ["mpirun", pytest.param("horovodrun", marks=pytest.mark.weekly)]
)
def test_the_example_trains(small_set: Path, launcher: str) -> None:
    text = example("torch_script.py")
    if launcher == "mpirun":
        done = run_script(2, text, small_set)
    else:
        words = ["horovodrun", "--mpi", "-np", "2"]
        done = subprocess.run(
            [*words, warm.python(), "-c", text, str(small_set)],
            capture_output=True,
            text=True,
            timeout=300,
            env=program_environment(),
        )
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = re.findall(r"epoch (\d): test accuracy (\d\.\d{4})", done.stdout)
    assert [number for number, _ in accuracies] == ["1", "2", "3"]
    assert float(accuracies[-1][1]) > 0.5  # by chance it is 0.2


def test_the_page_shows_the_difference_of_the_two_examples() -> None:
    before, after = (example(f"torch_script{end}.py") for end in ("_before", ""))
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    changed = [line.rstrip() for line in lines if line[0] in "+-"]
    start = next(place for place, line in enumerate(changed) if "import hvdtrain" in line)
    page = (ROOT / "docs" / "how-to" / "torch-script.md").read_text()
    shown = re.search(r"```diff\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    in_page = [line for line in shown[1].splitlines() if line[0] in "+-"]
    words = [
        [(line[0], *line[1:].split()) for line in side] for side in (in_page, changed[start:])
    ]
    assert words[0] == words[1]
    assert len(in_page) <= 14


AS_TRAIN = (
    START
    + """
from hvdtrain.models import components
from hvdtrain.models.component import build_component

folder = sys.argv[1]
data = distributed.loader(folder, 50)
test = distributed.loader(folder, 50, split="test")
parts = components("cnn", data.classes, data.image_size)
model = nn.Sequential(*(build_component(part, 0) for part in parts))
model, optimizer = distributed.prepare(model, torch.optim.Adam(model.parameters(), 1e-3))
for epoch in range(2):
    for images, labels in data:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
result = distributed.evaluate(model, test)
if rank.is_first:
    import json
    print(json.dumps(result))
"""
)


@pytest.mark.weekly
def test_a_loop_ends_where_train_does(hvdtrain: Program, small_set: Path, tmp_path: Path) -> None:
    """Order, shares, normalisation and gradients of both are the same, up to rounding."""
    options = ["--data", small_set, "--epochs", 2, "--batch-size", 50, "--ranks", 2]
    options += ["--optimizer", "adam", "--lr", "0.001", "--run", tmp_path / "run"]
    trained = hvdtrain("train", "--model", "cnn", *options)
    assert trained.returncode == 0, trained.stderr
    final = json.loads((tmp_path / "run" / "summary.json").read_text())["final"]
    done = run_script(2, AS_TRAIN, small_set)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["loss"] == pytest.approx(final["test_loss"], rel=1e-3)
    assert result["accuracy"] == pytest.approx(final["test_accuracy"], abs=0.011)


def test_a_loop_that_is_preempted_resumes_on_another_number_of_ranks(
    small_set: Path, tmp_path: Path
) -> None:
    """A signal to one rank in mid-epoch ends all with 75; one rank then ends as if nothing had."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    assert run_script(1, LOOP, small_set, whole, 3).returncode == 0
    stopped = run_script(3, LOOP, small_set, parts, 3, "stop")
    assert stopped.returncode == 75, stopped.stdout + stopped.stderr
    (line,) = lines_of(stopped)
    path = parts / "step-00000019"
    wanted = f"hvdtrain: requested to stop after step 19; the state is in {path}: start again"
    assert line.startswith(wanted)
    resumed = run_script(1, LOOP, small_set, parts, 3)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.strip() == "from step-00000019"
    import torch

    one, other = (torch.load(folder / "weights.pt") for folder in (whole, parts))
    for name, value in one.items():
        assert float((value - other[name]).abs().max() / value.abs().max()) < 1e-6


FEWER = (
    START
    + """
model = nn.Linear(4, 2)
model, optimizer = distributed.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(5 - (rank.rank == 1)):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""
)
LEAVES = (
    START
    + """
if rank.rank == 1:
    sys.exit()
model = nn.Linear(4, 2)
distributed.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
"""
)
RAISES = START + "\nif rank.rank == 1:\n    raise RuntimeError('from the user')\nrank.sizes\n"


def test_a_rank_that_takes_one_step_fewer_stops_the_job_with_one_line() -> None:
    done = run_script(2, FEWER)
    (line,) = lines_of(done)
    assert "rank 1 is at the end of the program while rank 0 is counting the samples of" in line
    assert done.returncode == 1


def test_a_rank_that_exits_before_prepare_stops_the_job_with_one_line() -> None:
    done = run_script(2, LEAVES)
    (line,) = lines_of(done)
    assert "rank 1 is at the end of the program while rank 0 is preparing model 0" in line
    assert done.returncode == 1


def test_torchrun_starts_a_program_as_mpirun_does(small_set: Path, tmp_path: Path) -> None:
    """The sum of two numbers has one order: the weights are the same to the bit."""
    import torch

    trained = []
    for name, launcher in (("mpirun", mpirun(2)), ("torchrun", TORCHRUN)):
        folder = tmp_path / name
        folder.mkdir()
        done = run_script(2, LOOP, small_set, folder, 2, launcher=launcher)
        assert done.returncode == 0, done.stderr
        trained.append(torch.load(folder / "weights.pt"))
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


TWICE = """
import sys
from hvdtrain import TrainConfig, train
for number in range(2):
    train(TrainConfig(model="cnn", data=sys.argv[1], run=f"{sys.argv[2]}/{number}", max_steps=2))
"""


def test_a_program_under_torchrun_trains_twice(small_set: Path, tmp_path: Path) -> None:
    """A second start waited for the first one's addresses."""
    done = run_script(2, TWICE, small_set, tmp_path, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    first, second = (summary_of(tmp_path / name) for name in "01")
    assert first["weights_sha256"] == second["weights_sha256"]
    assert second["ranks"] == 2


SPAWNS = (
    START
    + """
from torch.utils.data import DataLoader
samples = [(torch.ones(4), 0)] * 8
sampler = distributed.sampler(samples, 4)
loader = DataLoader(samples, batch_sampler=sampler, num_workers=1, multiprocessing_context="spawn")
next(iter(loader))
"""
)
ONE_SAMPLE = (
    START
    + """
model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
distributed.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
model(torch.ones(1, 4))
"""
)


def test_a_spawned_worker_that_imports_the_program_is_refused_in_one_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SPAWNS)
    words = ["import runpy, sys", f"sys.argv = [{str(program)!r}]", "runpy.run_path(sys.argv[0]"]
    text = "; ".join(words) + ", run_name='__main__')"
    done = run_script(1, text)
    (line,) = set(lines_of(done))  # the worker may print it, too
    assert line.startswith("hvdtrain: distributed.start() is called again in a child process")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_one_sample_under_batch_norm_is_one_line() -> None:
    done = run_script(1, ONE_SAMPLE)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("hvdtrain: batch norm has one value per channel in a rank's share of a")


def test_an_error_of_one_rank_ends_the_job_with_its_traceback() -> None:
    done = run_script(2, RAISES)
    assert done.returncode == 4, done.stderr
    assert done.stderr.count("Traceback") == 1
