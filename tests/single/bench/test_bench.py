"""`hvdtrain bench` as users start it."""

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.conftest import Program, program, program_environment
from tests.single.training.jobs import SOON_SECONDS, ranks_of

PARTS = {"compute", "communication", "bubble", "data", "rest"}


@pytest.mark.proves(
    "`bench` measures a step and its parts, a data set and the network; `--allreduce "
    "ring` gives the ring."
)
@pytest.mark.parametrize("plan", [(), ("--plan", "mp", "--ranks", 2)])
def test_a_step_is_split_into_what_it_is_spent_on(
    hvdtrain: Program, plan: tuple[object, ...]
) -> None:
    options = ("--model", "cnn", "--batch-size", 16, "--steps", 5, "--json", *plan)
    done = hvdtrain("bench", "step", *options, timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    seconds = result["seconds"]
    assert seconds.keys() == PARTS
    assert all(value >= 0 for value in seconds.values())
    assert seconds["compute"] > 0
    lower, upper = result["step_seconds"]["quartiles"]
    median = result["step_seconds"]["median"]
    assert lower <= median <= upper
    assert result["images_per_second"] == pytest.approx(16 / median)
    assert list(result["components"]) == ["conv1", "conv2", "dense", "head"]
    assert all(value["forward"] > 0 for value in result["components"].values())
    assert len(result["matrix_flops_per_second"]) == (2 if plan else 1)
    # Other work on the machine may slow the measured rate below that of the step.
    rate = result["step_flops"] / median / sum(result["matrix_flops_per_second"])
    assert result["matrix_share"] == pytest.approx(rate)
    assert rate > 0
    assert (seconds["bubble"] > 0) == bool(plan)
    operations = result["operations"]
    assert operations["convolution_backward"] > 0
    assert list(operations.values()) == sorted(operations.values(), reverse=True)


def test_the_same_in_words(hvdtrain: Program, small_set: Path) -> None:
    done = hvdtrain(
        *("bench", "step", "--model", "cnn", "--data", small_set, "--steps", 2),
        *("--batch-size", 8, "--augment", "crop-flip", "--precision", "bf16"),
    )
    assert done.returncode == 0, done.stderr
    for word in ("images/s", "GFLOP/s", "compute", "component", "dense", "operation", "others"):
        assert word in done.stdout
    assert done.stderr == ""


def test_a_loader_is_measured_and_its_parts(hvdtrain: Program, small_set: Path) -> None:
    options = ("bench", "loader", "--data", small_set, "--seconds", 0.4, "--batch-size", 32)
    result = json.loads(hvdtrain(*options, "--json").stdout)
    assert result["in_memory"]
    rates = ("images_per_second", "reading", "augmenting", "copying")
    assert all(result[name] > 0 for name in rates)
    text = hvdtrain(*options, "--augment", "none").stdout
    assert "augmenting" not in text
    assert "the loader" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("step", "--model", "cnn", "--steps", 0), "--steps must be above 0"),
        (("step", "--model", "cnn", "--classes", 0), "--classes must be above 0"),
        (
            ("step", "--model", "cnn", "--data", "{data}", "--classes", 5),
            "--data defines the classes",
        ),
        (("step", "--model", "cnm"), "unknown model 'cnm': did you mean cnn?"),
        (("step", "--model", "cnn", "--batch-size", 0), "--batch-size must be above 0"),
        (("step", "--model", "cnn", "--data", "{data}", "--batch-size", 9999), "is more than the"),
        (("loader", "--data", "absent"), "absent"),
        (("loader", "--data", "absent", "--seconds", 0), "--seconds must be above 0"),
        (("stepp",), "unknown command stepp; did you mean step"),
    ],
)
def test_what_is_wrong_is_one_line(
    hvdtrain: Program, small_set: Path, arguments: tuple[object, ...], message: str
) -> None:
    options = [str(argument).format(data=small_set) for argument in arguments]
    done = hvdtrain("bench", *options, timeout=600)
    assert done.returncode in (2, 3), done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("plan", [(), ("--plan", "mp", "--ranks", 2)])
def test_ctrl_c_ends_it_and_leaves_nothing_behind(
    tmp_path: Path, plan: tuple[object, ...]
) -> None:
    with subprocess.Popen(
        program("bench", "step", "--model", "cnn", "--steps", 1000000, *plan),
        env=program_environment()
        | dict.fromkeys(("TMPDIR", "PRTE_MCA_prte_tmpdir_base"), str(tmp_path)),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not computes(process):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SOON_SECONDS)
    assert process.returncode == 130, errors
    assert len(errors.splitlines()) == 1
    assert not list(tmp_path.glob("hvdtrain-*"))


def computes(process: "subprocess.Popen[str]") -> bool:
    """Return whether each rank has computed for two seconds, which is several hundred steps."""
    ranks = ranks_of(process) or [warm.fork_of(psutil.Process(process.pid))]
    return all(rank.cpu_times().user > 2 for rank in ranks)
