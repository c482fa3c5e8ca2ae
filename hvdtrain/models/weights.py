"""Weights of the shipped models under torchvision's names, and the files that hold them.

A file is a dictionary of tensors written by `torch.save`, as torchvision's own are. Reading one
never runs code from it.
"""

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hvdtrain.errors import DataError, UsageError
from hvdtrain.files import write_whole

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
    """What torchvision calls a tensor of `model`; of a model that it has not, the name itself."""
    for pattern, replacement in _RENAMED.get(model, ()):
        renamed, count = re.subn(f"^{pattern}$", replacement, name)
        if count:
            return renamed
    return name


def write(path: Path, model: str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, given by hvdtrain's names, under torchvision's; whole or not at all.

    Raises:
        UsageError: if the file cannot be written.
    """
    renamed = {
        torchvision_name(model, name): tensor.contiguous() for name, tensor in tensors.items()
    }
    try:
        write_whole(path, lambda file: torch.save(renamed, file))
    except (OSError, RuntimeError) as error:  # torch has errors of its own for a full disk
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UsageError(f"the weights {path} cannot be written: {reason}") from None


def read(
    path: Path, model: str, shapes: Mapping[str, tuple[int, ...]], last: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors by hvdtrain's names, from a file under torchvision's or hvdtrain's.

    Args:
        shapes: of all tensors of the model, by hvdtrain's names.
        last: the last component, whose tensors may have other shapes in the file: for other
            classes it starts anew.

    Returns:
        The tensors, and the names of those of the last component that have other shapes.

    Raises:
        DataError: if the file is not one of such tensors, or lacks one of the model.
    """
    content = _load(path)
    theirs = {name: torchvision_name(model, name) for name in shapes}
    if not theirs.keys() - content.keys():
        theirs = {name: name for name in shapes}
    if odd := content.keys() - set(theirs.values()):
        raise DataError(
            f"{path} holds {_some(odd)}, which {model} has not: it is of another model"
        )
    found, other = {}, []
    for name, shape in shapes.items():
        value = content.get(theirs[name])
        if value is None:
            if not name.endswith(COUNTER):
                raise DataError(f"{path} lacks {theirs[name]}: it holds no weights of {model}")
        elif tuple(value.shape) == shape:
            found[name] = value
        elif name.startswith(f"{last}."):
            other.append(name)
        else:
            raise DataError(
                f"{theirs[name]} has the shape {tuple(value.shape)} in {path} and {shape} here: "
                "use the image size and patch size that it was trained with"
            )
    return found, other


def _load(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():  # of strange files: what is wrong follows as an error
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"--weights {path}: there is no such file") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # a file made to harm can raise anything
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise DataError(f"{path} is no file of weights: {reason[0]}") from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise DataError(f"{path} holds no dictionary of tensors by name")
    return content


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return first + (f" and {len(others)} more" if others else "")
