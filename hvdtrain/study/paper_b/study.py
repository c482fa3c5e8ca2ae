"""`reproduce paper-b`: trains what is not trained yet, predicts, and writes the report."""

from collections.abc import Callable, Sequence
from pathlib import Path

from hvdtrain.data.index import read_index
from hvdtrain.study.paper_b import report
from hvdtrain.study.paper_b.arms import Compared, compared
from hvdtrain.study.paper_b.measured import Measured
from hvdtrain.study.paper_b.options import PaperBOptions
from hvdtrain.study.results import Result, read
from hvdtrain.study.runs import make_folder, run_all


def reproduce(options: PaperBOptions, say: Callable[[str], object]) -> Path:
    """Train all runs and write the report; return the path of `report.md`.

    Args:
        say: called with each line of progress.

    Raises:
        UsageError: if the folder holds runs of other settings.
        DataError: if there is no data set, or something cannot be written.
        HvdtrainError: the error of a run that failed; the same command resumes.
    """
    index, folder = read_index(options.data), Path(options.to)
    make_folder(folder)
    sides = compared(options, index)
    timed = run_all([one.timed for one in sides], options.repeats, folder, say)
    accuracy: dict[str, list[Path]] = {}
    if options.epochs:
        accuracy = run_all([one.accuracy for one in sides], options.seeds, folder, say)
    results = [_measured(options, sides, model.key, timed, accuracy) for model in options.trained]
    return report.write(folder, options, results, say)


def _measured(
    options: PaperBOptions,
    sides: Sequence[Compared],
    model: str,
    timed: dict[str, list[Path]],
    accuracy: dict[str, list[Path]],
) -> Measured:
    def results(paths: Sequence[Path]) -> list[Result]:
        return [read(path) for path in sorted(paths)]

    of_model = [one for one in sides if one.model.key == model]
    return Measured(
        model,
        options.ranks,
        {one.strategy: results(timed[one.timed.key]) for one in of_model},
        {
            one.strategy: results(accuracy[one.accuracy.key])
            for one in of_model
            if one.accuracy.key in accuracy
        },
    )
