"""The interpreter of schedules: a table from the kind of an action to what is done.

It knows no schedule by name and no strategy: what a rank does in a step is the list of actions
that it is given.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from hvdtrain.data.shards import Batch, Index
from hvdtrain.parallel.reduce import Gradients, Waiting
from hvdtrain.parallel.schedule import Action, last_backward

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


class StageModel:
    """The components that a rank holds, in order, with names as they stand in checkpoints."""

    def __init__(self, components: Mapping[str, nn.Module]) -> None:
        self.components = dict(components)

    def __call__(self, activations: Tensor) -> Tensor:
        """Run the components one after another."""
        for component in self.components.values():
            activations = component(activations)
        return activations

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name: component, a dot, and the name inside the component."""
        return {
            f"{name}.{key}": parameter
            for name, component in self.components.items()
            for key, parameter in component.named_parameters()
            if parameter.requires_grad
        }

    def statistics(self) -> dict[str, Tensor]:
        """The running statistics of batch norms, by name, as the parameters."""
        return {
            f"{name}.{path}.{key}" if path else f"{name}.{key}": buffer
            for name, component in self.components.items()
            for path, module in component.named_modules()
            if isinstance(module, _NormBase)
            for key, buffer in module.named_buffers(recurse=False)
        }

    def tensors(self) -> dict[str, Tensor]:
        """All parameters, frozen ones included, and all buffers, by name."""
        return {
            f"{name}.{key}": value
            for name, component in self.components.items()
            for key, value in (*component.named_parameters(), *component.named_buffers())
        }

    def train(self, mode: bool) -> None:
        """Switch all components between training and evaluation."""
        for component in self.components.values():
            component.train(mode)

    def sha256(self) -> str:
        """Hex digest of all parameters and buffers: names, types, shapes and bits."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


class Images:
    """Turns images as stored into what the first component reads.

    uint8 [n, H, W, C] becomes floating [n, C, H, W] in channels_last order, which is the same
    memory: no transposition is ever made.
    """

    def __init__(self, index: Index, normalise: str, device: torch.device, precision: str) -> None:
        self.device, self.dtype = device, DTYPES[precision]
        mean, std = np.asarray(index.mean), np.asarray(index.std)
        if normalise == "unit":
            mean, std = np.zeros_like(mean), np.ones_like(std)
        shape = (1, len(mean), 1, 1)
        self.scale = self._constant(1 / (255 * std), shape)
        self.shift = self._constant(-mean / std, shape)

    def __call__(self, images: np.ndarray) -> Tensor:
        """Normalise images uint8 [n, H, W, C]."""
        stored = torch.from_numpy(images).to(self.device, non_blocking=True)
        return stored.permute(0, 3, 1, 2).to(self.dtype).mul_(self.scale).add_(self.shift)

    def _constant(self, values: np.ndarray, shape: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=self.dtype, device=self.device).view(shape)


@dataclass
class Step:
    """What one step has of its own: input, and results as they come.

    Attributes:
        batch: this replica's samples of the step.
        parts: (start, stop) of each micro-batch in `batch`.
        batch_size: samples of the whole batch, over all replicas.
        first: whether this is the first replica with samples.
    """

    batch: Batch
    parts: Sequence[tuple[int, int]]
    batch_size: int
    first: bool = True
    inputs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    loss_sum: Tensor | None = None  # over this replica's samples
    correct: Tensor | None = None  # of this replica's samples, in evaluation
    communication: Waiting = field(default_factory=Waiting)


class Runtime:
    """Runs lists of actions on the components of this rank."""

    def __init__(
        self,
        model: StageModel,
        images: Images,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        precision: str,
    ) -> None:
        self.model, self.images = model, images
        self.gradients, self.optimizer = gradients, optimizer
        self.device = images.device
        self.bf16 = precision == "bf16"
        self.last_backward: Action | None = None
        self.do: dict[str, Callable[[Step, Action], None]] = {
            "LOAD": self._load,
            "F": self._forward,
            "B": self._backward,
            "REDUCE": self._reduce,
            "STEP": self._update,
        }

    def run(self, actions: Sequence[Action], step: Step) -> Step:
        """Do the actions in order; the step carries the results."""
        self.last_backward = last_backward(actions)
        for action in actions:
            self.do[action.kind](step, action)
        return step

    def evaluate(self, actions: Sequence[Action], step: Step) -> Step:
        """Do a forward-only schedule with the model in evaluation mode."""
        self.model.train(False)
        with torch.inference_mode():
            self.run(actions, step)
        self.model.train(True)
        return step

    def _load(self, step: Step, action: Action) -> None:
        start, stop = step.parts[_microbatch(action)]
        if start == stop:
            return
        labels = torch.from_numpy(step.batch.labels[start:stop]).to(self.device)
        images = self.images(step.batch.images[start:stop])
        step.inputs[_microbatch(action)] = images, labels

    def _forward(self, step: Step, action: Action) -> None:
        inputs = step.inputs.pop(_microbatch(action), None)
        if inputs is None:
            return
        images, labels = inputs
        with self._autocast():
            logits = self.model(images)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss_sum = functional.cross_entropy(logits, labels, reduction="sum")
        step.loss_sum = _add(step.loss_sum, loss_sum.detach())
        if torch.is_grad_enabled():
            step.losses[_microbatch(action)] = loss_sum / step.batch_size
        else:
            step.correct = _add(step.correct, (logits.argmax(1) == labels).sum())

    def _backward(self, step: Step, action: Action) -> None:
        if action == self.last_backward:
            samples = len(step.batch.labels)
            self.gradients.complete_with_next_backward(samples, step.first, step.batch_size)
        loss = step.losses.pop(_microbatch(action), None)
        if loss is not None:
            loss.backward()

    def _reduce(self, step: Step, action: Action) -> None:
        step.communication = self.gradients.reduce()

    def _update(self, step: Step, action: Action) -> None:
        self.optimizer.step()
        self.gradients.zero()

    def _autocast(self) -> AbstractContextManager[object]:
        if self.bf16:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()


def part_offsets(parts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Where each of `parts`, ranges of the whole batch, lies in this replica's own samples."""
    offset = 0
    for start, stop in parts:
        yield offset, offset + stop - start
        offset += stop - start


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None, f"{action} needs a micro-batch"
    return action.microbatch


def _add(total: Tensor | None, value: Tensor) -> Tensor:
    return value if total is None else total + value
