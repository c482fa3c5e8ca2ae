"""Options and files that make a plan: the short forms of `--plan`, JSON files, `--recompute`."""

import json
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

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
from hvdtrain.plan.plan import (
    CHUNKS_PER_RANK,
    DEFAULT_SCHEDULE,
    MICROBATCHES_PER_STAGE,
    Plan,
    Stage,
    check_schedule,
    pipeline,
    replicated,
    with_options,
)

LARGEST = 4 * 2**20  # bytes: hundreds of stages of a thousand ranks


def parse(
    text: str | None,
    components: Sequence[str],
    ranks: int,
    microbatches: int | None = None,
    schedule: str | None = None,
    costs: Callable[[], Sequence[float]] | None = None,
) -> Plan:
    """Return the plan that `--plan` names, for a model's components on a number of ranks.

    Args:
        text: "single", "dp", "mp", "hp:SxR", the path of a JSON file, or None: single on one
            rank, dp on more.
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


def save(plan: Plan, path: Path) -> None:
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
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise UsageError(f"{path} is not a plan file: it is larger than {LARGEST:,} bytes")
        return parse_json(text)
    except OSError as error:
        raise UsageError(f"the plan {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"the plan {path} cannot be used: {error}") from None


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
