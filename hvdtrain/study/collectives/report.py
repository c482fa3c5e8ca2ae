"""Write the report of the study of all-reduces: Markdown, CSV and pictures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.errors import DataError
from hvdtrain.host import files
from hvdtrain.study.collectives import plots, tables
from hvdtrain.study.collectives.cells import LIBRARIES
from hvdtrain.study.collectives.options import StudyOptions
from hvdtrain.study.collectives.results import Group, Steps, Sums
from hvdtrain.study.collectives.textbook import Crossing, size_name, worst_error
from hvdtrain.study.collectives.verdicts import (
    Crossover,
    choices_of_library,
    crossovers,
    growth,
    judgements,
    step_verdicts,
)
from hvdtrain.study.statistics import Estimate, median
from hvdtrain.study.tables import markdown_table, number

NONE = "-"
PAPER = (
    'Mishra, "A Distributed Training Approach to Scale Deep Learning to Massive Datasets", names '
    "ring, tree and hierarchical all-reduce, each with its trade-off. This study measures the "
    "trade-off as textbooks count it (Thakur et al., IJHPCA 19(1), 2005): few messages are fast "
    "for small sums, few bytes for large ones, and between them lies a crossover."
)
HOW = "\n".join(
    (
        "- **Measured:** an all-reduce of fp32 lasts from the end of a barrier until the last "
        "rank has the sum. Each job is started under one algorithm and sums each size once "
        "per round, in random order; its value is the median of the rounds. Jobs of all "
        "algorithms and groups, training runs and profiles are made in random order. Values "
        "are medians of the jobs, with 95 % intervals in brackets (Student's t on the "
        "logarithms).",
        "- **MPI** is the non-blocking all-reduce in place of `--reduce-with mpi`. "
        "**Horovod** is its sum in a cycle of 0.3 ms, as for models of up to 8 MiB; it calls "
        "MPI's blocking all-reduce. Larger models train with a cycle of 5 ms, which their "
        "predictions leave out.",
        "- **Fitted:** latency and bandwidth are the line with the smallest relative error to "
        "an algorithm's medians. Alpha and beta are seconds per message and per byte of a "
        "message, fitted to all algorithms of a group together with the textbook's counts and "
        "one overhead per all-reduce, such as Horovod's cycle; beta has the additions in it.",
        "- **Predicted:** crossovers follow from alpha, beta and the counts. A step is "
        "simulated from the times of each component, measured without training, and from the "
        "fitted line for each bucket of gradients. Nothing of the training runs is in a "
        "prediction.",
        "- **Crossover, measured:** a size counts if the repeats of two algorithms do not "
        "overlap and their medians differ by more than 5 %. In brackets are the largest size "
        "at which the first one is clearly faster, and the smallest at which the second one "
        "is.",
    )
)
OVERSUBSCRIBED = (
    "Oversubscribed groups have more ranks than this machine has cores for. Ranks then wait for a "
    "core, and the time follows the work of all ranks together, not the longest path that the "
    "textbook counts."
)


@dataclass(frozen=True)
class Findings:
    """Everything that the report shows.

    Attributes:
        contents: of the files of all-reduces.
    """

    options: StudyOptions
    groups: Sequence[Group]
    steps: Sequence[Steps]
    contents: Sequence[Mapping[str, Any]]


def write(folder: Path, findings: Findings) -> Path:
    """Write the report into the folder; return the path of `report.md`.

    Raises:
        DataError: if it cannot be written.
    """
    names, groups = findings.options.algorithm_names, findings.groups
    crossings = crossovers(groups)
    for group in groups:
        plots.draw_group(group, names, folder / _picture(group))
    for model in findings.options.model_names:
        steps = [item for item in findings.steps if item.arm.model == model]
        plots.draw_steps(steps, folder / f"steps-{model}.png")
    contents = {
        "report.md": as_markdown(findings, crossings),
        "sums.csv": tables.sums_csv(groups),
        "fits.csv": tables.fits_csv(groups),
        "crossovers.csv": tables.crossovers_csv(crossings),
        "steps.csv": tables.steps_csv(findings.steps),
    }
    for name, text in contents.items():
        files.write_text(folder / name, text, "the report", DataError)
    return folder / "report.md"


def _picture(group: Group) -> str:
    return f"allreduce-{group.engine}-{group.ranks}.png"


def as_markdown(findings: Findings, crossings: Sequence[Crossover]) -> str:
    """Return the text of the report."""
    groups = findings.groups
    parts = ["# Paper C's all-reduces on this machine", PAPER, _origin(findings)]
    if any(group.is_oversubscribed for group in groups):
        parts.append(OVERSUBSCRIBED)
    parts.append("## Time against bytes")
    for group in groups:
        parts += [f"### {group.title}", "Microseconds per all-reduce:", _times(group)]
        parts.append(
            f"![{group.title}]({_picture(group)})\n\n*Time against bytes, {group.title}: medians "
            "and intervals; dashed: the textbook's counts.*"
        )
    parts += ["## Latency and bandwidth", _fits(groups)]
    if crossings:
        parts += ["## Crossovers", _crossovers(crossings)]
    parts += ["## Verdict on the trade-off", _verdicts(groups)]
    parts.append("\n".join([*growth(groups), *choices_of_library(groups)]))
    if findings.steps:
        parts += ["## What a training step gains", _steps(findings.steps)]
        parts.append("\n".join(step_verdicts(findings.steps)))
        parts += [
            f"![Steps of {model}](steps-{model}.png)\n\n*Measured and predicted steps of {model}.*"
            for model in findings.options.model_names
        ]
    parts += ["## How this was measured", HOW]
    return "\n\n".join(part for part in parts if part) + "\n"


def _origin(findings: Findings) -> str:
    options, first = findings.options, findings.contents[0]
    versions = ", ".join(f"{name} {text}" for name, text in first["versions"].items())
    reasons = {
        f"{LIBRARIES[library]} with {content['algorithm']}: {reason.split(': ')[0]}"
        for content in findings.contents
        for library, reason in content["not_measured"].items()
    }
    lines = [
        f"- Made by hvdtrain {__version__} from {len(findings.contents)} jobs of all-reduces and "
        f"{sum(len(item.runs) for item in findings.steps)} training runs.",
        f"- Machine: {first['machine']}. All ranks are on it.",
        f"- MPI: {first['mpi']}. Versions: {versions}.",
        f"- Groups: {', '.join(map(str, options.groups))} ranks; repeats: {options.repeats}; "
        f"sizes: {size_name(options.sizes[0])} to {size_name(options.sizes[-1])}.",
    ]
    return "\n".join([*lines, *(f"- Not measured: {reason}." for reason in sorted(reasons))])


def _times(group: Group) -> str:
    sizes = next(iter(group.sums.values())).medians
    return markdown_table(
        [
            {"bytes": size_name(size)}
            | {name: _microseconds(sums, size) for name, sums in group.sums.items()}
            for size in sizes
        ]
    )


def _microseconds(sums: Sums, size: int) -> str:
    return number(median([1e6 * value for value in sums.seconds[size]]), ",.0f")


def _all_sums(groups: Sequence[Group]) -> list[tuple[Group, Sums]]:
    return [(group, sums) for group in groups for sums in group.sums.values()]


def _fits(groups: Sequence[Group]) -> str:
    rows = []
    for group, sums in _all_sums(groups):
        work, textbook = sums.counts, group.textbook(sums.algorithm)
        latency = sums.fit_of_repeats(lambda line: 1e6 * line.fixed)
        per_byte = sums.fit_of_repeats(lambda line: 1e9 * line.per_unit)
        smallest, largest = min(sums.medians), max(sums.medians)
        rows.append(
            {
                "library, ranks": group.words,
                "algorithm": sums.algorithm,
                "messages": str(work.messages) if work else NONE,
                "bytes / n": f"{work.volume:.2f}" if work else NONE,
                "latency (us)": number(latency, ",.1f"),
                "per message (us)": f"{latency.value / work.messages:,.1f}" if work else NONE,
                "ns per byte": number(per_byte, ".3f"),
                "per byte sent (ns)": f"{per_byte.value / work.volume:.3f}" if work else NONE,
                "worst fit": f"{worst_error(sums.fitted, sums.medians):.2f}x",
                f"measured / textbook, {size_name(smallest)}": _share(sums, textbook, smallest),
                f"measured / textbook, {size_name(largest)}": _share(sums, textbook, largest),
            }
        )
    together = "Fitted to all algorithms of a group together:"
    return "\n\n".join([markdown_table(rows), together, _networks(groups)])


def _networks(groups: Sequence[Group]) -> str:
    return "\n".join(
        f"- {group.title}: overhead {1e6 * group.network.overhead:,.1f} us, alpha "
        f"{1e6 * group.network.alpha:,.1f} us per message, beta "
        f"{1e9 * group.network.beta:.3f} ns per byte of a message."
        for group in groups
        if group.network is not None
    )


def _share(sums: Sums, textbook: Mapping[int, float] | None, size: int) -> str:
    if textbook is None or not textbook[size]:
        return NONE
    return f"{sums.medians[size] / textbook[size]:.2f}"


def _crossovers(crossings: Sequence[Crossover]) -> str:
    return markdown_table(
        [
            {
                "library, ranks": item.group.words,
                "pair": " / ".join(item.pair),
                "predicted": crossing_words(item.predicted),
                "measured": crossing_words(item.measured),
                "measured / predicted": NONE if item.factor is None else f"{item.factor:.2f}",
                "verdict": item.verdict,
            }
            for item in crossings
        ]
    )


def crossing_words(crossing: Crossing) -> str:
    """Return where two algorithms cross, in words."""
    if not crossing.below:
        return "no difference"
    if crossing.size is None:
        return f"{crossing.below} at all sizes"
    text = f"{crossing.below} below {size_name(crossing.size)}, {crossing.above} above"
    if crossing.between is None:
        return text
    low, high = map(size_name, crossing.between)
    return f"{text} ({low} to {high})"


def _verdicts(groups: Sequence[Group]) -> str:
    judged = judgements(groups)
    if not judged:
        return "The chosen algorithms have no trade-off to judge."
    return markdown_table(
        [
            {
                "claim": item.claim,
                "library, ranks": item.group.words,
                "slower / faster, measured": (
                    NONE if item.measured is None else number(item.measured, ".2f")
                ),
                "by the textbook": NONE if item.textbook is None else f"{item.textbook:.2f}",
                "verdict": item.verdict,
            }
            for item in judged
        ]
    )


def _steps(steps: Sequence[Steps]) -> str:
    def milliseconds(values: Sequence[float]) -> str:
        return number(median([1e3 * value for value in values]), ",.2f")

    rows = []
    for item in steps:
        predicted = item.predicted(lambda prediction: prediction.step)
        rows.append(
            {
                "model, ranks": f"{item.arm.model}, {item.arm.ranks}",
                "library": LIBRARIES[item.arm.engine],
                "algorithm": item.arm.algorithm,
                "measured (ms)": milliseconds(item.measured),
                "predicted (ms)": number(_scaled(predicted, 1e3), ",.2f"),
                "predicted / measured": number(item.prediction_ratio, ".3f"),
                "sums alone, fitted (ms)": _ms(item, lambda prediction: prediction.alone),
                "not hidden: predicted (ms)": _ms(item, lambda prediction: prediction.added),
                "measured waiting (ms)": f"{1e3 * item.exposed:,.2f}",
            }
        )
    return markdown_table(rows)


def _ms(item: Steps, part: Callable[[Any], float]) -> str:
    return f"{1e3 * item.predicted(part).value:,.2f}"


def _scaled(value: Estimate, factor: float) -> Estimate:
    low, high = (None if end is None else factor * end for end in (value.low, value.high))
    return Estimate(factor * value.value, low, high)
