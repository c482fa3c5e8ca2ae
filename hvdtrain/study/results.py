"""Find the runs of a study below some folders, and read the results of those that are finished."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hvdtrain import configfile
from hvdtrain.config import TrainConfig
from hvdtrain.data.images import shown
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host.counters import SLURM, Disturbance
from hvdtrain.options.requests import Chosen, Mirrored, PlanFile, is_adaptive, parse_plan_request
from hvdtrain.options.sections import Rule, SyncOptions, parse_emulate
from hvdtrain.training import metrics
from hvdtrain.training.metrics import METRICS, SUMMARY, Layout, Line, Summary

# Runs that differ only in these are compared: sizes, repeats, and the names and handling of files.
NOT_SETTINGS = frozenset(
    item.name for item in fields(TrainConfig) if Rule.NOT_COMPARED in item.metadata["rule"]
)
COMPARED_DEFAULTS = {
    name: value for name, value in configfile.DEFAULTS.items() if name not in NOT_SETTINGS
}
COUNTED = 0.98  # part of a run for which energy must be counted: not that of a last restart
EXACT = "exact"  # sums of gradients in every step
LEAST, MOST, MOST_RANKS = 1e-6, 1e18, 10**5  # what counts and times of a run lie between
LONGEST_NAME = 300


@dataclass(frozen=True)
class Epoch:
    """Metrics of an epoch; losses and accuracies are None if they were not computed.

    Attributes:
        seconds: from the first step of the run to the end of its evaluation.
    """

    number: int
    train_loss: float | None
    loss: float | None
    accuracy: float | None
    seconds: float | None = None


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        path: run folder.
        plan: single, dp, mp, hp:SxR, mirrored, or the file of another plan.
        ranks: number of ranks, times the devices per rank under MirroredStrategy.
        threads: threads per rank or device.
        settings: other options and hardware that must be equal in runs that are compared.
        seconds: from the first step to the end of the last, evaluation included.
        train_seconds: time of the steps alone.
        evaluation: seconds of evaluations, None if an earlier version made the run.
        exposed, bubble, data, imbalance: seconds of `train_seconds`, the mean over the ranks, in
            which a rank waited for communication (imbalance included), for its turn in a
            pipeline, for images, and for a slower rank.
        peak_memory_bytes: maximum over the ranks.
        accuracy: on the test images.
        validation_accuracy: on the part of the training images that is held out, None without it.
        expected: test accuracy that the run should reach, if it says so.
        step_seconds: median time of a step on a whole batch.
        predicted_seconds: time of a step that the planner predicted, None if it made no plan.
        agreement: how replicas agreed, as options without their dashes.
        summed_by: the library that summed gradients; None if nothing was summed.
        counted: what ranks counted about it, by its key in summary.json.
        disturbances: what else used the cores, by host; empty if that was not recorded.
        energy: joules of all hosts by source, such as RAPL; empty unless every host was counted
            from the first step of the run to its end.
        has_one_size: whether it never resumed with another plan or number of ranks.
        name: its name in texts: the path below the nearest folder of all runs.
    """

    path: Path
    model: str
    plan: str
    ranks: int
    threads: int
    batch_size: int
    seed: int
    settings: dict[str, Any]
    samples: int
    seconds: float
    startup_seconds: float
    train_seconds: float
    images_per_second: float
    exposed: float
    bubble: float
    data: float
    imbalance: float
    peak_memory_bytes: int
    accuracy: float | None
    epochs: tuple[Epoch, ...]
    machine: dict[str, Any]
    versions: dict[str, str]
    validation_accuracy: float | None = None
    evaluation: float | None = None
    expected: float | None = None
    step_seconds: float = 0.0
    predicted_seconds: float | None = None
    agreement: str = EXACT
    summed_by: object = "horovod"
    counted: Mapping[str, float] = field(default_factory=dict)
    disturbances: Mapping[str, Disturbance] = field(default_factory=dict)
    energy: Mapping[str, float] = field(default_factory=dict)
    has_one_size: bool = True
    name: str = ""

    @property
    def cores(self) -> int:
        """Return the number of cores that the run used."""
        return self.ranks * self.threads

    @property
    def was_shared(self) -> bool:
        """Return whether other work or throttling took much of its cores on any host."""
        return any(shared.is_large for shared in self.disturbances.values())

    @property
    def core_hours(self) -> float:
        """Return the core-hours of the run, start-up included."""
        return self.cores * (self.seconds + self.startup_seconds) / 3600


def read(run: Path) -> Result:
    """Return the result of a run.

    Raises:
        DataError: if its files cannot be parsed.
    """
    try:
        summary = metrics.read_summary(run)
        lines = metrics.read_lines(run)
        if summary is None or not lines:
            raise ValueError(f"it has no {SUMMARY}" if lines else f"its {METRICS} is empty")
        _check(summary)
        result = _result(run, summary, lines, configfile.load(run / "config.yaml"))
        _check_names(result)
        return result
    except (DataError, UsageError, ValueError, LookupError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{run} cannot be read as a finished run: {reason}") from None


def _check(summary: Summary) -> None:
    """Refuse a run that trained nothing, whose ratios are not defined, and impossible ranks.

    Raises:
        ValueError: if it did.
    """
    for name in ("images_per_second", "samples", "train_seconds", "seconds"):
        if not LEAST < getattr(summary, name) < MOST:
            raise ValueError(f"its {name} is {getattr(summary, name)}")
    devices = summary.devices_a_rank
    if not (0 < summary.ranks <= MOST_RANKS and 0 < devices <= MOST_RANKS):
        raise ValueError(f"it has {summary.ranks} rank(s) of {devices} device(s)")
    if not summary.plan.ranks or not summary.plan.ranks <= set(range(summary.ranks)):
        raise ValueError("its plan does not fit its ranks")


def _check_names(result: Result) -> None:
    """Refuse a run whose names could not be a title; raise ValueError."""
    names = [result.model, result.plan, result.agreement]
    names += [str(result.settings.get(name)) for name in ("framework", "precision")]
    for name in names:
        if not name.isprintable() or len(name) > LONGEST_NAME:
            raise ValueError(f"{name[:LONGEST_NAME]!r} is not a name of one line")


def _has_one_size(plan: Layout, devices: int, lines: list[Line], config: dict[str, Any]) -> bool:
    """Return whether a run used one plan and number of ranks, from its first start to its end."""
    # An adaptive run changes its plan, but not its ranks.
    may_change = is_adaptive(parse_plan_request(config.get("plan")))
    for line in lines:
        layout = Layout(line.stages)
        is_same = layout.ranks == plan.ranks if may_change else layout == plan
        if line.event == "plan" and not (is_same and line.devices_a_rank == devices):
            return False
    return True


def _settings(config: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal in runs that are compared, with the defaults of older versions."""
    values = COMPARED_DEFAULTS | config
    if values["emulate"] is not None:
        values["emulate"], _ = parse_emulate(str(values["emulate"]))  # at any speed
    return {name: value for name, value in values.items() if name not in NOT_SETTINGS} | {
        name: machine.get(name) for name in ("processor", "accelerator")
    }


def _result(run: Path, summary: Summary, lines: list[Line], config: dict[str, Any]) -> Result:
    steps = [line for line in lines if line.event == "step"]
    devices, train_seconds = summary.devices_a_rank, summary.train_seconds
    threads, batch_size = summary.machine.get("threads"), int(config["batch_size"])
    data, imbalance = _shares(steps, batch_size, summary.plan)
    return Result(
        path=run,
        model=summary.model,
        plan=_plan(summary.plan, config.get("plan"), str(config.get("sync")).startswith("server")),
        ranks=summary.ranks * devices,
        threads=max(1, (threads if isinstance(threads, int) else 1) // devices),
        batch_size=batch_size,
        seed=int(config["seed"]),
        expected=config.get("expected"),
        settings=_settings(config, summary.machine),
        samples=summary.samples,
        seconds=summary.seconds,
        startup_seconds=summary.startup_seconds,
        train_seconds=train_seconds,
        images_per_second=summary.images_per_second,
        exposed=summary.communication.exposed_fraction * train_seconds,
        bubble=summary.bubble_fraction * train_seconds,
        data=data * train_seconds,
        imbalance=imbalance * train_seconds,
        peak_memory_bytes=int(max(summary.peak_memory_bytes)),
        accuracy=summary.final.test_accuracy,
        validation_accuracy=summary.final.val_accuracy,
        evaluation=summary.evaluation_seconds,
        epochs=tuple(_epoch(line) for line in lines if line.event == "epoch"),
        machine=summary.machine,
        versions=summary.versions,
        step_seconds=_step_seconds(steps, batch_size),
        predicted_seconds=next(
            (line.predicted_seconds for line in lines if line.event == "plan"), None
        ),
        agreement=_agreement(config),
        summed_by=summary.agreement.get("library", "horovod"),
        counted={
            name: value for name, value in summary.agreement.items() if isinstance(value, float)
        },
        disturbances={line.host: line for line in summary.disturbance},
        energy=_energy(summary),
        has_one_size=_has_one_size(summary.plan, devices, lines, config),
    )


def _energy(summary: Summary) -> dict[str, float]:
    """Return joules by source, of the sources that counted the whole run on all hosts.

    What Slurm counted stands only if no other did: it may contain what they count. Its plugins
    show zero where they cannot read.
    """
    hosts = summary.energy
    is_whole = all(host.seconds >= COUNTED * summary.seconds for host in hosts)
    if not hosts or not is_whole or summary.emulated:  # emulated ranks take other seconds
        return {}
    counted = {
        source: sum(sum(host.joules[source].values()) for host in hosts)
        for source in hosts[0].joules
        if all(
            source in host.joules and not any(line.startswith(source) for line in host.missing)
            for host in hosts
        )
    }
    others = {source: joules for source, joules in counted.items() if source != SLURM}
    of_step = sum(sum(host.joules.get(SLURM, {}).values()) for host in hosts)
    return others or ({SLURM: of_step} if of_step else {})


def _agreement(config: dict[str, Any]) -> str:
    """Return the value of --sync, and all other options of agreement that are not defaults."""
    words = [str(config.get("sync", EXACT)).replace(",", ", ")]
    for item in fields(SyncOptions):
        value = config.get(item.name, item.default)
        if item.name != "sync" and value != item.default:
            name = item.name.replace("_", "-")
            words.append(name if value is True else f"{name} {value}")
    return ", ".join(words)


def _step_seconds(steps: list[Line], batch_size: int) -> float:
    """Return the median over the step lines; the first is skipped, as libraries warm up in it."""
    rates = [rate for line in steps if (rate := line.images_per_second or 0) > LEAST]
    return batch_size / median(rates[1:] or rates) if rates else 0.0


def plan_name(replicas: Sequence[int]) -> str:
    """Return the short name of a plan, as on the command line, from the ranks of its stages."""
    if len(replicas) == 1:
        return "single" if replicas[0] == 1 else "dp"
    if set(replicas) == {1}:
        return "mp"
    return f"hp:{len(replicas)}x{replicas[0]}" if len(set(replicas)) == 1 else "plan"


def _plan(plan: Layout, option: str | None, has_servers: bool) -> str:
    """Return the short name of a plan, or its file: the shape does not distinguish such plans."""
    request = parse_plan_request(option)
    if isinstance(request, Mirrored):
        return "mirrored"
    if isinstance(request, Chosen | PlanFile):
        return str(option)
    # Beside servers a single rank may train: its series is that of more ranks.
    return "dp" if has_servers else plan_name([len(stage.ranks) for stage in plan.stages])


def machines(results: list[Result]) -> list[str]:
    """Return descriptions of the machines of these runs, the most frequent first."""
    descriptions = [
        f"{item.get('processor', 'unknown processor')}, {item.get('cores', '?')} cores per host"
        + (f", {item['accelerator']}" if item.get("accelerator") else "")
        for item in (result.machine for result in results)
    ]
    return [text for text, _ in Counter(descriptions).most_common()]


def _shares(steps: list[Line], batch_size: int, plan: Layout) -> tuple[float, float]:
    """Return the parts of a step in which ranks wait for images, and for a slower stage replica.

    Both are means over ranks and step lines. Unequal costs of stages do not count as imbalance:
    they are the bubble.
    """
    data: list[float] = []
    imbalance: list[float] = []
    for line in steps:
        if line.ranks and (line.images_per_second or 0) > LEAST:
            step_seconds = batch_size / (line.images_per_second or 0)
            busy = np.array(line.ranks.own_seconds, float)
            waited = np.array(line.ranks.data_seconds, float)
            if not 0 < busy.size == waited.size or not np.isfinite([busy, waited]).all():
                continue
            waits = np.zeros(len(busy))
            for stage in plan.stages:
                replicas = np.array(stage.ranks, int)
                behind = busy[replicas].max() - busy[replicas]
                waits[replicas] = np.maximum(waits[replicas], behind)
            data.append(float(waited.mean()) / step_seconds)
            imbalance.append(float(waits.mean()) / step_seconds)
    if not data:
        return 0.0, 0.0
    first, second = (min(float(np.mean(shares)), 1.0) for shares in (data, imbalance))
    return first, second


def _epoch(line: Line) -> Epoch:
    test_loss, accuracy = line.test_loss, line.test_accuracy
    return Epoch(
        number=line.epoch or 0,
        train_loss=line.train_loss,
        loss=line.val_loss if test_loss is None else test_loss,
        accuracy=line.val_accuracy if accuracy is None else accuracy,
        seconds=line.seconds,
    )


def find(paths: list[str]) -> tuple[list[Result], list[str]]:
    """Return the finished runs in and below these folders, and a line for each other run.

    A run has the name of its path below the nearest folder of all.

    Raises:
        UsageError: if a folder does not exist, or none holds a finished run.
    """
    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise UsageError(
                f"{path} is not a folder: name run folders, or a folder that has some"
            )
        # Also what has lost its configuration, so that the report names it.
        for file in sorted((*path.rglob("config.yaml"), *path.rglob(SUMMARY))):
            folders.setdefault(file.parent.resolve(), file.parent)
    common = os.path.commonpath([folder.parent for folder in folders]) if folders else ""
    names = {folder: shown(whole.relative_to(common)) for whole, folder in folders.items()}
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
    return results, left_out
