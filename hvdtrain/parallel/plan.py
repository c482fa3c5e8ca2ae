"""The plan: which ranks hold which components, and how a step is cut.

A plan is a value: it is parsed, checked, printed and saved without any process knowing of it.
This version runs plans of one stage; `check` says so of all others.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.arguments import nearest
from hvdtrain.data import order
from hvdtrain.errors import UsageError

SHORT_FORMS = ("single", "dp")


@dataclass(frozen=True)
class Stage:
    """A run of components, held by each of `ranks`; `shares` are their parts of a batch."""

    components: tuple[str, ...]
    ranks: tuple[int, ...]
    shares: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Stages in the order of the model, and the micro-batches a step is cut into."""

    stages: tuple[Stage, ...]
    microbatches: int = 1
    schedule: str = "1f1b"

    def to_json(self) -> dict[str, Any]:
        """The plan as it stands in a plan file."""
        stages = [
            {"components": list(s.components), "ranks": list(s.ranks), "shares": list(s.shares)}
            for s in self.stages
        ]
        return {"stages": stages, "microbatches": self.microbatches, "schedule": self.schedule}


def parse(text: str | None, components: Sequence[str], ranks: int, microbatches: int) -> Plan:
    """Make the plan that `--plan` names, for a model of these components on so many ranks.

    Args:
        text: "single", "dp", the path of a JSON file, or None: single on one rank, dp on more.

    Raises:
        UsageError: if the plan is unknown, malformed, or does not fit the model or the ranks.
    """
    text = text or ("single" if ranks == 1 else "dp")
    if text == "single" and ranks > 1:
        raise UsageError(f"--plan single runs on one rank, not on {ranks}: use --plan dp")
    if text in SHORT_FORMS:
        stage = Stage(tuple(components), tuple(range(ranks)), (1,) * ranks)
        return Plan((stage,), microbatches)
    path = Path(text)
    if path.suffix != ".json" and not path.exists():
        raise UsageError(f"unknown plan {text}{nearest(text, (*SHORT_FORMS, 'FILE.json'))}")
    plan = from_json(_read(path), text, components, microbatches)
    check(plan, components, ranks)
    return plan


def from_json(content: Any, source: str, components: Sequence[str], microbatches: int) -> Plan:
    """Make a plan of the content of a plan file.

    `components` may be left out where there is one stage; `shares` are equal where left out.

    Raises:
        UsageError: naming the file and the key.
    """
    known = {"stages", "microbatches", "schedule"}
    _check_keys(content, known, source)
    stages = content.get("stages")
    if not isinstance(stages, list) or not stages:
        raise UsageError(f"{source}: stages must be a list of at least one stage")
    schedule = content.get("schedule", "1f1b")
    if schedule != "1f1b":
        raise UsageError(f"{source}: unknown schedule {schedule}; this version knows 1f1b")
    everything = list(components) if len(stages) == 1 else None
    return Plan(
        tuple(_stage(stage, f"{source}: stage {i}", everything) for i, stage in enumerate(stages)),
        _count(content.get("microbatches", microbatches), f"{source}: microbatches"),
        schedule,
    )


def check(plan: Plan, components: Sequence[str], ranks: int) -> None:
    """Refuse a plan that does not fit the model and the ranks, or that this version cannot run.

    Raises:
        UsageError: with the reason.
    """
    held = [name for stage in plan.stages for name in stage.components]
    for name in held:
        if name not in components:
            raise UsageError(f"the plan names a component {name}{nearest(name, components)}")
    if held != list(components):
        raise UsageError(
            "the plan must hold every component once, in the order of the model: "
            + " ".join(components)
        )
    used = {rank for stage in plan.stages for rank in stage.ranks}
    if beyond := sorted(used - set(range(ranks))):
        raise UsageError(f"the plan uses rank {beyond[0]}, but there are ranks 0 to {ranks - 1}")
    if idle := sorted(set(range(ranks)) - used):
        raise UsageError(f"the plan leaves rank {idle[0]} of {ranks} without a stage")
    if len(plan.stages) > 1:
        raise UsageError(
            f"the plan has {len(plan.stages)} stages, and this version runs plans of one stage "
            "(single, dp, or a file with one)"
        )


@dataclass(frozen=True)
class Cut:
    """What one replica does of a global batch of a given size.

    Attributes:
        parts: (start, stop) of each micro-batch's samples, relative to the batch's start.
        first: whether it is the first replica that has samples.
    """

    parts: tuple[tuple[int, int], ...]
    first: bool

    @property
    def samples(self) -> int:
        """This replica's samples, over all micro-batches."""
        return sum(stop - start for start, stop in self.parts)


def cut(stage: Stage, replica: int, batch_size: int, microbatches: int) -> Cut:
    """Cut a global batch: micro-batch k is its k-th contiguous slice, replicas share each one.

    A batch too small for its micro-batches and replicas gets fewer micro-batches.
    """
    number = order.microbatches(batch_size, microbatches, stage.shares)
    parts = [
        tuple(order.share_rows(0, batch_size, number, stage.shares, other))
        for other in range(len(stage.ranks))
    ]
    with_samples = [i for i, mine in enumerate(parts) if any(b > a for a, b in mine)]
    return Cut(parts[replica], first=replica == with_samples[0])


def _stage(content: Any, source: str, everything: list[str] | None) -> Stage:
    _check_keys(content, {"components", "ranks", "shares"}, source)
    components = content.get("components", everything)
    if not isinstance(components, list) or not all(isinstance(name, str) for name in components):
        raise UsageError(f"{source}: components must be a list of names")
    ranks = content.get("ranks")
    if not isinstance(ranks, list) or not ranks or not all(_is_count(rank) for rank in ranks):
        raise UsageError(f"{source}: ranks must be a list of rank numbers")
    if len(set(ranks)) != len(ranks):
        raise UsageError(f"{source}: a rank is named twice")
    shares = content.get("shares", [1] * len(ranks))
    if not isinstance(shares, list) or not all(_is_count(share) for share in shares):
        raise UsageError(f"{source}: shares must be a list of whole numbers")
    if len(shares) != len(ranks) or sum(shares) == 0:
        raise UsageError(f"{source}: shares must give each of the {len(ranks)} ranks a part")
    return Stage(tuple(components), tuple(ranks), tuple(shares))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"the plan {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"the plan {path} is not JSON: {error}") from None


def _check_keys(content: Any, known: set[str], source: str) -> None:
    if not isinstance(content, dict):
        raise UsageError(f"{source}: expected an object with the keys {', '.join(sorted(known))}")
    for key in content:
        if key not in known:
            raise UsageError(f"{source}: unknown key {key}{nearest(key, known)}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count(value: Any, source: str) -> int:
    if not _is_count(value) or value == 0:
        raise UsageError(f"{source} must be a whole number above 0, not {value!r}")
    return int(value)
