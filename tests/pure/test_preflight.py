"""The checks of a job that doctor derives from the properties of its ranks."""

from dataclasses import replace
from typing import Any

import pytest

from hvdtrain.doctor.probe import Seen, job_checks

GOOD = Seen("n1", (0, 1), 2, 0, 2**30, "hvdtrain 1", 0.0)


def _states(*seen: Seen) -> dict[str, tuple[str, str]]:
    return {check.name: (check.state, check.text) for check in job_checks("srun", seen)}


def test_a_good_job_has_no_fault() -> None:
    states = _states(GOOD, replace(GOOD, host="n2"))
    assert {state for state, _ in states.values()} == {"ok"}
    assert states["ranks"][1] == "2 by srun: 1 on n1, 1 on n2"


@pytest.mark.parametrize(
    ("changes", "name", "state", "text"),
    [
        ({"versions": "hvdtrain 2"}, "versions", "fault", "hvdtrain 2 on 1 rank(s)"),
        ({"host": "n1"}, "cores", "note", "4 threads on 2 cores of n1"),
        ({"shared_memory": 2**20}, "shared memory", "fault", "1 MiB free in /dev/shm of n2"),
        ({"folder_seconds": None}, "file system", "fault", "is not the same folder on n2"),
        ({"gpus": 2}, "GPUs", "fault", "none on n1"),
    ],
)
def test_each_fault_is_named(changes: dict[str, Any], name: str, state: str, text: str) -> None:
    states = _states(GOOD, replace(GOOD, **{"host": "n2"} | changes))
    assert states[name][0] == state
    assert text in states[name][1]
