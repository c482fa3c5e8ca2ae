"""Construction of the runtime that executes a plan on this rank, and trials of its components.

Which buffers a model's forward passes change is found by a trial on every replica. Every batch
size of a run is tried before its first step: the smaller batch at the end of an epoch comes hours
later, and must not be the first to fail.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain import device as devices
from hvdtrain.backends.pytorch.parts import build_parts, probe_forms
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.index import InputSize, TargetForm
from hvdtrain.engine.machine import machine_of
from hvdtrain.errors import UsageError, one_line
from hvdtrain.health.failure import patience, stalled
from hvdtrain.host.activity import Activity
from hvdtrain.models import REGISTRY
from hvdtrain.models.component import Component, build_component
from hvdtrain.models.costs import (
    Boundary,
    CountedComponent,
    boundaries,
    run_for_shape,
    run_for_shapes,
    sample_input,
    shape_of,
)
from hvdtrain.models.find import input_shape
from hvdtrain.models.losses import check_loss, loss_of
from hvdtrain.models.ready import ready_modules
from hvdtrain.options.requests import Server
from hvdtrain.options.sections import smoothing_of
from hvdtrain.parallel.dropout import Draws, follow_samples
from hvdtrain.parallel.exchange import Boundaries, Form
from hvdtrain.parallel.runtime import Observer, Runtime, Settings, UpdateRule
from hvdtrain.parallel.stage import AUTOCAST, DTYPES, ComponentClock, Images, Part, StageModel
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan, recomputed_components
from hvdtrain.plan.validate import prove
from hvdtrain.sync.states import bytes_of, digest
from hvdtrain.world import World, notes

ROWS = 2


def build_runtime(
    config: TrainConfig,
    plan: Plan,
    components: Sequence[Component],
    images: Images,
    image_size: InputSize,
    world: World,
    before: Runtime | None = None,
) -> Runtime:
    """Return the runtime of a plan on this rank. Collective.

    Args:
        before: the runtime of the previous plan, which the new one replaces; it must not be used
            any more.

    Raises:
        UsageError: if no rank has anything to train.
    """
    device = images.device
    exchange = before.exchange if before else None
    if exchange is None and world.communicator is not None:
        exchange = machine_of(world).exchange(world, device)
    parts = build_parts(config, plan, components, world, exchange, device)
    if not any(world.gather(any(part.parameters for part in parts.values()))):
        raise UsageError(f"model {config.model} has no trainable parameters: give another --model")
    if any(number < plan.last for number in parts):
        # Torch loads it in the first backward pass that starts from a gradient, while other ranks
        # would wait.
        import_module("torch.fx.experimental.symbolic_shapes")
    if config.is_adaptive and world.size > 1:
        for part in parts.values():
            part.model.clock = ComponentClock(partial(devices.mark, device))
    forms = probe_forms(plan, parts, image_size, config, world, device)
    find_states(config, plan, parts, components, forms, world, device)
    if plan.splits_backward:
        by_name = {part.name: part for part in components}
        for number, part in parts.items():
            example = forms[number].empty(ROWS, device).zero_()
            part.is_whole = packs_saved_tensors(config, part.model, by_name, example)
    draws = Draws()  # of dropout: by sample, unless components are compiled
    for part in parts.values() if not config.compile else ():
        for name, component in part.model.components.items():
            follow_samples(name, component, draws)
    bad = config.bad_step
    skips = bad.skips or config.precision == "fp16"
    rule = UpdateRule(
        config.clip_norm,
        bad.limit,
        skips=skips,
        # Otherwise ranks agree on the host, or more than a kernel of PyTorch makes the update.
        defers=devices.is_queued(device)
        and not (skips or config.shard_optimizer or bad.is_limited)
        and not isinstance(config.sync_request, Server)
        and config.optimizer in ("sgd", "adam", "adamw")
        and (config.clip_norm is None or plan.last == 0),
    )
    autocast = AUTOCAST.get(config.precision)
    settings = Settings(images, autocast, rule, loss_of(config), draws)
    boundaries = Boundaries(world.rank, forms[1:], exchange, device)
    if before is not None:
        return Runtime(settings, parts, boundaries, before.observer)
    activity = Activity(*notes(world.rank), patience(config), stalled)
    observer = Observer(activity, [] if config.trace is not None else None)
    return Runtime(settings, parts, boundaries, observer)


def find_states(
    config: TrainConfig,
    plan: Plan,
    parts: Mapping[int, Part],
    components: Sequence[Component],
    inputs: Sequence[Form],
    world: World,
    device: torch.device,
) -> None:
    """Set on the model of each part which of its buffers change. Collective.

    Args:
        inputs: the form of each stage's input.

    Raises:
        UsageError: on all ranks, if a component that changes buffers would run twice per step.
    """
    by_name = {part.name: part for part in components}
    tried = {
        number: try_buffers(config, part.model, by_name, inputs[number].empty(ROWS, device))
        for number, part in parts.items()
    }
    everywhere = world.gather(tried)
    recomputed = recomputed_components(config.recompute, list(by_name))
    for number, stage in enumerate(plan.stages):
        replicas = [everywhere[rank][number] for rank in stage.ranks]
        for name in sorted(set().union(*(replica.altered for replica in replicas))):
            owner = next(candidate for candidate in by_name if name.startswith(f"{candidate}."))
            if owner in recomputed:
                raise UsageError(
                    f"--recompute runs {owner} twice per step, and each run changes its buffer "
                    f"{name}: remove {owner} from --recompute"
                )
        if number in parts:
            names = (replica.changing for replica in replicas)
            parts[number].model.changing = frozenset[str]().union(*names)


@dataclass
class Tried:
    """Names of buffers after a trial.

    Attributes:
        changing: all buffers of components that change at least one of them in training.
        altered: buffers that have another value than before.
    """

    changing: set[str] = field(default_factory=set)
    altered: set[str] = field(default_factory=set)


def try_buffers(
    config: TrainConfig, model: StageModel, components: Mapping[str, Component], example: Tensor
) -> Tried:
    """Return the buffers that forwards in training mode change, without batch norm's statistics.

    The trial is two forwards, on zeros and on ones, of components that are built again, so that
    the model stays as it is. If a component changes one buffer, all of its buffers count: it may
    change others later. If a component cannot run alone, all buffers of the model count; the run
    itself will report an error, if there is one. A buffer whose dtype or shape changes does not
    count: replicas do not share it.
    """
    statistics = model.statistics().keys()
    candidates = {
        name: {f"{name}.{key}" for key, _ in module.named_buffers()} - statistics
        for name, module in model.components.items()
    }
    tried = Tried()
    if not any(candidates.values()):
        return tried
    autocast = devices.autocast(example.device, AUTOCAST.get(config.precision))
    with torch.random.fork_rng(devices=[]), autocast:
        inputs = [torch.zeros_like(example), torch.ones_like(example)]
        for name in model.components:
            module = build_component(
                components[name], config.seed, example.device, DTYPES[config.precision]
            ).train()
            before = _seen(name, module)
            try:
                inputs[0] = module(inputs[0]).detach()
                between = _seen(name, module)
                inputs[1] = module(inputs[1]).detach()
            except Exception:
                return Tried(set().union(*candidates.values()))
            after = _seen(name, module)
            kept = {
                key
                for key in candidates[name]
                if after[key].form == between[key].form == before[key].form
            }
            if any(before[key].differs(after[key]) for key in kept):
                tried.changing |= kept
            tried.altered |= {key for key in kept if between[key].bits != after[key].bits}
    return tried


def packs_saved_tensors(
    config: TrainConfig, model: StageModel, components: Mapping[str, Component], example: Tensor
) -> bool:
    """Return whether a forward of a stage uses `saved_tensors_hooks`, as torch's checkpoints do.

    The trial uses components that are built again. One that fails counts, too.
    """
    autocast = devices.autocast(example.device, AUTOCAST.get(config.precision))
    refusing = disable_saved_tensors_hooks("a backward in halves would unpack them twice")
    try:
        with torch.random.fork_rng(devices=[]), autocast, torch.enable_grad(), refusing:
            for name in model.components:
                module = build_component(
                    components[name], config.seed, example.device, DTYPES[config.precision]
                )
                example = module.train()(example).detach()
    except Exception:
        return True
    return False


class _Seen(NamedTuple):
    """The state of a buffer at one time."""

    tensor: Tensor
    version: int
    form: tuple[torch.dtype, torch.Size]
    bits: bytes

    def differs(self, other: "_Seen") -> bool:
        """Return whether the buffer was written in between, even with the same value."""
        is_same = self.tensor is other.tensor and self.version == other.version
        return not is_same or self.bits != other.bits


def _seen(name: str, module: nn.Module) -> dict[str, _Seen]:
    return {
        f"{name}.{key}": _Seen(
            value,
            0 if value.is_inference() else value._version,  # inference tensors have no version
            (value.dtype, value.shape),
            bytes_of(value).cpu().numpy().tobytes(),
        )
        for key, value in module.named_buffers()
    }


def agree_on_values(components: Sequence[Component], world: World) -> None:
    """Give the modules that components copy the weights that they have on rank 0. Collective.

    The seeds of a user's script may differ between ranks, and a stage of a pipeline is on one
    rank only.

    Raises:
        UsageError: on all ranks, if names, shapes or dtypes of their tensors differ.
    """
    if world.size == 1:
        return
    tensors = dict(_tensors(ready_modules(components)))
    forms = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    gathered = world.gather((forms, digests))
    first_forms, first_digests = gathered[0]
    for rank, (other_forms, _) in enumerate(gathered):
        if differing := set(other_forms.items()) ^ set(first_forms.items()):
            name = min(name for name, _ in differing)
            raise UsageError(
                f"rank {rank} passed another model than rank 0, which differs in {name}: pass the "
                "same model on all ranks"
            )
    if all(other_digests == first_digests for _, other_digests in gathered):
        return
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.copy_(world.broadcast(tensor.detach().cpu() if world.rank == 0 else None))


def _tensors(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for component, module in modules.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield f"{component}.{name}", tensor


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
    components: Sequence[Component], config: TrainConfig, image_size: InputSize, form: TargetForm
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
    return [Boundary((2, *input_shape(image_size)), dtype), *emitted[:-1]]


def _device(config: TrainConfig, components: Sequence[Component], image_size: InputSize) -> str:
    """Return where components run for their shapes.

    The meta device for any model of a user, for one that stands for another and may take its time,
    and for images so large that computing takes longer than what it loads.
    """
    is_small = isinstance(image_size, int) and image_size <= LARGEST_QUICK_IMAGE
    is_quick = config.model in REGISTRY and is_small
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
