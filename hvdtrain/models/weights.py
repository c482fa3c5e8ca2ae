"""Read and write files of weights with torchvision's names for the built-in models.

A file is a dictionary of tensors written by `torch.save`, as torchvision's are. Reading one never
runs code from it.

State of modules beside their tensors (`get_extra_state`) becomes tensors that a checkpoint can
hold: its structure as JSON, uint8 [n], and the tensors in it by number.
"""

import json
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.device import is_gpu
from hvdtrain.errors import DataError, UsageError, one_line
from hvdtrain.host.files import write_whole
from hvdtrain.models.ready import WHOLE

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


_LAYER = r"encoder.layers.encoder_layer_\1"
_RESNET = ((r"(?:stem|head)\.(.*)", r"\1"),)
_VIT = (
    (r"embed\.(class_token|conv_proj\..*)", r"\1"),
    (r"embed\.pos_embedding", r"encoder.pos_embedding"),
    (r"block(\d+)\.attention\.(ln_1\..*)", rf"{_LAYER}.\2"),
    (r"block(\d+)\.attention\.in_proj\.(.*)", rf"{_LAYER}.self_attention.in_proj_\2"),
    (r"block(\d+)\.attention\.(out_proj\..*)", rf"{_LAYER}.self_attention.\2"),
    (r"block(\d+)\.mlp\.(ln_2\..*)", rf"{_LAYER}.\2"),
    (r"block(\d+)\.mlp\.linear_1\.(.*)", rf"{_LAYER}.mlp.0.\2"),
    (r"block(\d+)\.mlp\.linear_2\.(.*)", rf"{_LAYER}.mlp.3.\2"),
    (r"head\.(ln\..*)", r"encoder.\1"),
    (r"head\.fc\.(.*)", r"heads.head.\1"),
)
_RENAMED = {"resnet18": _RESNET, "resnet50": _RESNET, "vit_tiny": _VIT, "vit_b16": _VIT}
COUNTER = "num_batches_tracked"  # missing in files of old versions of torch


def torchvision_name(model: str, name: str) -> str:
    """Return torchvision's name of a tensor of `model`; `name` if torchvision lacks the model."""
    for pattern, replacement in _RENAMED.get(model, ()):
        renamed, count = re.subn(f"^{pattern}$", replacement, name)
        if count:
            return renamed
    return name


def _names_in_files(model: str, names: Iterable[str]) -> dict[str, str]:
    """Return the names in a file by hvdtrain's names.

    A module that is one component keeps its own names.
    """
    listed = list(names)
    if model not in _RENAMED and all(name.startswith(f"{WHOLE}.") for name in listed):
        return {name: name.removeprefix(f"{WHOLE}.") for name in listed}
    return {name: torchvision_name(model, name) for name in listed}


def write(
    path: Path, model: str, tensors: Mapping[str, Tensor], extra: Mapping[str, Any] = {}
) -> None:
    """Write a file of weights with torchvision's names, completely or not at all.

    Args:
        path: of the file.
        model: its name.
        tensors: by hvdtrain's names.
        extra: the states of `get_extra_state`, as in PyTorch's `state_dict`.

    Raises:
        UsageError: if the file cannot be written.
    """
    content = {name: tensor.contiguous() for name, tensor in tensors.items()} | dict(extra)
    theirs = _names_in_files(model, content)
    renamed = {theirs[name]: value for name, value in content.items()}
    try:
        write_whole(path, lambda file: torch.save(renamed, file))
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UsageError(f"the weights {path} cannot be written: {reason}") from None


def read(
    path: Path, model: str, shapes: Mapping[str, tuple[int, ...]], last: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Read a file of weights with torchvision's or hvdtrain's names.

    Args:
        path: of the file.
        model: its name.
        shapes: of all tensors of the model, by hvdtrain's names.
        last: the last component, whose tensors may have another number of classes in the file:
            then they keep their initial values.

    Returns:
        The tensors by hvdtrain's names, with the states of `get_extra_state` as named tensors if
        the file has any; and the names of the last component's tensors with other classes.

    Raises:
        DataError: if the file does not hold exactly the tensors of the model.
    """
    content = _load(path)
    theirs = _names_in_files(model, shapes)
    if not theirs.keys() - content.keys():
        theirs = {name: name for name in shapes}
    whole = f"{WHOLE}." if all(name == f"{WHOLE}.{theirs[name]}" for name in shapes) else ""
    states = [name for name in content if name.endswith(KEY)]
    tensors, reshaped = dict[str, Tensor](), list[str]()
    for name in states:
        tensors |= encoded(f"{whole}{name}", content.pop(name))
    if odd := content.keys() - set(theirs.values()):
        raise DataError(
            f"{path} holds {_some(odd)}, which {model} does not have: use weights of {model}"
        )
    # The last tensor of a classifier has a value or a row for each class.
    classes = [(), *shapes.values()][-1][:1]
    for name, shape in shapes.items():
        value = content.get(theirs[name])
        if value is None:
            if not name.endswith(COUNTER):
                raise DataError(f"{path} lacks {theirs[name]}: use weights of {model}")
        elif tuple(value.shape) == shape:
            tensors[name] = value
        elif (
            name.startswith(f"{last}.")
            and value.ndim == len(shape)
            and (*classes, *value.shape[1:]) == shape
        ):
            reshaped.append(name)
        else:
            raise DataError(
                f"{theirs[name]} has the shape {tuple(value.shape)} in {path}, but {shape} in "
                f"{model}: use the image size and patch size of its training"
            )
    return tensors, reshaped


def _load(path: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():  # an invalid file is reported as an error instead
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"--weights {path}: there is no such file") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # a malicious file can raise anything
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise DataError(f"{path} is not a file of weights: {reason[0]}") from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and (isinstance(value, Tensor) or name.endswith(KEY))
        for name, value in content.items()
    ):
        raise DataError(
            f"{path} is not a file of weights: it must hold a dictionary of tensors by name"
        )
    return content


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return first + (f" and {len(others)} more" if others else "")
