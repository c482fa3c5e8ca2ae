"""The measurements of the study, one file or run folder each, which a stopped study resumes from.

A cell is one job of ranks. All cells are measured in random order, the same each time, so that
slow changes of the machine affect all algorithms.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain import launch
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files, records
from hvdtrain.host.harmless import parse_json
from hvdtrain.host.launchers import ALGORITHMS
from hvdtrain.options.syncoptions import Library
from hvdtrain.study.runs import error_of, make_folder

RANKS_PROGRAM = "hvdtrain.study.collectives.ranks"
MPI: Library = "mpi"
HOROVOD: Library = "horovod"
LIBRARIES: Mapping[Library, str] = {MPI: "MPI", HOROVOD: "Horovod"}  # their names in tables


@dataclass(frozen=True)
class Cell:
    """A measurement.

    Attributes:
        words: what is measured, for the progress.
        result: file that exists once the cell is finished.
        check: refuses a result, finished or not, of other settings.
        measure: makes the result.
    """

    words: str
    result: Path
    check: Callable[[], object]
    measure: Callable[[], object]


@dataclass(frozen=True)
class SumCell:
    """All-reduces of all sizes under one algorithm, by MPI and by Horovod."""

    algorithm: str
    ranks: int
    repeat: int
    sizes: tuple[int, ...]

    def path(self, folder: Path) -> Path:
        """Return the file of the result."""
        return folder / "sums" / f"{self.algorithm}-{self.ranks}-{self.repeat}.json"

    @property
    def settings(self) -> dict[str, Any]:
        """Return what a result in a file must have in common with this cell."""
        return {"algorithm": self.algorithm, "ranks": self.ranks, "sizes": list(self.sizes)}

    def cell(self, folder: Path) -> Cell:
        """Return the measurement."""
        path = self.path(folder)
        return Cell(
            f"all-reduces, {self.algorithm} on {self.ranks} ranks, repeat {self.repeat}",
            path,
            lambda: self.read(folder) if path.exists() else None,
            lambda: self._measure(path),
        )

    def _measure(self, path: Path) -> None:
        make_folder(path.parent)
        words = ["sums", self.algorithm, str(self.sizes[-1]), str(self.repeat), str(path)]
        start_ranks(self.ranks, words, self.algorithm, path)

    def read(self, folder: Path) -> dict[str, Any]:
        """Return the content of the result.

        Raises:
            DataError: if the file is damaged.
            UsageError: if it is of other settings, or of another machine.
        """
        path = self.path(folder)
        content = read_result(path)
        for name, value in (self.settings | {"machine": this_machine()}).items():
            if content.get(name) != value:
                raise UsageError(
                    f"{path} was measured with other settings ({name} was {content.get(name)!r}, "
                    f"is {value!r}): choose another --to"
                )
        return content


def this_machine() -> str:
    """Return the processor and the cores of this machine."""
    from hvdtrain.training.summary import machine

    described = machine(None, 1)
    return f"{described['processor']}, {described['cores']} cores, {free_cores()} usable"


def free_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def read_result(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        DataError: if there is none.
    """
    again = "remove it to measure again"
    try:
        content = records.checked(path, lambda: parse_json(records.content(path)), again)
    except FileNotFoundError:
        raise DataError(f"{path} is missing: measure again") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a measurement: {again}")
    return content


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object.

    Raises:
        DataError: if it cannot be written.
    """
    files.write_text(path, json.dumps(content, indent=1) + "\n", "the measurement", DataError)


def start_ranks(ranks: int, words: list[str], algorithm: str, result: Path) -> None:
    """Run the program of the study's ranks until it has written its result.

    Raises:
        HvdtrainError: the one of the ranks' exit code, if they failed.
    """
    outcome = launch.supervise(ranks, words, ALGORITHMS[algorithm], module=RANKS_PROGRAM)
    if outcome.code:
        raise error_of(outcome.code, f"{result} was not measured")
