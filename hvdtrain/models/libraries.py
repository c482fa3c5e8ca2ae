"""Models of torchvision and timm by name, such as `torchvision:resnet18` and `timm:resnet26d`."""

import importlib
import sys
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType

import torch
from torch import nn

from hvdtrain.errors import UsageError, one_line
from hvdtrain.models.component import Component
from hvdtrain.models.ready import cut

# Operators for detection, which torchvision wants to know. Its builds for GPUs cannot load theirs
# beside a PyTorch for CPUs; no classifier uses them.
OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def function_of(model: str) -> Callable[..., object] | None:
    """Return a function that builds a library's model, None for other models."""
    library, _, name = model.partition(":")
    return partial(_build, library, name) if library in ("torchvision", "timm") else None


def _build(library: str, name: str, classes: int, image_size: int) -> object:
    """Return a model's components, or the module itself if it cannot be cut.

    Raises:
        UsageError: if the library is missing, or has no such model.
    """
    module = _module(library, name, classes, image_size)
    try:
        parts: list[Component] = cut(module)
    except UsageError:  # its children do not run one after another
        return module
    return parts


def _module(library: str, name: str, classes: int, image_size: int) -> nn.Module:
    module = _import(library)
    known = module.models.list_models() if library == "torchvision" else module.list_models()
    if name not in known:
        raise UsageError(
            f"{library} {module.__version__} has no model {name!r}: python -c 'import {library}; "
            f"print({library}{'.models' if library == 'torchvision' else ''}.list_models())' "
            "prints their names"
        )
    make, size = module.create_model if library == "timm" else module.models.get_model, "img_size"
    if library == "torchvision":
        size = "image_size"
    try:  # vision transformers are built for one size
        made: nn.Module = make(name, num_classes=classes, **{size: image_size})
    except TypeError:
        made = make(name, num_classes=classes)
    return made


def _import(library: str) -> ModuleType:
    """Import a library.

    Raises:
        UsageError: with the command that installs it.
    """
    for operator in OPERATORS:
        try:
            return importlib.import_module(library)
        except ImportError as error:
            raise UsageError(
                f"{library} cannot be imported ({one_line(error)}): hvdtrain setup --models "
                "installs the version that fits this PyTorch"
            ) from error
        except RuntimeError as error:
            if f"torchvision::{operator} does not exist" not in str(error):
                raise
            for name in [name for name in sys.modules if name.startswith(("torchvision", "timm"))]:
                del sys.modules[name]
            _operators().define(operator + SCHEMA)
    return importlib.import_module(library)


@cache
def _operators() -> torch.library.Library:
    return torch.library.Library("torchvision", "FRAGMENT")
