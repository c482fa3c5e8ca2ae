"""Deviation of steps under a plan from serial steps, which torch's own optimizers update."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.backends.pytorch.parts import make_optimizer, set_learning_rate
from hvdtrain.config import TrainConfig
from hvdtrain.engine.feed import step_seed
from hvdtrain.models.component import Component, isolated
from hvdtrain.models.losses import loss_of
from hvdtrain.models.shapes import component_seed
from hvdtrain.options.sections import OPTIMIZERS
from hvdtrain.parallel.dropout import Draws, follow_samples
from hvdtrain.parallel.exchange import to_channels_last
from hvdtrain.parallel.reference import Reference, Rules, difference, largest_errors
from hvdtrain.parallel.stage import AUTOCAST, DTYPES, Images, StageModel
from hvdtrain.plan.plan import Plan

# DESIGN's bounds. Kernels get the same rows on both sides, so that bf16 values are rounded alike.
# Replicas with synchronised batch norm get other rows, and their sums are split differently.
TOLERANCES = {"fp64": 1e-12, "fp32": 1e-4, "tf32": 1e-3, "bf16": 1e-3, "fp16": 1e-3}
SYNCHRONISED_16_BITS = 0.1
LOOSER = {("fp64", "resnet50"): 1e-11}
# Weights are fp32 in all of the others.
UPDATES = {"fp64": 1e-12} | dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), 1e-4)
LOSS_SCALE = 16.0  # in fp16: a power of two, at which no gradient of a random batch overflows
ROUNDINGS = 4  # rounding errors of a weight that an update may contain
# Rounding errors of the largest gradient of a layer that its other gradients may contain, and more
# of those that are sums over all samples and pixels: before a batch norm, a bias and the magnitude
# of a weight norm have gradients of zero, and what is computed for them is rounding errors.
GRADIENT_ROUNDINGS = 16
SUMMED = ("bias", "original0", "weight_g")


@dataclass
class Parity:
    """Largest relative errors of steps under a plan against serial steps, by the design's measure.

    Attributes:
        tolerance: bound on all errors but those of updates, at this precision.
        update_tolerance: bound on the errors of updates.
        parameters: error of each parameter's gradient.
        updates: error of the change of each parameter, computed from the ranks' gradients.
        buffers: error of each running statistic and other buffer.
        initial: error of each tensor before the first step, against what the model's code makes.
        loss: error of the loss.
        steps: number of compared steps.
        mixing: the first module that mixes the samples of a batch; empty if none does.
        unproved: components for which the trial proves nothing in training mode.
    """

    tolerance: float
    update_tolerance: float
    parameters: dict[str, float] = field(default_factory=dict)
    updates: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, float] = field(default_factory=dict)
    initial: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0
    steps: int = 0
    mixing: str = ""
    unproved: tuple[str, ...] = ()

    @property
    def statistics(self) -> float:
        """The largest error of a running statistic, or another buffer."""
        return max(self.buffers.values(), default=0.0)

    @property
    def update(self) -> float:
        """The largest error of an update."""
        return max(self.updates.values(), default=0.0)

    @property
    def largest(self) -> float:
        """The largest error anywhere."""
        errors = (*self.parameters.values(), *self.initial.values())
        return max(self.statistics, self.loss, self.update, *errors)

    @property
    def is_within(self) -> bool:
        """Return whether the plan computes the serial steps within the tolerances."""
        return not self.fault

    @property
    def fault(self) -> str:
        """Return what differs from serial steps most, in words; empty if nothing does."""
        if self.mixing:
            return (
                f"the module {self.mixing} mixes the samples of a batch: where a plan divides the "
                "batch, its results or gradients are not those of one rank; compute each sample "
                "by itself, or use nn.BatchNorm2d, which plans know"
            )
        candidates = [
            *_errors("the gradient of ", self.parameters, self.tolerance),
            *_errors("the update of ", self.updates, self.update_tolerance),
            *_errors("the buffer ", self.buffers, self.tolerance),
            *_errors("the initial value of ", self.initial, self.tolerance),
            ("the loss", self.loss, self.tolerance),
        ]
        name, error, tolerance = max(candidates, key=lambda entry: entry[1] / entry[2])
        if error <= tolerance:
            return ""
        return f"{name} differs by {error:.2g}, more than {tolerance:g}"

    @property
    def not_proved(self) -> str:
        """Return what the comparison cannot show, in words; empty if there is nothing."""
        if not self.unproved:
            return ""
        return (
            f"not proved: that {', '.join(self.unproved)} compute(s) each sample by itself in "
            "training, since the results differ from call to call (random numbers or a counter)"
        )

    def by_component(self, components: Sequence[str]) -> dict[str, float]:
        """Return the largest gradient error of each component that has parameters."""
        largest: dict[str, float] = defaultdict(float)
        for name, error in self.parameters.items():
            owner = next(part for part in components if name.startswith(f"{part}."))
            largest[owner] = max(largest[owner], error)
        return dict(largest)

    def as_json(self, components: Sequence[str]) -> dict[str, Any]:
        """Return the output of `plan check --json`."""
        return {
            "within_tolerance": self.is_within,
            "tolerance": self.tolerance,
            "largest": self.largest,
            "components": self.by_component(components),
            "updates": self.update,
            "statistics": self.statistics,
            "loss": self.loss,
            "mixing": self.mixing,
            "unproved": list(self.unproved),
        }

    def as_text(self, components: Sequence[str]) -> str:
        """Return the output of `plan check`."""
        errors = self.by_component(components)
        width = max(len(name) for name in (*errors, "running statistics"))
        lines = [f"{'component':<{width}}  largest relative error of a gradient"]
        lines += [f"{name:<{width}}  {error:.2e}" for name, error in errors.items()]
        lines += [f"{'updates':<{width}}  {self.update:.2e}"]
        lines += [f"{'running statistics':<{width}}  {self.statistics:.2e}"]
        lines += [f"{'loss':<{width}}  {self.loss:.2e}"]
        verdict = "within" if self.is_within else "NOT within"
        lines.append(f"{verdict} the tolerance of {self.tolerance:g}, in {self.steps} steps")
        lines += [text for text in (self.fault, self.not_proved) if text]
        return "\n".join(lines)


def _errors(
    words: str, errors: Mapping[str, float], tolerance: float
) -> list[tuple[str, float, float]]:
    return [(f"{words}{name}", error, tolerance) for name, error in errors.items()]


def tolerances(config: TrainConfig) -> tuple[float, float]:
    """Return the tolerance of gradients, buffers and the loss, and the tolerance of updates."""
    precision = config.precision
    if precision in AUTOCAST and config.batch_norm == "sync":
        return SYNCHRONISED_16_BITS, UPDATES[precision]
    return LOOSER.get((precision, config.model), TOLERANCES[precision]), UPDATES[precision]


def loss_scale(config: TrainConfig) -> float:
    """Return the scale of the loss in the steps that are compared."""
    return LOSS_SCALE if config.precision == "fp16" else 1.0


@dataclass(frozen=True)
class Batch:
    """A global batch: one rank's part of it, and on rank 0 all samples.

    Attributes:
        position: of its first sample in training.
        local: this rank's images, uint8 [n, H, W, C], and labels [m], as in a `Step`.
        whole: all images, uint8 [size, H, W, C], and labels [size]; on rank 0.
        rate: the learning rate.
    """

    size: int
    position: int
    local: tuple[np.ndarray, np.ndarray]
    whole: tuple[np.ndarray, np.ndarray] | None
    rate: float


@dataclass(frozen=True)
class Done:
    """The results of one step of all ranks.

    Attributes:
        loss: the mean over the samples.
        gradients: by name, as the optimizers received them.
        tensors: parameters and buffers after the step, by name.
    """

    loss: float
    gradients: dict[str, Tensor]
    tensors: dict[str, Tensor]


class SerialRun:
    """Rank 0's serial steps.

    Attributes:
        parity: the largest errors so far.
    """

    def __init__(
        self, config: TrainConfig, components: Sequence[Component], plan: Plan, images: Images
    ) -> None:
        by_name, draws = {part.name: part for part in components}, Draws()

        def build(names: Sequence[str]) -> StageModel:
            modules = {name: built_plainly(by_name[name], config.seed) for name in names}
            for name, module in modules.items():
                change_dtype(module, DTYPES[config.precision])
                to_channels_last(module.to(images.device))
                if not config.compile:
                    follow_samples(name, module.train(), draws)
            return StageModel(modules, compiled=config.compile)

        rules = Rules(
            config.batch_norm == "sync",
            AUTOCAST.get(config.precision),
            loss_of(config),
            config.clip_norm,
            loss_scale(config),
        )
        self.config, self.components, self.images = config, components, images
        self.reference = Reference(plan, build, rules, draws)
        undecayed = self.reference.undecayed()
        self.optimizer = plain_optimizer(config, self.reference.parameters, undecayed)
        self.parity = Parity(*tolerances(config))

    def compare_initial(self, tensors: Mapping[str, Tensor]) -> None:
        """Note how the tensors of the ranks differ from what the model's code makes."""
        for component in self.components:
            module = built_plainly(component, self.config.seed)
            values = {
                f"{component.name}.{name}": value.detach()
                for name, value in (*module.named_parameters(), *module.named_buffers())
            }
            self.parity.initial |= largest_errors(tensors, values)

    def compare(self, batch: Batch, done: Done, before: Mapping[str, Tensor]) -> None:
        """Do the same step serially, from the weights before it, and note the largest errors."""
        assert batch.whole is not None
        images, labels = batch.whole
        self.reference.put(before)
        self.reference.draws.seed = step_seed(self.config.seed, batch.position, None)
        torch.manual_seed(step_seed(self.config.seed, batch.position, 0))
        serial = self.reference.step(
            self.images(images), torch.from_numpy(labels).to(self.images.device)
        )
        parity = self.parity
        parity.steps += 1
        parity.loss = max(parity.loss, _relative(done.loss, serial.loss))
        # If an optimizer was not called, its gradients are missing: the updates will differ.
        gradients = {
            name: done.gradients.get(name, gradient) for name, gradient in serial.gradients.items()
        }
        _keep(parity.parameters, gradient_errors(gradients, serial.gradients, images.size))
        for name, value in serial.buffers.items():
            _keep(parity.buffers, largest_errors(done.tensors, {name: value}))
        # The ranks' updates, against torch's with the same gradients.
        set_learning_rate(self.optimizer, batch.rate)
        parameters = self.reference.parameters
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].to(parameter)
        self.optimizer.step()
        expected, actual = {}, {}
        for name, parameter in parameters.items():
            parameter.grad = None
            expected[name] = difference(parameter.detach(), before[name])
            error = difference(done.tensors[name], parameter.detach())
            rounding = ROUNDINGS * torch.finfo(parameter.dtype).eps * before[name].abs()
            actual[name] = expected[name] + _beyond(error, rounding)
        _keep(parity.updates, largest_errors(actual, expected))


def built_plainly(component: Component, seed: int) -> nn.Module:
    """Return the module that a component's build function makes, as it is.

    The runtime builds its modules by `build_component`, whose mistakes this one must not share.
    """
    with isolated(component_seed(seed, component.name), "cpu"):
        return component.made()


def change_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Give each floating tensor the dtype, and complex ones the complex dtype of its precision."""
    for parameter in module.parameters():
        parameter.data = _plain(parameter.data, dtype)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            setattr(part, name, _plain(buffer, dtype))


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.contiguous().to(dtype.to_complex() if tensor.is_complex() else dtype)


def plain_optimizer(
    config: TrainConfig,
    parameters: Mapping[str, nn.Parameter],
    undecayed: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Return the optimizer of a run as torch's plain loop over tensors.

    Args:
        undecayed: as in `make_optimizer`.
    """
    if config.optimizer not in OPTIMIZERS:
        return make_optimizer(config, parameters)
    groups = [
        {"params": [value], "weight_decay": 0.0 if name in undecayed else config.weight_decay}
        for name, value in parameters.items()
    ]
    lr, momentum = config.learning_rate(), config.momentum
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr, momentum, nesterov=momentum > 0, foreach=False)
    adam = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return adam(groups, lr=lr, foreach=False)


def gradient_errors(
    measured: Mapping[str, Tensor], reference: Mapping[str, Tensor], values: int = 1
) -> dict[str, float]:
    """Return the error of each gradient, by name: `largest_errors` beyond rounding errors.

    A sum of terms that cancel has rounding errors of the size of the terms. Their size is that of
    the largest gradient of the same layer, which is computed from the same terms.

    Args:
        values: numbers in the batch, with which the rounding errors of long sums grow.
    """
    scales: dict[str, float] = defaultdict(float)
    for name, value in reference.items():
        layer = name.rpartition(".")[0]
        scales[layer] = max(scales[layer], _largest(value) * torch.finfo(value.dtype).eps)
    actual, expected = {}, {}
    for name, value in reference.items():
        layer, _, key = name.rpartition(".")
        actual[name] = other = measured[name]
        expected[name] = value.cpu().double()
        if other.shape == value.shape:
            rounding = GRADIENT_ROUNDINGS * scales[layer] * (sqrt(values) if key in SUMMED else 1)
            actual[name] = expected[name] + _beyond(difference(other, value), rounding)
    return largest_errors(actual, expected)


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _beyond(error: Tensor, rounding: Tensor | float) -> Tensor:
    """Return what of an error is more than a rounding error."""
    return error.sign() * (error.abs() - rounding).clamp(min=0)


def _keep(largest: dict[str, float], errors: Mapping[str, float]) -> None:
    for name, error in errors.items():
        largest[name] = max(largest.get(name, 0.0), error)


def _relative(value: float, reference: float) -> float:
    error = abs(value - reference) / max(abs(reference), 1e-30)
    return error if error == error else float("inf")  # NaN does not match
