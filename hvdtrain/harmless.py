"""YAML files of users, looked at before a parser that they could harm."""

from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError

LARGEST = 2**16  # bytes
DEEPEST = 4


def read_text(path: Path) -> str:
    """The text of a YAML file that can do no harm to the parser.

    A deep nesting ends the process in the C parser, and aliases of aliases fill the memory.

    Raises:
        UsageError: if it is too large, too deep, or has aliases; if it cannot be read.
    """
    import yaml

    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UsageError(f"{path} is no configuration: it is larger than {LARGEST:,} bytes")
        text = content.decode()
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST or isinstance(event, yaml.AliasEvent):
                raise UsageError(f"{path} is no configuration: expected lines of 'key: value'")
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} cannot be read as YAML: {reason}") from None
    return text


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The keys and values of such a file.

    Args:
        what: the file should hold, for an error.

    Raises:
        UsageError: as `read_text`, or if it holds something else.
    """
    import yaml

    try:
        content = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, ValueError) as error:  # such as a date that no calendar has
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} cannot be read as YAML: {reason}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds no {what}: expected lines of 'key: value'")
    return content
