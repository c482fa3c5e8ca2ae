"""The options that each framework supports."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.options.fields import Rule, flag
from hvdtrain.options.planrequest import Mirrored, Replicated, parse_plan_request

# Lines that TensorFlow writes to standard error whatever its log level is.
REMARKS = ("oneDNN custom operations are on", "absl::InitializeLog()")


def check_framework(options: Sequence[Field[Any]], values: Mapping[str, Any]) -> None:
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
    _check_absent(options, values, Rule.TORCH_ONLY, "--framework tensorflow")
    if isinstance(request, Mirrored):
        _check_absent(options, values, Rule.NOT_MIRRORED, f"--plan {values['plan']}")
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


def _check_absent(
    options: Iterable[Field[Any]], values: Mapping[str, Any], rule: Rule, where: str
) -> None:
    for item in options:
        if rule in item.metadata["rule"] and values[item.name] != item.default:
            raise UsageError(f"{flag(item.name)} is not supported with {where}: leave it out")
