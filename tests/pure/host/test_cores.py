"""Processes are bound to cores of their own, one per thread."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.host import process
from tests.conftest import ROOT

# Binds itself after a thread has started, and prints the cores of both threads.
PROGRAM = """
import os, sys, threading
from hvdtrain.host import process
event, done = threading.Event(), []
def wait():
    event.wait()
    done.append(sorted(os.sched_getaffinity(0)))
thread = threading.Thread(target=wait)
thread.start()
process.bind(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
event.set()
thread.join()
print(done[0], sorted(os.sched_getaffinity(0)))
"""


def bound(place: int, sharing: int, threads: int) -> list[int]:
    words = [sys.executable, "-c", PROGRAM, *map(str, (place, sharing, threads))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    other, this = done.stdout.strip().split("] [")
    assert f"{other.lstrip('[')}]" == this, "a thread that ran before has other cores"
    return [int(word) for word in this.rstrip("]").split(",")]


def test_each_process_gets_cores_of_its_own() -> None:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) == 1:
        assert bound(0, 1, 1) == usable
        return
    first, second = bound(0, 2, 1), bound(1, 2, 1)
    assert len(first) == len(second) == 1 and first != second
    assert bound(0, 1, 2) == sorted(process.physical_first(usable)[:2])


def test_more_threads_than_cores_are_refused() -> None:
    most = len(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    with pytest.raises(
        UsageError, match=rf"{most + 1} rank\(s\) x 1 thread\(s\) share {most} core"
    ):
        process.bind(0, most + 1, 1)
    assert os.sched_getaffinity(0) == before


def test_each_physical_core_is_used_before_any_is_used_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SIBLINGS", str(tmp_path / "{}"))
    for core, text in enumerate(("0,4\n", "1,5\n", "2-3\n", "2-3\n", "0,4\n", "1,5\n")):
        (tmp_path / str(core)).write_text(text)
    assert process.physical_first(range(6)) == [0, 1, 2, 3, 4, 5]
    assert process.physical_first([0, 2, 3, 4]) == [0, 2, 3, 4]
    assert process.physical_first([2, 3, 4, 5]) == [2, 4, 5, 3]
    assert process.physical_first([8, 9]) == [8, 9]  # nothing is known of these


def test_a_later_run_of_the_process_may_use_all_cores_again() -> None:
    program = (
        "import os; from hvdtrain import world; before = os.sched_getaffinity(0); "
        "world.start(threads=1, bind=True); bound = os.sched_getaffinity(0); world.stop(); "
        "print(len(bound) == 1 and os.sched_getaffinity(0) == before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "True\n", done.stderr
