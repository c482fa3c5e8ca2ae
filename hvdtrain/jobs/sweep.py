"""Submit the runs of a study, whose YAML file holds values and lists of values."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from hvdtrain.config import TrainConfig
from hvdtrain.configfile import NOT_IN_RESULT
from hvdtrain.errors import UsageError
from hvdtrain.host import records
from hvdtrain.host.files import plain_name
from hvdtrain.jobs import watch
from hvdtrain.jobs.estimate import LEAST, Need, need, replacing
from hvdtrain.jobs.options import JobOptions, SlurmOptions, load_site
from hvdtrain.jobs.slurm import Request, dry_run
from hvdtrain.jobs.submit import (
    check,
    check_runs,
    joined_numbers,
    reasons_to_skip,
    run_folder,
    submission_lock,
    submit_and_record,
)
from hvdtrain.options.givenmodel import beside
from hvdtrain.options.names import folded, unknown_key
from hvdtrain.options.parser import Parser, add_dataclass, select_fields
from hvdtrain.options.sections import SyncOptions, about

MOST_RUNS = 1000
SINGLE_RUN_KEYS = ("run", "resume", "restarts", "ledger", "trace", "dry_run", "chain")
WHOLE_STUDY_KEYS = (
    *("repeats", "interval", "most_core_hours", "repeat_disturbed", "to_accuracy"),
    *("config", "in_flight", "cluster", "site"),
)
DEFAULT_SYNC: dict[str, Any] = {item.name: item.default for item in fields(SyncOptions)}
LIST_KEYS = ("sbatch",)  # a list is one value, not several values to combine


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Options of a study, in addition to the options of its runs and jobs."""

    repeats: int | Literal["auto"] = field(
        default=1,
        metadata=about(
            "runs per size, with consecutive seeds; auto: three, and at each further sweep as "
            "many more as `interval` needs"
        ),
    )
    interval: float = field(
        default=0.05,
        metadata=about(
            "for repeats: auto: half the width of the interval of each speed-up to reach, "
            "relative to it"
        ),
    )
    most_core_hours: float | None = field(
        default=None,
        metadata=about(
            "for repeats: auto: core-hours after which no repeats are added", default="no limit"
        ),
    )
    repeat_disturbed: bool = field(
        default=False,
        metadata=about(
            "at each further sweep, one repeat more for each run that something else slowed down, "
            "at most as many again; with a number of repeats"
        ),
    )
    scaling: Literal["strong", "weak"] = field(
        default="strong",
        metadata=about("strong: batch_size is the global batch size; weak: that of each rank"),
    )
    ranks_per_node: int | None = field(
        default=None,
        metadata=about("ranks per node; sets the number of nodes", default="all on one"),
    )
    config: str | None = field(
        default=None,
        metadata=about(
            "YAML file of train, such as a recipe, whose keys count where the study has none; "
            "relative to the study's file",
            metavar="FILE",
        ),
    )
    to_accuracy: float | None = field(
        default=None,
        metadata=about("test accuracy that runs should reach; the report has the time until then"),
    )
    in_flight: int | None = field(
        default=None, metadata=about("runs that may run at the same time", default="any number")
    )


@dataclass(frozen=True)
class Study:
    """A study: its sizes and its options.

    Attributes:
        cells: the repeats of each size, which differ only in their seeds and become one
            submission, in the order of submission, which is random.
        options: options of the study.
        remarks: why sizes need more repeats.
    """

    cells: tuple[Request, ...]
    options: StudyOptions
    remarks: tuple[str, ...] = ()


OPTION_CLASSES = (StudyOptions, JobOptions, TrainConfig)  # their fields are keys of a study's file


def load(path: str, folder: str, slurm: SlurmOptions | None = None) -> Study:
    """Return the study that a file describes.

    The keys are options of `train`, of `jobs submit` and of `StudyOptions`. A list means each of
    its values; all combinations of all lists are run.

    Args:
        path: YAML file.
        folder: parent of the run folders.
        slurm: options that override those of the file.

    Raises:
        UsageError: if a key is unknown, or a value has the wrong type or is out of range.
    """
    axes, slurm = _axes(path), slurm or SlurmOptions()
    parser = Parser()
    for option_class in OPTION_CLASSES:
        add_dataclass(parser, option_class)
    cells: dict[str, Request] = {}
    needed = None
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        parser.check_keys(path, chosen)
        try:
            parsed = parser.parse_object(chosen).as_dict()
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        is_coded = parsed["sync"] != "exact" and parsed["compress"] != "none"
        if is_coded and "none" in axes["compress"]:
            continue  # only exact sums are compressed
        options = select_fields(StudyOptions, parsed)
        varied = [key for key in axes if len(axes[key]) > 1]
        name = "-".join(f"{key}={plain_name(str(chosen[key]))}" for key in varied)
        name = name or "run"
        if options.repeats == "auto" and options.repeat_disturbed:
            raise UsageError(
                f"{path}: repeats: auto adds what disturbed runs need: leave repeat_disturbed out"
            )
        if options.repeats == "auto":
            needed = needed or _need(options, Path(folder))
            options = replace(options, repeats=needed.counts.get(name, LEAST))
        elif options.repeat_disturbed:
            needed = needed or replacing(Path(folder), options.repeats)
            options = replace(options, repeats=needed.counts.get(name, options.repeats))
        cell = _cell(parsed, options, Path(folder), name, slurm)
        # One rank runs the same under every plan, so that is a single size.
        cells.setdefault(repr([replace(cell.runs[0], run=None), cell.job]), cell)
    shuffled = list(cells.values())
    folders = Counter(cell.runs[0].run for cell in shuffled)
    if duplicate := next((run for run, count in folders.items() if count > 1), None):
        raise UsageError(
            f"{path}: two combinations of values have the same run folder {duplicate}: write the "
            "values differently"
        )
    # Random order: slow changes of the cluster's load must not correlate with the sizes.
    random.Random(0).shuffle(shuffled)
    return Study(tuple(shuffled), options, tuple(needed.remarks if needed else ()))


def _need(options: StudyOptions, folder: Path) -> Need:
    """Return the repeats that `repeats: auto` needs."""
    if not 0 < options.interval < 1:
        raise UsageError(f"interval must be above 0 and below 1, not {options.interval}")
    hours = options.most_core_hours
    if hours is not None and hours <= 0:
        raise UsageError(f"most_core_hours must be above 0, not {hours}")
    return need(folder, options.interval, hours)


def _axes(path: str) -> dict[str, list[Any]]:
    """Return the list of values for each key of a file."""
    content = records.read_mapping(Path(path), "study")
    if isinstance(content.get("config"), str):
        recipe = Path(path).parent / content["config"]
        settings = records.read_mapping(recipe, "file of train's options")
        content = beside(folded(settings), recipe.parent) | content
    options = [item for option_class in OPTION_CLASSES for item in fields(option_class)]
    known = [item.name for item in options]
    switches = [item.name for item in options if isinstance(item.default, bool)]
    for name in content:
        if name not in known:
            raise unknown_key(path, name, known, switches)
        if name in SINGLE_RUN_KEYS:
            raise UsageError(f"{path}: {name} is an option of a single run: leave it out")
        if name in WHOLE_STUDY_KEYS and isinstance(content[name], list):
            raise UsageError(f"{path}: {name} applies to the whole study: give one value")
    axes = {
        name: value if isinstance(value, list) and name not in LIST_KEYS else [value]
        for name, value in content.items()
    }
    combinations = math.prod(map(len, axes.values()))
    if not 0 < combinations <= MOST_RUNS:
        raise UsageError(f"{path} requests {combinations:,} sizes: give 1 to {MOST_RUNS:,}")
    return axes


def _cell(
    parsed: dict[str, Any], options: StudyOptions, folder: Path, name: str, slurm: SlurmOptions
) -> Request:
    """Return the repeats of one combination of values, in run folders that start with `name`."""
    assert isinstance(options.repeats, int)
    for option in ("repeats", "ranks_per_node", "in_flight"):
        value = getattr(options, option)
        if value is not None and not 0 < value <= MOST_RUNS:
            raise UsageError(f"{option} must be between 1 and {MOST_RUNS}, not {value}")
    job, run = select_fields(JobOptions, parsed), select_fields(TrainConfig, parsed)
    ranks = run.ranks or 1
    if options.scaling == "weak":
        if run.sync.partition(":")[0] == "server":
            raise UsageError(
                "scaling: weak multiplies the batch by all ranks, but servers do not "
                "train: use scaling: strong"
            )
        run = replace(run, batch_size=run.batch_size * ranks)
    if options.to_accuracy is not None:
        if not 0 < options.to_accuracy <= 1:
            raise UsageError(f"to_accuracy must be above 0 to 1, not {options.to_accuracy}")
        run = replace(run, expected=options.to_accuracy)
    if ranks == 1:  # which has nobody to agree with
        run = replace(run, plan=None, **DEFAULT_SYNC)
    if options.ranks_per_node:
        job = replace(job, nodes=-(-ranks // options.ranks_per_node))
    if job.gpus_per_node:
        job = replace(job, gpus_per_node=ranks // job.nodes)
    if run.threads is None:
        run = replace(run, threads=job.cpus_per_rank)
    seeds = range(run.seed, run.seed + options.repeats)
    stem = str(folder / name)
    runs = [replace(run, ranks=ranks, seed=n, run=f"{stem}-seed={n}").check() for n in seeds]
    job.ranks_per_node(run)
    job = job.overridden_by(slurm)
    return Request(
        runs=tuple(runs),
        job=job,
        site=load_site(job.site),
        logs=folder / watch.LOGS,
        name=name,
        parallel=min(options.in_flight or len(runs), len(runs)),
    )


def sweep(study: Study, folder: str, is_dry: bool) -> Iterator[str]:
    """Submit every run of a study that is not done yet; yield the lines to print.

    Each size is one submission, because the runs of an array request the same nodes; its repeats
    are the array. A second sweep submits only the runs that failed. Without Slurm, all runs are
    one job on this machine, one after the other.

    Raises:
        UsageError, DataError: as `submit`; nothing is submitted if any run is refused.
    """
    yield from study.remarks
    check(study.cells)
    check_runs(cell.runs[0] for cell in study.cells)
    with nullcontext() if is_dry else submission_lock(Path(folder)):
        yield from _submit(study, Path(folder), is_dry)


def _submit(study: Study, folder: Path, is_dry: bool) -> Iterator[str]:
    all_runs = [run for cell in study.cells for run in cell.runs]
    folders = list(map(run_folder, all_runs))
    reasons = dict(zip(folders, reasons_to_skip(all_runs, NOT_IN_RESULT), strict=True))
    yield from filter(None, reasons.values())
    pending = []
    for cell in study.cells:
        if runs := tuple(run for run in cell.runs if not reasons[run_folder(run)]):
            pending.append(replace(cell, runs=runs))
    if is_dry:
        yield from map(dry_run, pending)
        return
    if pending and pending[0].job.cluster == "local":
        # One job runs them all in turn, within the sum of their time limits.
        minutes = sum(cell.job.minutes() * len(cell.runs) for cell in pending)
        job = replace(pending[0].job, time=str(minutes))
        runs = tuple(run for cell in pending for run in cell.runs)
        pending = [replace(pending[0], runs=runs, job=job, name=folder.name)]
    limit, submitted = study.options.in_flight, list[list[str]]()
    others = watch.active(folders) if limit is not None else {}
    earlier = [number for numbers in others.values() for number in numbers]
    for request in pending:
        dependency = None
        if limit is not None:  # one more starts when an earlier one has ended
            together = max(1, limit // max(len(cell.runs) for cell in study.cells))
            before = submitted[-together] if len(submitted) >= together else earlier
            dependency = f"afterany:{joined_numbers(before)}" if before else None
        submitted.append(submit_and_record(request, dependency))
        count = f"{len(request.runs)} run{'s' if len(request.runs) > 1 else ''}"
        yield f"{request.name}: {count}, job {joined_numbers(submitted[-1]).replace(':', ', ')}"
