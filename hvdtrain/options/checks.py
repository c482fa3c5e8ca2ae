"""Checks of the values of a configuration, one by one, together, and against the framework."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field
from typing import Any, get_args

from hvdtrain.errors import UsageError
from hvdtrain.host.records import LARGEST_WHOLE
from hvdtrain.options import injection
from hvdtrain.options.emulateoptions import parse_emulate
from hvdtrain.options.exclusions import check_exclusions
from hvdtrain.options.faultrequest import interval, parse_bad_step, parse_restarts
from hvdtrain.options.fields import DEFAULT_EPOCHS, Rule, flag
from hvdtrain.options.givenmodel import is_reference
from hvdtrain.options.imageoptions import AUGMENTATIONS
from hvdtrain.options.nearest import nearest
from hvdtrain.options.optimisationoptions import (
    LOSSES,
    OPTIMIZERS,
    RATE_SCHEDULES,
    smoothing_of,
)
from hvdtrain.options.planrequest import (
    Mirrored,
    Replicated,
    parse_plan_request,
)
from hvdtrain.options.syncrequest import check_servers

# The allowed values, as the end of a message about another one.
LIMITS = {
    Rule.POSITIVE: "above 0",
    Rule.NOT_NEGATIVE: "0 or more",
    Rule.HOLDOUT: "between 0 and 0.9",
    Rule.SHARE: "between 0 and 1",
    Rule.ONE_LINE: "one line of text",
}
BUILT_IN = {
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "lr_schedule": RATE_SCHEDULES,
    "augment": AUGMENTATIONS,
}
MOST_RANKS = 2**20  # upper bound where only the launcher knows the number of ranks


def check_values(options: Sequence[Field[Any]], values: Mapping[str, Any]) -> None:
    """Refuse a configuration that cannot run on any machine, data set and model.

    Raises:
        UsageError: naming the option.
    """
    for item in options:
        if values[item.name] is None and type(None) not in get_args(item.type):
            raise UsageError(f"{flag(item.name)} must have a value")
    _check_ranges(options, values)
    _check_framework(options, values)
    parse_bad_step(values["on_bad_step"])
    parse_restarts(values["restarts"])
    parse_emulate(values["emulate"] or "")
    if values["inject"]:
        injection.parse(values["inject"], values["ranks"] or MOST_RANKS)
    _check_length(values)
    _check_seams(values)
    defaults = {item.name: item.default for item in options}
    check_exclusions(values, defaults)
    check_servers(values)


def _check_ranges(options: Iterable[Field[Any]], values: Mapping[str, Any]) -> None:
    """Refuse values that are out of range for every machine, data set and model.

    Raises:
        UsageError: naming the option.
    """
    for name, value in values.items():
        if isinstance(value, int) and abs(value) >= LARGEST_WHOLE:
            raise UsageError(f"{flag(name)} must be below {LARGEST_WHOLE:,}")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not _is_utf8(text):
                raise UsageError(f"{flag(name)} {text!r} is not UTF-8 text: rename it")
    for item in options:
        value = values[item.name]
        for rule, limits in LIMITS.items():
            if rule in item.metadata["rule"] and value is not None and not _holds(rule, value):
                shown = repr(value) if rule is Rule.ONE_LINE else value
                raise UsageError(f"{flag(item.name)} must be {limits}, not {shown}")


def _is_utf8(text: str) -> bool:
    """Return whether a text can be recorded; bytes of a command line that are not UTF-8 cannot."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _holds(rule: Rule, value: Any) -> bool:
    if rule is Rule.ONE_LINE:
        return len(value.splitlines()) <= 1 and "\0" not in value
    if rule is Rule.POSITIVE:
        return bool(0 < value < float("inf"))
    if rule is Rule.HOLDOUT:
        return bool(0 <= value <= 0.9)
    if rule is Rule.SHARE:
        return bool(0 <= value <= 1)
    return bool(0 <= value < float("inf"))


def _check_length(values: Mapping[str, Any]) -> None:
    """Refuse a warm-up and intervals that are longer than the run."""
    warmup, epochs = values["warmup_epochs"], values["epochs"]
    if epochs is None and values["max_steps"] is None:
        epochs = DEFAULT_EPOCHS
    if epochs is not None and warmup > epochs:
        raise UsageError(
            f"--warmup-epochs {warmup} is more than --epochs {epochs}: give at most {epochs}"
        )
    if epochs is not None and not values["resume"]:  # a run of an older version may resume
        _check_schedules(values, epochs)


def _check_seams(values: Mapping[str, Any]) -> None:
    """Refuse names that are neither built in nor of the form of a user's function."""
    for name, known in BUILT_IN.items():
        value = values[name]
        is_known = value in known or (name == "loss" and smoothing_of(value) is not None)
        if not is_known and not is_reference(value):
            raise UsageError(
                f"{flag(name)} {value} is not known"
                + nearest(value.partition(":")[0], (*known, "package.module:function"))
            )
    for reference in values["callback"] or ():
        if ":" not in reference:
            raise UsageError(f"--callback {reference} is not known: use package.module:Class")


def _check_schedules(values: Mapping[str, Any], epochs: int) -> None:
    """Refuse intervals in epochs that are longer than the run."""
    every, unit = interval(values["checkpoint_every"])
    for option, number, others in (
        ("--eval-every", values["eval_every"], ", or 0 to never evaluate"),
        ("--checkpoint-every", every if unit == "epoch" else 0, ""),
    ):
        if number > epochs:
            value = f"{number:g} epochs" if option == "--checkpoint-every" else number
            raise UsageError(
                f"{option} {value} is more than --epochs {epochs}: give {epochs}, which is once "
                f"at the end, or less{others}"
            )


def _check_framework(options: Sequence[Field[Any]], values: Mapping[str, Any]) -> None:
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
