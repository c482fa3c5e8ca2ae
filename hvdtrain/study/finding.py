"""Find the runs of a study below some folders, and name them."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.data.images import shown
from hvdtrain.errors import DataError, UsageError
from hvdtrain.study.results import Result, read
from hvdtrain.training.runrecords import SUMMARY


@dataclass(frozen=True)
class Found:
    """The runs in and below some folders.

    Attributes:
        results: finished runs.
        left_out: a line for each other run.
    """

    results: list[Result]
    left_out: list[str]


def find(paths: list[str]) -> Found:
    """Return the runs in and below these folders.

    Raises:
        UsageError: if a folder does not exist, or none holds a finished run.
    """
    names = _names(paths)
    results: list[Result] = []
    left_out: list[str] = []
    # In the order of the names, so that no text depends on where the folders are.
    for folder, name in sorted(names.items(), key=lambda item: item[1]):
        if not os.path.lexists(folder / SUMMARY):
            left_out.append(f"{name} is not finished")
            continue
        try:
            results.append(replace(read(folder), name=name))
        except DataError as error:
            left_out.append(str(error).replace(str(folder), name))
    if not results:
        reasons = "; ".join(left_out[:3]) or "there is no config.yaml in or below it"
        raise UsageError(f"no run in {', '.join(paths)} can be reported: {reasons}")
    return Found(results, left_out)


def _names(paths: list[str]) -> dict[Path, str]:
    """Return the names of run folders in texts: the path below the nearest folder of all."""
    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise UsageError(
                f"{path} is not a folder: name run folders, or a folder that has some"
            )
        # Also what has lost its configuration, so that the report names it.
        for file in sorted((*path.rglob("config.yaml"), *path.rglob(SUMMARY))):
            folders.setdefault(file.parent.resolve(), file.parent)
    if not folders:
        return {}
    common = Path(os.path.commonpath([folder.parent for folder in folders]))
    return {folder: shown(whole.relative_to(common)) for whole, folder in folders.items()}
