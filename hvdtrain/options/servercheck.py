"""Checks of the options that exclude `--sync server`."""

from collections.abc import Mapping
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.options.fields import flag
from hvdtrain.options.planrequest import PlanFile, Replicated, parse_plan_request

# By option: its value without effect, and why another one cannot be used.
REFUSED: Mapping[str, tuple[Any, str]] = {
    "compress": ("none", "which sends the gradients as they are"),
    "shard_optimizer": (False, "whose servers divide the optimizer's state already"),
    "reduce_with": (None, "which sums gradients on the servers"),
    "allreduce": ("auto", "which sums gradients on the servers"),
    "verify": (False, "because it compares runs without servers"),
    "clip_norm": (None, "because no rank knows the norm of all gradients"),
    "gradient_limit": (None, "because no rank knows the norm of all gradients"),
    "on_bad_step": ("stop", "because no rank knows the norm of all gradients"),
    "batch_norm": ("local", "whose workers compute apart from each other"),
    "memory_limit": (None, "whose memory it does not count"),
}


def check_servers(values: Mapping[str, Any]) -> None:
    """Refuse options that do not go together with servers.

    Args:
        values: of all options, by name.

    Raises:
        UsageError: naming both options.
    """
    sync = f"--sync {values['sync']}"
    for name, (allowed, reason) in REFUSED.items():
        if values[name] != allowed:
            value = "" if values[name] is True else f" {values[name]}"
            raise UsageError(
                f"{flag(name)}{value} is not supported with {sync}, {reason}: leave one out"
            )
    if not isinstance(parse_plan_request(values["plan"]), Replicated | PlanFile):
        raise UsageError(
            f"--plan {values['plan']} is not supported with {sync}, whose workers hold the whole "
            "model: use --plan dp"
        )
    servers, ranks, fewest = values["servers"], values["ranks"], values["min_ranks"]
    if ranks is not None and ranks <= servers:
        raise UsageError(no_worker(values["sync"], servers, ranks))
    if fewest is not None and fewest <= servers:
        raise UsageError(
            f"--min-ranks {fewest} leaves no rank to train beside --servers {servers}: give at "
            f"least --min-ranks {servers + 1}"
        )


def no_worker(sync: str, servers: int, ranks: int) -> str:
    """Return the message about ranks that are all servers."""
    return (
        f"--sync {sync} with --servers {servers} leaves none of {ranks} rank(s) to train: use at "
        f"least --ranks {servers + 1}"
    )
