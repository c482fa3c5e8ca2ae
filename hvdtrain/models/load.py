"""Check the value that a model's function returned."""

from hvdtrain.errors import UsageError
from hvdtrain.models.component import Component, check_names


def as_components(model: str, returned: object) -> list[Component]:
    """Return the components that a model's function returned.

    Args:
        model: its name, for errors.
        returned: a list of Components or (name, build) pairs.

    Raises:
        UsageError: if it is anything else, or the names are not valid.
    """
    expected = "it must return a list of Component(name, build)"
    if not isinstance(returned, list | tuple):
        raise UsageError(f"model {model!r} returned a {type(returned).__name__}: {expected}")
    if not returned:
        raise UsageError(f"model {model!r} returned no component: {expected}")
    components = []
    try:
        for item in returned:
            if isinstance(item, tuple) and len(item) == 2:
                components.append(Component(*item))
            elif isinstance(item, Component):
                components.append(item)
            else:
                raise UsageError(f"its list holds a {type(item).__name__}: {expected}")
        check_names(components)
    except UsageError as error:
        raise UsageError(f"model {model!r}: {error}") from error
    return components
