"""Files made to harm: a good one with any value in any place."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from hvdtrain.errors import UsageError

Found = TypeVar("Found")

# Numbers that no float holds, and those that become infinite or zero in a product.
EXTREMES = st.sampled_from([10**400, -(10**400), 2**63, 2**64, 1e308, 5e-324, 1e-300])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | EXTREMES | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def understood(read: Callable[[], Found], refusal: type[Exception] = UsageError) -> Found | None:
    """What was read, or None where it was refused, in one short line."""
    try:
        return read()
    except refusal as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 500
        return None


def paths_of(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of a JSON document lies."""
    inner: list[tuple[Any, ...]] = []
    if isinstance(value, dict):
        inner = [found for key in value for found in paths_of(value[key], (*path, key))]
    elif isinstance(value, list):
        inner = [found for i, item in enumerate(value) for found in paths_of(item, (*path, i))]
    return [path, *inner] if path else inner


def changed(good: Any, keys: Sequence[Any], to: object) -> Any:
    """The good document with one value changed."""
    content = copy.deepcopy(good)
    inner: Any = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    return content
