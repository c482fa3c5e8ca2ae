"""`train --resume auto`: one command that starts a run, and resumes it when it is repeated."""

import shutil
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.errors import UsageError
from tests.conftest import Program
from tests.single.training.jobs import summary_of


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_command_starts_a_run_and_then_resumes_it(
    hvdtrain: Program, small_set: Path, tmp_path: Path, ranks: int
) -> None:
    run, ledger = tmp_path / "run", tmp_path / "ledger.csv"
    common = ["train", "--model", "cnn", "--data", small_set, "--ranks", ranks, "--run", run]
    common += ["--ledger", ledger, "--resume", "auto", "--batch-size", 60]
    done = hvdtrain(*common, "--max-steps", 5)
    assert done.returncode == 0, done.stderr
    assert "resumed" not in done.stdout
    done = hvdtrain(*common, "--max-steps", 8)
    assert done.returncode == 0, done.stderr
    assert "resumed after step 5" in done.stdout
    assert summary_of(run)["steps"] == 8
    assert len(ledger.read_text().splitlines()) == 1 + 8 * 60
    done = hvdtrain(*common, "--lr", "0.5")
    assert done.returncode == 2
    assert "lr was 0.001, is 0.5" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_job_that_is_restarted_obeys_the_first_time_what_the_user_said(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """Once, --restarts resumed a folder that held the run already, without a request."""
    run = tmp_path / "run"
    common = ["train", "--model", "cnn", "--data", small_set, "--batch-size", 60, "--run", run]
    assert hvdtrain(*common, "--max-steps", 2).returncode == 0
    again = [*common, "--restarts", 1, "--ranks", 2, "--max-steps", 6]
    again += ["--checkpoint-every", "2 steps", "--inject", "kill step=5 rank=1"]
    done = hvdtrain(*again)
    assert done.returncode == 2
    assert "holds this run already: add --resume" in done.stderr
    done = hvdtrain(*again, "--resume")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resumed after step") == 2


def test_what_can_be_seen_before_ranks_are_started_is_refused_then(
    small_set: Path, tmp_path: Path
) -> None:
    common = ["train", "--model", "cnn", "--data", str(small_set), "--ranks", "2", "--run"]
    empty, weights = tmp_path / "empty", tmp_path / "no.pth"
    empty.mkdir()
    with pytest.raises(UsageError, match="holds no run to resume"):
        cli.run([*common, str(empty), "--resume"])
    with pytest.raises(UsageError, match="there is no such file"):
        cli.run([*common, str(empty), "--resume", "auto", "--weights", str(weights)])


def test_a_checkpoint_of_another_configuration_is_refused(
    small_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has a config.yaml of another run, and the command matches it."""
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    common = ["train", "--model", "cnn", "--data", str(small_set), "--max-steps", "1"]
    others = ["--seed", "5", "--batch-size", "70"]
    assert cli.run([*common, "--batch-size", "60", "--run", str(run)]) == 0
    assert cli.run([*common, *others, "--run", str(theirs)]) == 0
    shutil.copyfile(theirs / "config.yaml", run / "config.yaml")
    kept = (*run.glob("checkpoints/*/*"), run / "config.yaml", run / "metrics.jsonl")
    before = {path: path.read_bytes() for path in kept}
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.run([*common, *others, "--run", str(run), "--resume"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    changed = "batch_size was 60, is 70; seed was 0, is 5"
    assert f"than config.yaml has now ({changed}): restore config.yaml, or choose" in line
    assert all(path.read_bytes() == content for path, content in before.items())


MODEL = """
from functools import partial
from torch import nn
from hvdtrain.models.component import Component

def build(classes, image_size):
    first = lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, WIDTH), nn.ReLU())
    return [Component("first", first), Component("last", partial(nn.Linear, WIDTH, classes))]
"""


def test_a_checkpoint_of_another_model_is_refused_with_both_sides(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    common = ["train", "--model", "changed:build", "--data", small_set, "--run", tmp_path / "run"]
    common += ["--resume", "auto", "--max-steps"]
    code = tmp_path / "changed.py"
    code.write_text(MODEL.replace("WIDTH", "4"))
    done = hvdtrain(*common, 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    code.write_text(MODEL.replace("WIDTH", "50"))
    done = hvdtrain(*common, 2, cwd=tmp_path)
    assert done.returncode == 2
    assert (
        "holds the parameters of another model than --model changed:build: first.1.weight is "
        "4 x 768 in the checkpoint, 50 x 768 in the model (and 2 more): use the model code that"
    ) in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("resume", [(), ("--resume",), ("--resume", "auto")])
def test_checkpoints_without_a_configuration_are_not_started_over(
    hvdtrain: Program, small_set: Path, tmp_path: Path, resume: tuple[str, ...], ranks: int
) -> None:
    run = tmp_path / "run"
    common = ("train", "--model", "cnn", "--data", small_set, "--run", run, "--max-steps", 2)
    assert hvdtrain(*common).returncode == 0
    (run / "config.yaml").unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = hvdtrain(*common, *resume, "--ranks", ranks)
    assert done.returncode == 2
    assert "holds checkpoints of a run, but its config.yaml is missing" in done.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
