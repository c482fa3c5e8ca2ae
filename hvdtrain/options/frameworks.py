"""The options that each framework supports."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.options.fields import Rule, flag

# Lines that TensorFlow writes to standard error whatever its log level is.
REMARKS = ("oneDNN custom operations are on", "absl::InitializeLog()")


def check_framework(options: Sequence[Field[Any]], values: Mapping[str, Any]) -> None:
    """Refuse options that the framework of a run does not support.

    Raises:
        UsageError: naming the option.
    """
    devices = mirrored_devices(values["plan"])
    if values["framework"] == "torch":
        if devices is not None:
            raise UsageError(
                f"--plan {values['plan']} is TensorFlow's MirroredStrategy: "
                "add --framework tensorflow, or use --plan dp"
            )
        return
    if values["plan"] not in (None, "single", "dp") and devices is None:
        raise UsageError(
            f"--plan {values['plan']} is not supported with --framework tensorflow: "
            "use single, dp or mirrored[:N]"
        )
    _check_absent(options, values, Rule.TORCH_ONLY, "--framework tensorflow")
    if devices is not None:
        _check_absent(options, values, Rule.NOT_MIRRORED, f"--plan {values['plan']}")
        if devices > values["batch_size"]:
            raise UsageError(
                f"--plan {values['plan']} has more devices than --batch-size "
                f"{values['batch_size']} has images: use a larger --batch-size or fewer devices"
            )
        if (values["ranks"] or 1) > 1:
            raise UsageError(
                f"--plan {values['plan']} runs in one process, not on {values['ranks']} ranks: "
                "leave --ranks out, or use --plan dp"
            )


def mirrored_devices(plan: str | None) -> int | None:
    """Return the number of devices in `mirrored:N`, 0 for `mirrored`; None for any other plan.

    Raises:
        UsageError: if N is not a positive integer.
    """
    if plan is None or plan.partition(":")[0] != "mirrored":
        return None
    match = re.fullmatch(r"mirrored(?::(\d{1,6}))?", plan)
    if match is None or (match[1] is not None and int(match[1]) == 0):
        raise UsageError(
            f"--plan {plan} is not known: write mirrored:N for N devices, such as mirrored:2"
        )
    return int(match[1] or 0)


def _check_absent(
    options: Iterable[Field[Any]], values: Mapping[str, Any], rule: Rule, where: str
) -> None:
    for item in options:
        if rule in item.metadata["rule"] and values[item.name] != item.default:
            raise UsageError(f"{flag(item.name)} is not supported with {where}: leave it out")
