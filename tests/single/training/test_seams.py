"""A user's own optimizer, rate, augmentation and callback, as `module:function`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from hvdtrain.backends.pytorch.parts import make_optimizer, set_learning_rate
from hvdtrain.config import TrainConfig
from hvdtrain.data.shards import Batch
from hvdtrain.engine.feed import augmentation
from hvdtrain.errors import UsageError
from tests.conftest import Program

HERE = "tests.single.training.seams"
OURS = ("--model", "cnn", "--precision", "fp64", "--batch-size", 50, "--eval-every", 0)
OWN = (
    *("--optimizer", f"{HERE}:momentum", "--lr-schedule", f"{HERE}:halving"),
    *("--augment", f"{HERE}:brighter", "--lr", 0.01),
)


def summary(run: Path) -> dict[str, object]:
    values: dict[str, object] = json.loads((run / "summary.json").read_text())
    return values


@pytest.mark.proves(
    "A user's optimizer, rate and augmentation give the same run on any ranks, under any plan and "
    "after a resume."
)
def test_own_functions_give_the_same_run_on_any_ranks_and_after_a_resume(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    def train(name: str, *options: object) -> float:
        run = ("--run", tmp_path / name, "--data", small_set, *OURS, *OWN)
        done = hvdtrain("train", *run, *options)
        assert done.returncode == 0, done.stderr
        final = summary(tmp_path / name)["final"]
        assert isinstance(final, dict)
        return float(final["train_loss"])

    whole = train("one", "--epochs", 2)
    assert train("resumed", "--epochs", 2, "--max-steps", 17) != whole
    # The rate depends on the length of the run, which a resumed one keeps.
    for name, more in (
        ("two", ("--ranks", 2, "--reduce-with", "mpi")),
        ("pipeline", ("--ranks", 2, "--plan", "mp")),
    ):
        assert train(name, "--epochs", 2, *more) == pytest.approx(whole, rel=1e-12)
    stopped = ("--epochs", 2, "--checkpoint-every", "5 steps", "--inject", "kill step=17")
    killed = hvdtrain(
        "train", "--run", tmp_path / "killed", "--data", small_set, *OURS, *OWN, *stopped
    )
    assert killed.returncode == -9
    assert train("killed", "--epochs", 2, "--resume") == whole


def test_an_own_optimizer_is_the_built_in_one_that_it_copies(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    losses: list[float] = []
    for optimizer in (f"{HERE}:momentum", "sgd"):
        run = tmp_path / str(len(losses))
        options = ("--optimizer", optimizer, "--lr", 0.01, "--max-steps", 6, "--data", small_set)
        assert hvdtrain("train", *OURS, "--run", run, *options).returncode == 0
        final = summary(run)["final"]
        assert isinstance(final, dict)
        losses.append(final["train_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_the_rates_of_an_own_optimizer_keep_their_ratio() -> None:
    layer = nn.Linear(2, 2)
    config = TrainConfig(model="cnn", data="d", optimizer=f"{HERE}:two_rates", lr=0.1).check()
    optimizer = make_optimizer(config, dict(layer.named_parameters()))
    set_learning_rate(optimizer, 0.05)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.005])


def test_an_own_augmentation_knows_each_sample() -> None:
    config = TrainConfig(model="cnn", data="d", augment=f"{HERE}:brighter").check()
    made = augmentation(config, 1).batch
    assert made is not None
    images, ids = np.full((3, 4, 4, 3), 200, np.uint8), np.arange(3)
    pixels = made(Batch(images, ids, ids)).images
    brightest = pixels.max((1, 2, 3))
    assert len(set(brightest.tolist())) == 3, "each sample has a brightness of its own"


def test_plan_check_compares_with_an_own_optimizer(hvdtrain: Program) -> None:
    options = ("--model", "cnn", "--plan", "mp", "--ranks", 2, "--optimizer", f"{HERE}:momentum")
    done = hvdtrain("plan", "check", *options, "--batch-size", 8, "--image-size", 16)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--optimizer", f"{HERE}:momentun"), "has no function 'momentun': did you mean momentum"),
        (
            ("--optimizer", "nowhere:made"),
            "'nowhere:made': there is no module 'nowhere'",
        ),
        (("--optimizer", f"{HERE}:no_optimizer"), "returned a dict: return a torch.optim.Opti"),
        (("--optimizer", f"{HERE}:half_of_it"), "returned an optimizer of other parameters"),
        (("--optimizer", f"{HERE}:forgetful"), "keeps a list as 'history'"),
        (("--optimizer", f"{HERE}:momentum", "--shard-optimizer"), "gives it slices of the weigh"),
        (("--optimizer", f"{HERE}:momentum", "--sync", "local:2"), "has to know the optimizer's"),
        (("--optimizer", f"{HERE}:momentum", "--momentum", "0.5"), "which sets it itself"),
        (("--lr-schedule", f"{HERE}:negative"), "returned -0.5 for 0.5, the share of the run"),
        (("--augment", f"{HERE}:as_floats"), "returned float32 [50, 16, 16, 3]: return images"),
        (("--augment", f"{HERE}:no_views"), "not of the form [(weight, function of images), ...]"),
        (("--augment", f"{HERE}:no_functions"), "what follows a weight is no function"),
        (
            ("--augment", f"{HERE}:small_views", "--eval-every", 1),
            "a view of --augment tests.single.training.seams:small_views returned uint8 [",
        ),
        (
            ("--augment", f"{HERE}:two_views", "--framework", "tensorflow"),
            "has views of test images, which --framework tensorflow does not evaluate",
        ),
        (("--callback", f"{HERE}:halving"), "is no class of callbacks: derive it from"),
        (("--callback", "Notes"), "--callback Notes is not known: use package.module:Class"),
    ],
)
def test_what_is_not_what_an_option_takes_is_one_line(
    hvdtrain: Program, small_set: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    run = ("--run", tmp_path / "run", "--data", small_set, "--max-steps", 2)
    done = hvdtrain("train", *OURS, *run, *options)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr.splitlines()[-1]


def test_objects_take_the_place_of_names_in_python() -> None:
    config = TrainConfig(model="cnn", data="d", lr_schedule=lambda done: 1 - done).check()
    assert config.lr_schedule == "in-python:lambda"
    with pytest.raises(UsageError, match=r"optimizer is a int: pass a name, or a function of"):
        TrainConfig(model="cnn", data="d", optimizer=3)


def test_callbacks_of_the_command_line_follow_a_run_and_its_resume(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    run = ("--run", tmp_path / "run", "--data", small_set, "--callback", f"{HERE}:Notes")
    assert hvdtrain("train", *OURS, *run, "--max-steps", 2).returncode == 0
    assert hvdtrain("train", *OURS, *run, "--max-steps", 3, "--resume").returncode == 0
    notes = (tmp_path / "run" / "notes.txt").read_text().splitlines()
    assert notes == ["start", "end 2", "start", "resume 2", "end 3"]


@pytest.mark.weekly
def test_mlflow_goes_on_with_the_same_run(small_set: Path, tmp_path: Path) -> None:
    """The callback of docs/how-to/python.md, with a store in a folder."""
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "python.md").read_text()
    (block,) = (part for part in page.split("```python")[1:] if "class MLflow" in part)
    (tmp_path / "tracking.py").write_text(block.partition("```")[0])
    packages = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(packages)]
    subprocess.run([*pip, "mlflow-skinny==3.17.2"], check=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), str(packages)]),
        "MLFLOW_TRACKING_URI": f"file:{tmp_path / 'store'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    command = [sys.executable, "-m", "hvdtrain", "train", "--model", "cnn", "--batch-size", "300"]
    command += ["--data", str(small_set), "--run", "run", "--callback", "tracking:MLflow"]
    for epochs, more in (("1", []), ("2", ["--resume"])):
        run = [*command, "--epochs", epochs, *more]
        subprocess.run(run, check=True, env=environment, cwd=tmp_path)
    lines = [path.read_text().splitlines() for path in tmp_path.rglob("metrics/train_loss")]
    assert [len(line) for line in lines] == [2]  # one run, with both epochs
