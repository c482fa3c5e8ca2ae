"""`reproduce collectives`: measures what is not measured yet, and writes the report."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdtrain import launch
from hvdtrain.errors import UsageError
from hvdtrain.host.launchers import has_horovod
from hvdtrain.options.syncoptions import Library
from hvdtrain.study.collectives import report
from hvdtrain.study.collectives.arms import Arm, arms, images_for
from hvdtrain.study.collectives.cells import HOROVOD, MPI, Cell, SumCell, free_cores
from hvdtrain.study.collectives.options import StudyOptions
from hvdtrain.study.collectives.predictions import Predictor, ProfileCell
from hvdtrain.study.collectives.results import Group, Steps, arrange

Say = Callable[[str], object]


def reproduce(options: StudyOptions, say: Say) -> Path:
    """Measure all cells and write the report; return the path of `report.md`.

    Args:
        say: called with each line of progress.

    Raises:
        UsageError: if the folder holds measurements of other settings, or there is no MPI.
        DataError: if there is no data set, or something cannot be written.
        HvdtrainError: the error of ranks that failed.
    """
    launch.mpirun(options.groups[-1])  # refuses a machine without MPI
    folder, repeats = Path(options.to), range(options.repeats)
    libraries: list[Library] = [MPI, HOROVOD] if has_horovod() else [MPI]
    compared: list[Arm] = []
    if options.model_names:
        compared = arms(options, images_for(options, folder), libraries)
    sums = [
        SumCell(algorithm, ranks, repeat, options.sizes)
        for algorithm in options.algorithm_names
        for ranks in options.groups
        for repeat in repeats
    ]
    profiles = {arm.profile_key: arm for arm in compared}
    profile_cells = [ProfileCell(arm, repeat) for arm in profiles.values() for repeat in repeats]
    cells = [cell.cell(folder) for cell in sums]
    cells += [cell.cell(folder) for cell in profile_cells]
    cells += [arm.cell(folder, repeat) for arm in compared for repeat in repeats]
    measure_all(cells, say)
    contents = [(cell, cell.read(folder)) for cell in sums]
    groups = arrange(contents, free_cores())
    if not groups:
        reasons = {text for _, content in contents for text in content["not_measured"].values()}
        raise UsageError(f"nothing was measured: {'; '.join(sorted(reasons))}")
    steps = _all_steps(compared, groups, profile_cells, folder, options.repeats)
    measured = [content for _, content in contents]
    findings = report.Findings(options, groups, steps, measured)
    return report.write(folder, findings)


def measure_all(cells: Sequence[Cell], say: Say) -> None:
    """Measure all cells that are not finished, in random order, the same each time.

    Raises:
        UsageError: if a result of other settings exists; nothing is measured then.
        HvdtrainError: the error of ranks that failed; finished cells stay.
    """
    todo = list(cells)
    random.Random(0).shuffle(todo)
    for cell in todo:
        cell.check()
    for place, cell in enumerate(todo, 1):
        if cell.result.exists():
            say(f"{place} of {len(todo)}: {cell.words} is finished")
            continue
        say(f"{place} of {len(todo)}: {cell.words}")
        cell.measure()


def _all_steps(
    compared: Sequence[Arm],
    groups: Sequence[Group],
    profile_cells: Sequence[ProfileCell],
    folder: Path,
    repeats: int,
) -> list[Steps]:
    """Return the measured and predicted steps of the arms whose all-reduces were measured."""
    sums = {
        (group.engine, group.ranks, name): one
        for group in groups
        for name, one in group.sums.items()
    }
    predictors: dict[tuple[object, ...], list[Predictor]] = {}
    for cell in profile_cells:
        predictors.setdefault(cell.arm.profile_key, []).append(cell.predictor(folder))
    return [
        Steps(
            arm,
            arm.results(folder, repeats),
            [one.step(measured.line) for one in predictors[arm.profile_key]],
        )
        for arm in compared
        if (measured := sums.get((arm.engine, arm.ranks, arm.algorithm))) is not None
    ]
