"""The components of a user's model: a function, a list of components, or a module."""

from functools import partial

from torch import nn

from hvdtrain.models import find
from hvdtrain.models.component import Component, as_components, component_seed, isolated
from hvdtrain.models.ready import built_whole, whole


def components_of(
    name: str,
    model: object,
    classes: int,
    image_size: int,
    patch_size: int | None,
    seed: int,
) -> list[Component]:
    """Return the components of a user's model, whatever kind it is.

    Args:
        name: of the model, for errors.
        model: a function of (classes, image_size), a list of components, or a module.
        classes, image_size, patch_size: as in `models.components`.
        seed: of the random numbers that a function draws outside of the build functions.

    Raises:
        UsageError: if the function fails, or its result is no model.
    """
    if isinstance(model, nn.Module):
        find.refuse_patches(name, patch_size)
        return whole(model)
    if not callable(model):
        find.refuse_patches(name, patch_size)
        return as_components(name, model)
    build = partial(find.call, name, model, classes, image_size, patch_size)
    # A function may build modules at once, as the argument of `cut`: all ranks draw the same.
    with isolated(component_seed(seed, name), "cpu"):
        returned = build()
    if isinstance(returned, nn.Module):
        return built_whole(build)
    return as_components(name, returned)
