"""Checks of the values of a configuration, one by one, together, and against the framework."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field
from typing import Any, get_args

from hvdtrain.errors import UsageError
from hvdtrain.host.records import LARGEST_WHOLE
from hvdtrain.options import requests
from hvdtrain.options.givenmodel import is_reference
from hvdtrain.options.names import nearest
from hvdtrain.options.requests import (
    Chosen,
    Mirrored,
    PlanFile,
    Replicated,
    Rounded,
    Server,
    TopK,
    check_servers,
    interval,
    is_adaptive,
    parse_bad_step,
    parse_compress_request,
    parse_plan_request,
    parse_restarts,
    parse_sync_request,
)
from hvdtrain.options.sections import (
    AUGMENTATIONS,
    DEFAULT_EPOCHS,
    LOSSES,
    OPTIMIZERS,
    RATE_SCHEDULES,
    Rule,
    flag,
    parse_emulate,
    smoothing_of,
)

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
        requests.parse_faults(values["inject"], values["ranks"] or MOST_RANKS)
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
    if epochs is None or values["resume"]:  # a run of an older version may resume
        return
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


ONE = "leave one of them out"
UNKNOWN_NORM = "which does not sum the gradients of all replicas in every step"
BF16 = "use bf16"
HOROVOD = "use --reduce-with horovod (hvdtrain setup installs it), or another --allreduce"
# Two uses that exclude each other, as in `uses`, why, and the cure.
EXCLUDED = (
    ("compress", "sync", UNKNOWN_NORM, "use --sync exact, or leave --compress out"),
    ("shard_optimizer", "sync", UNKNOWN_NORM, ONE),
    ("shard_optimizer", "compress", "which has no exact sums", ONE),
    ("verify", "sync", "which differs from the serial run", ONE),
    ("verify", "compress", "which differs from the serial run", ONE),
    ("plan of stages", "server", "whose workers hold the whole model", "use --plan dp"),
    ("plan adaptive", "sync", "which it cannot predict", "use --plan auto"),
    ("plan adaptive", "compress", "which it cannot predict", "use --plan auto"),
    ("clip_norm", "sync", UNKNOWN_NORM, ONE),
    ("on_bad_step", "sync", UNKNOWN_NORM, ONE),
    ("batch_norm", "sync", "which lets replicas make local steps", "use --batch-norm local"),
    ("reduce_with", "server", "which sums gradients on the servers", ONE),
    ("allreduce", "server", "which sums gradients on the servers", ONE),
    ("allreduce", "shard_optimizer", "which sums by reduce-scatter", ONE),
    ("allreduce", "gathered", "which sends without an all-reduce", ONE),
    ("hierarchical", "by mpi", "whose all-reduces do not block", HOROVOD),
    ("allreduce", "by torch", "which chooses it itself", ONE),
    ("memory limit", "sync", "whose memory it does not count", ONE),
    ("memory limit", "compress", "whose memory it does not count", ONE),
    ("memory limit", "shard_optimizer", "whose memory it does not count", ONE),
    ("memory limit", "own optimizer", "whose state it does not count", ONE),
    ("other loss", "framework", "which trains classifiers", ONE),
    ("own optimizer", "framework", "which has other optimizers", ONE),
    ("own optimizer", "sync", "which has to know the optimizer's state", ONE),
    ("own optimizer", "shard_optimizer", "which gives it slices of the weights", ONE),
    ("momentum", "own optimizer", "which sets it itself", ONE),
    ("weight_decay", "own optimizer", "which sets it itself", ONE),
    ("precision of torch", "framework", "which has fp32, bf16 and fp64", "use one of them"),
    ("fp16", "sync", UNKNOWN_NORM, BF16),
    ("fp16", "compress", "which does not send gradients as they are", BF16),
    ("compile", "recompute", "which runs a forward twice", ONE),
    ("compile", "batch_norm", "which communicates in a forward", ONE),
    ("sync", "emulate", "which emulates the sum of gradients in every step", ONE),
    ("compress", "emulate", "which does not emulate compression", ONE),
    ("shard_optimizer", "emulate", "which emulates whole updates", ONE),
    ("bind", "emulate", "whose ranks share the cores", ONE),
    ("batch_norm", "emulate", "whose components have no batch norm", ONE),
    ("verify", "emulate", "whose components compute nothing", ONE),
    ("weights", "emulate", "whose components have other weights", ONE),
    ("holdout", "emulate", "which evaluates nothing: its components learn nothing", ONE),
    ("compile", "emulate", "whose components compute nothing", ONE),
    ("memory limit", "emulate", "whose processes hold no real activations", ONE),
    ("profile", "emulate", "whose measurements depend on the dilation", ONE),
    ("gpu", "emulate", "whose devices are modelled", ONE),
)
# A use that needs another one, and how that is written.
NEEDED = (
    ("profile", "plan chosen", "--plan auto or --plan adaptive"),
    ("schedule_every", "plan adaptive", "--plan adaptive"),
    ("resume", "run", "--run"),
)


def uses(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, str]:
    """Return what a configuration uses, with the option as a user types it.

    These are the options that have not their default, and by a name of its own what matters of
    their values.

    Args:
        values, defaults: of all options, by name.
    """
    typed = {
        name: flag(name) if value is True else f"{flag(name)} {value}"
        for name, value in values.items()
    }
    plan = parse_plan_request(values["plan"])
    sync = parse_sync_request(values["sync"])
    holds = {name: value != defaults[name] for name, value in values.items()}
    named = {
        "server": ("sync", isinstance(sync, Server)),
        "gathered": (
            "compress",
            isinstance(parse_compress_request(values["compress"]), Rounded | TopK),
        ),
        "plan adaptive": ("plan", is_adaptive(plan)),
        "plan chosen": ("plan", isinstance(plan, Chosen)),
        "memory limit": ("plan", isinstance(plan, Chosen) and plan.memory_gib is not None),
        "plan of stages": ("plan", not isinstance(plan, Replicated | PlanFile)),
        "own optimizer": ("optimizer", values["optimizer"] not in OPTIMIZERS),
        "precision of torch": ("precision", values["precision"] in ("tf32", "fp16", "auto")),
        "fp16": ("precision", values["precision"] == "fp16"),
        "hierarchical": ("allreduce", values["allreduce"] == "hierarchical"),
        "by mpi": ("reduce_with", values["reduce_with"] == "mpi"),
        "by torch": ("reduce_with", values["reduce_with"] == "torch"),
        "gpu": ("device", values["device"] == "cuda"),
        "other loss": ("loss", smoothing_of(values["loss"]) is None),
    }
    used = {name: typed[name] for name, is_used in holds.items() if is_used}
    return used | {name: typed[owner] for name, (owner, is_used) in named.items() if is_used}


def check_exclusions(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse options that exclude each other, or that have no effect without another one.

    Args:
        values, defaults: of all options, by name.

    Raises:
        UsageError: naming both options, with the reason and the cure.
    """
    used = uses(values, defaults)
    for one, other, reason, cure in EXCLUDED:
        if one in used and other in used:
            raise UsageError(f"{used[one]} is not supported with {used[other]}, {reason}: {cure}")
    for one, other, words in NEEDED:
        if one in used and other not in used:
            raise UsageError(f"{flag(one)} needs {words}: add it, or leave this out")
