"""A published experiment reproduced, with short real runs of every arm."""

import re
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import Program
from tests.single.training.jobs import summary_of


@pytest.mark.proves(
    "`reproduce paper-a` makes each run once and writes table, figures and a verdict from "
    "intervals."
)
def test_the_runs_of_paper_a_are_made_once(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    warm.python("tensorflow")  # some of the runs need it
    to = tmp_path / "paper"
    words = ("reproduce", "paper-a", "--data", small_set, "--to", to)
    command = (*words, "--epochs", "1", "--repeats", "1")
    done = hvdtrain(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(to / "report.md")
    text = (to / "report.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")][2:8]
    assert [row[0].strip() for row in rows] == [
        *("single device, TensorFlow", "MirroredStrategy", "MirroredStrategy, 1 device"),
        "Horovod, TensorFlow",
        *("single device, PyTorch", "Horovod, PyTorch"),
    ]
    assert [row[1].strip() for row in rows][1:4:2] == ["2 x 1"] * 2
    assert [row[7].strip() for row in rows] == ["156.63", "126.12", "-", "-", "-", "-"]
    assert text.count("not shown (one run of each)") == 6  # one epoch has no second one
    assert len(list((to / "fits").iterdir())) == 2
    for number in (4, 5):
        assert (to / f"figure{number}.png").read_bytes().startswith(b"\x89PNG")
    frameworks = {path.name: summary_of(path)["framework"] for path in (to / "runs").iterdir()}
    assert len(frameworks) == 8
    in_torch = {name for name in frameworks if frameworks[name] == "torch"}
    assert in_torch == {"single-torch-0", "horovod-torch-0"}
    made = {path: path.stat().st_mtime_ns for path in (to / "runs").rglob("*.json*")}
    (to / "report.md").unlink()
    done = hvdtrain(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" is finished") == 8
    assert (to / "report.md").read_text() == text
    assert {path: path.stat().st_mtime_ns for path in (to / "runs").rglob("*.json*")} == made
    done = hvdtrain(*words, "--epochs", "2", "--repeats", "1")
    assert done.returncode == 2
    assert "holds a run of other settings (epochs was 1, is 2): choose another --to" in done.stderr


def test_without_a_data_set_nothing_is_begun(hvdtrain: Program, tmp_path: Path) -> None:
    done = hvdtrain("reproduce", "paper-a", "--data", tmp_path / "none", "--to", tmp_path / "to")
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "to").exists()


@pytest.mark.proves(
    "`reproduce paper-b` makes each run once, and writes table I measured and predicted, "
    "figures and verdicts."
)
@pytest.mark.weekly
def test_the_runs_of_paper_b_are_made_once(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    to = tmp_path / "paper"
    words = (
        "reproduce",
        "paper-b",
        "--data",
        small_set,
        "--to",
        to,
        "--models",
        "cnn",
        "--ranks",
        2,
    )
    fast = ("--timed-models", "none", "--event-steps", 0, "--repeats", 1)
    command = (*words, *fast, "--steps", 3, "--epochs", 1, "--seeds", 1)
    done = hvdtrain(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(to / "report.md")
    text = (to / "report.md").read_text()
    assert len(re.findall(r"The objective promises \d+ ms per step\. Measured \(", text)) == 2
    for strategy in ("single", "DP", "MP", "hybrid", "adaptive"):
        assert f"| {strategy} | {1 if strategy == 'single' else 2} | " in text
    for head in ("## Claims", "## Predicted for 8 V100", "hours, paper | 24.6 | 8.2 |"):
        assert head in text
    for picture in ("figure1", "figure2", "figure3", "figure4-cnn", "figure5", "figure6"):
        assert (to / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    made = {path: path.stat().st_mtime_ns for path in (to / "runs").rglob("summary.json")}
    # The paper's objective has runs of its own if its optimum is none of the other strategies.
    number = sum("objective" not in path.parent.name for path in made)
    assert number == len(("profile", *5 * ("timed", "accuracy")))
    plan = summary_of(to / "runs" / "timed-cnn-hybrid-2-0")["plan"]
    assert [stage["ranks"] for stage in plan["stages"]] == [[0, 1], [1]]
    done = hvdtrain(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" is finished") == len(made)
    assert (to / "report.md").read_text() == text
    assert {path: path.stat().st_mtime_ns for path in made} == made
    done = hvdtrain(*words, *fast, "--steps", 4)
    assert done.returncode == 2
    assert "holds a run of other settings (max_steps was 3, is 4)" in done.stderr
    predicted = tmp_path / "predicted"
    done = hvdtrain(*(*words[:4], "--to", predicted, "--models", "none", *fast))
    assert done.returncode == 0, done.stderr
    assert "Nothing was measured" in (predicted / "report.md").read_text()
    assert not (predicted / "runs").exists()
