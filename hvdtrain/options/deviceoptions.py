"""The options that say what a rank computes on, and how precisely."""

from dataclasses import dataclass
from typing import Literal

from hvdtrain.options.fields import Group, Rule, option

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
