"""Detection of modules that mix the samples of a batch, which a plan would divide.

New components with noisy weights get a few images together, and then in two halves, in fp64.
Results must be those of the halves, and gradients their sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hvdtrain.check.parity import gradient_errors
from hvdtrain.models.component import Component, build_component
from hvdtrain.parallel.reference import largest_errors

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

    def note(path: str, _: nn.Module, given: tuple[object, ...]) -> None:
        if len(given) == 1 and isinstance(given[0], Tensor) and len(given[0]) == len(inputs):
            seen.setdefault(path, given[0].detach().requires_grad_(given[0].requires_grad))

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
