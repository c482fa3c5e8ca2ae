"""`reproduce paper-b`: trains what is not trained yet, predicts, and writes the report."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvdtrain.data.index import Index, read_index
from hvdtrain.study.paper_b import arms, report
from hvdtrain.study.paper_b.arms import Case, Compared
from hvdtrain.study.paper_b.claims import PUBLISHED
from hvdtrain.study.paper_b.emulations import emulate, on_measured_ranks
from hvdtrain.study.paper_b.measured import Measured
from hvdtrain.study.paper_b.objective import DIVIDED, READINGS, Optimum, minimise
from hvdtrain.study.paper_b.options import PaperBOptions
from hvdtrain.study.paper_b.predicted import predict
from hvdtrain.study.results import Result, read
from hvdtrain.study.runs import make_folder, run_all


def reproduce(options: PaperBOptions, say: Callable[[str], object]) -> Path:
    """Train all runs and write the report; return the path of `report.md`.

    Args:
        say: called with each line of progress.

    Raises:
        UsageError: if the folder holds runs of other settings, or a model does not accept the
            images of the runs for accuracy.
        DataError: if there is no data set, or something cannot be written.
        HvdtrainError: the error of a run that failed; the same command resumes.
    """
    index, folder = read_index(options.data), Path(options.to)
    arms.check_accuracy_pixels(options, index)
    make_folder(folder)
    make_folder(folder / "profiles")
    arms.make_images(options, index)
    run_all(arms.profiled(options, index), 1, folder, say)
    optima = {case: _optima(options, case, index) for case in arms.cases(options)}
    divided = {case: of_case[DIVIDED] for case, of_case in optima.items()}
    sides = arms.compared(options, index, divided)
    timed: dict[str, list[Path]] = {}
    for model in options.trained:
        of_model = [one.timed for one in sides if one.case.model == model]
        timed |= run_all(arms.distinct(of_model), options.repeats_of(model), folder, say)
    trained = [one.accuracy for one in sides if one.accuracy is not None]
    accuracy = run_all(arms.distinct(trained), options.seeds, folder, say)
    measured = {
        case: _measured(sides, case, of_case, timed, accuracy) for case, of_case in optima.items()
    }
    say("predicting table I")
    predictions = [predict(model) for model in PUBLISHED]
    on_measured = on_measured_ranks(options, sides, measured)
    emulations = emulate(options, on_measured, predictions, say)
    return report.write(folder, options, list(measured.values()), predictions, emulations)


def _optima(options: PaperBOptions, case: Case, index: Index) -> dict[str, Optimum]:
    """Return the optima of the paper's objective on measured times, by how it is read."""
    known = arms.known_of(options, case, index)
    images = arms.images_per_step(options, case.model, index)
    return {reading: minimise(known, case.ranks, images, reading) for reading in READINGS}


def _measured(
    sides: Sequence[Compared],
    case: Case,
    optima: Mapping[str, Optimum],
    timed: Mapping[str, list[Path]],
    accuracy: Mapping[str, list[Path]],
) -> Measured:
    def results(paths: Sequence[Path]) -> list[Result]:
        return [read(path) for path in sorted(paths)]

    of_case = [one for one in sides if one.case == case]
    return Measured(
        case.model.key,
        case.ranks,
        {one.strategy: results(timed[one.timed.key]) for one in of_case},
        {
            one.strategy: results(accuracy[one.accuracy.key])
            for one in of_case
            if one.accuracy is not None
        },
        optima,
    )
