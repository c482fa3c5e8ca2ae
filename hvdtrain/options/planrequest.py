"""Parse the text of `--plan` into one value per form."""

import math
import re
from dataclasses import dataclass
from functools import cache

from hvdtrain.errors import UsageError
from hvdtrain.options.texts import number


@dataclass(frozen=True)
class Replicated:
    """Each rank holds the whole model: `dp` on any number of ranks, `single` on one alone."""

    is_single: bool


@dataclass(frozen=True)
class Pipeline:
    """`hp:SxR`, or `mp`: its number of stages is None, as it follows from the ranks."""

    stages: int | None
    replicas: int


@dataclass(frozen=True)
class Chosen:
    """A plan chosen from measurements on the ranks of a run: `auto`, or `adaptive`.

    Attributes:
        memory_gib: what the process of a rank may use; None for no limit.
    """

    is_adaptive: bool
    memory_gib: float | None = None


@dataclass(frozen=True)
class Mirrored:
    """TensorFlow's MirroredStrategy on a number of devices; None for all of them."""

    devices: int | None


@dataclass(frozen=True)
class PlanFile:
    """Any other text: the path of a JSON file, which may be absent."""

    path: str


PlanRequest = Replicated | Pipeline | Chosen | Mirrored | PlanFile

SINGLE, DP = Replicated(is_single=True), Replicated(is_single=False)
NAMES: dict[str, PlanRequest] = {
    "single": SINGLE,
    "dp": DP,
    "mp": Pipeline(None, 1),
    "auto": Chosen(is_adaptive=False),
    "adaptive": Chosen(is_adaptive=True),
}
SHORT_FORMS = (*NAMES, "hp:SxR")


@cache  # each step asks
def parse_plan_request(text: str | None) -> PlanRequest:
    """Return what a value of `--plan` requests; None, the default, is single on one rank, else dp.

    Raises:
        UsageError: if `hp:SxR`, `mirrored[:N]` or the limit of `auto:XGiB` is malformed.
    """
    text = "dp" if text is None else text
    if text in NAMES:
        return NAMES[text]
    word = text.partition(":")[0]
    if text.startswith("hp:"):
        return _pipeline(text)
    if word == "mirrored":
        return _mirrored(text)
    if word in ("auto", "adaptive"):
        return _chosen(text)
    return PlanFile(text)


def check_one_rank(text: str | None, ranks: int) -> None:
    """Refuse `single` and `mirrored` on several ranks.

    Raises:
        UsageError: naming the plan.
    """
    request = parse_plan_request(text)
    if ranks > 1 and (request == SINGLE or isinstance(request, Mirrored)):
        raise UsageError(f"--plan {text} runs on one rank, not on {ranks}: use --plan dp")


def is_adaptive(request: PlanRequest) -> bool:
    """Return whether the plan may change during training."""
    return isinstance(request, Chosen) and request.is_adaptive


def _chosen(text: str) -> Chosen:
    word, _, limit = text.partition(":")
    gib = number(limit[:-3]) if limit.lower().endswith("gib") else math.nan
    if not 0 < gib < math.inf:
        raise UsageError(f"--plan {text} is not valid: write {word}:XGiB for X GiB per rank")
    return Chosen(word == "adaptive", gib)


def _pipeline(text: str) -> Pipeline:
    match = re.fullmatch(r"hp:(\d{1,6})x(\d{1,6})", text)
    if not match or not int(match[1]) or not int(match[2]):
        raise UsageError(
            f"--plan {text} is not valid: use hp:SxR, S stages of R replicas each, such as hp:2x2"
        )
    return Pipeline(int(match[1]), int(match[2]))


def _mirrored(text: str) -> Mirrored:
    match = re.fullmatch(r"mirrored(?::(\d{1,6}))?", text)
    if match is None or (match[1] is not None and int(match[1]) == 0):
        raise UsageError(
            f"--plan {text} is not known: write mirrored:N for N devices, such as mirrored:2"
        )
    return Mirrored(int(match[1]) if match[1] else None)
