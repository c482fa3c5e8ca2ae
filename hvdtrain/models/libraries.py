"""Models of torchvision and timm by name, such as `torchvision:resnet18` and `timm:resnet26d`."""

import importlib
import sys
from types import ModuleType

from torch import library as operators
from torch import nn

from hvdtrain.errors import UsageError, one_line
from hvdtrain.models.component import Component
from hvdtrain.models.ready import cut

# Operators for detection, which torchvision wants to know. Its builds for GPUs cannot load theirs
# beside a PyTorch for CPUs; no classifier uses them.
OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def build(library: str, name: str, classes: int, image_size: int) -> list[Component] | nn.Module:
    """Return a model's components, or the module itself if it cannot be cut.

    Args:
        library: "torchvision" or "timm".

    Raises:
        UsageError: if the library is missing, or has no such model.
    """
    module = _module(library, name, classes, image_size)
    try:
        return cut(module)
    except UsageError:  # its children do not run one after another
        return module


def _module(library: str, name: str, classes: int, image_size: int) -> nn.Module:
    if library == "timm":
        models, make, size, place = _import("timm"), "create_model", "img_size", "timm"
    else:
        models, make, size = _import("torchvision").models, "get_model", "image_size"
        place = "torchvision.models"
    if name not in models.list_models():
        raise UsageError(
            f"{library} has no model {name!r}: python -c 'import {library}; "
            f"print({place}.list_models())' prints their names"
        )
    try:  # vision transformers are built for one size
        made: nn.Module = getattr(models, make)(name, num_classes=classes, **{size: image_size})
    except TypeError:
        made = getattr(models, make)(name, num_classes=classes)
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
            operators.define(f"torchvision::{operator}", SCHEMA)
    return importlib.import_module(library)
