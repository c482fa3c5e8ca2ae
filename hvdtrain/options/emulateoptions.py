"""The options of an emulation: a run on devices and links that are modelled, not present."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.options.fields import Group, Rule, flag, option

# By option: the only value that goes together with --emulate, and why.
REFUSED: Mapping[str, tuple[Any, str]] = {
    "sync": ("exact", "which emulates the sum of gradients in every step"),
    "compress": ("none", "which does not emulate compression"),
    "shard_optimizer": (False, "which emulates whole updates"),
    "bind": (False, "whose ranks share the cores"),
    "batch_norm": ("local", "whose components have no batch norm"),
    "verify": (False, "whose components compute nothing"),
    "weights": (None, "whose components have other weights"),
    "holdout": (0.0, "which evaluates nothing: its components learn nothing"),
    "compile": (False, "whose components compute nothing"),
    "memory_limit": (None, "whose processes hold no real activations"),
    "profile": (None, "whose measurements depend on the dilation"),
    "device": (None, "whose devices are modelled"),
}


@dataclass(frozen=True, kw_only=True)
class EmulateOptions:
    """A run on ranks whose devices and links are modelled."""

    emulate: str | None = option(
        None,
        "rehearse the run on hardware you do not have: ranks sleep for as long as its devices "
        "would compute, and messages take as long as on its links. 8-v100, 8-h200, 16-cpu-10g, "
        "16-cpu-100g or a YAML file, as in plan simulate --cluster; or a file "
        "that --profile has saved: the ranks that it was measured on",
        Group.PLAN,
        Rule.ONE_LINE | Rule.TORCH_ONLY,
        "CLUSTER",
    )
    emulate_dilation: float | None = option(
        None,
        "with --emulate: real seconds per emulated second",
        Group.PLAN,
        Rule.POSITIVE | Rule.ON_RESUME | Rule.TORCH_ONLY | Rule.NOT_COMPARED,
        "D",
        shown_default="enough to hide the overhead of the ranks on these cores",
    )


def check_emulation(values: Mapping[str, Any]) -> None:
    """Refuse options that do not go together with an emulation.

    Args:
        values: of all options, by name.

    Raises:
        UsageError: naming both options.
    """
    if values["emulate"] is None:
        if values["emulate_dilation"] is not None:
            raise UsageError("--emulate-dilation needs --emulate: add it, or leave this out")
        return
    for name, (allowed, reason) in REFUSED.items():
        if values[name] != allowed and (name, values[name]) != ("device", "cpu"):
            value = "" if values[name] is True else f" {values[name]}"
            raise UsageError(
                f"{flag(name)}{value} is not supported with --emulate, {reason}: leave it out"
            )
