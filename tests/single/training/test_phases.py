"""Faults of a run at each moment of its life: CONTRIBUTING.md has the table.

Each of these runs ends as if nothing had happened, to the bit.
"""

import errno
import os
import signal
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from hvdtrain.checkpoint import store
from hvdtrain.host.ownership import NAME
from tests import warm
from tests.conftest import Program
from tests.single.training.jobs import (
    SOON_SECONDS,
    events_of,
    fill,
    is_stopped,
    members_of,
    resume,
    samples_of,
    small_disk,
    start,
    summary_of,
    wait_for,
    wait_for_end,
)

EPOCH, EPOCHS, STEPS = 601, 2, 32
MODELS = {
    "torch": "tests.single.training.models:with_moments",
    "tensorflow": "tests.single.tf.models:with_moments",
}
# Moments, named by the action that a rank is about to do.
MOMENTS = {
    "start": r"^build",
    "owner": r"^os.rename .*owner\.json$",
    "manifest read": r"^open .*/step-\d+/manifest\.json r$",
    "part read": r"^open .*/step-\d+/part-0000\S* r$",
    "records cut": r"^os.rename .*metrics\.jsonl$",
    "configuration": r"^os.rename .*config\.yaml$",
    "step": r"^train",
    "evaluation": r"^evaluate",
    "part": r"^open .*unfinished\S*/part-0000\S* w$",
    "receipt": r"^os.rename .*written-0000\.json$",
    "read back": r"^open .*unfinished\S*/part-0000\S* r$",
    "manifest": r"^os.rename .*unfinished\S*/manifest\.json$",
    "name": r"^os.rename \S*unfinished\S* \S*/step-\d+$",
    "older one removed": r"^os.rename .*/step-\d+ .*removed",
    "summary": r"^os.rename .*summary\.json$",
}
RESTORED = ("manifest read", "part read", "records cut")
DONE_BEFORE = 8  # steps before the run is resumed


@dataclass(frozen=True)
class Case:
    """A run with a fault, and its commands."""

    data: Path
    run: Path
    ranks: int = 1
    framework: str = "torch"

    def command(self, *more: object) -> list[str]:
        """Return the command that starts the run, and resumes it."""
        words: list[object] = ["train", "--framework", self.framework, "--data", self.data]
        words += ["--model", MODELS[self.framework], "--ranks", self.ranks, "--run", self.run]
        words += ["--batch-size", 40, "--epochs", EPOCHS, "--checkpoint-every", "5 steps"]
        words += ["--log-every", 1, "--ledger", self.run.with_suffix(".csv")]
        return [str(word) for word in (*words, "--resume", "auto", *more)]

    def happens(self, moment: str, deed: str, times: int = 1, rank: int = 0) -> dict[str, str]:
        """Return the environment in which a rank does a deed at a moment."""
        values = {"MOMENT": MOMENTS[moment], "DEED": deed, "MOMENT_NOTE": str(self.note)}
        return {**values, "MOMENT_TIMES": str(times), "MOMENT_RANK": str(rank)}

    @property
    def note(self) -> Path:
        """The file that the deed leaves."""
        return self.run.with_suffix(".note")

    def run_before(self, program: Program, moment: str) -> None:
        """Train some steps, if the moment is one of a resumed run."""
        if moment in RESTORED:
            done = program(*self.command("--max-steps", DONE_BEFORE))
            assert done.returncode == 0, done.stderr

    def finish(self, program: Program, whole: str) -> None:
        """Resume the run, and check that it ends as the undisturbed one."""
        done = program(*self.command())
        assert done.returncode == 0, done.stderr
        self.compare(whole)

    def compare(self, whole: str) -> None:
        """Check that the run is over, with the results of the undisturbed one."""
        assert summary_of(self.run)["weights_sha256"] == whole
        assert [line["step"] for line in events_of(self.run, "step")] == list(range(1, STEPS + 1))
        for samples in samples_of(self.run.with_suffix(".csv"), EPOCHS):
            assert len(samples) == len(set(samples)) == EPOCH
        assert store.load_newest(self.run / "checkpoints")[2] == []
        assert not list((self.run / "checkpoints").glob(".*"))
        assert not (self.run / NAME).exists()


class Undisturbed(Protocol):
    """Returns the hash of the weights of an undisturbed run."""

    def __call__(self, ranks: int, framework: str = "torch") -> str: ...


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, hvdtrain: Program, small_set: Path
) -> Undisturbed:
    """Return a function that returns the hash of the weights of an undisturbed run."""

    @cache
    def find(ranks: int, framework: str = "torch") -> str:
        run = tmp_path_factory.mktemp("undisturbed") / "run"
        done = hvdtrain(*Case(small_set, run, ranks, framework).command())
        assert done.returncode == 0, done.stderr
        return str(summary_of(run)["weights_sha256"])

    return find


def proof(*values: object) -> Any:
    """Return a case of `make proof`."""
    return pytest.param(*values, marks=pytest.mark.weekly)


def each_moment(quick: tuple[str, ...]) -> list[Any]:
    """Return a case for each moment, on one rank; all but these belong to `make proof`."""
    cases = ((moment, 1, "torch") for moment in MOMENTS)
    return [case if case[0] in quick else proof(*case) for case in cases]


@pytest.mark.parametrize(
    ("moment", "ranks", "framework"),
    [
        *each_moment(quick=("manifest read", "evaluation", "name")),
        *(proof(moment, 2, "torch") for moment in ("start", "part read", "evaluation", "name")),
        *(proof(moment, 1, "tensorflow") for moment in ("part read", "part", "name")),
    ],
)
def test_a_rank_is_killed(
    hvdtrain: Program,
    small_set: Path,
    tmp_path: Path,
    undisturbed: Undisturbed,
    moment: str,
    ranks: int,
    framework: str,
) -> None:
    case = Case(small_set, tmp_path / "run", ranks, framework)
    case.run_before(hvdtrain, moment)
    done = hvdtrain(*case.command(), **case.happens(moment, "SIGKILL"))
    assert done.returncode == (-signal.SIGKILL if ranks == 1 else 4), done.stderr
    case.finish(hvdtrain, undisturbed(ranks, framework))


@pytest.mark.parametrize(
    ("moment", "ranks", "framework"),
    [
        *each_moment(quick=("part read", "manifest")),
        *(proof(moment, 2, "torch") for moment in ("part read", "name")),
        *(proof(moment, 1, "tensorflow") for moment in ("part read", "name")),
    ],
)
def test_a_rank_is_asked_to_leave(
    hvdtrain: Program,
    small_set: Path,
    tmp_path: Path,
    undisturbed: Undisturbed,
    moment: str,
    ranks: int,
    framework: str,
) -> None:
    """A run that is stopped at its last moment has no work left."""
    case = Case(small_set, tmp_path / "run", ranks, framework)
    case.run_before(hvdtrain, moment)
    done = hvdtrain(*case.command(), **case.happens(moment, "SIGTERM"))
    assert case.note.exists()
    is_over = moment == "summary"
    assert done.returncode == (0 if is_over else 75), done.stderr
    assert len(done.stderr.splitlines()) == (0 if is_over else 1), done.stderr
    case.finish(hvdtrain, undisturbed(ranks, framework))


@pytest.mark.parametrize(
    ("moment", "error", "times", "code", "framework"),
    [
        ("manifest read", "ESTALE", 2, 0, "torch"),
        ("part", "EDQUOT", 1, 0, "torch"),
        ("records cut", "ENOSPC", 1, 3, "torch"),
        proof("owner", "ENOSPC", 1, 3, "torch"),
        proof("manifest read", "EIO", 99, 3, "torch"),
        proof("part read", "ESTALE", 2, 0, "torch"),
        proof("part read", "EIO", 99, 3, "torch"),
        proof("records cut", "EDQUOT", 1, 3, "torch"),
        proof("configuration", "EDQUOT", 1, 3, "torch"),
        proof("part", "EDQUOT", 99, 3, "torch"),
        proof("receipt", "ENOSPC", 1, 0, "torch"),
        proof("read back", "EIO", 1, 0, "torch"),
        proof("manifest", "EDQUOT", 1, 0, "torch"),
        proof("manifest", "ENOSPC", 99, 3, "torch"),
        proof("name", "ESTALE", 1, 0, "torch"),
        proof("name", "EIO", 99, 3, "torch"),
        proof("older one removed", "EIO", 99, 0, "torch"),
        proof("summary", "EDQUOT", 1, 3, "torch"),
        proof("part", "ENOSPC", 1, 0, "tensorflow"),
        proof("name", "EDQUOT", 99, 3, "tensorflow"),
    ],
)
def test_the_disk_refuses(
    hvdtrain: Program,
    small_set: Path,
    tmp_path: Path,
    undisturbed: Undisturbed,
    moment: str,
    error: str,
    times: int,
    code: int,
    framework: str,
) -> None:
    """The run tries again, or ends with the reason in one line; no checkpoint is lost."""
    case = Case(small_set, tmp_path / "run", framework=framework)
    case.run_before(hvdtrain, moment)
    held = {path: path.read_bytes() for path in case.run.glob("checkpoints/step-*/*")}
    done = hvdtrain(*case.command(), **case.happens(moment, error, times))
    assert case.note.exists()
    assert done.returncode == code, done.stderr
    if code:
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert os.strerror(getattr(errno, error)) in done.stderr
        assert {path: path.read_bytes() for path in held} == held
    case.finish(hvdtrain, undisturbed(1, framework))


@pytest.mark.parametrize("as_user", [proof(False), proof(True)], ids=["mounted", "as a user"])
def test_a_full_disk_lets_no_run_begin_and_none_go_on(
    small_set: Path, tmp_path: Path, undisturbed: Undisturbed, as_user: bool
) -> None:
    with small_disk(tmp_path / "disk", "4m", as_user) as disk:
        case = Case(small_set, disk.folder / "run")
        seen = Case(small_set, disk.seen / "run")
        for options in (("--max-steps", DONE_BEFORE), ()):
            fill(disk.seen / "filler")
            done = disk.run(*case.command())
            assert done.returncode == 3, done.stderr
            assert len(done.stderr.splitlines()) == 1, done.stderr
            assert "No space left on device" in done.stderr
            (disk.seen / "filler").unlink()
            done = disk.run(*case.command(*options))
            assert done.returncode == 0, done.stderr
        seen.compare(undisturbed(1))


@pytest.mark.parametrize(
    ("moment", "ranks"),
    [
        ("part read", 1),
        ("evaluation", 1),
        ("name", 1),
        *(proof(moment, 2) for moment in ("start", "part read", "evaluation", "name", "summary")),
    ],
)
def test_a_rank_is_suspended(
    hvdtrain: Program,
    small_set: Path,
    tmp_path: Path,
    undisturbed: Undisturbed,
    moment: str,
    ranks: int,
) -> None:
    case = Case(small_set, tmp_path / "run", ranks)
    case.run_before(hvdtrain, moment)
    process = start(case.command(), environment=case.happens(moment, "SIGSTOP"))
    wait_for(process, lambda: any(is_stopped(member) for member in members_of(process)))
    resume(members_of(process))
    errors = process.communicate(timeout=600)[1]
    assert process.returncode == 0, errors
    case.compare(undisturbed(ranks))


@pytest.mark.parametrize(
    ("moment", "rank"),
    [proof("part read", 0), proof("evaluation", 1), proof("name", 0), proof("summary", 0)],
)
def test_a_rank_hangs(
    hvdtrain: Program,
    small_set: Path,
    tmp_path: Path,
    undisturbed: Undisturbed,
    moment: str,
    rank: int,
) -> None:
    case = Case(small_set, tmp_path / "run", 2)
    case.run_before(hvdtrain, moment)
    limit = ("--stall-timeout", 5)
    done = hvdtrain(*case.command(*limit), **case.happens(moment, "SIGSTOP", rank=rank))
    assert case.note.exists(), done.stderr
    assert done.returncode == 4, done.stderr
    assert "has been stuck for longer than --stall-timeout allows" in done.stderr
    case.finish(hvdtrain, undisturbed(2))


@pytest.mark.parametrize("number", [proof(signal.SIGKILL), signal.SIGTERM])
def test_a_launcher_that_waits_to_start_again_ends_and_leaves_nothing(
    hvdtrain: Program,
    small_set: Path,
    tmp_path: Path,
    undisturbed: Undisturbed,
    number: signal.Signals,
) -> None:
    case = Case(small_set, tmp_path / "run", 2)
    process = wait_to_start_again(case)
    warm.fork_of(psutil.Process(process.pid)).send_signal(number)
    errors = process.communicate(timeout=SOON_SECONDS)[1]
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 75
        assert errors == "hvdtrain: ended before training started\n"
    wait_for_end(tmp_path)
    case.finish(hvdtrain, undisturbed(2))


@pytest.mark.weekly
def test_a_run_that_another_start_finishes_between_restarts_is_over(
    hvdtrain: Program, small_set: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    case = Case(small_set, tmp_path / "run", 2)
    process = wait_to_start_again(case)
    case.finish(hvdtrain, undisturbed(2))
    errors = process.communicate(timeout=600)[1]
    assert process.returncode == 0, errors
    case.compare(undisturbed(2))


def wait_to_start_again(case: Case) -> "subprocess.Popen[str]":
    """Start a job that has lost a rank twice, and waits to restart because nothing was saved yet.

    The second wait is long enough for another start on a busy machine, the first one is not.
    """
    options = ("--restarts", 2, "--inject", "kill step=1 rank=1; kill step=2 rank=1")
    process = start(case.command(*options))
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("restarting on 2 rank(s)" in line and " in 30 s" in line for line in lines)
    return process
