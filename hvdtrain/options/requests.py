"""Parse the texts of options, such as `--plan hp:2x2` or `--sync local:8`."""

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hvdtrain.errors import UsageError

AVERAGE = "average-optimizer"
WHOLE = ("a whole number above 0", lambda value: value >= 1 and value % 1 == 0)
# What may follow after a comma: the words of its range, and the range itself.
_RANGES: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "lr": ("above 0", lambda value: 0 < value < math.inf),
    "momentum": ("0 or more and below 1", lambda value: 0 <= value < 1),
    "rate": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "servers": WHOLE,
    "min-ranks": WHOLE,
    "grow-after": ("above 0", lambda value: 0 < value < math.inf),
    "after": ("a whole number", lambda value: value % 1 == 0),
}


def number(text: str) -> float:
    """Return the number that a text is, from 0 to infinity; NaN for another text."""
    is_number = re.fullmatch(r"\d{1,12}(?:\.\d{1,20})?(?:e[-+]?\d{1,3})?", text)
    return float(text) if is_number else math.nan


def settings_of(option: str, text: str, allowed: Sequence[str]) -> dict[str, float]:
    """Return what follows the method in `METHOD,name=value,...`.

    Raises:
        UsageError: for a name that the method does not have, or a value out of its range.
    """
    chosen: dict[str, float] = {}
    for word in text.split(",")[1:]:
        name, _, value = word.partition("=")
        if name not in allowed or name in chosen or (name == AVERAGE) != (word == AVERAGE):
            forms = " and ".join(item if item == AVERAGE else f"{item}=X" for item in allowed)
            raise UsageError(
                f"{option} {text} is not known: {word!r} is none of what it takes after a comma, "
                f"{forms or 'which is nothing'}"
            )
        chosen[name] = 1.0 if name == AVERAGE else number(value)
        if name != AVERAGE and not _RANGES[name][1](chosen[name]):
            raise UsageError(f"{option} {text}: {name} must be {_RANGES[name][0]}, not {value!r}")
    return chosen


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
    """Any other text: the path of a JSON file or a run folder, which may be absent."""

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
        match = re.fullmatch(r"hp:(\d{1,6})x(\d{1,6})", text)
        if not match or not int(match[1]) or not int(match[2]):
            raise UsageError(
                f"--plan {text} is not valid: use hp:SxR, S stages of R replicas each, such as "
                "hp:2x2"
            )
        return Pipeline(int(match[1]), int(match[2]))
    if word == "mirrored":
        match = re.fullmatch(r"mirrored(?::(\d{1,6}))?", text)
        if match is None or (match[1] is not None and int(match[1]) == 0):
            raise UsageError(
                f"--plan {text} is not known: write mirrored:N for N devices, such as mirrored:2"
            )
        return Mirrored(int(match[1]) if match[1] else None)
    if word in ("auto", "adaptive"):
        limit = text.partition(":")[2]
        gib = number(limit[:-3]) if limit.lower().endswith("gib") else math.nan
        if not 0 < gib < math.inf:
            raise UsageError(f"--plan {text} is not valid: write {word}:XGiB for X GiB per rank")
        return Chosen(word == "adaptive", gib)
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


@dataclass(frozen=True)
class BadStep:
    """A limit above which gradients make a step bad, and what follows.

    Attributes:
        skips: leave the step out; else the run stops.
        limit: the largest norm of the gradients that is not bad; infinite for none.
    """

    skips: bool
    limit: float = math.inf

    @property
    def is_limited(self) -> bool:
        """Return whether there is a limit."""
        return self.limit < math.inf


def parse_bad_step(text: str) -> BadStep:
    """Return what a value of `--on-bad-step` requests.

    Raises:
        UsageError: if it is none of stop, skip, stop:NORM and skip:NORM.
    """
    word, colon, part = str(text).partition(":")
    limit = number(part) if colon else math.inf
    if word not in ("stop", "skip") or not limit > 0:
        raise UsageError(
            f"--on-bad-step {text} is not known: use stop or skip, or stop:NORM or skip:NORM with "
            "the norm above which gradients are bad"
        )
    return BadStep(word == "skip", limit)


@dataclass(frozen=True)
class Restarts:
    """The number of restarts.

    Attributes:
        fewest_ranks: None for as many as before.
        grow_seconds: on fewer ranks, until the job is started on all of them again.
    """

    most: int
    fewest_ranks: int | None = None
    grow_seconds: float = 600.0


def parse_restarts(value: int | str) -> Restarts:
    """Return what a value of `--restarts` requests.

    Raises:
        UsageError: if it is neither N nor N,min-ranks=M.
    """
    text = str(value)
    count = text.partition(",")[0]
    if not re.fullmatch(r"\d{1,6}", count):
        raise UsageError(
            f"--restarts {text} is not known: use N, or N,min-ranks=M for one rank fewer at each "
            "restart, down to M"
        )
    settings = settings_of("--restarts", text, ("min-ranks", "grow-after"))
    if "grow-after" in settings and "min-ranks" not in settings:
        raise UsageError(f"--restarts {text}: grow-after needs min-ranks=M")
    fewest = settings.get("min-ranks")
    grow = settings.get("grow-after", Restarts.grow_seconds)
    return Restarts(int(count), None if fewest is None else int(fewest), grow)


def interval(text: str) -> tuple[float, str]:
    """Return the number and "epoch", "step" or "minute" in a value of `--checkpoint-every`.

    Raises:
        UsageError: if the text is not such an interval.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(epoch|step|minute)s?", text)
    number = float(match[1]) if match else 0.0
    if match is None or number == 0 or (match[2] != "minute" and number % 1):
        raise UsageError(
            f"--checkpoint-every {text!r} is not understood: "
            "give it as '2 epochs', '500 steps' or '10 minutes'"
        )
    return number, match[2]


# Each rank keeps the batches of as many steps, to explain a bad one, and an agreement per step.
MOST_STEPS_AHEAD = 32


@dataclass(frozen=True)
class Exact:
    """Replicas sum their gradients in every step."""


@dataclass(frozen=True)
class Local:
    """Replicas train alone and average their weights after every `period` steps.

    Attributes:
        exact_epochs: before that, epochs in which they sum their gradients in every step.
        averages_optimizer: average the optimizer's state, too; else each replica keeps its own.
    """

    period: int
    exact_epochs: int = 0
    averages_optimizer: bool = False


@dataclass(frozen=True)
class DiLoCo:
    """Replicas train alone; their average is a gradient for an outer optimizer.

    Attributes:
        lr, momentum: of the outer optimizer, which is SGD with Nesterov momentum.
    """

    period: int
    lr: float = 0.7
    momentum: float = 0.9


@dataclass(frozen=True)
class Elastic:
    """Replicas train alone and are drawn to a common centre after every `period` steps.

    Attributes:
        rate: share of the way to the centre; None: 0.9 / replicas.
    """

    period: int
    rate: float | None = None


@dataclass(frozen=True)
class Server:
    """Servers hold the weights; in every step replicas push gradients and get weights.

    Attributes:
        staleness: how many steps of others a replica's weights may miss; None: any number.
        servers: ranks that hold weights and do not train, the last ones. A run may resume with
            another number of them.
    """

    staleness: int | None = 0
    servers: int = field(default=1, compare=False)

    @property
    def steps_ahead(self) -> int:
        """Return how many steps a replica may be ahead of the slowest one inside an epoch."""
        return MOST_STEPS_AHEAD if self.staleness is None else self.staleness + 1


SyncRequest = Exact | Local | DiLoCo | Elastic | Server


@dataclass(frozen=True)
class NoCompression:
    """Gradients travel as they are."""


@dataclass(frozen=True)
class Rounded:
    """Gradients travel in 16 or 8 bits.

    Attributes:
        form: "fp16", "bf16" or "int8", whose values have a scale for each block.
        after: first sums of gradients that stay exact, here and below.
    """

    form: str
    after: int = 100


@dataclass(frozen=True)
class TopK:
    """Gradients travel as the share `ratio` of their values, the largest ones."""

    ratio: float
    after: int = 100


@dataclass(frozen=True)
class PowerSGD:
    """Matrices travel as products of two of rank `rank`."""

    rank: int
    after: int = 100


CompressRequest = NoCompression | Rounded | TopK | PowerSGD

SYNC_FORMS = (
    "exact, local:H, local:H@EPOCH, diloco:H, elastic:H, server, server:stale=S or server:async"
)
COMPRESS_FORMS = "none, fp16, bf16, int8, topk:RATIO or powersgd:RANK"
NO_SYNC, NO_COMPRESSION = Exact(), NoCompression()


@cache  # each step asks
def parse_sync_request(text: str) -> SyncRequest:
    """Return what a value of `--sync` requests.

    Raises:
        UsageError: if it is not one of the forms, or a number is out of range.
    """
    method = text.partition(",")[0].removeprefix("post-")  # post-local: an older name
    match = re.fullmatch(r"(local|diloco|elastic):(\d{1,9})(?:@(\d{1,6}))?", method)
    if method == "exact":
        settings_of("--sync", text, ())
        return NO_SYNC
    if method.partition(":")[0] == "server":
        staleness = _staleness(method)
        servers = settings_of("--sync", text, ("servers",)).get("servers", 1)
        return Server(staleness, int(servers))
    if match is None or not int(match[2]) or (match[3] and match[1] != "local"):
        raise UsageError(
            f"--sync {text} is not known: use {SYNC_FORMS}, such as local:8 or local:8@2"
        )
    period = int(match[2])
    if match[1] == "local":
        averages = AVERAGE in settings_of("--sync", text, (AVERAGE,))
        return Local(period, int(match[3] or 0), averages)
    if match[1] == "diloco":
        return DiLoCo(period, **settings_of("--sync", text, ("lr", "momentum")))
    return Elastic(period, **settings_of("--sync", text, ("rate",)))


def _staleness(method: str) -> int | None:
    if method == "server:async":
        return None
    match = re.fullmatch(r"server(?::stale=(\d{1,6}))?", method)
    staleness = int(match[1] or 0) if match else 0
    if match is None or staleness >= MOST_STEPS_AHEAD:
        raise UsageError(
            f"--sync {method} is not known: use server, server:async or server:stale=S with S "
            f"from 0 to {MOST_STEPS_AHEAD - 1}, such as server:stale=2"
        )
    return staleness


def parse_compress_request(text: str, option: str = "--compress") -> CompressRequest:
    """Return what a value of `--compress` requests.

    Args:
        option: its name in the error.

    Raises:
        UsageError: if it is not one of the forms, or a number is out of range.
    """
    method, _, part = text.partition(",")[0].partition(":")
    is_known = (
        (method in ("none", "fp16", "bf16", "int8") and text.partition(",")[0] == method)
        or (method == "topk" and 0 < number(part) <= 1)
        or (method == "powersgd" and part.isdigit() and 0 < int(part) < 10**6)
    )
    if not is_known:
        raise UsageError(
            f"{option} {text} is not known: use {COMPRESS_FORMS}, such as topk:0.01 or powersgd:2"
        )
    settings = settings_of(option, text, () if method == "none" else ("after",))
    after = int(settings.get("after", 100))
    if method == "none":
        return NO_COMPRESSION
    if method == "topk":
        return TopK(float(part), after)
    return PowerSGD(int(part), after) if method == "powersgd" else Rounded(method, after)


def check_servers(values: Mapping[str, Any]) -> None:
    """Refuse a number of ranks that leaves none to train beside the servers.

    Raises:
        UsageError: naming the smallest number.
    """
    request = parse_sync_request(values["sync"])
    if not isinstance(request, Server):
        return
    servers, ranks = request.servers, values["ranks"]
    fewest = parse_restarts(values["restarts"]).fewest_ranks
    if ranks is not None and ranks <= servers:
        raise UsageError(no_worker(values["sync"], servers, ranks))
    if fewest is not None and fewest <= servers:
        raise UsageError(
            f"--restarts {values['restarts']} leaves no rank to train beside {servers} servers: "
            f"give at least min-ranks={servers + 1}"
        )


def no_worker(sync: str, servers: int, ranks: int) -> str:
    """Return the message about ranks that are all servers."""
    return (
        f"--sync {sync} with {servers} server(s) leaves none of {ranks} rank(s) to train: use at "
        f"least --ranks {servers + 1}"
    )


FAULTS = (
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
FAULT_SETTINGS = {"slow": ("seconds", "steps"), "nan": ("component", "steps")}
FAULT_SYNTAX = "KIND step=N [rank=R], such as 'kill step=20 rank=1'"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: one of `FAULTS`; `hvdtrain.training.inject` says what each does.
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
        for name in ("rank", *FAULT_SETTINGS.get(self.kind, ())):
            if getattr(self, name) is not None:
                words.append(f"{name}={getattr(self, name)}")
        return " ".join(words)


def parse_faults(text: str, ranks: int) -> tuple[Fault, ...]:
    """Return the faults in a value of `--inject`, which are separated by semicolons.

    `step=10..50` and `rank=any` are drawn from `seed=S`.

    Raises:
        UsageError: naming the part that is not understood.
    """
    return tuple(_parse_one(part.strip(), ranks) for part in text.split(";"))


def _parse_one(text: str, ranks: int) -> Fault:
    kind, *words = text.split() or [""]
    if kind not in FAULTS:
        raise UsageError(
            f"--inject {text!r} is not understood: {FAULT_SYNTAX}; KIND is {_or(FAULTS)}"
        )
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    allowed = ("step", "rank", "seed", *FAULT_SETTINGS.get(kind, ()))
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


TIME_FORMS = "minutes, M:SS, H:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
MEMORY_FORMS = "megabytes, or a whole number with K, M, G or T, such as 16G"
_TIME_PARTS = re.compile(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,2}))?(?::(\d{1,2}))?", re.ASCII)


def minutes(text: str) -> int | None:
    """Return a limit in whole minutes, seconds rounded up; None for any other text.

    The forms are those of `sbatch --time` (https://slurm.schedmd.com/sbatch.html#OPT_time): one
    number is minutes, two are minutes and seconds, and after days the first number is hours.

    >>> minutes("12"), minutes("1:30"), minutes("1:30:00"), minutes("1-12")
    (12, 2, 90, 2160)
    """
    match = _TIME_PARTS.fullmatch(text)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:
        hours, whole, seconds = 0, first, second
    elif second < 60:
        hours, whole, seconds = first, second, third
    else:
        return None
    return (days * 24 + hours) * 60 + whole + -(-seconds // 60) if seconds < 60 else None
