import threading
import time
from pathlib import Path

from hvdtrain.activity import LINE_BYTES, Activity, last_activity


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
