import threading
import time
from pathlib import Path

from hvdtrain.activity import (
    AFTER_THE_RANKS_SECONDS,
    LINE_BYTES,
    Activity,
    Watch,
    last_activity,
)


def test_each_rank_has_a_line_whatever_the_order(tmp_path: Path) -> None:
    path = tmp_path / "activity"
    ranks = {rank: Activity(path, rank, 60, print) for rank in (2, 0, 1)}
    for rank, activity in ranks.items():
        activity.step(7)
        activity.note(f"1F{rank}: forward")
    assert [last_activity(path, rank) for rank in range(3)] == [
        f"step 7, 1F{rank}: forward" for rank in range(3)
    ]
    ranks[1].note("2B0: " + "x" * 500)
    assert len(last_activity(path, 1)) == LINE_BYTES
    assert last_activity(path, 2) == "step 7, 1F2: forward"
    for activity in ranks.values():
        activity.close()


def test_what_was_never_written_is_unknown(tmp_path: Path) -> None:
    assert last_activity(tmp_path / "absent", 0) == ""
    Activity(tmp_path / "activity", 0, 60, print).close()
    assert last_activity(tmp_path / "activity", 0) == ""
    assert last_activity(tmp_path / "activity", 5) == ""


def test_an_action_that_takes_too_long_is_reported_once_with_its_line() -> None:
    stalls: list[str] = []
    seen = threading.Event()

    def on_stall(line: str) -> None:
        stalls.append(line)
        seen.set()

    activity = Activity(None, 0, 0.2, on_stall)
    activity.step(3)
    activity.note("0F0: forward")
    assert seen.wait(5)
    time.sleep(0.3)
    assert stalls == ["step 3, 0F0: forward"]
    activity.close()


def test_neither_short_actions_nor_rest_are_stalls() -> None:
    stalls: list[str] = []
    activity = Activity(None, 0, 0.3, stalls.append)
    for number in range(8):
        activity.note(f"0F{number}: forward")
        time.sleep(0.05)
    activity.rest()
    time.sleep(0.5)
    with activity.doing("agreeing"):
        pass
    time.sleep(0.5)
    activity.close()
    assert stalls == []


class Looks:
    """A watch that looks every second, with limits of 10 s in steps and 50 s before the first."""

    def __init__(self, path: Path) -> None:
        self.now = 0.0
        self.watch = Watch(path, 2, 50, 1, clock=lambda: self.now)

    def look_for(self, seconds: int) -> tuple[int, str] | None:
        for _ in range(seconds):
            self.now += 1
            if found := self.watch.stalled():
                return found
        return None


def test_a_rank_that_notes_nothing_for_too_long_is_found_from_outside(tmp_path: Path) -> None:
    """Also at rest, where its own watchdog does not look: it was there until somebody came."""
    path = tmp_path / "activity"
    ranks = [Activity(path, rank, 10, print) for rank in range(2)]
    looks = Looks(path)
    for rank in ranks:
        rank.step(7)
        rank.note("0F0: forward")
    assert looks.look_for(8) is None
    ranks[0].rest()
    ranks[1].note("1B0: backward", factor=5)
    assert looks.look_for(10 + int(AFTER_THE_RANKS_SECONDS)) is None
    assert looks.look_for(3) == (0, "its own work after step 7, 0F0: forward")
    ranks[0].note("0F1: forward", factor=10)
    assert looks.look_for(20) is None
    assert looks.look_for(20) == (1, "step 7, 1B0: backward")
    for rank in ranks:
        rank.close()


def test_a_rank_that_never_begins_is_found_after_a_longer_time(tmp_path: Path) -> None:
    looks = Looks(tmp_path / "activity")
    assert looks.look_for(50 + int(AFTER_THE_RANKS_SECONDS)) is None
    assert looks.look_for(3) == (1, "its start-up")


def test_a_job_that_is_suspended_is_not_stalled(tmp_path: Path) -> None:
    """The watch is suspended with it: the gap between two of its looks does not count."""
    looks = Looks(tmp_path / "activity")
    for _ in range(10):
        looks.now += 3600
        assert looks.look_for(1) is None
