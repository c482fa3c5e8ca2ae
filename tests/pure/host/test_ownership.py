"""Ownership of a folder: one owner at a time, by signs of life and the disk's clock."""

import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.host.ownership import LAUNCH, LOOK_SECONDS, NAME, STALE_SECONDS, Owner, alone, claim
from tests.children import end_of, in_child

SLURM = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", LAUNCH)


@pytest.fixture(autouse=True)
def outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)


def take(folder: Path, messages: list[str] | None = None, waits: "Waits | None" = None) -> Owner:
    messages, waits = [] if messages is None else messages, waits or Waits()
    return claim(folder, folder / "heartbeats", messages.append, waits.clock, waits.sleep)


def elsewhere(folder: Path, age: float = 0.0, **changed: object) -> Owner:
    """Return an owner on another host, whose newest heartbeat is `age` seconds old."""
    owner = take(folder)
    content = json.loads(owner.path.read_text())
    owner.path.write_text(json.dumps(content | {"host": "far", "place": "far"} | changed))
    then = owner.path.stat().st_mtime - age
    for path in (owner.path, *(folder / "heartbeats").iterdir()):
        os.utime(path, (then, then))
    return owner


class Waits:
    """A clock that advances only while a waiting process sleeps; `signs` is called each time."""

    def __init__(self, signs: Callable[[], object] = lambda: None) -> None:
        self.now, self.signs = 0.0, signs

    def clock(self) -> float:
        """Return the seconds of this clock."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the clock, and call `signs`."""
        self.now += seconds
        assert self.now < 20 * STALE_SECONDS, "it hangs"
        self.signs()


def test_a_folder_has_one_owner_and_then_none(tmp_path: Path) -> None:
    owner = take(tmp_path / "run")
    assert owner.holds()
    owner.check()
    owner.release()
    assert not owner.path.exists()
    messages: list[str] = []
    assert take(tmp_path / "run", messages).token != owner.token
    assert messages == []


@pytest.mark.parametrize("hours", [0, -1000, 1000])
def test_an_owner_that_lives_is_not_replaced_whatever_the_clocks_of_the_hosts_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    owner = elsewhere(tmp_path, age=1)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * hours)
    beats = Waits((tmp_path / "heartbeats" / "rank-0001.json").touch)
    with pytest.raises(UsageError) as caught:
        take(tmp_path, waits=beats)
    assert beats.now == LOOK_SECONDS, "the first sign of life is enough"
    assert f"{tmp_path} is in use by process {os.getpid()} on far" in str(caught.value)
    assert f"{STALE_SECONDS:.0f} s after its last heartbeat" in str(caught.value)
    owner.check()


def test_an_owner_without_a_sign_of_life_is_replaced_and_learns_of_it(tmp_path: Path) -> None:
    owner, messages = elsewhere(tmp_path, age=STALE_SECONDS + 1), list[str]()
    new = take(tmp_path, messages)
    assert messages == []
    assert not owner.holds()
    with pytest.raises(UsageError, match="no longer belongs to this run"):
        owner.check()
    owner.release()
    new.check()


def test_an_owner_that_lives_is_not_replaced_by_one_that_was_suspended(tmp_path: Path) -> None:
    """A suspended process must not take its own absence for silence of the owner."""
    owner = elsewhere(tmp_path, age=1)
    waits = Waits()

    def be_suspended() -> None:
        waits.now += 10 * STALE_SECONDS
        owner.path.touch()

    waits.signs = be_suspended
    with pytest.raises(UsageError, match="which is alive"):
        take(tmp_path, waits=waits)
    owner.check()


def test_a_silent_owner_is_waited_for_until_it_has_been_silent_for_long_enough(
    tmp_path: Path,
) -> None:
    elsewhere(tmp_path, age=STALE_SECONDS / 2)
    messages, waits = list[str](), Waits()
    take(tmp_path, messages, waits)
    (line,) = messages
    left = re.search(r"waiting up to (\d+) s to see whether it is alive", line)
    assert left is not None, line
    assert waits.now <= float(left[1]) + 0.5 + 2 * LOOK_SECONDS
    assert float(left[1]) - 0.5 <= waits.now


def test_the_owner_of_a_time_to_come_is_waited_for_no_longer(tmp_path: Path) -> None:
    """Such a folder was copied from a disk whose clock was ahead."""
    elsewhere(tmp_path, age=-1e6)
    waits = Waits()
    take(tmp_path, waits=waits)
    assert STALE_SECONDS <= waits.now <= STALE_SECONDS + 2 * LOOK_SECONDS


def test_an_owner_that_was_killed_here_is_replaced_at_once(tmp_path: Path) -> None:
    def be_killed() -> None:
        take(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)

    end_of(in_child(be_killed))
    assert (tmp_path / NAME).exists()
    messages: list[str] = []
    take(tmp_path, messages)
    assert messages == []


def test_a_number_that_another_process_has_by_now_is_no_sign_of_life(tmp_path: Path) -> None:
    owner = take(tmp_path)
    content = json.loads(owner.path.read_text())
    owner.path.write_text(json.dumps(content | {"started": "1"}))
    messages: list[str] = []
    take(tmp_path, messages)
    assert messages == []


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("Slurm job 7", {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}),
        ("launcher ab", {LAUNCH: "ab:1"}),
    ],
)
def test_a_later_start_by_the_same_job_replaces_an_earlier_one_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, again: dict[str, str]
) -> None:
    elsewhere(tmp_path, starts={name: 0})
    for variable, value in again.items():
        monkeypatch.setenv(variable, value)
    messages: list[str] = []
    take(tmp_path, messages)
    assert messages == []


def test_two_starts_inside_one_job_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(tmp_path, age=1, starts={"Slurm job 7": 1})
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(UsageError, match="in use by Slurm job 7, "):
        take(tmp_path, waits=Waits((tmp_path / NAME).touch))


def test_of_many_that_come_at_once_one_is_the_owner(tmp_path: Path) -> None:
    elsewhere(tmp_path, age=STALE_SECONDS + 1)
    over = tmp_path / "over"

    def compete() -> None:
        owner = claim(tmp_path, tmp_path / "heartbeats", print)  # by the real clock
        while not over.exists():
            owner.check()
            owner.path.touch()
            time.sleep(0.05)

    children = [in_child(compete) for _ in range(6)]
    ends = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in children[1:]]
    assert ends == [1] * 5, "refused"
    over.touch()
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0


def test_a_file_that_is_no_owner_counts_as_one_until_it_is_old(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"token": 1')
    with pytest.raises(UsageError, match="in use by another run"):
        take(tmp_path, waits=Waits((tmp_path / NAME).touch))
    messages, waits = list[str](), Waits()
    take(tmp_path, messages, waits)
    assert "belongs to another run, last seen" in messages[0]
    assert waits.now > 0


def test_what_one_may_do_at_a_time_survives_whoever_was_killed_in_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"

    def be_killed() -> None:
        with alone(lock):
            os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(3):
        end_of(in_child(be_killed))
        assert lock.exists()
    counter = tmp_path / "counter"
    counter.write_text("0")

    def count() -> None:
        for _ in range(5):
            with alone(lock):
                number = int(counter.read_text())
                time.sleep(0.002)
                counter.write_text(str(number + 1))

    children = [in_child(count) for _ in range(4)]
    assert [end_of(child) for child in children] == [0] * 4
    assert counter.read_text() == "20"
    assert not lock.exists()


def test_a_lock_that_could_not_be_written_is_not_left_for_the_next_start(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"), alone(tmp_path / "lock"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
