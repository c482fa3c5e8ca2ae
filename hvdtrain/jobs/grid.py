"""The runs of a study, from a YAML file of values and lists of values."""

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from hvdtrain import harmless
from hvdtrain.arguments import Parser, add_dataclass, part_of, unknown_key
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.fields import about
from hvdtrain.files import plain_name
from hvdtrain.jobs.options import JobOptions, SlurmOptions

MOST_RUNS = 1000
OF_ONE_RUN = ("run", "resume", "restarts", "ledger", "trace", "dry_run", "chain")
OF_THE_STUDY = ("repeats", "in_flight", "cluster", "site")
LISTS = ("sbatch",)  # whose values are lists, and not one of each


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What a study has beside the options of its runs and jobs."""

    repeats: int = field(default=1, metadata=about("runs of each, with seeds one after the other"))
    scaling: Literal["strong", "weak"] = field(
        default="strong", metadata=about("whether batch_size is the global one or each rank's")
    )
    ranks_per_node: int | None = field(
        default=None, metadata=about("from which follow the nodes", default="all on one")
    )
    in_flight: int | None = field(
        default=None, metadata=about("runs that may run at a time", default="any number")
    )


@dataclass(frozen=True)
class Cell:
    """The repeats of one size: they differ in their seeds alone, and are one submission."""

    runs: tuple[TrainConfig, ...]
    job: JobOptions


@dataclass(frozen=True)
class Grid:
    """A study.

    Attributes:
        cells: in the order in which they are submitted, which is random.
    """

    cells: tuple[Cell, ...]
    options: StudyOptions


KINDS = (StudyOptions, JobOptions, TrainConfig)  # whose options a study's file may have


def load(path: str, folder: str, slurm: SlurmOptions | None = None) -> Grid:
    """The study of a file, whose keys are options of `train`, of `jobs submit` and of a study.

    A list means every one of its values, in all combinations.

    Args:
        folder: for the run folders.
        slurm: options that override those of the file.

    Raises:
        UsageError: if a key is unknown, a value of another type or out of range.
    """
    axes, slurm = _axes(path), slurm or SlurmOptions()
    parser = Parser()
    for kind in KINDS:
        add_dataclass(parser, kind)
    cells: dict[str, Cell] = {}
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        parser.check_keys(path, chosen)
        try:
            parsed = parser.parse_object(chosen).as_dict()
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        study = part_of(StudyOptions, parsed)
        varied = [key for key in axes if len(axes[key]) > 1]
        name = "-".join(f"{key}={plain_name(str(chosen[key]))}" for key in varied)
        cell = _cell(parsed, study, str(Path(folder) / (name or "run")))
        cell = replace(cell, job=cell.job.overridden_by(slurm))
        # One rank runs the same under every plan: that is one size.
        cells.setdefault(repr([replace(cell.runs[0], run=None), cell.job]), cell)
    found = list(cells.values())
    folders = Counter(cell.runs[0].run for cell in found)
    if twice := next((run for run, count in folders.items() if count > 1), None):
        raise UsageError(f"{path}: two values make one name, {twice}: write them differently")
    random.Random(0).shuffle(found)  # what else the cluster does must not follow the sizes
    return Grid(tuple(found), study)


def _axes(path: str) -> dict[str, list[Any]]:
    """The values of each key of a file."""
    content = harmless.read_mapping(Path(path), "study")
    known = [item.name for kind in KINDS for item in fields(kind)]
    switches = [
        item.name for kind in KINDS for item in fields(kind) if isinstance(item.default, bool)
    ]
    for name in content:
        if name not in known:
            raise unknown_key(path, name, known, switches)
        if name in OF_ONE_RUN:
            raise UsageError(f"{path}: {name} is of a single run: leave it out")
        if name in OF_THE_STUDY and isinstance(content[name], list):
            raise UsageError(f"{path}: {name} is of the whole study: give one value")
    axes = {
        name: value if isinstance(value, list) and name not in LISTS else [value]
        for name, value in content.items()
    }
    combinations = math.prod(map(len, axes.values()))
    if not 0 < combinations <= MOST_RUNS:
        raise UsageError(f"{path} asks for {combinations:,} sizes: give 1 to {MOST_RUNS:,}")
    return axes


def _cell(parsed: dict[str, Any], study: StudyOptions, stem: str) -> Cell:
    """The repeats of one combination of values."""
    for name in ("repeats", "ranks_per_node", "in_flight"):
        value = getattr(study, name)
        if value is not None and not 0 < value <= MOST_RUNS:
            raise UsageError(f"{name} must be between 1 and {MOST_RUNS}, not {value}")
    job, run = part_of(JobOptions, parsed), part_of(TrainConfig, parsed)
    ranks = run.ranks or 1
    if study.scaling == "weak":
        run = replace(run, batch_size=run.batch_size * ranks)
    if ranks == 1:
        run = replace(run, plan=None, change_batch_norm=False)
    if study.ranks_per_node:
        job = replace(job, nodes=-(-ranks // study.ranks_per_node))
    if job.gpus_per_node:
        job = replace(job, gpus_per_node=ranks // job.nodes)
    if run.threads is None:
        run = replace(run, threads=job.cpus_per_rank)
    seeds = range(run.seed, run.seed + study.repeats)
    runs = [replace(run, ranks=ranks, seed=n, run=f"{stem}-seed={n}").check() for n in seeds]
    job.ranks_per_node(run)
    return Cell(tuple(runs), job)
