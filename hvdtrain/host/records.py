"""Checked reading of the files of users and of runs: YAML, JSON, and records such as `job.json`.

A record may be of another user or version, half-written, or damaged: it is a regular file of
limited size, and a dataclass names its keys and their types. Users' YAML and JSON are checked
before a parser, or arithmetic, that they could harm; CSV is written so that it harms no
spreadsheet.
"""

import csv
import errno
import io
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import IO, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hvdtrain.errors import DataError, UsageError, on_one_line

LARGEST_YAML = 2**16  # bytes
DEEPEST = 4
LARGEST_WHOLE = 2**63  # whole numbers must be below this: NumPy has no integer for larger ones
SIXTIES = r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
OCTAL = r"[-+]?0[0-7_]+"
FORMULA = re.compile(r"[=@\t\r]|[-+](?![\d.]*$)")
MISREAD = re.compile(f"{SIXTIES}|{OCTAL}")


def read_text(path: Path) -> str:
    """Return the text of a YAML file that cannot harm the parser.

    Deep nesting crashes the C parser, and aliases of aliases fill the memory. YAML 1.1 reads
    `1:30:00` as the number 5400 and the account `010` as the number 8, so such values are returned
    in quotes, as text.

    Raises:
        UsageError: if the file is too large, is nested too deeply, has aliases, or cannot be read.
    """
    import yaml

    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_YAML + 1)
        if len(content) > LARGEST_YAML:
            raise UsageError(
                f"{path} is not a configuration: it is larger than {LARGEST_YAML:,} bytes"
            )
        text = content.decode()
        depth = 0
        misread: list[tuple[int, int]] = []
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST or isinstance(event, yaml.AliasEvent):
                raise UsageError(f"{path} is not a configuration: expected lines of 'key: value'")
            if isinstance(event, yaml.ScalarEvent):
                misread += _misread(event)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}: correct the path") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} cannot be read as YAML: {reason}") from None
    for start, end in reversed(misread):
        text = f"{text[:start]}'{text[start:end]}'{text[end:]}"
    return text


def _misread(event: Any) -> list[tuple[int, int]]:
    """Return start and end of a scalar that PyYAML would read as a number of base 60 or 8."""
    is_plain = event.style is None and event.tag is None and event.anchor is None
    is_number = is_plain and MISREAD.fullmatch(event.value)
    return [(event.start_mark.index, event.end_mark.index)] if is_number else []


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Return the keys and values of a YAML file.

    Args:
        what: the expected content of the file, for an error.

    Raises:
        UsageError: as in `read_text`, or if the file holds something else.
    """
    return mapping(read_text(path), path, what)


def mapping(text: str, path: Path, what: str) -> dict[str, Any]:
    """Return the keys and values in a text that `read_text` returned, as `read_mapping` does."""
    import yaml

    try:
        # The C parser: `read_text` has refused what crashes it.
        content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError) as error:  # such as a date that does not exist
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} cannot be read as YAML: {reason}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a {what}: expected lines of 'key: value'")
    try:
        check_numbers(content)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    return content


def parse_json(text: str | bytes) -> Any:
    """Return the content of a JSON text.

    Raises:
        ValueError: if it is not JSON, is nested too deeply, has a key twice, or holds a number
            that `check_numbers` refuses.
    """
    try:
        content = json.loads(text, object_pairs_hook=_without_repetition)
        check_numbers(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return content


def check_numbers(content: Any, key: object = "") -> None:
    """Refuse numbers that are infinite, NaN, or so large that a float cannot hold them.

    Args:
        key: key of the content, for an error.

    Raises:
        ValueError: naming the key.
    """
    if isinstance(content, dict):
        for name, value in content.items():
            check_numbers(name)
            check_numbers(value, name)
    elif isinstance(content, list):
        for value in content:
            check_numbers(value, key)
    elif isinstance(content, float) and not math.isfinite(content):
        raise ValueError(f"{on_one_line(key)} must be a finite number, not {content}")
    elif isinstance(content, int) and not -LARGEST_WHOLE < content < LARGEST_WHOLE:
        raise ValueError(f"{on_one_line(key)} is too large, with {content.bit_length()} bits")


def as_csv(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return rows below their heads as CSV, in which no text is a formula of a spreadsheet."""

    def harmless(cell: Any) -> Any:
        return f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) else cell

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(map(harmless, row) for row in (heads, *rows))
    return text.getvalue()


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the key {on_one_line(name)!r} is given twice")
        content[name] = value
    return content


LARGEST = 16 * 2**20  # bytes of a record
LARGEST_LINES = 2**29  # bytes of a file with a record per line
LARGEST_NUMBER = 1e100  # so that products of a few of them are finite
Kind = TypeVar("Kind")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file to read it: a FIFO would wait; raise OSError for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EISDIR, "it is not a regular file")
        yield file


def content(path: Path, largest: int = LARGEST) -> bytes:
    """Return the content of a regular file; raise OSError also if it is larger than `largest`."""
    with opened(path) as file:
        text = file.read(largest + 1)
    if len(text) > largest:
        raise OSError(errno.EFBIG, f"it is larger than {largest:,} bytes")
    return text


def tail(path: Path, most: int) -> bytes:
    """Return the lines that start in the last `most` bytes of a regular file; raise OSError."""
    with opened(path) as file:
        start = max(0, os.fstat(file.fileno()).st_size - most)
        file.seek(start)
        text = file.read(most)
    return text.partition(b"\n")[2] if start else text


def read(path: Path, kind: type[Kind], advice: str = "restore it") -> Kind | None:
    """Return the record in a JSON file as a dataclass; None if there is no such file.

    Args:
        advice: what to do about a file that is not such a record, for the error.

    Raises:
        DataError: if it cannot be read or is not such a record.
    """
    try:
        return checked(path, lambda: parse(content(path), kind), advice)
    except FileNotFoundError:
        return None


def read_lines(path: Path, parse: Callable[[bytes], Kind], last: int | None = None) -> list[Kind]:
    """Return the records in a file with one per line, but not one that is half-written at its end.

    Args:
        parse: returns the record in a line, or raises ValueError.
        last: number of bytes to read from the end of the file; None for all of it.

    Raises:
        DataError: if the file cannot be read, or a line is not such a record.
    """

    def load() -> list[Kind]:
        if last is not None:
            return parsed(io.BytesIO(tail(path, last)))
        with opened(path) as file:
            if os.fstat(file.fileno()).st_size > LARGEST_LINES:
                raise OSError(errno.EFBIG, f"it is larger than {LARGEST_LINES:,} bytes")
            return parsed(file)

    def parsed(file: IO[bytes]) -> list[Kind]:
        records = []
        for line in filter(bytes.strip, file):
            with nullcontext() if line.endswith(b"\n") else suppress(ValueError):
                records.append(parse(line))
        return records

    try:
        return checked(path, load)
    except FileNotFoundError:
        return []


def checked(path: Path, load: Callable[[], Kind], advice: str = "restore it") -> Kind:
    """Return what `load` reads from a file.

    Raises:
        FileNotFoundError: as `load` does.
        DataError: for its other OSErrors, and its ValueErrors.
    """
    try:
        return load()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {advice}") from None
    except ValueError as error:
        raise DataError(f"{path} is not valid ({on_one_line(error, 300)}): {advice}") from None


def parse(text: str | bytes, kind: type[Kind]) -> Kind:
    """Return a JSON text as a dataclass; NaN and infinities count as null.

    Raises:
        ValueError: if it is not JSON, or holds something else.
    """
    try:
        record: Kind = build(kind, json.loads(text, parse_constant=lambda name: None))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return record


def build(kind: Any, value: Any, name: str = "it") -> Any:
    """Return a value of JSON or YAML as a type, such as that of a dataclass's field.

    Keys that a dataclass has not are of another version and are left out; so are the values of a
    Literal.

    Args:
        name: key of the value, for an error.

    Raises:
        ValueError: naming the key, if the value is of another type, or too large.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or (origin is Literal and type(value) in map(type, inner)):
        return value
    if origin in (Union, UnionType):
        for one in inner:
            with suppress(ValueError):
                return build(one, value, name)
    elif origin in (tuple, list) and isinstance(value, list):
        return origin(build(inner[0], item, name) for item in value)
    elif origin is dict and isinstance(value, dict):
        return {key: build(inner[1], item, key) for key, item in value.items()}
    elif is_dataclass(kind) and isinstance(value, dict):
        return _object(kind, value)
    elif kind is float and type(value) in (int, float) and abs(value) < LARGEST_NUMBER:
        return float(value)
    elif kind is type(value) and not (kind is int and abs(value) >= LARGEST_WHOLE):
        return value
    seen = f"a {type(value).__name__}" if isinstance(value, list | dict) else repr(value)
    raise ValueError(f"{on_one_line(name)} cannot be {on_one_line(seen)}")


def _object(kind: Any, value: Mapping[str, Any]) -> Any:
    hints, required = _keys(kind)
    if missing := required - value.keys():
        raise ValueError(f"{min(missing)} is missing")
    return kind(**{name: build(hints[name], value[name], name) for name in hints if name in value})


@cache
def _keys(kind: Any) -> tuple[dict[str, Any], set[str]]:
    """Return the types of the fields of a dataclass, and the names of those without a default."""
    hints = get_type_hints(kind)
    needed = {f.name for f in fields(kind) if f.default is f.default_factory is MISSING}
    return {item.name: hints[item.name] for item in fields(kind)}, needed
