"""The options that exclude each other, and those that need another one: one line for each."""

from collections.abc import Mapping
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.options.fields import flag
from hvdtrain.options.optimisationoptions import OPTIMIZERS, smoothing_of
from hvdtrain.options.planrequest import (
    Chosen,
    PlanFile,
    Replicated,
    is_adaptive,
    parse_plan_request,
)
from hvdtrain.options.syncrequest import (
    Half,
    Server,
    TopK,
    parse_compress_request,
    parse_sync_request,
)

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
    ("batch_norm", "sync", "which lets replicas train apart", "use --batch-norm local"),
    ("reduce_with", "server", "which sums gradients on the servers", ONE),
    ("allreduce", "server", "which sums gradients on the servers", ONE),
    ("allreduce", "shard_optimizer", "which sums by reduce-scatter", ONE),
    ("allreduce", "gathered", "which sends without an all-reduce", ONE),
    ("hierarchical", "by mpi", "whose all-reduces do not block", HOROVOD),
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
            isinstance(parse_compress_request(values["compress"]), Half | TopK),
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
