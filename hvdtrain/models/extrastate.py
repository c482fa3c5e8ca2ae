"""State of modules beside their tensors, `get_extra_state`, as tensors that a checkpoint can hold.

The state of each module becomes its structure as JSON, uint8 [n], and the tensors in it by number.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.device import is_gpu
from hvdtrain.errors import DataError, UsageError, one_line

KEY = "_extra_state"  # as in PyTorch's state_dict
COMPILED = "_orig_mod."  # torch.compile puts it into the names of parameters
LISTS: dict[str, Any] = {"list": list, "tuple": tuple}
MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict}


def with_state(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module that has such a state, with the name of the state after `prefix`."""
    for path, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            name = f"{prefix}{path}.{KEY}" if path else f"{prefix}{KEY}"
            yield name.replace(COMPILED, ""), part


def saved(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Return the states of a module as named tensors, which are not copies.

    Raises:
        UsageError: if a state cannot be saved, or not be loaded again.
    """
    named: dict[str, Tensor] = {}
    for name, part in with_state(module, prefix):
        if type(part).set_extra_state is nn.Module.set_extra_state:
            raise UsageError(
                f"{name}: {type(part).__name__} has get_extra_state and no set_extra_state, so "
                "that no run could resume: add it"
            )
        named |= encoded(name, part.get_extra_state())
    return named


def load(module: nn.Module, prefix: str, tensors: Mapping[str, Tensor]) -> None:
    """Give a module the states in named tensors, which may hold others, too.

    Raises:
        DataError: if a state is missing, or not in the form of `encoded`.
    """
    for name, part in with_state(module, prefix):
        if name not in tensors:
            raise DataError(
                f"the checkpoint holds no {name}, since older versions did not save what "
                "get_extra_state returns: start a new run from its weights"
            )
        device = next((value.device for value in (*module.parameters(), *module.buffers())), None)
        try:
            state = decoded(name, tensors, device)
        except (LookupError, RecursionError, TypeError, ValueError) as error:
            raise DataError(f"{name} in the checkpoint is damaged: {one_line(error)}") from None
        part.set_extra_state(state)


def encoded(name: str, state: Any) -> dict[str, Tensor]:
    """Return a state as named tensors.

    Raises:
        UsageError: if it is not made of tensors, arrays, numbers, text, lists and dictionaries.
    """
    tensors: list[Tensor] = []

    def plain(value: Any) -> Any:
        kind = type(value).__name__
        if value is None or type(value) in (bool, int, float, str):
            return value
        if LISTS.get(kind) is type(value):
            return {kind: [plain(item) for item in value]}
        if MAPPINGS.get(kind) is type(value):
            return {kind: [[plain(key), plain(item)] for key, item in value.items()]}
        is_array = isinstance(value, np.ndarray | np.generic)
        if is_array:
            with suppress(TypeError, ValueError):  # of objects, or in another byte order
                value = torch.from_numpy(np.array(value))
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            raise UsageError(
                f"{name}: get_extra_state returns a {kind}, which a checkpoint cannot hold: "
                "return tensors, numbers, text, lists and dictionaries, or keep it elsewhere"
            )
        tensors.append(value.detach())
        return {"array" if is_array else value.device.type: len(tensors) - 1}

    text = json.dumps(plain(state)).encode()
    named = {name: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    return named | {f"{name}/{number}": tensor for number, tensor in enumerate(tensors)}


def decoded(name: str, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """Return the state in named tensors; those that were not on the CPU go to `device`."""

    def state(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind in LISTS:
            return LISTS[kind](map(state, content))
        if kind in MAPPINGS:
            return MAPPINGS[kind]((state(key), state(item)) for key, item in content)
        tensor = tensors[f"{name}/{content}"]
        if kind == "array":
            return tensor.numpy()[()]
        return tensor.to(device) if is_gpu(torch.device(kind)) else tensor

    return state(json.loads(tensors[name].cpu().numpy().tobytes()))
