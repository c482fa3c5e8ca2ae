"""The metadata of a configuration field that describe its option: help, heading and default."""

from dataclasses import field
from enum import Flag, StrEnum, auto
from typing import Any


class Group(StrEnum):
    """A heading of the help; under each, options are listed in the order of their fields."""

    DATA = "model and data"
    PLAN = "plan"
    SYNC = "agreement of replicas"
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
    SHARE = auto()
    ONE_LINE = auto()
    ON_RESUME = auto()  # a resumed run may have another value
    NO_RESULT = auto()
    ALWAYS = ON_RESUME | NO_RESULT  # it does not change the result: it makes no other run
    TORCH_ONLY = auto()
    NOT_MIRRORED = auto()  # it needs the gradients before MirroredStrategy applies them
    NOT_COMPARED = auto()  # runs that a study compares may differ in it
    FIRST = auto()  # a first run needs it: it is on the page of --help


NO_RULE = Rule(0)
DEFAULT_EPOCHS = 10


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
    group: Group,
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


def flag(name: str) -> str:
    """Return the command line option of a field."""
    return "--" + name.replace("_", "-")
