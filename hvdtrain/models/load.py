"""Check what a model's function returned."""

from hvdtrain.errors import UsageError
from hvdtrain.models.component import Component, check_names


def as_components(model: str, made: object) -> list[Component]:
    """Check what a model's function returned: Components or (name, build) pairs, well named."""
    wanted = "it must return a list of Component(name, build)"
    if not isinstance(made, list | tuple):
        raise UsageError(f"model {model!r} returned a {type(made).__name__}: {wanted}")
    if not made:
        raise UsageError(f"model {model!r} returned no component: {wanted}")
    found = []
    try:
        for item in made:
            if isinstance(item, tuple) and len(item) == 2:
                found.append(Component(*item))
            elif isinstance(item, Component):
                found.append(item)
            else:
                raise UsageError(f"its list holds a {type(item).__name__}: {wanted}")
        check_names(found)
    except UsageError as error:
        raise UsageError(f"model {model!r}: {error}") from error
    return found
