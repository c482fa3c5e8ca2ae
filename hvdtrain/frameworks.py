"""What a configuration may ask of each framework."""

import re
from collections.abc import Mapping
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.ranges import flag

# Of TensorFlow, on standard error, whatever it is told of its log.
REMARKS = ("oneDNN custom operations are on", "absl::InitializeLog()")
# What Keras is not asked to do, with the values that ask for nothing.
OF_TORCH = {
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
# What has to look at the gradients before each replica of MirroredStrategy takes them.
NOT_OF_MIRRORED = {"clip_norm": None, "gradient_limit": None, "on_bad_step": "stop"}


def check_framework(values: Mapping[str, Any]) -> None:
    """Refuse what the framework of a run does not do.

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
            f"--framework tensorflow knows no plan {values['plan']}: "
            "there are single, dp and mirrored[:N]"
        )
    _check_absent(values, OF_TORCH, "--framework tensorflow")
    if devices is not None:
        _check_absent(values, NOT_OF_MIRRORED, f"--plan {values['plan']}")
        if devices > values["batch_size"]:
            raise UsageError(
                f"--plan {values['plan']} has more devices than --batch-size "
                f"{values['batch_size']} has images"
            )
        if (values["ranks"] or 1) > 1:
            raise UsageError(
                f"--plan {values['plan']} runs in one process, not on {values['ranks']} ranks: "
                "leave --ranks out, or use --plan dp"
            )


def mirrored_devices(plan: str | None) -> int | None:
    """How many devices `mirrored:N` asks for, 0 for `mirrored`; None for any other plan.

    Raises:
        UsageError: if N is no number above 0.
    """
    if plan is None or plan.partition(":")[0] != "mirrored":
        return None
    found = re.fullmatch(r"mirrored(?::(\d{1,6}))?", plan)
    if found is None or (found[1] is not None and int(found[1]) == 0):
        raise UsageError(f"{plan} is no plan: mirrored:N is N devices, such as mirrored:2")
    return int(found[1] or 0)


def _check_absent(values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
    for name, default in defaults.items():
        if values[name] != default:
            raise UsageError(f"{flag(name)} does not go with {where}: leave it out")
