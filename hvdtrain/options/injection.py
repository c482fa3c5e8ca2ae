"""The faults that `--inject` can inject at a step on a rank, to rehearse recovery."""

import random
import re
from dataclasses import dataclass

from hvdtrain.errors import UsageError

KINDS = (
    "kill",
    "segfault",
    "memory",
    "stop",
    "slow",
    "nan",
    "corrupt",
    "truncate",
    "fill",
    "replan",
)
OPTIONS = {"slow": ("seconds", "steps"), "nan": ("component", "steps")}
SYNTAX = "KIND step=N [rank=R], such as 'kill step=20 rank=1'"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: one of `KINDS`; `hvdtrain.training.inject` says what each does.
        step, rank: when and where it happens; `step` is the first of `steps`. A `rank` of None is
            the first rank that holds `component` when the fault is due.
        seed: seed for the random choices of the fault.
    """

    kind: str
    step: int
    rank: int | None
    seed: int = 0
    steps: int = 1
    seconds: float = 0.1
    component: str | None = None

    def __str__(self) -> str:
        """Return the fault in the syntax of `--inject`."""
        words = [self.kind, f"step={self.step}", f"seed={self.seed}"]
        for name in ("rank", *OPTIONS.get(self.kind, ())):
            if getattr(self, name) is not None:
                words.append(f"{name}={getattr(self, name)}")
        return " ".join(words)


def parse(text: str, ranks: int) -> tuple[Fault, ...]:
    """Return the faults in a value of `--inject`, which are separated by semicolons.

    `step=10..50` and `rank=any` are drawn from `seed=S`.

    Raises:
        UsageError: naming the part that is not understood.
    """
    return tuple(_parse_one(part.strip(), ranks) for part in text.split(";"))


def _parse_one(text: str, ranks: int) -> Fault:
    kind, *words = text.split() or [""]
    if kind not in KINDS:
        raise UsageError(f"--inject {text!r} is not understood: {SYNTAX}; KIND is {_or(KINDS)}")
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    allowed = ("step", "rank", "seed", *OPTIONS.get(kind, ()))
    if len(settings) < len(words) or not set(settings) <= set(allowed) or "step" not in settings:
        raise UsageError(
            f"--inject {text!r} is not understood: {kind} takes {_or(allowed)}, and needs step=N"
        )
    dice = random.Random(f"{settings.get('seed', '0')} {kind}")
    if kind == "replan" and settings.get("rank", "0") != "0":
        raise UsageError(f"--inject {text!r}: all ranks change the plan: leave out rank=")
    first, _, last = settings["step"].partition("..")
    step = dice.randint(*sorted((_count(text, first), _count(text, last or first))))
    return Fault(
        kind,
        step,
        _rank(text, settings, dice, ranks),
        seed=_count(text, settings.get("seed", "0"), smallest=0),
        steps=_count(text, settings.get("steps", "1000" if kind == "slow" else "1")),
        seconds=_seconds(text, settings.get("seconds", "0.1")),
        component=settings.get("component"),
    )


def _rank(text: str, settings: dict[str, str], dice: random.Random, ranks: int) -> int | None:
    if settings.get("rank") == "any":
        return dice.randrange(ranks)
    if "rank" not in settings and "component" in settings:
        return None
    rank = _count(text, settings.get("rank", "0"), smallest=0)
    if rank >= ranks:
        raise UsageError(f"--inject {text!r}: rank {rank} does not exist, use 0 to {ranks - 1}")
    return rank


def _count(text: str, value: str, smallest: int = 1) -> int:
    if not re.fullmatch(r"\d{1,12}", value) or int(value) < smallest:
        raise UsageError(
            f"--inject {text!r}: {value!r} is not a whole number of at least {smallest}"
        )
    return int(value)


def _seconds(text: str, value: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", value):
        raise UsageError(f"--inject {text!r}: {value!r} is not a duration in seconds")
    return float(value)


def _or(names: tuple[str, ...]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"
