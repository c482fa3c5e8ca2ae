"""Test of every batch size of a run before its first step.

The smaller batch at the end of an epoch comes hours later, and must not be the first to fail.
"""

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.index import TargetForm
from hvdtrain.errors import UsageError, one_line
from hvdtrain.models import REGISTRY
from hvdtrain.models.component import IMAGE_CHANNELS, Component
from hvdtrain.models.costs import CountedComponent
from hvdtrain.models.losses import check_loss
from hvdtrain.models.shapes import (
    Boundary,
    boundaries,
    run_for_shape,
    run_for_shapes,
    sample_input,
    shape_of,
)
from hvdtrain.options.sections import smoothing_of
from hvdtrain.parallel.stage import DTYPES
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.validate import prove

LARGEST_QUICK_IMAGE = 64  # pixels


def batch_sizes(config: TrainConfig, epoch_length: int) -> list[int]:
    """Return the distinct batch sizes of a run from its start, the usual one first."""
    total = config.total_samples(epoch_length)
    slices = order.step_slices(epoch_length, config.batch_size)
    return list(dict.fromkeys(stop - start for start, stop in slices if start < total))


def check_batches(
    config: TrainConfig,
    plan: Plan,
    components: Sequence[Component],
    inputs: Sequence[Boundary],
    epoch_length: int,
) -> None:
    """Prove the schedule of every batch, and that each component can take its share of it.

    Args:
        inputs: the input of each component, with any number of samples.

    Raises:
        ScheduleError: as `prove` does.
        UsageError: if a component cannot take the number of samples that it gets.
    """
    check_sizes(config, plan, components, inputs, batch_sizes(config, epoch_length))


def input_boundaries(
    components: Sequence[Component], config: TrainConfig, image_size: int, form: TargetForm
) -> list[Boundary]:
    """Return the input of each component, by a forward pass of two images.

    Args:
        form: of the targets.

    Raises:
        UsageError: if images or targets do not fit the model and its loss.
    """
    classes = None if smoothing_of(config.loss) is None else form.outputs
    dtype = DTYPES[config.precision]
    device = _device(config, components, image_size)
    emitted = boundaries(components, image_size, classes=classes, dtype=dtype, device=device)
    if classes is None:
        check_loss(config, emitted[-1], form)
    return [Boundary((2, IMAGE_CHANNELS, image_size, image_size), dtype), *emitted[:-1]]


def _device(config: TrainConfig, components: Sequence[Component], image_size: int) -> str:
    """Return where components run for their shapes.

    The meta device for any model of a user, for one that stands for another and may take its time,
    and for images so large that computing takes longer than what it loads.
    """
    is_quick = config.model in REGISTRY and image_size <= LARGEST_QUICK_IMAGE
    is_real = not any(isinstance(part, CountedComponent) for part in components)
    return "cpu" if is_quick and is_real else "meta"


def check_sizes(
    config: TrainConfig,
    plan: Plan,
    components: Sequence[Component],
    inputs: Sequence[Boundary],
    sizes: Collection[int],
) -> None:
    """Check batches of these sizes as `check_batches` does."""
    for size in sizes:
        prove(plan, size, config.batch_norm == "sync")
    device = _device(config, components, inputs[0].shape[-1])
    forms = {component.name: form for component, form in zip(components, inputs, strict=True)}
    modules = {
        part.name: _module(part, forms[part.name], DTYPES[config.precision], device)
        for part in components
    }
    for number, stage in enumerate(plan.stages):
        layers = [
            layer
            for name in stage.components
            for layer in modules[name][0].modules()
            if isinstance(layer, _BatchNorm)
        ]
        is_synchronised = config.batch_norm == "sync" and len(stage.ranks) > 1 and bool(layers)
        for size in sizes:
            parts = list(cut(plan, size).parts[number].values())
            counts = {stop - start for pieces in parts for start, stop in pieces}
            whole = {
                sum(stop - start for start, stop in pieces) for pieces in zip(*parts, strict=True)
            }
            for name in stage.components:
                # Synchronised batch norms see the samples of all replicas together.
                local = counts if is_synchronised else counts - {0}
                run = partial(_try, config, name, *modules[name], forms[name])
                run(local, size, not is_synchronised)
                if is_synchronised:
                    run(whole, size, True)


def _module(
    component: Component, form: Boundary, dtype: torch.dtype, device: str
) -> tuple[nn.Module, str]:
    """Return a component that takes two samples, and the device that it takes them on."""
    if device == "cpu":
        return shape_of(component, dtype), device

    def run(module: nn.Module, input: Tensor) -> tuple[nn.Module, str]:
        run_for_shape(component, module, input)
        return module, input.device.type

    samples = torch.zeros((2, *form.shape[1:]), dtype=form.dtype, device=device)
    return run_for_shapes(component, dtype, [samples], run)


def _try(
    config: TrainConfig,
    name: str,
    module: nn.Module,
    device: str,
    form: Boundary,
    counts: Collection[int],
    size: int,
    normalises: bool,
) -> None:
    """Run a component in training mode with each number of samples.

    Args:
        size: the global batch size, for the message.
        normalises: whether batch norms are in training mode, too.
        device: of the module.

    Raises:
        UsageError: if the component fails.
    """
    if device != "meta":  # real samples take time, and a model fails with 1 if with any number
        counts = {min(count, 2) for count in counts}
    module.train()
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and not normalises:
            layer.eval()
    for count in sorted(counts):
        images = sample_input((count, *form.shape[1:]), form.dtype, device)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                module(images)
        except Exception as error:
            raise UsageError(_refusal(name, count, size, config, error)) from error


def _refusal(name: str, count: int, size: int, config: TrainConfig, error: Exception) -> str:
    samples = f"{count} sample{'' if count == 1 else 's'}"
    where = "" if size == config.batch_size else ", the last of an epoch"
    return (
        f"component {name!r} cannot take {samples} at once, its part of a batch of {size}{where} "
        f"({one_line(error)}): give another --batch-size, or fewer --microbatches or --ranks"
    )
