"""Checks of users' YAML and JSON before a parser, or arithmetic, that they could harm.

And CSV that harms no spreadsheet.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError, on_one_line

LARGEST = 2**16  # bytes
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
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UsageError(f"{path} is not a configuration: it is larger than {LARGEST:,} bytes")
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
        content = yaml.safe_load(text)
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
