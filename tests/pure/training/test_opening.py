"""The seconds of a start."""

import time

import pytest

from hvdtrain.host.ownership import LAUNCHED, process_start
from hvdtrain.training.loop import StartClock


def test_a_clock_that_is_set_meanwhile_changes_no_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that was set back by a day during the start made it last -86,382 s."""
    monkeypatch.setenv(LAUNCHED, str(process_start()))
    start = StartClock()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 86400)
    start.mark("python")
    monkeypatch.setattr(time, "time", lambda: now + 86400)
    start.mark("mpi")
    assert list(start.seconds) == ["launch", "python", "mpi"]
    assert all(0 <= seconds < 86400 / 2 for seconds in start.seconds.values())
