"""Plans: the components that each rank holds, and the micro-batches of a step.

A plan is a plain value: making, checking, printing and saving it needs no running processes.

The short forms of `--plan`, JSON files and `--recompute` are parsed here.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.host.files import write_text
from hvdtrain.host.records import parse_json
from hvdtrain.options.names import nearest, unknown_key
from hvdtrain.options.requests import (
    DP,
    SHORT_FORMS,
    Chosen,
    Mirrored,
    Pipeline,
    Replicated,
    check_one_rank,
    parse_plan_request,
)

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")  # `schedule.POLICIES` has their rules
DEFAULT_SCHEDULE = "1f1b"
CHUNKS_PER_RANK = 2  # stages per rank of `mp` under the interleaved schedule
MICROBATCHES_PER_STAGE = 4  # the default: GPipe's rule of thumb


@dataclass(frozen=True)
class Stage:
    """Consecutive components on some ranks, with each rank's share of a batch."""

    components: tuple[str, ...]
    ranks: tuple[int, ...]
    shares: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Stages in the order of the model, and the micro-batches per step.

    Attributes:
        stages: the stages.
        microbatches: the most per step; a batch that is too small is cut into fewer.
        schedule: one of SCHEDULES.
    """

    stages: tuple[Stage, ...]
    microbatches: int = 1
    schedule: str = DEFAULT_SCHEDULE

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold a stage, ascending."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.ranks}))

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.stages) - 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the stages that `rank` holds, ascending."""
        return tuple(i for i, stage in enumerate(self.stages) if rank in stage.ranks)

    @property
    def replicated_stages(self) -> frozenset[int]:
        """The numbers of the stages that several ranks hold."""
        return frozenset(i for i, stage in enumerate(self.stages) if len(stage.ranks) > 1)

    @property
    def splits_backward(self) -> bool:
        """Return whether weight gradients are computed separately from input gradients."""
        return self.schedule == "zb-h1" and len(self.stages) > 1

    def repeats_groups(self) -> bool:
        """Return whether the stages repeat the groups of ranks, each time in the same order."""
        held = [stage.ranks for stage in self.stages]
        once = list(dict.fromkeys(held))
        return len(held) > len(once) and held == once * (len(held) // len(once))

    def to_json(self) -> dict[str, Any]:
        """Return the content of a plan file."""
        stages = [
            {"components": list(s.components), "ranks": list(s.ranks), "shares": list(s.shares)}
            for s in self.stages
        ]
        return {"stages": stages, "microbatches": self.microbatches, "schedule": self.schedule}


def labels(plan: Plan) -> dict[str, str]:
    """Return the kind of parallelism of each component, by name.

    DP is on all ranks, MP on one, HP on several; "single" if there is only one rank.
    """
    size = len(plan.ranks)

    def label(stage: Stage) -> str:
        if size == 1:
            return "single"
        return {size: "DP", 1: "MP"}.get(len(stage.ranks), "HP")

    return {name: label(stage) for stage in plan.stages for name in stage.components}


def replicated(
    components: Sequence[str], ranks: int, microbatches: int | None, schedule: str | None
) -> Plan:
    """Return the plan with all components on all ranks: data parallelism, or a single rank."""
    stage = Stage(tuple(components), tuple(range(ranks)), (1,) * ranks)
    return Plan((stage,), microbatches or 1, schedule or DEFAULT_SCHEDULE)


def pipeline(
    components: Sequence[str],
    costs: Sequence[float],
    ranks: int,
    stages: int,
    replicas: int,
    microbatches: int | None = None,
    schedule: str | None = None,
    name: str | None = None,
) -> Plan:
    """Return a plan of `stages` stages of `replicas` ranks each, balanced by costs.

    If there are more stages than groups of ranks, the stages repeat the groups: with 4 stages on
    2 ranks, rank 0 holds stages 0 and 2.

    Args:
        components: the names of the model's components, in order.
        costs: of each component, in any unit.
        ranks: the world size.
        stages: the number of stages.
        replicas: the number of ranks per stage.
        microbatches: per step; by default several per stage.
        schedule: one of SCHEDULES.
        name: the plan as the user typed it, for errors.

    Raises:
        UsageError: if the number of stages does not fit the model or the ranks.
    """
    name = name or f"hp:{stages}x{replicas}"
    count = len(components)
    if stages > count:
        advice = "use single or dp, or hvdtrain.cut" if count == 1 else "use fewer stages"
        raise UsageError(
            f"{name} has {stages} stages, but the model has {count} component(s): {advice}"
        )
    groups, left = divmod(ranks, replicas)
    if left or not groups or stages % groups:
        possible = [str(replicas * n) for n in range(1, stages + 1) if stages % n == 0]
        raise UsageError(f"{name} does not fit {ranks} ranks: start {' or '.join(possible)}")
    made, start = [], 0
    for number, size in enumerate(balance(costs, stages)):
        first = number * replicas % ranks
        held = tuple(range(first, first + replicas))
        made.append(Stage(tuple(components[start : start + size]), held, (1,) * replicas))
        start += size
    default = MICROBATCHES_PER_STAGE * stages if stages > 1 else 1
    return Plan(tuple(made), microbatches or default, schedule or DEFAULT_SCHEDULE)


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Return the sizes of `parts` contiguous, non-empty parts with the least largest cost.

    The exact dynamic programme of linear partitioning (Skiena, The Algorithm Design Manual, 8.5).
    """
    sums = [0.0, *accumulate(costs)]
    number = len(costs)
    # best[i]: (cost, sizes) of the first i components in the parts so far
    best: list[tuple[float, list[int]]] = [(sums[i], [i]) for i in range(number + 1)]
    for part in range(2, parts + 1):
        best = [
            min(
                (
                    (max(best[j][0], sums[i] - sums[j]), [*best[j][1], i - j])
                    for j in range(part - 1, i)
                ),
                key=lambda candidate: candidate[0],
                default=(float("inf"), []),
            )
            for i in range(number + 1)
        ]
    return best[number][1]


def check(
    plan: Plan, components: Sequence[str], ranks: int, splits_backward: Callable[[], str] = str
) -> None:
    """Check that a plan fits the model and the ranks, and that the runtime can run it.

    Args:
        plan: the plan.
        components: the names of the model's components, in order.
        ranks: the world size.
        splits_backward: returns what forbids a split backward, in words; "" if nothing does.

    Raises:
        UsageError: if it does not.
    """
    held = [name for stage in plan.stages for name in stage.components]
    for name in held:
        if name not in components:
            shown = " ".join(name.split())
            hint = nearest(name, components)
            raise UsageError(f"the plan names an unknown component {shown}{hint}")
    if held != list(components) or not all(stage.components for stage in plan.stages):
        raise UsageError(
            "the plan must hold every component once, in the order of the model: "
            + " ".join(components)
        )
    used = set(plan.ranks)
    if beyond := sorted(used - set(range(ranks))):
        raise UsageError(
            f"the plan uses rank {beyond[0]}, but there are ranks 0 to {ranks - 1}: "
            "start more ranks or change the plan"
        )
    if idle := sorted(set(range(ranks)) - used):
        raise UsageError(
            f"the plan leaves rank {idle[0]} of {ranks} without a stage: "
            "start fewer ranks or change the plan"
        )
    check_schedule(plan.schedule)
    if plan.schedule == "interleaved" and len(plan.stages) > 1 and not plan.repeats_groups():
        raise UsageError(
            "the interleaved schedule needs several stages per rank, with the same order of ranks "
            "each time: use 1f1b, mp, or more stages"
        )
    if plan.splits_backward and (reason := splits_backward()):
        raise UsageError(f"zb-h1 splits the backward, which {reason} does not allow: use 1f1b")


def check_schedule(schedule: str) -> None:
    """Raise UsageError for an unknown schedule."""
    if schedule not in SCHEDULES:
        raise UsageError(f"unknown schedule {schedule}{nearest(schedule, SCHEDULES)}")


def with_options(plan: Plan, microbatches: int | None, schedule: str | None) -> Plan:
    """Return the plan with the micro-batches and schedule of the options; None changes nothing."""
    return replace(
        plan,
        microbatches=microbatches or plan.microbatches,
        schedule=schedule or plan.schedule,
    )


class Move(NamedTuple):
    """The transfer of one component from a rank that holds it to a rank that needs it."""

    component: str
    sender: int
    receiver: int


def is_same_layout(before: Plan, after: Plan) -> bool:
    """Return whether every rank holds the same stages: then nothing is moved or rebuilt."""
    pairs = [[(stage.components, stage.ranks) for stage in p.stages] for p in (before, after)]
    return pairs[0] == pairs[1]


def moves(before: Plan, after: Plan) -> list[Move]:
    """Return the components that ranks need under `after` and do not hold under `before`.

    The moves are in the order of the model. Replicas take turns as senders, to share the load.
    """
    held = _holders(before)
    transfers: list[Move] = []
    for component, receivers in _holders(after).items():
        senders = held[component]
        lacking = [rank for rank in receivers if rank not in senders]
        for receiver in lacking:
            transfers.append(Move(component, senders[len(transfers) % len(senders)], receiver))
    return transfers


def _holders(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {name: stage.ranks for stage in plan.stages for name in stage.components}


LARGEST_FILE = 4 * 2**20  # bytes: hundreds of stages of a thousand ranks


def parse_plan(
    text: str | None,
    components: Sequence[str],
    ranks: int,
    microbatches: int | None = None,
    schedule: str | None = None,
    costs: Callable[[], Sequence[float]] | None = None,
) -> Plan:
    """Return the plan that `--plan` names, for a model's components on a number of ranks.

    Args:
        text: "single", "dp", "mp", "hp:SxR", the path of a JSON file or of a run folder, whose
            last plan it is, or None: single on one rank, dp on more.
        components: the names of the model's components, in order.
        ranks: the world size.
        microbatches: overrides the file's value.
        schedule: overrides the file's value.
        costs: returns the cost of each component, to balance a pipeline; by default all are equal.

    Raises:
        UsageError: if the plan is unknown, malformed, or does not fit the model or the ranks.
    """
    text = text or ("single" if ranks == 1 else "dp")
    if schedule is not None:
        check_schedule(schedule)
    check_one_rank(text, ranks)
    request = parse_plan_request(text)
    if isinstance(request, Chosen):
        raise UsageError(
            f"--plan {text} depends on the ranks of a run and is for train only: name another plan"
        )
    if isinstance(request, Replicated):
        return replicated(components, ranks, microbatches, schedule)
    if isinstance(request, Pipeline):
        chunks = CHUNKS_PER_RANK if schedule == "interleaved" and ranks > 1 else 1
        return pipeline(
            components,
            costs() if costs else [1.0] * len(components),
            ranks,
            stages=request.stages or ranks * chunks,
            replicas=request.replicas,
            microbatches=microbatches,
            schedule=schedule,
            name=text,
        )
    path = Path(text)
    # For a text that cannot be a path os.path.exists returns False where pathlib raises.
    if path.suffix != ".json" and not os.path.exists(path):  # noqa: PTH110
        raise UsageError(f"unknown plan {text}{nearest(text, (*SHORT_FORMS, 'FILE.json'))}")
    if path.is_dir():
        return with_options(plan_of_run(path), microbatches, schedule)
    plan = from_json(_read(path), text, components)
    return with_options(plan, microbatches, schedule)


def refit(text: str | None, ranks: int) -> str | None:
    """Return the `--plan` with which to resume on another number of ranks, as close as possible.

    A pipeline keeps its number of stages, or takes the next smaller one that divides the ranks. A
    plan file names its ranks, so data parallelism replaces it.
    """
    request = parse_plan_request(text)
    if text is None or request == DP or isinstance(request, Chosen | Mirrored):
        return text
    if not isinstance(request, Pipeline):
        return "single" if ranks == 1 else "dp"
    if request.stages is None:
        return text
    if ranks == 1:
        return "single"
    most = min(request.stages, ranks)
    stages = max(number for number in range(1, most + 1) if ranks % number == 0)
    return f"hp:{stages}x{ranks // stages}" if stages > 1 else "dp"


def reason_against_split_backward(config: TrainConfig, names: Sequence[str]) -> str:
    """Return the option that forbids a backward pass in halves; empty if none does."""
    if config.compile:
        return "--compile"
    if recomputed_components(config.recompute, names):
        return "--recompute"
    return "--batch-norm sync" if config.batch_norm == "sync" else ""


def recomputed_components(patterns: str | None, names: Sequence[str]) -> frozenset[str]:
    """Return the components that `--recompute` names.

    Raises:
        UsageError: for a name or pattern that matches no component.
    """
    recomputed: set[str] = set()
    for pattern in filter(None, (word.strip() for word in (patterns or "").split(","))):
        matching = [name for name in names if pattern == "all" or fnmatchcase(name, pattern)]
        if not matching:
            raise UsageError(
                f"--recompute {pattern} names no component of the model{nearest(pattern, names)}"
            )
        recomputed.update(matching)
    return frozenset(recomputed)


def from_json(content: Any, source: str, components: Sequence[str]) -> Plan:
    """Return the plan in the content of a plan file.

    A file with one stage may omit `components`; omitted `shares` are equal.

    Args:
        content: the parsed JSON.
        source: the file's name, for errors.
        components: the names of the model's components, in order.

    Raises:
        UsageError: with the file and the key.
    """
    known = {"stages", "microbatches", "schedule"}
    _check_keys(content, known, source)
    stages = content.get("stages")
    if not isinstance(stages, list) or not stages:
        raise UsageError(f"{source}: stages must be a list of at least one stage")
    schedule = content.get("schedule", DEFAULT_SCHEDULE)
    if not isinstance(schedule, str):
        raise UsageError(f"{source}: schedule must be a name, not {schedule!r}")
    check_schedule(schedule)
    everything = list(components) if len(stages) == 1 else None
    default = MICROBATCHES_PER_STAGE * len(stages) if len(stages) > 1 else 1
    return Plan(
        tuple(_stage(stage, f"{source}: stage {i}", everything) for i, stage in enumerate(stages)),
        _count(content.get("microbatches", default), f"{source}: microbatches"),
        schedule,
    )


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan as a file that `--plan` reads.

    Raises:
        UsageError: if it cannot be written.
    """
    write_text(path, json.dumps(plan.to_json(), indent=1) + "\n", "the plan")


def _stage(content: Any, source: str, everything: list[str] | None) -> Stage:
    _check_keys(content, {"components", "ranks", "shares"}, source)
    components = content.get("components", everything)
    if not isinstance(components, list) or not all(isinstance(name, str) for name in components):
        raise UsageError(f"{source}: components must be a list of names")
    ranks = content.get("ranks")
    if not isinstance(ranks, list) or not ranks or not all(_is_count(rank) for rank in ranks):
        raise UsageError(f"{source}: ranks must be a list of rank numbers")
    if len(set(ranks)) != len(ranks):
        raise UsageError(f"{source}: ranks {ranks} names a rank twice: name each rank once")
    shares = content.get("shares", [1] * len(ranks))
    if not isinstance(shares, list) or not all(_is_count(share) for share in shares):
        raise UsageError(f"{source}: shares must be a list of whole numbers")
    if len(shares) != len(ranks) or sum(shares) == 0:
        raise UsageError(
            f"{source}: shares must have one number for each of the {len(ranks)} ranks, not all 0"
        )
    return Stage(tuple(components), tuple(ranks), tuple(shares))


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise UsageError(
                f"{path} is not a plan file: it is larger than {LARGEST_FILE:,} bytes"
            )
        return parse_json(text)
    except OSError as error:
        raise UsageError(f"the plan {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"the plan {path} cannot be used: {error}") from None


def plan_of_run(folder: Path) -> Plan:
    """Return the plan that a run had last, or has now.

    Raises:
        UsageError: if there is none.
    """
    plan = None
    try:
        with (folder / "metrics.jsonl").open(encoding="utf-8") as file:
            for line in file:
                if '"event": "plan"' in line and line.endswith("\n"):
                    plan = parse_json(line)
        if plan is None:
            raise ValueError("it has no plan")
        content = {key: plan[key] for key in ("stages", "microbatches", "schedule")}
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not a plan: {error}"
        raise UsageError(
            f"{folder} is not a run folder with a plan (metrics.jsonl: {reason})"
        ) from None
    return from_json(content, str(folder), ())


def _check_keys(content: Any, known: set[str], source: str) -> None:
    if not isinstance(content, dict):
        raise UsageError(f"{source}: expected an object with the keys {', '.join(sorted(known))}")
    for key in content:
        if key not in known:
            raise unknown_key(source, key, known)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count(value: Any, source: str) -> int:
    if not _is_count(value) or value == 0:
        raise UsageError(f"{source} must be a whole number above 0, not {value!r}")
    return int(value)
