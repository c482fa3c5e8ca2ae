"""The metadata of a configuration field that describe its option: help, heading and default."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, field
from enum import Flag, auto
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.host.harmless import LARGEST_WHOLE
from hvdtrain.options.planrequest import ADAPTIVE, Chosen, parse_plan_request

# Headings of the help. Under each, options are listed in the order of their fields.
DATA = "model and data"
PLAN = "plan"
LENGTH = "length and batch"
DEVICES = "precision and devices"
OPTIMISATION = "optimisation"
FAULTS = "fault tolerance"
OUTPUT = "output"


class Rule(Flag):
    """A rule for the values of one option, besides their type."""

    POSITIVE = auto()
    NOT_NEGATIVE = auto()
    HOLDOUT = auto()
    BELOW_ONE = auto()
    ONE_LINE = auto()
    ON_RESUME = auto()  # a resumed run may have another value
    IN_STUDY = auto()
    ALWAYS = ON_RESUME | IN_STUDY  # and so may the same run of a study
    TORCH_ONLY = auto()
    NOT_MIRRORED = auto()  # it needs the gradients before MirroredStrategy applies them
    NOT_COMPARED = auto()  # runs that a study compares may differ in it


NO_RULE = Rule(0)
# The allowed values, as the end of a message about another one.
LIMITS = {
    Rule.POSITIVE: "above 0",
    Rule.NOT_NEGATIVE: "0 or more",
    Rule.HOLDOUT: "between 0 and 0.9",
    Rule.BELOW_ONE: "0 or more and below 1",
    Rule.ONE_LINE: "one line of text",
}


def about(
    text: str, group: str = "", metavar: str = "", default: str = "", alias: str = ""
) -> dict[str, Any]:
    """Return the metadata of a field that is an option.

    Args:
        text: help, without the default.
        group: heading of the help.
        metavar: placeholder for the value, if its type does not imply one.
        default: description of the default, for a field whose default is None.
        alias: another name of the option, without its dashes.
    """
    return {"help": text, "group": group, "metavar": metavar, "default": default, "alias": alias}


def option(
    default: Any,
    text: str,
    group: str,
    rule: Rule = NO_RULE,
    metavar: str = "",
    shown_default: str = "",
    alias: str = "",
) -> Any:
    """Return a field of `TrainConfig`: everything that is known about one option of `train`.

    Args:
        default: value of the option, MISSING if it is required.
        text, group, metavar, shown_default, alias: as in `about`.
        rule: rules for its values.
    """
    metadata = about(text, group, metavar, shown_default, alias) | {"rule": rule}
    return field(default=default, metadata=metadata)


CHOSEN_PLANS_ONLY = ("memory_limit", "profile")
DEFAULT_EPOCHS = 10


def flag(name: str) -> str:
    """Return the command line option of a field."""
    return "--" + name.replace("_", "-")


def check_ranges(options: Iterable[Field[Any]], values: Mapping[str, Any]) -> None:
    """Refuse values that are out of range for every machine, data set and model.

    Raises:
        UsageError: naming the option.
    """
    for name, value in values.items():
        if isinstance(value, int) and abs(value) >= LARGEST_WHOLE:
            raise UsageError(f"{flag(name)} must be below {LARGEST_WHOLE:,}")
    for item in options:
        value = values[item.name]
        for rule, limits in LIMITS.items():
            if rule in item.metadata["rule"] and value is not None and not _holds(rule, value):
                shown = repr(value) if rule is Rule.ONE_LINE else value
                raise UsageError(f"{flag(item.name)} must be {limits}, not {shown}")


def _holds(rule: Rule, value: Any) -> bool:
    if rule is Rule.ONE_LINE:
        return len(value.splitlines()) <= 1 and "\0" not in value
    if rule is Rule.POSITIVE:
        return bool(0 < value < float("inf"))
    if rule is Rule.HOLDOUT:
        return bool(0 <= value <= 0.9)
    return bool(0 <= value < (1 if rule is Rule.BELOW_ONE else float("inf")))


def check_together(values: Mapping[str, Any]) -> None:
    """Refuse options that exclude each other.

    Raises:
        UsageError: naming both.
    """
    warmup, epochs = values["warmup_epochs"], values["epochs"]
    if epochs is None and values["max_steps"] is None:
        epochs = DEFAULT_EPOCHS
    if epochs is not None and warmup > epochs:
        raise UsageError(
            f"--warmup-epochs {warmup} is more than --epochs {epochs}: give at most {epochs}"
        )
    if epochs is not None and not values["resume"]:  # a run of an older version may resume
        _check_schedules(values, epochs)
    if values["compile"] and (values["recompute"] or values["batch_norm"] == "sync"):
        other = "--recompute" if values["recompute"] else "--batch-norm sync"
        raise UsageError(f"--compile and {other} exclude each other: leave one of them out")
    request = parse_plan_request(values["plan"])
    if values["change_batch_norm"] and request != ADAPTIVE:
        raise UsageError("--change-batch-norm needs --plan adaptive: add it, or leave this out")
    if not isinstance(request, Chosen):
        for name in CHOSEN_PLANS_ONLY:
            if values[name] is not None:
                raise UsageError(f"{flag(name)} needs --plan auto or --plan adaptive")
    if values["resume"] and values["run"] is None:
        raise UsageError("--resume needs --run: give the folder of the run to resume")


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


def interval(text: str) -> tuple[float, str]:
    """Return the number and "epoch", "step" or "minute" in a value of `--checkpoint-every`.

    Raises:
        UsageError: if the text is not such an interval.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(epoch|step|minute)s?", text)
    number = float(match[1]) if match else 0.0
    if match is None or number == 0 or (match[2] != "minute" and number % 1):
        raise UsageError(
            f"--checkpoint-every {text!r} is not understood: "
            "give it as '2 epochs', '500 steps' or '10 minutes'"
        )
    return number, match[2]
