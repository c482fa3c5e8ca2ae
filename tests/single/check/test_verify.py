"""`train --verify`: a run whose steps differ from those of one rank ends before its first step."""

import re
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cli
from hvdtrain.errors import CheckFailed
from hvdtrain.plan.plan import Plan, Stage
from hvdtrain.planner import choose
from hvdtrain.planner.choose import Choice
from hvdtrain.planner.cost import Question
from hvdtrain.planner.measure import Subject
from hvdtrain.world import World
from tests.conftest import Program
from tests.pure.planner.machines import known, network
from tests.single.check.test_plancheck import no_update
from tests.single.training.jobs import events_of, summary_of

MODELS = "tests.single.training.models"


def options(data: Path, run: Path, *others: Any) -> list[str]:
    words = ("train", "--model", "cnn", "--data", data, "--run", run, "--threads", 1)
    return [str(word) for word in (*words, "--batch-size", 100, "--max-steps", 8, *others)]


@pytest.mark.proves(
    "`train --verify` ends a run whose steps are not those of one rank before its first "
    "step, and changes nothing in others; `auto` takes `zb-h1` only after it."
)
def test_a_verified_run_is_the_run_without(
    small_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, others in (("plain", []), ("verified", ["--verify"])):
        words = ("--augment", "crop-flip", "--weight-decay", 0.01, "--microbatches", 2, *others)
        assert cli.run(options(small_set, tmp_path / name, *words)) == 0
    plain, verified = (summary_of(tmp_path / name) for name in ("plain", "verified"))
    assert verified["weights_sha256"] == plain["weights_sha256"]
    assert "verified: 3 step(s) under the plan match those of one rank" in capsys.readouterr().out


def test_a_wrong_step_ends_the_run_before_it_begins(
    small_set: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    no_update(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        cli.run(options(small_set, tmp_path / "run", "--verify"))
    assert ended.value.code == CheckFailed.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"hvdtrain: --verify: the update of \S+ differs by 1, more than 0.0001", line)
    assert not (tmp_path / "run").exists()


def test_several_ranks_verify_their_own_plan(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """The faulty rank changes its bias in the fifth forward."""
    words = ("--verify", "--ranks", 2, "--microbatches", 2, "--batch-size", 90)
    command = options(small_set, tmp_path / "run", *words)
    command[2] = f"{MODELS}:drifts"
    done = hvdtrain(*command, FAULTY_RANKS="")
    assert done.returncode == 0, done.stderr
    assert "verified: 3 step(s) under the plan" in done.stdout
    command[command.index("--run") + 1] = str(tmp_path / "other")
    done = hvdtrain(*command, FAULTY_RANKS="1")
    assert done.returncode == 1
    assert "--verify: the " in done.stderr
    assert "all.linear.bias differs by " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_ranks_wait_for_the_serial_step_as_long_as_it_takes(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """Once, they were reported as hung."""
    command = options(small_set, tmp_path / "run", "--verify", "--ranks", 2)
    command[2] = f"{MODELS}:hesitates_alone"
    done = hvdtrain(*command, "--stall-timeout", 2)
    assert done.returncode == 0, done.stderr
    assert "verified: 3 step(s) under the plan" in done.stdout


@pytest.fixture
def halves_are_chosen(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """Make `--plan auto` choose a split backward without measuring; return its choices."""
    made: list[Choice] = []

    def choose_split(subject: Subject, world: World) -> Choice:
        names = subject.names
        stages = tuple(Stage((name,), (0,), (1,)) for name in names)
        costs = known(subject.costs, [1.0] * len(names), [1.0], network(1))
        question = Question(costs, 100, "adam", ("1f1b", "interleaved", "zb-h1"))
        made.append(Choice(Plan(stages, 4, "zb-h1"), ("chosen: divided, zb-h1",), 1.0, question))
        return made[0]

    monkeypatch.setattr(choose, "choose_plan", choose_split)
    return made


@pytest.mark.usefixtures("halves_are_chosen")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_auto_takes_a_backward_in_halves_only_if_it_is_right(
    small_set: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_wrong: bool,
) -> None:
    # One rank has no bubbles to fill: tests/mpi/test_controls.py has halves that differ, on two.
    if is_wrong:
        no_update(monkeypatch)
    assert cli.run(options(small_set, tmp_path / "run", "--plan", "auto")) == 0
    (plan,) = events_of(tmp_path / "run", "plan")
    assert plan["schedule"] == ("1f1b" if is_wrong else "zb-h1")
    remark = "zb-h1 is not used, because the update of "
    assert (remark in capsys.readouterr().out) == is_wrong


@pytest.mark.usefixtures("halves_are_chosen")
def test_a_schedule_that_was_asked_for_is_taken_as_it_is(small_set: Path, tmp_path: Path) -> None:
    words = options(small_set, tmp_path / "run", "--plan", "auto", "--schedule", "zb-h1")
    assert cli.run(words) == 0
    (plan,) = events_of(tmp_path / "run", "plan")
    assert plan["schedule"] == "zb-h1"
