import json
import os
from pathlib import Path

from hvdtrain.health.heartbeat import beat_seconds, file_of, suspects

OWN = ("", "reading its samples")


def beat(folder: Path, rank: int, doing: str, age: float = 0.0) -> None:
    path = file_of(folder, rank)
    path.write_text(
        json.dumps({"time": 0, "pid": 1, "host": f"n{rank}", "step": 5, "doing": doing})
    )
    os.utime(path, (1000 - age, 1000 - age))


def test_ranks_that_wait_for_nobody_are_suspected(tmp_path: Path) -> None:
    beat(tmp_path, 0, "0STEP: waiting for the reduction")
    beat(tmp_path, 1, "reading its samples")
    beat(tmp_path, 2, "")
    assert suspects(tmp_path, 4, 0, OWN) == [
        "rank 1 on n1 is reading its samples (step 5)",
        "rank 2 on n2 is at its own work (step 5)",
    ]
    assert suspects(tmp_path, 4, 1, OWN) == ["rank 2 on n2 is at its own work (step 5)"]


def test_ranks_without_a_sign_of_life_are_suspected_before_all_others(tmp_path: Path) -> None:
    beat(tmp_path, 0, "0STEP: waiting for the reduction")
    beat(tmp_path, 1, "0F0: forward", age=60)
    beat(tmp_path, 2, "")
    (line,) = suspects(tmp_path, 3, 0, OWN)
    assert line.startswith("rank 1 on n1 has sent no heartbeat for 60 s (step 5)")


def test_ranks_of_a_large_job_beat_less_often_and_are_silent_later(tmp_path: Path) -> None:
    assert [beat_seconds(size) for size in (1, 200, 1024)] == [2.0, 2.0, 10.24]
    beat(tmp_path, 0, "")
    beat(tmp_path, 1, "0F0: forward", age=30)
    beat(tmp_path, 2, "0F0: forward", age=50)
    (line,) = suspects(tmp_path, 1024, 0, OWN)
    assert line.startswith("rank 2 on n2 has sent no heartbeat for 50 s")
