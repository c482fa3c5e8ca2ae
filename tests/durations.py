"""How long each test took the last time it was measured, so that a run starts with the longest.

`make test PYTEST_OPTIONS=--save-durations` measures again; `make proof` likewise.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")
SHORTEST = 0.5  # seconds; shorter tests are not in the file


def read() -> dict[str, float]:
    """Seconds per test, by its id."""
    seconds: dict[str, float] = json.loads(FILE.read_text())
    return seconds


def in_order(
    tests: Sequence[tuple[str, str]], seconds: Mapping[str, float], workers: int
) -> list[int]:
    """Return the places of the tests in the order in which they should run.

    `--dist worksteal` gives each worker as many tests, one after the other. So the files that take
    long are dealt to as many parts (the longest first, each to the part with the least to do), and
    each part is filled up with tests that take next to nothing, until all have as many.

    Args:
        tests: file and id of each test. The tests of a file stay together, in their order.
        seconds: what tests take, by id; 0 for those that are missing.
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
    """Collects what tests take, and writes it down at the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the set-up, the call and the tear-down of a test."""
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Replace what was known of these tests."""
        known = read() if FILE.exists() else {}
        for name, seconds in self.seconds.items():
            known.pop(name, None)
            if seconds >= SHORTEST:
                known[name] = round(seconds, 1)
        FILE.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")
