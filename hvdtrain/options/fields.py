"""The metadata of a configuration field that describe its option: help, heading and default."""

import re
from collections.abc import Mapping
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


def about(
    text: str, group: str = "", metavar: str = "", default: str = "", alias: str = ""
) -> dict[str, str]:
    """Return the metadata of a field that is an option.

    Args:
        text: help, without the default.
        group: heading of the help.
        metavar: placeholder for the value, if its type does not imply one.
        default: description of the default, for a field whose default is None.
        alias: another name of the option, without its dashes.
    """
    return {"help": text, "group": group, "metavar": metavar, "default": default, "alias": alias}


POSITIVE = ("batch_size", "lr", "log_every", "stall_timeout", "keep_checkpoints")
POSITIVE_OR_NONE = (
    *("epochs", "max_steps", "ranks", "min_ranks", "threads", "lr_base_batch", "microbatches"),
    *("clip_norm", "gradient_limit", "memory_limit", "cutout", "image_size", "patch_size"),
)
CHOSEN_PLANS_ONLY = ("memory_limit", "profile")
DEFAULT_EPOCHS = 10
ONE_LINE = (
    "model",
    "data",
    "run",
    "ledger",
    "trace",
    "weights",
    "stage",
    "replicate",
    "profile",
)
NOT_NEGATIVE = ("warmup_epochs", "momentum", "weight_decay", "seed", "eval_every", "restarts")


def flag(name: str) -> str:
    """Return the command line option of a field."""
    return "--" + name.replace("_", "-")


def check_ranges(values: Mapping[str, Any]) -> None:
    """Refuse values that are out of range for every machine, data set and model.

    Raises:
        UsageError: naming the option.
    """
    for name, value in values.items():
        if isinstance(value, int) and abs(value) >= LARGEST_WHOLE:
            raise UsageError(f"{flag(name)} must be below {LARGEST_WHOLE:,}")
    for name in (*POSITIVE, *POSITIVE_OR_NONE):
        value = values[name]
        if value is None and name in POSITIVE_OR_NONE:
            continue
        if not 0 < value < float("inf"):
            raise UsageError(f"{flag(name)} must be above 0, not {value}")
    for name, value in values.items():
        if (
            name in ONE_LINE
            and value is not None
            and (len(value.splitlines()) > 1 or "\0" in value)
        ):
            raise UsageError(f"{flag(name)} must be one line of text, not {value!r}")
    for name in NOT_NEGATIVE:
        if not 0 <= values[name] < float("inf"):
            raise UsageError(f"{flag(name)} must be 0 or more, not {values[name]}")
    if not 0 <= values["holdout"] <= 0.9:
        raise UsageError(f"--holdout must be between 0 and 0.9, not {values['holdout']}")
    if not 0 <= values["label_smoothing"] < 1:
        raise UsageError(
            f"--label-smoothing must be 0 or more and below 1, not {values['label_smoothing']}"
        )


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
