"""Parse the texts of `--sync` and `--compress`, and refuse what does not go together with them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.options.faultrequest import parse_restarts
from hvdtrain.options.texts import AVERAGE, number, settings_of

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
class Half:
    """Gradients travel in 16 bits: "fp16" or "bf16".

    Attributes:
        after: first sums of gradients that stay exact, here and below.
    """

    dtype: str
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


CompressRequest = NoCompression | Half | TopK | PowerSGD

SYNC_FORMS = (
    "exact, local:H, local:H@EPOCH, diloco:H, elastic:H, server, server:stale=S or server:async"
)
COMPRESS_FORMS = "none, fp16, bf16, topk:RATIO or powersgd:RANK"
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
        (method in ("none", "fp16", "bf16") and text.partition(",")[0] == method)
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
    return PowerSGD(int(part), after) if method == "powersgd" else Half(method, after)


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
