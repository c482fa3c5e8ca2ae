"""Comparison of steps under a plan with serial steps: `plan check`, and `train --verify`.

Each serial step starts with the current weights of the ranks, so that rounding errors do not add
up. Its optimizer gets the gradients of the ranks: gradients and updates are compared separately.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hvdtrain.backends.pytorch.build import (
    agree_on_values,
    build_runtime,
    check_sizes,
    input_boundaries,
)
from hvdtrain.backends.pytorch.parts import set_learning_rate
from hvdtrain.backends.pytorch.setup import Checks, Trial
from hvdtrain.backends.pytorch.state import agree_on_weights, gather_tensors
from hvdtrain.check.parity import Batch, Done, Parity, SerialRun, gradient_errors, loss_scale
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.index import InputSize, TargetForm, size_of
from hvdtrain.data.order import Range
from hvdtrain.engine.feed import Feeder, augmentation, step_seed, take_rows
from hvdtrain.engine.progress import learning_rate
from hvdtrain.errors import CheckFailed, UsageError
from hvdtrain.models.component import Component, build_component
from hvdtrain.models.costs import boundaries
from hvdtrain.models.find import input_shape
from hvdtrain.models.losses import example_targets, form_for
from hvdtrain.parallel.reference import largest_errors
from hvdtrain.parallel.runtime import Runtime, Step
from hvdtrain.parallel.stage import Images, Part
from hvdtrain.plan.cut import Cut, cut
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.schedule import program_of
from hvdtrain.sync.states import digest
from hvdtrain.world import World

MEAN, STD = [0.5] * 3, [0.25] * 3  # of an image
GRADIENTS_TAG = 2
CPU = torch.device("cpu")


def check_plan(
    config: TrainConfig,
    components: Sequence[Component],
    plan: Plan,
    image_size: InputSize,
    classes: int,
    world: World,
    sizes: Sequence[int] | None = None,
    device: torch.device = CPU,
) -> Parity:
    """Compare steps under a plan with serial steps on rank 0 from the same weights. Collective.

    Both get the same batches of random images and targets, from the seed of the configuration.

    Args:
        sizes: batch sizes; by default a whole batch, one of about two thirds (in place of the
            last one of an epoch) if the model can take it, and another whole one.
        device: of this rank. Both steps compute on it.
    """
    agree_on_values(components, world)
    channels, size = input_shape(image_size)[0], config.batch_size
    images = Images(MEAN[:1] * channels, STD[:1] * channels, device, config.precision)
    form = target_form(config, components, image_size, classes)
    batches = []
    for number, count in enumerate(sizes or _sizes(config, components, plan, image_size, form)):
        whole = random_samples(count, image_size, form, config.seed + number)
        local = local_batch(plan, cut(plan, count), world.rank, *whole)
        batches.append(Batch(count, number * size, local, whole, config.learning_rate()))
    return compare(config, components, plan, batches, images, world)


def _sizes(
    config: TrainConfig,
    components: Sequence[Component],
    plan: Plan,
    image_size: InputSize,
    form: TargetForm,
) -> tuple[int, ...]:
    size = config.batch_size
    tail = -(-2 * size // 3)
    try:
        inputs = input_boundaries(components, config, image_size, form)
        check_sizes(config, plan, components, inputs, [tail])
    except UsageError:
        return size, size
    return size, tail, size


def compare(
    config: TrainConfig,
    components: Sequence[Component],
    plan: Plan,
    batches: Sequence[Batch],
    images: Images,
    world: World,
) -> Parity:
    """Compare steps under a plan on these batches with serial steps. Collective.

    It leaves no runtime behind, and restores the random generators.
    """
    config = replace(config, trace=None)
    if config.bad_step.is_limited:  # keeps the code path of the limit, but no step is bad
        word = config.on_bad_step.partition(":")[0]
        config = replace(config, on_bad_step=f"{word}:{sys.float_info.max}")
    image_size = size_of(batches[0].local[0].shape[1:])
    with torch.random.fork_rng():
        runtime = build_runtime(config, plan, components, images, image_size, world)
        ranks = _Ranks(runtime, plan, world, config)
        serial = SerialRun(config, components, plan, images) if world.rank == 0 else None
        try:
            before = ranks.tensors()
            if serial is not None:
                serial.compare_initial(before)
            for batch in batches:
                done = ranks.step(batch)
                if serial is not None:
                    serial.compare(batch, done, before)
                world.barrier()  # the watchdog would count a wait within a step, but not this
                before = done.tensors
        finally:
            runtime.observer.close()
        has_replicas = any(len(stage.ranks) > 1 for stage in plan.stages)
        if serial is not None and (plan.microbatches > 1 or has_replicas):
            assert batches[0].whole is not None
            trial = images(batches[0].whole[0][:SAMPLES])
            mixing = find_mixing(components, trial, config.seed)
            serial.parity.mixing, serial.parity.unproved = mixing.module, mixing.unproved
    parity: Parity = world.broadcast(serial.parity if serial is not None else None)
    return parity


class _Ranks:
    """The runtime under test on all ranks. All methods are collective."""

    def __init__(self, runtime: Runtime, plan: Plan, world: World, config: TrainConfig) -> None:
        self.runtime, self.plan, self.world, self.config = runtime, plan, world, config
        self.optimizer_gradients: dict[str, Tensor] = {}
        parts = runtime.parts
        digests = {
            name: value for part in parts.values() for name, value in part.model.digests().items()
        }
        agree_on_weights(plan, parts, digests, world)
        for part in parts.values():
            if part.optimizer is not None:
                part.optimizer.register_step_pre_hook(self._noting(part))

    def _noting(self, part: Part) -> Callable[..., None]:
        """Return a hook that keeps a copy of the gradients that the optimizer uses."""

        def note(*_: object) -> None:
            part.gradients.gather()
            for name, value in part.model.parameters().items():
                if value.grad is not None:
                    self.optimizer_gradients[name] = value.grad.detach().cpu().clone()

        return note

    def step(self, batch: Batch) -> Done:
        """Run one training step; return its results on rank 0."""
        self.optimizer_gradients.clear()
        for part in self.runtime.parts.values():
            if part.optimizer is not None:
                set_learning_rate(part.optimizer, batch.rate)
        torch.manual_seed(step_seed(self.config.seed, batch.position, self.world.rank))
        self.runtime.settings.draws.seed = step_seed(self.config.seed, batch.position, None)
        program = program_of(self.plan, batch.size, self.world.rank, True)
        scale = loss_scale(self.config)
        step = self.runtime.train(Step(program, *batch.local, loss_scale=scale))
        losses = self.world.gather(0.0 if step.loss_sum is None else float(step.loss_sum))
        return Done(sum(losses) / batch.size, self._gradients(), self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of all tensors of the model, on rank 0; NaN where replicas differ."""
        parts = self.runtime.parts
        local_tensors = {
            name: value for part in parts.values() for name, value in part.model.tensors().items()
        }
        differing = self._differing(local_tensors)
        tensors = gather_tensors(self.plan, parts, self.world)
        return _marked({name: value.clone() for name, value in tensors.items()}, differing)

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients that all optimizers used, on rank 0; NaN where replicas differ."""
        differing = self._differing(self.optimizer_gradients)
        gradients = dict(self.optimizer_gradients)
        firsts = {stage.ranks[0] for stage in self.plan.stages} - {0}
        if self.world.rank in firsts:
            self.world.send(self.optimizer_gradients, 0, GRADIENTS_TAG)()
        for rank in sorted(firsts) if self.world.rank == 0 else ():
            gradients = self.world.receive(rank, GRADIENTS_TAG) | gradients
        return _marked(gradients, differing)

    def _differing(self, local_tensors: Mapping[str, Tensor]) -> set[str]:
        """Return the names of tensors that differ between replicas, or that some do not hold."""
        digests = self.world.gather({name: digest(value) for name, value in local_tensors.items()})
        differing: set[str] = set()
        for stage in self.plan.stages:
            prefixes = tuple(f"{name}." for name in stage.components)
            names = {
                name for rank in stage.ranks for name in digests[rank] if name.startswith(prefixes)
            }
            differing |= {
                name
                for name in names
                if len({digests[rank].get(name) for rank in stage.ranks}) > 1
            }
        return differing


def _marked(tensors: Mapping[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {
        name: torch.full(value.shape, float("nan")) if name in names else value
        for name, value in tensors.items()
    }


def random_batch(
    size: int, image_size: int, classes: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [size, image_size, image_size, 3] and labels int64 [size]."""
    return random_samples(size, image_size, TargetForm((), "int64", classes), seed)


def random_samples(
    size: int, image_size: InputSize, form: TargetForm, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [size, height, width, channels] and targets of a form [size, ...]."""
    random = np.random.default_rng(seed)
    channels, height, width = input_shape(image_size)
    images = random.integers(0, 256, (size, height, width, channels), dtype=np.uint8)
    return images, example_targets(form, size, random)


def target_form(
    config: TrainConfig, components: Sequence[Component], image_size: InputSize, classes: int
) -> TargetForm:
    """Return a form of targets that a model and its loss take, without a data set.

    Raises:
        UsageError: if there is none.
    """
    return form_for(config, boundaries(components, image_size)[-1], classes)


def local_batch(
    plan: Plan, pieces: Cut, rank: int, images: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's images and labels of a global batch."""
    first, last = pieces.parts[0], pieces.parts[plan.last]
    return take_rows(images, first.get(rank, ())), take_rows(labels, last.get(rank, ()))


def compare_run(trial: Trial, plan: Plan) -> Parity:
    """Compare the first step, the last one of the first epoch, and the second. Collective.

    With batch norm over all replicas the steps run in fp64: sums over replicas round differently
    from sums in one process, and batch norm amplifies the difference.
    """
    config, images = trial.config, trial.images
    if config.batch_norm == "sync" and config.precision != "fp64":
        config = replace(config, precision="fp64")
        images = Images(*trial.normalisation, images.device, config.precision)
    length, size = len(trial.rows), config.batch_size
    total = config.total_samples(length)
    slices = [bounds for bounds in order.step_slices(length, size) if bounds[0] < total]
    compared = dict.fromkeys([slices[0], slices[-1], *slices[1:2]])
    batches = [_batch(trial, plan, bounds) for bounds in compared]
    return compare(config, trial.components, plan, batches, images, trial.world)


def _batch(trial: Trial, plan: Plan, bounds: Range) -> Batch:
    config, (start, stop) = trial.config, bounds
    rows = order.training_order(trial.index, trial.rows, config.seed, 0)[start:stop]
    feeder = Feeder(trial.splits["train"], augmentation(config, 0))
    parts = cut(plan, len(rows)).parts
    first, last = (parts[k].get(trial.world.rank, ()) for k in (0, plan.last))
    local = feeder.gather((take_rows(rows, first), take_rows(rows, last)))
    whole = feeder.gather((rows, rows)) if trial.world.rank == 0 else None
    return Batch(
        size=len(rows),
        position=start,
        local=(local.pixels, local.labels),
        whole=(whole.pixels, whole.labels) if whole else None,
        rate=learning_rate(config, len(trial.rows), start),
    )


def fault(trial: Trial, plan: Plan) -> str:
    """Return how the results of a plan differ from those of one rank, or "". Collective."""
    return compare_run(trial, plan).fault


def verify(trial: Trial, plan: Plan) -> str:
    """Refuse a plan whose results differ from those of one rank. Collective.

    Returns:
        The result, in words.

    Raises:
        CheckFailed: on rank 0, naming the tensor with the largest error.
    """
    compared = compare_run(trial, plan)
    if trial.world.rank == 0 and compared.mixing:
        raise CheckFailed(f"--verify: {compared.fault}")
    if trial.world.rank == 0 and compared.fault:
        raise CheckFailed(
            f"--verify: {compared.fault}, between the plan and one rank: use another --plan or "
            "--schedule, or drop --verify if the model draws random numbers other than those of "
            "nn.Dropout, because it cannot check such a model"
        )
    trial.world.barrier()
    verified = (
        f"verified: {compared.steps} step(s) under the plan match those of one rank; the largest "
        f"error is {compared.largest:.1e}"
    )
    return "; ".join(filter(None, (verified, compared.not_proved)))


CHECKS = Checks(verify, fault)


SAMPLES = 4  # images of a trial: two halves, since some models cannot take one image
NOISE = 0.05  # added to parameters: a branch whose weights start at zero would hide what it does
TOLERANCE = 1e-9  # of results and gradients in fp64
SCALES = (2.0**-10, 1.0, 2.0**10)  # of the output's gradient: a limit acts on large ones only
Results = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class Mixing:
    """The result of a trial of a model.

    Attributes:
        module: the first module that mixes samples, `component.path`; empty if none does.
        unproved: components whose results differ from call to call in training mode, or that
            cannot run alone.
    """

    module: str = ""
    unproved: tuple[str, ...] = ()


def find_mixing(components: Sequence[Component], images: Tensor, seed: int) -> Mixing:
    """Return the first module whose result or gradient for a sample depends on others.

    Batch norm uses its running statistics meanwhile: plans know what it does.

    Args:
        images: floating [n, C, H, W], normalised; up to 4 of them are used.
    """
    inputs, unproved = images[:SAMPLES].double(), list[str]()
    for component in components if len(inputs) > 1 else ():
        module = build_component(component, seed, images.device, torch.float64)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=NOISE)
        for mode in (True, False):
            mixes = _mixes(module, inputs, mode)
            if mixes:
                path = _innermost(module, inputs, mode)
                return Mixing(f"{component.name}.{path}".rstrip("."), tuple(unproved))
            if mixes is None and mode:
                unproved.append(component.name)
        try:
            emitted = module(inputs.clone())
        except Exception:
            break
        inputs = emitted.detach().requires_grad_(emitted.requires_grad)
    return Mixing("", tuple(unproved))


def _mixes(module: nn.Module, inputs: Tensor, training: bool) -> bool | None:
    """Return whether a module mixes samples; None if a trial cannot tell."""
    for part in module.train(training).modules():
        if isinstance(part, _BatchNorm | _DropoutNd):
            part.eval()
    half = len(inputs) // 2
    try:
        whole = _results(module, inputs, [slice(None)])
        halves = _results(module, inputs, [slice(half), slice(half, None)])
        again = _results(module, inputs, [slice(None)])
    except Exception:
        return None
    return None if _differ(again, whole) else _differ(halves, whole)


def _results(module: nn.Module, inputs: Tensor, parts: Sequence[slice]) -> Results:
    """Return the output for the inputs, and the sums of the gradients, computed part by part."""
    outputs, sums = [], dict[str, Tensor]()
    rows = torch.arange(len(inputs), dtype=inputs.dtype, device=inputs.device)
    for part in parts:
        leaf = inputs.detach().requires_grad_(inputs.requires_grad)
        output = module(leaf[part].clone())
        outputs.append(output.detach().clone())
        places = torch.arange(output[0].numel(), device=inputs.device)
        weights = (len(places) * rows[part, None] + places).cos().view(output.shape)
        for scale in SCALES if output.requires_grad else ():
            output.backward(weights * scale, retain_graph=True)
            for name, value in (("input", leaf), *module.named_parameters()):
                if value.grad is not None:
                    key, gradient = f"{scale}.{name}", value.grad.to_dense() / scale
                    sums[key] = sums[key] + gradient if key in sums else gradient
                    value.grad = None
    return torch.cat(outputs), sums


def _differ(results: Results, others: Results) -> bool:
    (output, gradients), (other, other_gradients) = results, others
    if gradients.keys() != other_gradients.keys():
        return True
    errors = largest_errors({"": output}, {"": other})
    errors |= gradient_errors(gradients, other_gradients)
    return max(errors.values()) > TOLERANCE


def _innermost(module: nn.Module, inputs: Tensor, training: bool) -> str:
    """Return the path of the deepest part that mixes the samples of its own input."""
    seen: dict[str, Tensor] = {}

    def note(path: str, _: nn.Module, arguments: tuple[object, ...]) -> None:
        first = arguments[0] if len(arguments) == 1 else None
        if isinstance(first, Tensor) and len(first) == len(inputs):
            seen.setdefault(path, first.detach().requires_grad_(first.requires_grad))

    hooks = [
        part.register_forward_pre_hook(partial(note, path))
        for path, part in module.named_modules()
    ]
    module(inputs.clone())
    for hook in hooks:
        hook.remove()
    for path in sorted(seen, key=lambda path: -path.count(".") - bool(path)):
        try:
            if _mixes(module.get_submodule(path), seen[path], training):
                return path
        except Exception:  # it takes or returns something else than a batch of samples
            continue
    return ""
