"""The models, each a list of named components, and the lookup of a model by name.

Importing this package does not import torch, so that listing and checking names is fast.
"""

from __future__ import annotations

import difflib
from functools import partial
from typing import TYPE_CHECKING

from hvdtrain.data.index import InputSize
from hvdtrain.errors import UsageError
from hvdtrain.options.givenmodel import GivenModel, refuse_lost

if TYPE_CHECKING:
    from hvdtrain.models.component import Component

# The function of each model, in the form in which users name their own.
REGISTRY = {
    "cnn": "hvdtrain.models.resnet:cnn",
    "resnet18": "hvdtrain.models.resnet:resnet18",
    "resnet50": "hvdtrain.models.resnet:resnet50",
    "vit_tiny": "hvdtrain.models.vit:vit_tiny",
    "vit_b16": "hvdtrain.models.vit:vit_b16",
    "cct_2": "hvdtrain.models.vit:cct_2",
    "cct_6": "hvdtrain.models.vit:cct_6",
}
MODEL_NAMES = tuple(REGISTRY)
LIBRARIES = ("torchvision:", "timm:")  # before the name of a model of theirs


def check_name(model: str) -> None:
    """Raise UsageError unless `model` is one of MODEL_NAMES or has the form module:function."""
    refuse_lost(model)
    if model in REGISTRY or ":" in model:
        return
    near = difflib.get_close_matches(model, MODEL_NAMES)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(
        f"unknown model {model!r}: {hint}use one of {', '.join(MODEL_NAMES)}, "
        "torchvision:NAME or timm:NAME, or package.module:function for a model of your own"
    )


def components(
    model: str, classes: int, image_size: InputSize, patch_size: int | None = None, seed: int = 0
) -> list[Component]:
    """Return the components of `model` for inputs of a size and `classes` classes.

    Args:
        model: one of MODEL_NAMES, `torchvision:NAME` or `timm:NAME`, or
            `package.module:function`, a function of (classes, image_size) that returns a list of
            Component or of (name, build) pairs, or a torch module, which becomes one component.
            The module is imported from the current folder or from Python's module path. Also a
            model that was passed in Python: `TrainConfig` gives it a name that carries it.
        classes: number of classes.
        image_size: width and height in pixels of square images of three channels, or (channels,
            height, width) of other inputs, which a user's function gets as `input_shape`.
        patch_size: in pixels, passed to models whose function has a parameter of that name.
        seed: of the random numbers that a user's function draws itself.

    Raises:
        UsageError: if an argument is not valid, or a user's model fails or returns something else.
    """
    check_name(model)
    for what, value in (("classes", classes), ("image size", image_size)):
        if min(value if isinstance(value, tuple) else (value,)) < 1:
            raise UsageError(f"{what} {value} is not valid: it must be at least 1")
    if isinstance(image_size, tuple) and (model in REGISTRY or model.startswith(LIBRARIES)):
        raise UsageError(
            f"{model} takes square images of three channels, and the data has inputs "
            f"{'x'.join(map(str, image_size))} (channels, height, width): give a model of your "
            "own, package.module:function with a parameter input_shape"
        )
    from hvdtrain.models import find, libraries
    from hvdtrain.models.component import as_components
    from hvdtrain.models.ready import components_of

    if isinstance(model, GivenModel):
        return components_of(model, model.model, classes, image_size, patch_size, seed)
    if model.startswith(LIBRARIES):
        library, _, name = model.partition(":")
        function: find.ModelFunction = partial(libraries.build, library, name)
    else:
        function = find.find_function(REGISTRY.get(model, model))
    if model not in REGISTRY:
        return components_of(model, function, classes, image_size, patch_size, seed)
    return as_components(model, find.call(model, function, classes, image_size, patch_size))
