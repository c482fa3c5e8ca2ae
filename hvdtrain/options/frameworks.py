"""The options that each framework supports."""

import re
from collections.abc import Mapping
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.options.fields import flag

# Lines that TensorFlow writes to standard error whatever its log level is.
REMARKS = ("oneDNN custom operations are on", "absl::InitializeLog()")
# Options that Keras does not support, with the values that leave them off.
TORCH_ONLY = {
    "microbatches": None,
    "schedule": None,
    "batch_norm": "local",
    "recompute": None,
    "compile": False,
    "trace": None,
    "weights": None,
    "patch_size": None,
    "verify": False,
}
# Options that inspect the gradients before the replicas of MirroredStrategy apply them.
NOT_WITH_MIRRORED = {"clip_norm": None, "gradient_limit": None, "on_bad_step": "stop"}


def check_framework(values: Mapping[str, Any]) -> None:
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
    _check_absent(values, TORCH_ONLY, "--framework tensorflow")
    if devices is not None:
        _check_absent(values, NOT_WITH_MIRRORED, f"--plan {values['plan']}")
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


def _check_absent(values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
    for name, default in defaults.items():
        if values[name] != default:
            raise UsageError(f"{flag(name)} is not supported with {where}: leave it out")
