import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hvdtrain.host.activity import (
    AFTER_THE_RANKS_SECONDS,
    LINE_BYTES,
    Activity,
    Watch,
    last_activity,
)

Result = TypeVar("Result")


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


def test_a_rank_that_starts_a_step_is_not_shown_in_the_step_before(tmp_path: Path) -> None:
    path = tmp_path / "activity"
    activity = Activity(path, 0, 60, print)
    activity.step(7)
    with activity.doing("reading"):
        assert last_activity(path, 0) == "step 7, reading"
        activity.step(8)
        assert last_activity(path, 0) == "step 7, reading"  # still the same action
    activity.step(9)
    assert last_activity(path, 0) == "step 9, starting"
    assert activity.now() == (9, "")
    activity.close()


def test_what_was_never_written_is_unknown(tmp_path: Path) -> None:
    assert last_activity(tmp_path / "absent", 0) == ""
    Activity(tmp_path / "activity", 0, 60, print).close()
    assert last_activity(tmp_path / "activity", 0) == ""
    assert last_activity(tmp_path / "activity", 5) == ""


class Looks:
    """An observer that checks ranks at intervals of its own clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        """Return the seconds of this clock."""
        return self.now

    def look_for(
        self, seconds: float, stalled: Callable[[], Result | None], tick: float = 1.0
    ) -> Result | None:
        """Return the first result of `stalled` within `seconds`, checked every `tick`."""
        for _ in range(round(seconds / tick)):
            self.now += tick
            if result := stalled():
                return result
        return None


def watch(looks: Looks, path: Path) -> Watch:
    """Return a watch of two ranks every second, with a limit of 50 s before the first step."""
    return Watch(path, range(2), 50, 1, looks.clock)


def test_the_watchdog_reports_an_action_that_takes_too_long_and_ends() -> None:
    stalls: list[str] = []
    others = threading.enumerate()  # other tests of this process may have watchdogs of their own
    activity = Activity(None, 0, 0.02, stalls.append)
    watchdogs = [thread for thread in threading.enumerate() if thread not in others]
    assert watchdogs
    activity.step(3)
    activity.note("0F0: forward")
    for thread in watchdogs:
        thread.join(20)
    assert not any(thread.is_alive() for thread in watchdogs)
    assert stalls == ["step 3, 0F0: forward"]
    activity.close()


def test_an_action_may_take_its_limit_and_no_longer() -> None:
    looks = Looks()
    activity = Activity(None, 0, 1000, print, looks.clock)  # its own watchdog is far too slow
    activity.step(3)
    for factor in (1, 5):
        activity.note("0F0: forward", factor)
        assert looks.look_for(1000 * factor, activity.stalled, activity.tick) is None
        line = looks.look_for(2 * activity.tick, activity.stalled, activity.tick)
        assert line == "step 3, 0F0: forward"
    activity.close()


def test_neither_short_actions_nor_rest_are_stalls() -> None:
    looks = Looks()
    activity = Activity(None, 0, 1000, print, looks.clock)
    for number in range(8):
        activity.note(f"0F{number}: forward")
        assert looks.look_for(900, activity.stalled, activity.tick) is None
    activity.rest()
    assert looks.look_for(5000, activity.stalled, activity.tick) is None
    with activity.doing("agreeing"):
        assert looks.look_for(900, activity.stalled, activity.tick) is None
    assert looks.look_for(5000, activity.stalled, activity.tick) is None
    activity.close()


def test_what_goes_on_inside_another_action_is_not_its_end(tmp_path: Path) -> None:
    path = tmp_path / "activity"
    activity = Activity(path, 0, 60, print)
    with activity.doing("reading a checkpoint"):
        with activity.doing("waiting for all ranks"):
            assert activity.now() == (0, "waiting for all ranks")
        assert activity.now() == (0, "reading a checkpoint")
        assert last_activity(path, 0) == "reading a checkpoint"
    assert activity.now() == (0, "")
    activity.close()


def test_a_rank_that_is_silent_for_too_long_is_found_from_outside(tmp_path: Path) -> None:
    """A rank at rest is watched too, where its own watchdog does not look."""
    path = tmp_path / "activity"
    ranks = [Activity(path, rank, 10, print) for rank in range(2)]
    looks = Looks()
    stalled = watch(looks, path).stalled
    for rank in ranks:
        rank.step(7)
        rank.note("0F0: forward")
    assert looks.look_for(8, stalled) is None
    ranks[0].rest()
    ranks[1].note("1B0: backward", factor=5)
    assert looks.look_for(10 + int(AFTER_THE_RANKS_SECONDS), stalled) is None
    assert looks.look_for(3, stalled) == (0, "its own work after step 7, 0F0: forward")
    ranks[0].note("0F1: forward", factor=10)
    assert looks.look_for(20, stalled) is None
    assert looks.look_for(20, stalled) == (1, "step 7, 1B0: backward")
    for rank in ranks:
        rank.close()


def test_a_rank_that_waits_for_all_others_is_named_after_them(tmp_path: Path) -> None:
    """Without the extra time, the highest of equally stuck ranks would be named."""
    path = tmp_path / "activity"
    ranks = [Activity(path, rank, 10, print) for rank in range(2)]
    looks = Looks()
    stalled = watch(looks, path).stalled
    for rank, activity in enumerate(ranks):
        activity.step(7)
        activity.note("leaving with all ranks" if rank else "summing up", after_others=rank == 1)
    assert looks.look_for(30, stalled) == (0, "step 7, summing up")
    ranks[0].note("its last breath")
    assert looks.look_for(20, stalled) == (1, "step 7, leaving with all ranks")
    for activity in ranks:
        activity.close()


def test_a_rank_that_never_begins_is_found_after_the_patience_of_a_start(tmp_path: Path) -> None:
    looks = Looks()
    stalled = watch(looks, tmp_path / "activity").stalled
    assert looks.look_for(50 + int(AFTER_THE_RANKS_SECONDS), stalled) is None
    assert looks.look_for(3, stalled) == (1, "its start-up")


def test_a_job_that_is_suspended_is_not_stalled(tmp_path: Path) -> None:
    """The watch is suspended with the job: the gap between two of its checks does not count."""
    looks = Looks()
    stalled = watch(looks, tmp_path / "activity").stalled
    for _ in range(10):
        looks.now += 3600
        assert looks.look_for(1, stalled) is None
