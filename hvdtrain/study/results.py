"""Read the result of a finished run from its folder."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host.energy import SLURM
from hvdtrain.host.load import Disturbance
from hvdtrain.options import configfile
from hvdtrain.options.fields import Rule
from hvdtrain.options.planrequest import ADAPTIVE, Chosen, Mirrored, PlanFile, parse_plan_request
from hvdtrain.options.syncoptions import SyncOptions

# Runs that differ only in these are compared: sizes, repeats, and the names and handling of files.
NOT_SETTINGS = frozenset(
    item.name for item in fields(TrainConfig) if Rule.NOT_COMPARED in item.metadata["rule"]
)
COMPARED_DEFAULTS = {
    name: value for name, value in configfile.DEFAULTS.items() if name not in NOT_SETTINGS
}
COUNTED = 0.98  # part of a run for which energy must be counted: not that of a last restart
EXACT = "exact"  # sums of gradients in every step
EVALUATION = "evaluation_seconds"  # not in summaries of earlier versions
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    UsageError,
    ArithmeticError,
    RecursionError,
)


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
        counted: what ranks counted about it, by its key in summary.json.
        disturbances: what else used the cores, by host; empty if that was not recorded.
        energy: joules of all hosts by source, such as RAPL; empty unless every host was counted
            from the first step of the run to its end.
        name: its name in texts, see `finding.Found`.
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
    counted: Mapping[str, float] = field(default_factory=dict)
    disturbances: Mapping[str, Disturbance] = field(default_factory=dict)
    energy: Mapping[str, float] = field(default_factory=dict)
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
        summary = json.loads((run / "summary.json").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        config = configfile.load(run / "config.yaml")
        return _result(run, summary, lines, config)
    except UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{run} cannot be read as a finished run: {reason}") from None


def _stages(plan: dict[str, Any]) -> object:
    return plan["stages"]


def _ranks(plan: dict[str, Any]) -> object:
    return {rank for stage in plan["stages"] for rank in stage["ranks"]}


def _check_size(
    plan: dict[str, Any], devices: int, lines: list[dict[str, Any]], config: dict[str, Any]
) -> None:
    """Refuse a run that used several numbers of ranks or several plans.

    Raises:
        ValueError: if it did.
    """
    # An adaptive run changes its plan, but not its ranks.
    part = _ranks if parse_plan_request(config.get("plan")) == ADAPTIVE else _stages
    if any(
        part(line) != part(plan) or line.get("devices_a_rank", 1) != devices
        for line in lines
        if line["event"] == "plan"
    ):
        raise ValueError(
            "it resumed with another plan or number of ranks, so it does not belong to one size"
        )


def _settings(config: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal in runs that are compared, with the defaults of older versions."""
    return (
        COMPARED_DEFAULTS
        | {name: value for name, value in config.items() if name not in NOT_SETTINGS}
        | configfile.values_of_older_version(config)
        | ({} if config.get("weight_decay") else {"no_decay": "none"})
        | {name: machine.get(name) for name in ("processor", "accelerator")}
    )


def _result(
    run: Path, summary: dict[str, Any], lines: list[dict[str, Any]], config: dict[str, Any]
) -> Result:
    steps = [line for line in lines if line["event"] == "step"]
    devices = int(summary.get("devices_a_rank", 1))
    _check_size(summary["plan"], devices, lines, config)
    train_seconds = float(summary["train_seconds"])
    _check_positive(summary)
    machine = dict(summary.get("machine", {}))
    data, imbalance = _shares(steps, int(config["batch_size"]), summary["plan"])
    return Result(
        path=run,
        model=str(summary["model"]),
        plan=_plan(
            summary["plan"], config.get("plan"), str(config.get("sync")).startswith("server")
        ),
        ranks=int(summary["ranks"]) * devices,
        threads=max(1, int(machine.get("threads", 1)) // devices),
        batch_size=int(config["batch_size"]),
        seed=int(config["seed"]),
        expected=config.get("expected"),
        settings=_settings(config, machine),
        samples=int(summary["samples"]),
        seconds=float(summary["seconds"]),
        startup_seconds=float(summary["startup_seconds"]),
        train_seconds=train_seconds,
        images_per_second=float(summary["images_per_second"]),
        exposed=float(summary["communication"]["exposed_fraction"]) * train_seconds,
        bubble=float(summary["bubble_fraction"]) * train_seconds,
        data=data * train_seconds,
        imbalance=imbalance * train_seconds,
        peak_memory_bytes=max(map(int, summary["peak_memory_bytes"])),
        accuracy=summary["final"]["test_accuracy"],
        validation_accuracy=summary["final"].get("val_accuracy"),
        evaluation=float(summary[EVALUATION]) if EVALUATION in summary else None,
        epochs=tuple(_epoch(line) for line in lines if line["event"] == "epoch"),
        machine=machine,
        versions=dict(summary["versions"]),
        step_seconds=_step_seconds(steps, int(config["batch_size"])),
        predicted_seconds=next(
            (line.get("predicted_seconds") for line in lines if line["event"] == "plan"), None
        ),
        agreement=_agreement(config),
        counted=_counted(summary),
        disturbances=_disturbances(summary),
        energy=_energy(summary),
    )


def _counted(summary: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of what ranks counted about their agreement, by key."""
    return {
        name: float(value)
        for name, value in summary.get("agreement", {}).items()
        if isinstance(value, int | float)
    }


def _check_positive(summary: dict[str, Any]) -> None:
    """Refuse a run that trained nothing, whose ratios are not defined.

    Raises:
        ValueError: if it did.
    """
    for name in ("images_per_second", "samples", "train_seconds", "seconds"):
        if not float(summary[name]) > 0:
            raise ValueError(f"its {name} is {summary[name]}")


def _disturbances(summary: dict[str, Any]) -> dict[str, Disturbance]:
    names = [item.name for item in fields(Disturbance)]
    return {
        str(line["host"]): Disturbance(**{name: line[name] for name in names})
        for line in summary.get("disturbance", [])
    }


def _energy(summary: dict[str, Any]) -> dict[str, float]:
    """Return joules by source, of the sources that counted the whole run on all hosts.

    What Slurm counted stands only if no other did: it may contain what they count. Its plugins
    show zero where they cannot read.
    """
    hosts = summary.get("energy", [])
    is_whole = all(host["seconds"] >= COUNTED * float(summary["seconds"]) for host in hosts)
    if not hosts or not is_whole or "emulated" in summary:  # emulated ranks take other seconds
        return {}
    counted = {
        source: sum(sum(host["joules"][source].values()) for host in hosts)
        for source in hosts[0]["joules"]
        if all(
            source in host["joules"]
            and not any(line.startswith(source) for line in host["missing"])
            for host in hosts
        )
    }
    others = {source: joules for source, joules in counted.items() if source != SLURM}
    of_step = sum(sum(host["joules"].get(SLURM, {}).values()) for host in hosts)
    return others or ({SLURM: of_step} if of_step else {})


def _agreement(config: dict[str, Any]) -> str:
    """Return the value of --sync, and all other options of agreement that are not defaults."""
    words = [str(config.get("sync", EXACT))]
    for item in fields(SyncOptions):
        value = config.get(item.name, item.default)
        if item.name != "sync" and value != item.default:
            name = item.name.replace("_", "-")
            words.append(name if value is True else f"{name} {value}")
    return ", ".join(words)


def _step_seconds(steps: list[dict[str, Any]], batch_size: int) -> float:
    """Return the median over the step lines; the first is skipped, as libraries warm up in it."""
    rates = [line["images_per_second"] for line in steps]
    return batch_size / median(rates[1:] or rates) if rates else 0.0


def plan_name(plan: dict[str, Any]) -> str:
    """Return the short name of a plan, as on the command line."""
    replicas = [len(stage["ranks"]) for stage in plan["stages"]]
    if len(replicas) == 1:
        return "single" if replicas[0] == 1 else "dp"
    if set(replicas) == {1}:
        return "mp"
    return f"hp:{len(replicas)}x{replicas[0]}" if len(set(replicas)) == 1 else "plan"


def _plan(plan: dict[str, Any], option: str | None, has_servers: bool) -> str:
    """Return the short name of a plan, or its file: the shape does not distinguish such plans."""
    request = parse_plan_request(option)
    if isinstance(request, Mirrored):
        return "mirrored"
    if isinstance(request, Chosen | PlanFile):
        return str(option)
    # Beside servers a single rank may train: its series is that of more ranks.
    return "dp" if has_servers else plan_name(plan)


def machines(results: list[Result]) -> list[str]:
    """Return descriptions of the machines of these runs, the most frequent first."""
    descriptions = [
        f"{item.get('processor', 'unknown processor')}, {item.get('cores', '?')} cores per host"
        + (f", {item['accelerator']}" if item.get("accelerator") else "")
        for item in (result.machine for result in results)
    ]
    return [text for text, _ in Counter(descriptions).most_common()]


def _shares(
    steps: list[dict[str, Any]], batch_size: int, plan: dict[str, Any]
) -> tuple[float, float]:
    """Return the parts of a step in which ranks wait for images, and for a slower stage replica.

    Both are means over ranks and step lines. Unequal costs of stages do not count as imbalance:
    they are the bubble.
    """
    data: list[float] = []
    imbalance: list[float] = []
    for line in steps:
        if (ranks := line.get("ranks")) and line["images_per_second"] > 0:
            step_seconds = batch_size / line["images_per_second"]
            busy = np.array(ranks["own_seconds"], float)
            waited = np.array(ranks["data_seconds"], float)
            data.append(float(waited.mean()) / step_seconds)
            waits = np.zeros(len(busy))
            for stage in plan["stages"]:
                replicas = np.array(stage["ranks"], int)
                behind = busy[replicas].max() - busy[replicas]
                waits[replicas] = np.maximum(waits[replicas], behind)
            imbalance.append(float(waits.mean()) / step_seconds)
    if not data:
        return 0.0, 0.0
    first, second = (min(float(np.mean(shares)), 1.0) for shares in (data, imbalance))
    return first, second


def _epoch(line: dict[str, Any]) -> Epoch:
    def first(*names: str) -> float | None:
        return next((line[name] for name in names if line.get(name) is not None), None)

    return Epoch(
        number=int(line["epoch"]),
        train_loss=line.get("train_loss"),
        loss=first("test_loss", "val_loss"),
        accuracy=first("test_accuracy", "val_accuracy"),
        seconds=line.get("seconds"),
    )
