"""Runs that are killed, preempted, suspended and resumed elsewhere, in random sequences.

A sequence of events is drawn from a seed, which is in the name of the test. The same seed draws
the same events, but their times depend on the machine. HVDTRAIN_SEQUENCES sets their number.
"""

import functools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hvdtrain.checkpoint import store
from hvdtrain.host.ownership import NAME
from tests import warm
from tests.conftest import Program, run_program
from tests.single.training.jobs import (
    alive,
    events_of,
    members_of,
    resume,
    samples_of,
    start,
    summary_of,
    suspend,
    wait_for_end,
)

SEQUENCES = int(os.environ.get("HVDTRAIN_SEQUENCES", "8"))
EPOCH, BATCH = 601, 40
STEPS = -(-EPOCH // BATCH)  # per epoch
LONGEST = 240  # seconds for one start on a busy machine
SAME_NUMBERS = 1e-9  # relative error between different numbers of ranks, in fp64
MODELS = {
    "torch": "tests.single.training.models:small",
    "tensorflow": "tests.single.tf.models:small",
}


@dataclass(frozen=True)
class Layout:
    """Options of a run; each of its starts is on one of these numbers of ranks."""

    ranks: tuple[int, ...] = (1,)
    plan: str | None = None
    framework: str = "torch"
    epochs: int = 2

    def command(self, data: Path, run: Path, ranks: int, *more: object) -> list[str]:
        """Return the command that starts the run, and resumes it."""
        words: list[object] = ["train", "--framework", self.framework, "--data", data]
        words += ["--model", MODELS[self.framework], "--batch-size", BATCH, "--run", run]
        words += ["--epochs", self.epochs, "--augment", "crop-flip", "--log-every", 1]
        words += ["--precision", "fp64" if len(self.ranks) > 1 else "fp32", "--ranks", ranks]
        words += ["--plan", self.plan] if self.plan else []
        words += ["--ledger", run.with_suffix(".csv"), "--resume", "auto", *more]
        return [str(word) for word in words]


# In turn: one of each kind first, then many on one rank, which start quickly.
ALONE = (Layout(epochs=3), Layout(epochs=2), Layout(epochs=4))
LAYOUTS = (
    *(ALONE[0], Layout((2,)), Layout((1, 2, 3)), Layout((2,), "mp"), Layout((3,))),
    *(Layout(framework="tensorflow"), *ALONE, *ALONE, *ALONE, *ALONE),
)


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, hvdtrain: Program, small_set: Path
) -> Callable[[Layout], Path]:
    """Return a function that returns the undisturbed run of a layout."""

    @functools.cache
    def find(layout: Layout) -> Path:
        run = tmp_path_factory.mktemp("undisturbed") / "run"
        done = hvdtrain(*layout.command(small_set, run, layout.ranks[0]))
        assert done.returncode == 0, done.stderr
        return run

    return find


class Look:
    """Progress of a start, from its run folder and the folder's earlier content."""

    def __init__(self, run: Path, steps: int) -> None:
        self.run, self.steps = run, steps
        self.owner, self.records = self._owner(), self._records()
        self.step = self.last("step")

    def is_owned(self) -> bool:
        """Return whether the start has claimed the folder."""
        return self._owner() not in ("", self.owner)

    def is_restored(self) -> bool:
        """Return whether the start has loaded the checkpoint that it resumes from, if any."""
        return self.is_owned() and self._records() not in (0, self.records)

    def is_writing(self, pattern: str) -> bool:
        """Return whether this file of an unfinished checkpoint exists."""
        with suppress(OSError):  # it may be renamed meanwhile
            return self.is_restored() and any((self.run / "checkpoints").glob(pattern))
        return False

    def is_at(self, step: int) -> bool:
        """Return whether the start has done this number of steps."""
        return self.is_restored() and self.last("step") >= min(self.step + step, self.steps)

    def is_evaluating(self) -> bool:
        """Return whether an epoch is trained and not yet recorded."""
        return (
            self.is_restored() and self.last("event") == "step" and self.last("step") % STEPS == 0
        )

    def is_over(self) -> bool:
        """Return whether there is nothing left to train."""
        return self.is_restored() and self.last("event") == "epoch" and self.is_at(self.steps)

    def last(self, key: str) -> Any:
        """Return the content of the last line of the metrics."""
        with suppress(OSError):
            lines = (self.run / "metrics.jsonl").read_bytes().split(b"\n")
            if len(lines) > 1:
                return json.loads(lines[-2])[key]
        return 0

    def _owner(self) -> str:
        with suppress(OSError):
            return (self.run / NAME).read_text()
        return ""

    def _records(self) -> int:
        with suppress(OSError):
            return (self.run / "metrics.jsonl").stat().st_ino
        return 0


MOMENTS: dict[str, Callable[[Look, int], bool]] = {
    "start": lambda look, number: True,
    "folder taken": lambda look, number: look.is_owned(),
    "restored": lambda look, number: look.is_restored(),
    "step": lambda look, number: look.is_at(number),
    "evaluation": lambda look, number: look.is_evaluating(),
    "part": lambda look, number: look.is_writing(f"{store.UNFINISHED}*/part-*"),
    "manifest": lambda look, number: look.is_writing(f"{store.UNFINISHED}*/manifest.json"),
    "over": lambda look, number: look.is_over(),
}


@dataclass
class Disturbed:
    """A run whose starts are disturbed one after the other, with a log of the events."""

    dice: random.Random
    layout: Layout
    data: Path
    run: Path

    def begin(self) -> None:
        """Start the run, or resume it."""
        self.ranks = self.dice.choice(self.layout.ranks)
        self.look = Look(self.run, STEPS * self.layout.epochs)
        self.codes = {0}  # possible exit codes
        self.process = start(self.command())
        print(f"start on {self.ranks} rank(s) after step {self.look.step}")

    def command(self) -> list[str]:
        """Return the command of this start."""
        every = ("--checkpoint-every", f"{self.dice.randint(2, 6)} steps")
        slow = ("--inject", "slow step=1 rank=0 seconds=0.01 steps=100000")
        return self.layout.command(self.data, self.run, self.ranks, *every, *slow)

    def disturb(self) -> bool:
        """Disturb the current start once; return whether that may end it."""
        dice = self.dice
        moment, number = dice.choice(list(MOMENTS)), dice.randint(1, 12)
        delay = dice.choice((0.0, dice.uniform(0, 0.02), dice.uniform(0, 0.3)))
        deed = dice.choice(("kill", "kill", "SIGINT", "SIGTERM", "SIGUSR1", "pause", "second"))
        is_suspended = deed == "pause" or dice.random() < 0.2
        if not self.wait_for(moment, number):
            return True
        time.sleep(delay)
        print(f"{deed} {delay:.3f} s after {moment} ({number}), suspended: {is_suspended}")
        with self.suspended() if is_suspended else nullcontext():
            match deed:
                case "kill":
                    self.codes |= {4, -signal.SIGKILL}
                    self.kill()
                case "SIGINT":
                    # Python itself exits with 1 while it starts.
                    self.codes |= {130, -signal.SIGINT, *({1} if moment == "start" else ())}
                    self.process.send_signal(signal.SIGINT)
                case "SIGTERM" | "SIGUSR1":
                    # A signal ends a program that has not installed its handler yet.
                    self.codes |= {75, -signal.Signals[deed]}
                    self.process.send_signal(signal.Signals[deed])
        if deed == "second" and self.look.is_owned():
            self.start_a_second()
        return deed not in ("pause", "second")

    def wait_for(self, moment: str, number: int) -> bool:
        """Return True once the moment has come, or False if the start ends before."""
        deadline = time.monotonic() + LONGEST
        while not MOMENTS[moment](self.look, number):
            if self.process.poll() is not None:
                print(f"it ended before {moment} ({number})")
                return False
            assert time.monotonic() < deadline, f"{moment} never came"
            time.sleep(0.001)
        return True

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend all processes of the job meanwhile."""
        members: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # it may end
            launcher = warm.fork_of(psutil.Process(self.process.pid))
            members += [launcher, *launcher.children(recursive=True)]
            members += members_of(self.process)
        suspend(members)
        yield
        time.sleep(self.dice.uniform(0, 0.2))
        resume(members)

    def kill(self) -> None:
        """Kill one process that trains, or all of them, or their launcher."""
        with suppress(psutil.NoSuchProcess):
            members = members_of(self.process)
            launcher = warm.fork_of(psutil.Process(self.process.pid))
            chosen = self.dice.choice(([self.dice.choice(members)], members, [launcher]))
            for member in chosen:
                member.kill()

    def start_a_second(self) -> None:
        """Start the run again: this is refused, unless the first start has ended meanwhile."""
        done = run_program(*self.command(), timeout=LONGEST)
        assert done.returncode == 2 or self.process.poll() is not None, done.stderr
        assert done.returncode in (0, 2), done.stderr

    def end(self) -> int:
        """Return the exit code of the current start, once all of its processes have ended."""
        errors = self.process.communicate(timeout=LONGEST)[1]
        wait_for_end(self.run)
        code = self.process.returncode
        assert code in self.codes, errors
        assert "Traceback" not in errors or 1 in self.codes or code == -signal.SIGINT, errors
        return code


@pytest.mark.parametrize(
    "number",
    [pytest.param(seed, marks=pytest.mark.weekly if seed else ()) for seed in range(SEQUENCES)],
)
def test_whatever_happens_to_a_run_it_ends_as_if_nothing_had(
    small_set: Path, tmp_path: Path, undisturbed: Callable[[Layout], Path], number: int
) -> None:
    layout = LAYOUTS[number % len(LAYOUTS)]
    whole, dice = undisturbed(layout), random.Random(number)
    disturbed = Disturbed(dice, layout, small_set, tmp_path / "run")
    try:
        disturbed.begin()
        for _ in range(dice.randint(2, 5)):
            if disturbed.disturb():
                print(f"ended with {disturbed.end()}")
                disturbed.begin()
        assert disturbed.end() == 0
    finally:
        for pid in alive(tmp_path):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    compare(tmp_path / "run", whole, layout)


def compare(run: Path, whole: Path, layout: Layout) -> None:
    """Check that all results of a run are those of the undisturbed one."""
    summary, expected = summary_of(run), summary_of(whole)
    steps = STEPS * layout.epochs
    assert [summary[key] for key in ("steps", "samples")] == [steps, EPOCH * layout.epochs]
    for samples in samples_of(run.with_suffix(".csv"), layout.epochs):
        assert len(samples) == len(set(samples)) == EPOCH
    assert rows(run) == rows(whole)
    assert [line["step"] for line in events_of(run, "step")] == list(range(1, steps + 1))
    assert [line["epoch"] for line in events_of(run, "epoch")] == list(range(1, layout.epochs + 1))
    saved = [line["step"] for line in events_of(run, "checkpoint")]
    assert saved == sorted(saved)  # twice if an epoch was trained and not yet evaluated
    newest, path, skipped = store.load_newest(run / "checkpoints")
    assert newest is not None
    assert path == run / "checkpoints" / store.name_of(steps)
    assert skipped == []
    if len(layout.ranks) == 1:
        for key in ("weights_sha256", "final", "best"):
            assert summary[key] == expected[key]
    held = store.load_newest(whole / "checkpoints")[0]
    assert held is not None
    for name, tensor in held.tensors.items():
        error = np.abs(newest.tensors[name] - tensor).max() / np.abs(tensor).max()
        assert error <= (SAME_NUMBERS if len(layout.ranks) > 1 else 0), name
    assert left_over(run) == []


def rows(run: Path) -> list[tuple[str, ...]]:
    """Return epoch, step and sample of each line of the ledger; the rank may differ."""
    lines = [line.split(",") for line in run.with_suffix(".csv").read_text().splitlines()]
    return sorted((epoch, step, sample) for epoch, step, _, sample in lines)


def left_over(run: Path) -> list[str]:
    """Return files that a finished run must not leave in its folder."""
    checkpoints = run / "checkpoints"
    unfinished = [*run.glob(".*"), *checkpoints.glob(".*"), *checkpoints.glob("damaged-*")]
    return [path.name for path in (*unfinished, *run.glob(NAME))]
