"""The options that each framework supports."""

from collections.abc import Mapping
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.options.fields import flag
from hvdtrain.options.planrequest import Mirrored, Replicated, parse_plan_request

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
    request = parse_plan_request(values["plan"])
    if values["framework"] == "torch":
        if isinstance(request, Mirrored):
            raise UsageError(
                f"--plan {values['plan']} is TensorFlow's MirroredStrategy: "
                "add --framework tensorflow, or use --plan dp"
            )
        return
    if not isinstance(request, Replicated | Mirrored):
        raise UsageError(
            f"--plan {values['plan']} is not supported with --framework tensorflow: "
            "use single, dp or mirrored[:N]"
        )
    _check_absent(values, TORCH_ONLY, "--framework tensorflow")
    if isinstance(request, Mirrored):
        _check_absent(values, NOT_WITH_MIRRORED, f"--plan {values['plan']}")
        if (request.devices or 0) > values["batch_size"]:
            raise UsageError(
                f"--plan {values['plan']} has more devices than --batch-size "
                f"{values['batch_size']} has images: use a larger --batch-size or fewer devices"
            )
        if (values["ranks"] or 1) > 1:
            raise UsageError(
                f"--plan {values['plan']} runs in one process, not on {values['ranks']} ranks: "
                "leave --ranks out, or use --plan dp"
            )


def _check_absent(values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
    for name, default in defaults.items():
        if values[name] != default:
            raise UsageError(f"{flag(name)} is not supported with {where}: leave it out")
