"""The measured durations of tests, so that a run starts with the longest ones.

`make test PYTEST_OPTIONS=--save-durations` measures them again, and `make proof` does with the
same option.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")
SHORTEST = 0.5  # seconds; shorter tests are not in the file


def read() -> dict[str, float]:
    """Return the seconds per test, by its id."""
    seconds: dict[str, float] = json.loads(FILE.read_text())
    return seconds


def in_order(
    tests: Sequence[tuple[str, str]], seconds: Mapping[str, float], workers: int
) -> list[int]:
    """Return the indices of the tests in the order in which they should run.

    `--dist worksteal` gives each worker the same number of consecutive tests. The long files are
    therefore dealt to one part per worker (the longest first, each to the part with the least
    work), and each part is filled up with short tests to the same number.

    Args:
        tests: file and id of each test. The tests of a file stay together, in their order.
        seconds: seconds per test, by id; 0 for those that are missing.
        workers: number of workers.
    """
    files: dict[str, list[int]] = defaultdict(list)
    for place, (file, _) in enumerate(tests):
        files[file].append(place)
    takes = {
        file: sum(seconds.get(tests[place][1], 0.0) for place in places)
        for file, places in files.items()
    }
    parts: list[list[int]] = [[] for _ in range(workers)]
    loads = [0.0] * workers
    for file in sorted((file for file in files if takes[file] > 0), key=lambda file: -takes[file]):
        least = loads.index(min(loads))
        parts[least] += files[file]
        loads[least] += takes[file]
    short = [place for file in files if takes[file] == 0 for place in files[file]]
    for number in range(workers):
        size = len(tests) * (number + 1) // workers - len(tests) * number // workers
        missing = size - len(parts[number]) if number < workers - 1 else len(short)
        parts[number] += short[: max(0, missing)]
        del short[: max(0, missing)]
    return [place for part in parts for place in part]


class Recorder:
    """A pytest plugin that collects the durations of tests, and saves them at the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the duration of the set-up, the call or the tear-down of a test."""
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Replace the saved durations of these tests."""
        known = read() if FILE.exists() else {}
        for name, seconds in self.seconds.items():
            known.pop(name, None)
            if seconds >= SHORTEST:
                known[name] = round(seconds, 1)
        FILE.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")
