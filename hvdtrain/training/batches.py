"""Every batch size of a run, tried out before its first step: tails of epochs come hours later."""

from collections.abc import Sequence

import torch
from torch.nn.modules.batchnorm import _NormBase

from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.errors import UsageError, one_line
from hvdtrain.models.component import Boundary, Component, build_on_meta
from hvdtrain.parallel.cut import cut
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.stage import DTYPES
from hvdtrain.parallel.validate import prove


def batch_sizes(config: TrainConfig, epoch_length: int) -> list[int]:
    """Those of a run from its start, the usual one first."""
    total = config.total_samples(epoch_length)
    slices = order.step_slices(epoch_length, config.batch_size)
    return list(dict.fromkeys(stop - start for start, stop in slices if start < total))


def check_batches(
    config: TrainConfig,
    plan: Plan,
    components: Sequence[Component],
    given: Sequence[Boundary],
    epoch_length: int,
) -> None:
    """Prove the schedule of every batch, and that each component can take its part of it.

    Args:
        given: what each component is given, with any batch.

    Raises:
        ScheduleError: as of `prove`.
        UsageError: naming a component, and how many samples it cannot take.
    """
    is_synchronised = config.batch_norm == "sync"
    for size in batch_sizes(config, epoch_length):
        prove(plan, size, is_synchronised)
    rows = _rows(config, plan, batch_sizes(config, epoch_length))
    for component, form in zip(components, given, strict=True):
        module = build_on_meta(component).to(dtype=DTYPES[config.precision])
        for layer in module.modules():
            if isinstance(layer, _NormBase) and is_synchronised:
                layer.eval()  # one that is synchronised sees the samples of all replicas
        for count, size in rows[component.name].items():
            images = torch.empty((count, *form.shape[1:]), device="meta", dtype=form.dtype)
            try:
                module(images)
            except Exception as error:
                raise UsageError(_refusal(component.name, count, size, config, error)) from error


def _rows(config: TrainConfig, plan: Plan, sizes: Sequence[int]) -> dict[str, dict[int, int]]:
    """Of each component the numbers of samples that it is given at once, and in which batch."""
    found: dict[str, dict[int, int]] = {}
    for number, stage in enumerate(plan.stages):
        counts: dict[int, int] = {}
        for size in sizes:
            for pieces in cut(plan, size).parts[number].values():
                for start, stop in pieces:
                    counts.setdefault(stop - start, size)
        if config.batch_norm != "sync" or len(stage.ranks) == 1:
            counts.pop(0, None)  # what has no sample does nothing
        found |= dict.fromkeys(stage.components, counts)
    return found


def _refusal(name: str, count: int, size: int, config: TrainConfig, error: Exception) -> str:
    samples = f"{count} sample{'' if count == 1 else 's'}"
    where = "" if size == config.batch_size else ", the last of an epoch"
    return (
        f"component {name!r} cannot take {samples} at once, its part of a batch of {size}{where} "
        f"({one_line(error)}): give another --batch-size, or fewer --microbatches or --ranks"
    )
