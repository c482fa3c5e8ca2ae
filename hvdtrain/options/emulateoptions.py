"""The option of an emulation: a run on devices and links that are modelled, not present."""

import math
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.options.fields import Group, Rule, option
from hvdtrain.options.texts import number


@dataclass(frozen=True, kw_only=True)
class EmulateOptions:
    """A run on ranks whose devices and links are modelled."""

    emulate: str | None = option(
        None,
        "rehearse the run on hardware you do not have: ranks sleep for as long as its devices "
        "would compute, and messages take as long as on its links. 8-v100, 8-h200, 16-cpu-10g, "
        "16-cpu-100g or a YAML file, as in plan simulate --cluster; or a file "
        "that --profile has saved: the ranks that it was measured on. CLUSTER:D: D real seconds "
        "per emulated one, by default enough to hide the overhead of the ranks on these cores",
        Group.PLAN,
        Rule.ONE_LINE | Rule.TORCH_ONLY,
        "CLUSTER[:D]",
    )


def parse_emulate(text: str) -> tuple[str, float | None]:
    """Return the cluster of a value of `--emulate`, and its real seconds per emulated second.

    Raises:
        UsageError: if these are not above 0.
    """
    cluster, _, part = text.rpartition(":")
    dilation = number(part)
    if not cluster or math.isnan(dilation):
        return text, None
    if not 0 < dilation < math.inf:
        raise UsageError(
            f"--emulate {text} is not valid: the real seconds per emulated second must be above 0"
        )
    return cluster, dilation
