"""A command line parser whose errors are one line with the nearest valid names."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

from jsonargparse import ArgumentParser

from hvdtrain import harmless
from hvdtrain.errors import UsageError

Options = TypeVar("Options")


class Parser(ArgumentParser):
    """jsonargparse's parser, with errors as `UsageError` instead of a usage page and an exit."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_path(self, path: Any, *arguments: Any, **settings: Any) -> Any:
        """As jsonargparse, from a file that can do its parser no harm."""
        text = harmless.read_text(Path(path).expanduser())
        return self.parse_string(text, str(path), *arguments, **settings)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the message in one line, with suggestions where a name is unknown."""
        raise UsageError(explain(message, sorted(_long_options(self)))) from None


def explain(message: str, options: Iterable[str]) -> str:
    """Turn jsonargparse's message into one line; `options` are the valid option names."""
    options = list(options)
    message = " ".join(message.split())
    if match := re.match(r"unrecognized arguments: (\S+)", message, re.IGNORECASE):
        return f"unknown option {match[1]}" + nearest(match[1].partition("=")[0], options)
    if match := re.match(r"(?:Subcommand|Option|Key).*?does not accept option '(.+?)'", message):
        keys = [option.removeprefix("--").replace("-", "_") for option in options]
        return f"unknown key {match[1]}" + nearest(match[1], keys)
    if match := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
        choices = re.findall(r"'(.*?)'", match[2])
        return f"unknown command {match[1]}" + nearest(match[1], choices)
    if match := re.search(r'expected "\S+" to be one of \{(.*?)\}', message):
        return f"a command is missing: one of {match[1].replace(',', ', ')}"
    if match := re.match(r"the following arguments are required: (.*)", message):
        keys = [name.split(".")[-1] for name in match[1].split(", ")]
        needed = [f"--{key}" if f"--{key}" in options else key for key in keys]
        return f"missing: {', '.join(needed)}"
    if match := re.match(r'Parser key "(.*?)": Expected an? (.*)\. Got value: (.*)', message):
        return _wrong_value(match[1].split(".")[-1], match[2], match[3])
    if match := re.match(
        r'Parser key "(.*?)": .*Subtypes: \[(.*?)\] Err.*Given value: (.*)', message
    ):
        return _wrong_value(match[1].split(".")[-1], match[2], match[3])
    return re.sub(r'^Parser key "(?:\S+\.)?(.*?)": ', r"--\1: ", message)


def nearest(name: str, valid: Iterable[str]) -> str:
    """A suggestion to append to an error about an unknown name, empty if `valid` is."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=3, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; valid are {', '.join(valid)}" if valid else ""


def add_dataclass(parser: ArgumentParser, owner: type) -> None:
    """Add one option for each field of a dataclass, its help taken from the metadata."""
    hints = get_type_hints(owner)
    for item in dataclasses.fields(owner):
        flag = "--" + item.name.replace("_", "-")
        text = item.metadata["help"]
        if hints[item.name] is bool:
            parser.add_argument(flag, action="store_true", help=text)
        elif hints[item.name] == list[str]:
            parser.add_argument(flag, type=_Texts(), action="extend", default=[], help=text)
        elif item.default is dataclasses.MISSING:
            parser.add_argument(flag, type=hints[item.name], required=True, help=text)
        else:
            parser.add_argument(flag, type=hints[item.name], default=item.default, help=text)


def part_of(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """The dataclass of these of the parsed values that are its fields."""
    names = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names})


class _Texts:
    """The type of an option that may be repeated: one value, or the list of a file."""

    def __call__(self, value: Any) -> list[str]:
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"must be text, not {value}")
        return texts

    def __repr__(self) -> str:
        return "str"  # in the help


def _long_options(parser: ArgumentParser) -> set[str]:
    """The options of a parser and of its commands, which it may report errors for."""
    found: set[str] = set()
    for action in parser._actions:
        found.update(flag for flag in action.option_strings if flag.startswith("--"))
        if isinstance(action.choices, dict):
            for command in action.choices.values():
                found |= _long_options(command)
    return found - {"--help", "--version", "--print_shtab", "--print_config"}


def _wrong_value(key: str, expected: str, value: Any) -> str:
    flag = f"--{key.replace('_', '-')}"
    literals = re.findall(r"'(.*?)'", expected) if "Literal" in expected else []
    if literals:
        return f"{flag} {value} is not known" + nearest(str(value), literals)
    kind = "a whole number" if "int" in expected else "a number" if "float" in expected else "text"
    return f"{flag} must be {kind}, not {value}"
