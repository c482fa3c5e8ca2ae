"""The options that say what a rank computes on, and how precisely."""

from dataclasses import dataclass
from typing import Literal

from hvdtrain.options.fields import Group, Rule, option

Precision = Literal["fp32", "bf16", "fp64"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The precision, device, threads and cores of each rank."""

    precision: Precision = option("fp32", "bf16: autocast with fp32 weights", Group.DEVICES)  # noqa: RUF009
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
        Rule.ON_RESUME,
        shown_default="cuda if there is one",
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
