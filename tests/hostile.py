"""Hostile files: a valid document with any value at any place."""

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

from hypothesis import strategies as st

from hvdtrain.errors import UsageError

Result = TypeVar("Result")

# Numbers too large for a float, and numbers that become infinite or zero in a product.
EXTREMES = st.sampled_from([10**400, -(10**400), 2**63, 2**64, 1e308, 5e-324, 1e-300])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | EXTREMES | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def understood(read: Callable[[], Result], refusal: type[Exception] = UsageError) -> Result | None:
    """Return the result of `read`, or None if it refused the file with one short line."""
    try:
        return read()
    except refusal as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 500
        return None


def paths_of(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a JSON document."""
    inner: list[tuple[Any, ...]] = []
    if isinstance(value, dict):
        inner = [place for key in value for place in paths_of(value[key], (*path, key))]
    elif isinstance(value, list):
        inner = [place for i, item in enumerate(value) for place in paths_of(item, (*path, i))]
    return [path, *inner] if path else inner


def changed(good: Any, keys: Sequence[Any], to: object) -> Any:
    """Return the good document with one value changed."""
    content = copy.deepcopy(good)
    inner: Any = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    return content


@contextmanager
def fifo(path: Path) -> Iterator[Path]:
    """Make a FIFO for which a reader waits; a writer ends the wait of each reader."""
    ended = Event()

    def write() -> None:
        while not ended.wait(0.02):  # the pause in which a reader sees the end
            os.close(os.open(path, os.O_WRONLY))

    os.mkfifo(path)
    writer = Thread(target=write, daemon=True)
    writer.start()
    try:
        yield path
    finally:
        ended.set()
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # ends the wait of the writer
        writer.join()
        os.close(reader)
