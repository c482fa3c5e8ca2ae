"""The model of a stage on one rank, and the conversion of images to its input.

A component runs as it is, compiled, or recomputed, with or without a clock.

Images may be in the memory of the device. A batch then is a few numbers per image: where its
pixels come from, as `data.augment` draws them, so that the images are the same to the bit as when
the host makes them.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from hvdtrain.data.augment import PADDING, Places
from hvdtrain.device import Mark
from hvdtrain.models import weights
from hvdtrain.options.sections import is_exempt
from hvdtrain.parallel.batchnorm import Moments, SynchronisedBatchNorm, keeping_statistics
from hvdtrain.parallel.exchange import keeping_format
from hvdtrain.sync.gradients import Gradients
from hvdtrain.sync.local import Meetings
from hvdtrain.sync.states import digest, fingerprint


@dataclass(frozen=True)
class Resident:
    """The images of a split on a device: uint8 [samples, H, W, C]."""

    images: Tensor

    def take(self, places: Places) -> Tensor:
        """Return the images uint8 [n, H, W, C], as `crop_flip` makes them."""
        device, (_, height, width, _) = self.images.device, self.images.shape
        rows = self._numbers([places.rows])[0]
        if places.moves is None:
            return self.images[rows]
        top, left, mirrored = self._numbers(places.moves)
        y = top[:, None] + torch.arange(height, device=device) - PADDING
        x = torch.arange(width, device=device).expand(len(places), width)
        x = torch.where(mirrored[:, None] > 0, width - 1 - x, x) + left[:, None] - PADDING
        inside_y, inside_x = y.clamp(0, height - 1), x.clamp(0, width - 1)
        pixels = self.images[rows[:, None, None], inside_y[:, :, None], inside_x[:, None, :]]
        is_inside = (y == inside_y)[:, :, None] & (x == inside_x)[:, None, :]
        moved: Tensor = pixels * is_inside[..., None]
        return moved

    def _numbers(self, arrays: Sequence[NDArray[np.generic]]) -> Tensor:
        """Return small arrays [n] as int64 [arrays, n] on the device, in one copy."""
        stacked = np.stack([array.astype(np.int64) for array in arrays])
        return torch.from_numpy(stacked).to(self.images.device, non_blocking=True)


# Of weights; and of what forwards compute in, if it is another one.
DTYPES = {"fp64": torch.float64} | dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), torch.float32)
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StageModel:
    """Components in order; their tensors have the names that checkpoints use.

    Args:
        components: the modules by name.
        recomputed: names of the components that keep no activations and run again in backward.
        compiled: whether to run the others through torch.compile.

    Attributes:
        components: the modules by name.
        calls: the function that runs each component, by name.
        clock: measures the components' times, if set.
        changing: names of the buffers that forwards change, without batch norm statistics.
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
            elif compiled:  # module.compile() would skip torch's own modules
                self.calls[name] = torch.compile(component)
        self._norms = [
            module
            for component in self.components.values()
            for module in component.modules()
            if isinstance(module, _NormBase)
        ]

    def __call__(self, activations: Tensor) -> Tensor:
        """Run the components one after another."""
        if self.clock is not None and torch.is_grad_enabled():
            return self.clock.forward(self.calls, activations)
        for call in self.calls.values():
            activations = keeping_format(call(activations))
        return activations

    def in_backward(self) -> AbstractContextManager[None]:
        """Return the context of a backward, in which the forwards of checkpoints track nothing."""
        return keeping_statistics(self._norms)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name: `component.name`."""
        return {
            f"{name}.{key}": parameter
            for name, component in self.components.items()
            for key, parameter in component.named_parameters()
            if parameter.requires_grad
        }

    def undecayed(self) -> frozenset[str]:
        """Return the names of the parameters without weight decay."""
        return frozenset(
            f"{name}.{path}"
            for name, component in self.components.items()
            for path, value in component.named_parameters()
            if is_exempt(path, _layer_of(component, path), value.dim())
        )

    def statistics(self) -> dict[str, Tensor]:
        """Return the running statistics of batch norms by name, as `parameters`."""
        return {
            f"{name}.{path}.{key}" if path else f"{name}.{key}": buffer
            for name, component in self.components.items()
            for path, module in component.named_modules()
            if isinstance(module, _NormBase)
            for key, buffer in module.named_buffers(recurse=False)
        }

    def states(self) -> dict[str, Tensor]:
        """Return the current tensors of the changing buffers by name."""
        if not self.changing:
            return {}
        return {name: value for name, value in self.tensors().items() if name in self.changing}

    def tensors(self) -> dict[str, Tensor]:
        """Return all parameters, including frozen ones, and all buffers, by name."""
        return {
            f"{name}.{key}": value
            for name, component in self.components.items()
            for key, value in (*component.named_parameters(), *component.named_buffers())
        }

    def extra(self) -> dict[str, Tensor]:
        """Return the states that `get_extra_state` returns, as named tensors."""
        return {
            name: value
            for component, module in self.components.items()
            for name, value in weights.saved(module, f"{component}.").items()
        }

    def put_extra(self, tensors: Mapping[str, Tensor]) -> None:
        """Load such states.

        Raises:
            DataError: if one is missing.
        """
        for component, module in self.components.items():
            weights.load(module, f"{component}.", tensors)

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Copy values into the parameters and buffers of the same names.

        A forward may have created a buffer that cannot be written to: an expanded one, which
        repeats its memory, one of inference mode, or one of another shape. Such a buffer is
        replaced by a new one.
        """
        for name, target in self.tensors().items():
            if name not in values:
                continue
            value = values[name]
            is_same_shape = target.shape == value.shape
            if isinstance(target, nn.Parameter) or (is_same_shape and _is_writable(target)):
                target.copy_(value)
            else:
                other = torch.empty(value.shape, dtype=target.dtype, device=target.device)
                self._replace(target, other.copy_(value))

    def _replace(self, buffer: Tensor, other: Tensor) -> None:
        """Replace a buffer by another tensor in all modules that have it."""
        for component in self.components.values():
            for module in component.modules():
                named = module.named_buffers(recurse=False, remove_duplicate=False)
                for key in [key for key, value in named if value is buffer]:
                    setattr(module, key, other)

    def train(self, mode: bool) -> None:
        """Switch all components between training and evaluation."""
        for component in self.components.values():
            component.train(mode)

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of all that replicas share, by name: dtype, shape and bits."""
        everything = self.tensors() | self.extra()
        return {name: digest(tensor) for name, tensor in everything.items()}

    def fingerprint(self) -> int:
        """Return a checksum of the same: faster than `digests`, but collisions are possible."""
        return fingerprint([*self.tensors().values(), *self.extra().values()])


def _is_writable(tensor: Tensor) -> bool:
    """Return whether PyTorch allows `copy_` into a tensor."""
    is_repeated = any(
        size > 1 and stride == 0
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return not (is_repeated or tensor.is_inference())


def _layer_of(component: nn.Module, path: str) -> str:
    """Return the class name of the layer that holds a parameter."""
    return type(component.get_submodule(path.rpartition(".")[0])).__name__


class Images:
    """Converts stored images, or other inputs, to the input of the first component.

    uint8 [n, H, W, C], or other numbers, becomes floating [n, C, H, W] in channels_last format,
    which has the same memory order, so that nothing is transposed.

    Args:
        mean: per channel, of numbers / 255.
        std: per channel, of numbers / 255.
        device: of the result.
        precision: a key of DTYPES.

    Attributes:
        resident: the training images, if they are on the device.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], device: torch.device, precision: str
    ) -> None:
        self.device, self.dtype = device, DTYPES[precision]
        self.resident: Resident | None = None
        shape = (1, len(mean), 1, 1)
        self.scale = self._constant(1 / (255 * np.asarray(std)), shape)
        self.shift = self._constant(-np.asarray(mean) / np.asarray(std), shape)

    def __call__(self, images: np.ndarray | Places) -> Tensor:
        """Return normalised images [n, C, H, W] for uint8 [n, H, W, C], or their places."""
        if isinstance(images, Places):
            assert self.resident is not None, "these images are not on the device"
            stored = self.resident.take(images)
        else:
            stored = torch.from_numpy(images).to(self.device, non_blocking=True)
        scaled = stored.permute(0, 3, 1, 2).to(self.dtype)
        # Inputs of this dtype are not copied, and may be read again.
        scaled = scaled.mul(self.scale) if stored.dtype == self.dtype else scaled.mul_(self.scale)
        return scaled.add_(self.shift)

    def _constant(self, values: np.ndarray, shape: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=self.dtype, device=self.device).view(shape)


class ComponentClock:
    """Marks the forward and the backward of each component of a stage, to add up their seconds.

    The backward of a component starts when the gradient of its output is complete and ends where
    the backward of the component before it starts: autograd runs the operations of a step in
    reverse.
    """

    def __init__(self, clock: Callable[[], Mark]) -> None:
        """Read the time from `clock`, which returns a mark in the queue of the device."""
        self.clock = clock
        self._spans: list[tuple[str, Mark, Mark]] = []
        self._running: tuple[str, Mark] | None = None  # component and start of its backward

    def forward(
        self, calls: Mapping[str, Callable[[Tensor], Tensor]], activations: Tensor
    ) -> Tensor:
        """Run the components one after another."""
        for name, call in calls.items():
            start = self.clock()
            inputs, activations = activations, keeping_format(call(activations))
            self._spans.append((name, start, self.clock()))
            if activations.requires_grad and activations is not inputs:  # inputs have a hook
                activations.register_hook(partial(self._begin, name))
        return activations

    def end(self) -> None:
        """Stop the running measurement: the backward of a stage is over."""
        if self._running is not None:
            self._spans.append((*self._running, self.clock()))
            self._running = None

    def read(self) -> dict[str, float]:
        """Return the seconds of each component since the last call, by name.

        The device must have done all that was marked.
        """
        seconds: defaultdict[str, float] = defaultdict(float)
        for name, start, end in self._spans:
            seconds[name] += end - start
        self._spans.clear()
        self._running = None
        return dict(seconds)

    def _begin(self, name: str, _: Tensor) -> None:
        self.end()
        self._running = name, self.clock()


def forward_recomputed(module: nn.Module, activations: Tensor) -> Tensor:
    """Return `module(activations)`, keeping only `activations` and the moments of batch norms.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, through torch's own
    checkpointing. The recomputation does not change buffers and does not communicate: synchronised
    batch norms reuse the moments of the first forward instead of gathering them again.

    Results, gradients and buffers have the same bits as those of a plain call. With gradients off
    it is a plain call. The recomputation uses the random numbers and autocast of the first
    forward. Forwards of several micro-batches may be in flight, with backwards in any order.

    Args:
        module: must run the same layers at each call.
        activations: [n, ...]; must not change before backward.

    Returns:
        The output of the module.
    """
    emitted: Tensor
    if torch.is_grad_enabled():
        emitted = checkpoint(
            module,
            activations,
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=partial(_contexts, module),
        )
    else:
        emitted = module(activations)
    return emitted


def _contexts(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a first forward and of its recomputations."""
    moments: dict[SynchronisedBatchNorm, list[Moments]] = {
        layer: [] for layer in module.modules() if isinstance(layer, SynchronisedBatchNorm)
    }
    return _recording(moments), _Recomputing(module, moments)


@contextmanager
def _recording(moments: dict[SynchronisedBatchNorm, list[Moments]]) -> Iterator[None]:
    for layer, record in moments.items():
        layer.record = record
    try:
        yield
    finally:
        for layer in moments:
            layer.record = None


class _Recomputing(AbstractContextManager[None]):
    """Replays the moments and lets the module change copies of its buffers, which are discarded.

    Entered once per recomputation; there are several if backward runs again on a retained graph.
    """

    def __init__(
        self, module: nn.Module, moments: dict[SynchronisedBatchNorm, list[Moments]]
    ) -> None:
        self.module, self.moments = module, moments
        self.buffers: list[tuple[nn.Module, str, Tensor]] = []

    def __enter__(self) -> None:
        for layer, record in self.moments.items():
            layer.replay = iter(record)
        self.buffers = [
            (part, name, buffer)
            for part in self.module.modules()
            for name, buffer in part.named_buffers(recurse=False)
        ]
        for part, name, buffer in self.buffers:
            setattr(part, name, buffer.clone())

    def __exit__(self, *_: object) -> None:
        for part, name, buffer in self.buffers:
            setattr(part, name, buffer)
        for layer in self.moments:
            layer.replay = None


@dataclass
class Part:
    """One rank's replica of a stage.

    Attributes:
        optimizer: None if the stage has no trainable parameters.
        meetings: of replicas that do not agree in every step.
        is_first_replica: whether this rank contributes the norm of the stage's gradients.
        synchronised: whether every replica must run forward and backward, which communicate.
        is_whole: whether its backward must not be split into halves.
    """

    model: StageModel
    gradients: Gradients
    optimizer: torch.optim.Optimizer | None
    meetings: Meetings = field(default_factory=Meetings)
    is_first_replica: bool = True
    synchronised: bool = False
    is_whole: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, in the order of the model."""
        return list(self.model.parameters().values())
