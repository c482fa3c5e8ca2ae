"""The components of a stage as a rank holds them, and how images become their first input."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hvdtrain.decay import is_exempt
from hvdtrain.parallel.clock import ComponentClock
from hvdtrain.parallel.recompute import forward_recomputed

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


class StageModel:
    """Components in order, with names as they stand in checkpoints.

    Args:
        components: the modules by name.
        recomputed: names of those that keep no activations and run again in backward.
        compiled: whether they run through torch.compile.

    Attributes:
        components: the modules by name. calls: what runs each of them.
        clock: what takes their times, if anybody wants them.
        changing: names of the buffers, but for batch norms' statistics, that forwards change.
    """

    def __init__(
        self,
        components: Mapping[str, nn.Module],
        recomputed: Collection[str] = (),
        compiled: bool = False,
    ) -> None:
        self.components = dict(components)
        self.calls: dict[str, Callable[[Tensor], Tensor]] = {}
        self.clock: ComponentClock | None = None
        self.changing: frozenset[str] = frozenset()
        for name, component in self.components.items():
            self.calls[name] = component
            if name in recomputed:
                self.calls[name] = partial(forward_recomputed, component)
            elif compiled:  # not by its method, which passes over modules of torch's own
                self.calls[name] = torch.compile(component)

    def __call__(self, activations: Tensor) -> Tensor:
        """Run the components one after another."""
        if self.clock is not None and torch.is_grad_enabled():
            return self.clock.forward(self.calls, activations)
        for call in self.calls.values():
            activations = call(activations)
        return activations

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name: component, a dot, and the name inside the component."""
        return {
            f"{name}.{key}": parameter
            for name, component in self.components.items()
            for key, parameter in component.named_parameters()
            if parameter.requires_grad
        }

    def undecayed(self, kinds: frozenset[str]) -> frozenset[str]:
        """Names of the parameters that weight decay leaves alone: those of `decay.KINDS`."""
        found = set()
        for name, value in self.parameters().items():
            component = next(part for part in self.components if name.startswith(f"{part}."))
            path = name.removeprefix(f"{component}.")
            owner = self.components[component].get_submodule(path.rpartition(".")[0])
            if is_exempt(kinds, path, type(owner).__name__, value.dim()):
                found.add(name)
        return frozenset(found)

    def statistics(self) -> dict[str, Tensor]:
        """The running statistics of batch norms, by name, as the parameters."""
        return {
            f"{name}.{path}.{key}" if path else f"{name}.{key}": buffer
            for name, component in self.components.items()
            for path, module in component.named_modules()
            if isinstance(module, _NormBase)
            for key, buffer in module.named_buffers(recurse=False)
        }

    def states(self) -> dict[str, Tensor]:
        """The changing buffers, by name, as they are now."""
        if not self.changing:
            return {}
        return {name: value for name, value in self.tensors().items() if name in self.changing}

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

    def digests(self) -> dict[str, str]:
        """SHA-256 of every parameter and buffer by name: type, shape and bits."""
        return {name: digest(tensor) for name, tensor in self.tensors().items()}


def digest(tensor: Tensor) -> str:
    """SHA-256 of type, shape and bits."""
    content = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    content.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return content.hexdigest()


class Images:
    """Turns images as stored into what the first component reads.

    uint8 [n, H, W, C] becomes floating [n, C, H, W] in channels_last order, which is the same
    memory: no transposition is ever made. `mean` and `std` are of pixels / 255, by channel.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], device: torch.device, precision: str
    ) -> None:
        self.device, self.dtype = device, DTYPES[precision]
        shape = (1, len(mean), 1, 1)
        self.scale = self._constant(1 / (255 * np.asarray(std)), shape)
        self.shift = self._constant(-np.asarray(mean) / np.asarray(std), shape)

    def __call__(self, images: np.ndarray) -> Tensor:
        """Normalise images uint8 [n, H, W, C]."""
        stored = torch.from_numpy(images).to(self.device, non_blocking=True)
        return stored.permute(0, 3, 1, 2).to(self.dtype).mul_(self.scale).add_(self.shift)

    def _constant(self, values: np.ndarray, shape: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=self.dtype, device=self.device).view(shape)
