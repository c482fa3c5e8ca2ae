"""Fields of a configuration that are options, and the sections of the options of `train`."""

import math
import re
from dataclasses import dataclass, field
from enum import Flag, StrEnum, auto
from typing import Any, Literal

from hvdtrain.errors import UsageError
from hvdtrain.options.givenmodel import Model
from hvdtrain.options.requests import (
    CompressRequest,
    Server,
    SyncRequest,
    no_worker,
    number,
    parse_compress_request,
    parse_sync_request,
)


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


Seam = Model  # a name on the command line, or any function in Python
OPTIMIZERS = ("sgd", "adam", "adamw")
RATE_SCHEDULES = ("constant", "cosine", "linear", "step")
CROSS_ENTROPY = "cross-entropy"
LOSSES = (CROSS_ENTROPY, "pixel-cross-entropy", "mse", "l1", "binary-cross-entropy")


def smoothing_of(loss: str) -> float | None:
    """Return the label smoothing of `cross-entropy[:SMOOTHING]`; None for another loss.

    Raises:
        UsageError: if it is not 0 or more and below 1.
    """
    name, _, text = loss.partition(":")
    if name != CROSS_ENTROPY:
        return None
    if loss == CROSS_ENTROPY:
        return 0.0
    smoothing = number(text)
    if not 0 <= smoothing < 1:
        raise UsageError(
            f"--loss {loss} is not valid: write {CROSS_ENTROPY}:X with a label smoothing X of 0 "
            "or more and below 1"
        )
    return smoothing


@dataclass(frozen=True, kw_only=True)
class OptimisationOptions:
    """The optimizer, its schedule, and what the run should reach."""

    loss: Seam = option(  # noqa: RUF009
        CROSS_ENTROPY,
        "cross-entropy (with label smoothing: cross-entropy:0.1), pixel-cross-entropy, mse, l1, "
        "binary-cross-entropy (of logits), or package.module:function of your own, from outputs "
        "and targets to a loss per sample",
        Group.OPTIMISATION,
        Rule.ONE_LINE,
        "NAME",
    )
    optimizer: Seam = option(  # noqa: RUF009
        "adam",
        "sgd (with Nesterov momentum), adam, adamw, or module:function of (parameters by name, "
        "lr) that returns a torch.optim.Optimizer",
        Group.OPTIMISATION,
        Rule.FIRST,
        "NAME",
    )
    lr: float = option(
        0.001, "learning rate, used as given", Group.OPTIMISATION, Rule.FIRST | Rule.POSITIVE
    )
    lr_base_batch: int | None = option(
        None,
        "scale the learning rate by batch size / N (Goyal et al., arXiv 1706.02677)",
        Group.OPTIMISATION,
        Rule.POSITIVE,
    )
    lr_schedule: Seam = option(  # noqa: RUF009
        "constant",
        "constant; cosine or linear down to 0; step: divided by 10 at 50 % and at 75 % "
        "of the run; or module:function of the share of the run that is done, which returns a "
        "factor of --lr",
        Group.OPTIMISATION,
        Rule.FIRST,
        "NAME",
    )
    warmup_epochs: float = option(
        0.0,
        "epochs of linear warm-up",
        Group.OPTIMISATION,
        Rule.FIRST | Rule.NOT_NEGATIVE,
    )
    momentum: float = option(0.9, "momentum of sgd", Group.OPTIMISATION, Rule.NOT_NEGATIVE)
    weight_decay: float = option(
        0.0,
        "weight decay of all parameters but norms, biases, position embeddings, class tokens",
        Group.OPTIMISATION,
        Rule.FIRST | Rule.NOT_NEGATIVE,
    )
    clip_norm: float | None = option(
        None,
        "scale gradients down to this norm over the whole model",
        Group.OPTIMISATION,
        Rule.POSITIVE | Rule.NOT_MIRRORED,
    )
    expected: float | None = option(
        None,
        "test accuracy that the run should reach, as a share: it says at its end whether it did",
        Group.OPTIMISATION,
        Rule.SHARE | Rule.ALWAYS | Rule.NOT_COMPARED,
    )


AUGMENTATIONS = ("none", "crop-flip", "resized-crop-flip")


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The augmentation of training images."""

    augment: Seam = option(  # noqa: RUF009
        "none",
        "none; crop-flip: shifts, flips; resized-crop-flip: random parts, flips; or "
        "module:function of (images, seeds of the samples, epoch) that returns the images",
        Group.DATA,
        Rule.FIRST,
        "NAME",
    )


FixedPrecision = Literal["fp32", "tf32", "bf16", "fp16", "fp64"]
Precision = Literal[FixedPrecision, "auto"]
AUTO_PRECISION = "auto"
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The precision, device, threads and cores of each rank, and the choice of algorithms."""

    precision: Precision = option(  # noqa: RUF009
        "fp32",
        "tf32: fp32, but a GPU rounds the factors of products to 10 bits, not 23; bf16 or fp16: "
        "autocast with fp32 weights, and in fp16 with a scaled loss; auto: bf16 where a "
        "measurement at the start says that it is faster, else fp32",
        Group.DEVICES,
        Rule.FIRST,
    )
    compile: bool = option(
        False,
        "compile each component with torch.compile (takes minutes)",
        Group.DEVICES,
        Rule.ON_RESUME | Rule.TORCH_ONLY,
    )
    device: Device | None = option(  # noqa: RUF009
        None,
        "device to train on",
        Group.DEVICES,
        Rule.FIRST | Rule.ON_RESUME,
        shown_default="cuda if there is one",
    )
    resident: Literal["auto", "always", "never"] = option(
        "auto",
        "keep the training images on the device, and augment them there: auto: on a GPU, if they "
        "fit into a tenth of its free memory; the images are the same",
        Group.DEVICES,
        Rule.ON_RESUME | Rule.TORCH_ONLY | Rule.NOT_COMPARED,
    )
    deterministic: bool = option(
        False,
        "use only algorithms that compute the same bits each time, on a GPU too; stop where "
        "there is none",
        Group.DEVICES,
        Rule.ON_RESUME | Rule.TORCH_ONLY,
    )
    threads: int | None = option(
        None,
        "threads per rank",
        Group.DEVICES,
        Rule.POSITIVE | Rule.ON_RESUME | Rule.NOT_COMPARED,
        shown_default="the rank's share of the cores",
    )
    bind: bool = option(
        False,
        "bind each rank to cores of its own, one per thread, as for a study of its speed",
        Group.DEVICES,
        Rule.ON_RESUME,
    )


@dataclass(frozen=True, kw_only=True)
class EmulateOptions:
    """A run on ranks whose devices and links are modelled."""

    emulate: str | None = option(
        None,
        "rehearse the run on hardware you do not have: ranks sleep for as long as its devices "
        "would compute, and messages take as long as on its links. 8-v100, 8-h200, 16-cpu-10g, "
        "16-cpu-100g or a YAML file, as in plan simulate --cluster; or a file "
        "that --profile has saved: the ranks that it was measured on. CLUSTER:D: D real seconds "
        "per emulated one, by default enough to hide the overhead of the ranks on these cores",
        Group.PLAN,
        Rule.ONE_LINE | Rule.TORCH_ONLY,
        "CLUSTER[:D]",
    )


def parse_emulate(text: str) -> tuple[str, float | None]:
    """Return the cluster of a value of `--emulate`, and its real seconds per emulated second.

    Raises:
        UsageError: if these are not above 0.
    """
    cluster, _, part = text.rpartition(":")
    dilation = number(part)
    if not cluster or math.isnan(dilation):
        return text, None
    if not 0 < dilation < math.inf:
        raise UsageError(
            f"--emulate {text} is not valid: the real seconds per emulated second must be above 0"
        )
    return cluster, dilation


Library = Literal["horovod", "mpi", "torch"]
Algorithm = Literal["auto", "ring", "recursive-doubling", "rabenseifner", "tree", "hierarchical"]


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """The agreement of the replicas of a stage: when, on what, and over what."""

    sync: str = option(
        "exact",
        "exact: sum gradients in every step; local:H: train alone and average weights every H "
        "steps (local:H@EPOCH: after that many exact epochs; local:H,average-optimizer: the "
        "optimizer's state, too); diloco:H: as local, with an outer optimizer "
        "(diloco:H,lr=0.7,momentum=0.9); elastic:H: drawn to a common centre every H steps "
        "(elastic:H,rate=X: by that share of the way instead of 0.9 / replicas); server: the last "
        "rank (server,servers=N: the last N) holds the weights, updates them with the sum of all "
        "gradients and does not train; server:stale=S: each rank's gradients when they arrive, up "
        "to S steps ahead of the slowest rank; server:async: without waiting for any",
        Group.SYNC,
        Rule.ONE_LINE | Rule.TORCH_ONLY,
        "METHOD",
    )
    compress: str = option(
        "none",
        "how gradients travel under --sync exact: none (as they are), fp16, bf16, int8, "
        "topk:RATIO (the largest values) or powersgd:RANK (low-rank matrices), each after 100 "
        "exact sums (topk:0.01,after=20: after 20); what is left out is added to the next "
        "gradients",
        Group.SYNC,
        Rule.ONE_LINE | Rule.TORCH_ONLY,
        "METHOD",
    )
    shard_optimizer: bool = option(
        False,
        "divide the optimizer's state among the replicas of a stage (ZeRO stage 1)",
        Group.SYNC,
        Rule.ON_RESUME | Rule.TORCH_ONLY,
    )
    reduce_with: Library | None = option(  # noqa: RUF009
        None,
        "library that sums gradients; torch: torch.distributed, by NCCL on GPUs and by gloo on "
        "CPUs and where ranks share a GPU",
        Group.SYNC,
        Rule.ON_RESUME | Rule.TORCH_ONLY,
        shown_default="horovod; without it mpi; on GPUs torch, if Horovod has no NCCL",
    )
    allreduce: Algorithm = option(  # noqa: RUF009
        "auto",
        "algorithm of the MPI library's all-reduce; auto: let the library choose; hierarchical "
        "needs --reduce-with horovod",
        Group.SYNC,
        Rule.ON_RESUME,
    )

    @property
    def sync_request(self) -> SyncRequest:
        """Return the parsed value of --sync."""
        return parse_sync_request(self.sync)

    @property
    def steps_ahead(self) -> int:
        """Return how many steps a rank may be ahead of the slowest one inside an epoch."""
        request = self.sync_request
        return request.steps_ahead if isinstance(request, Server) else 1

    def workers_of(self, ranks: int) -> int:
        """Return how many of a number of ranks train; the others, the last ones, are servers.

        Raises:
            UsageError: if none is left to train.
        """
        request = self.sync_request
        if not isinstance(request, Server):
            return ranks
        if ranks <= request.servers:
            raise UsageError(no_worker(self.sync, request.servers, ranks))
        return ranks - request.servers

    @property
    def compress_request(self) -> CompressRequest:
        """Return the parsed value of --compress."""
        return parse_compress_request(self.compress)


POSITION = re.compile(r"pos_?emb|(?<![a-z])position|(class|cls)_?(token|emb)", re.IGNORECASE)


def is_exempt(name: str, layer: str, dimensions: int) -> bool:
    """Return whether a parameter is a scale, a shift, a bias, or a position or class embedding.

    Args:
        name: the parameter's name with its path, such as "ln_1.weight".
        layer: the class, or the name, of the layer that holds it.
    """
    last = re.split(r"[./]", name)[-1].lower()
    is_norm = "norm" in layer.lower() or last in ("gamma", "beta")
    return "bias" in last or bool(POSITION.search(name)) or (is_norm and dimensions <= 1)
