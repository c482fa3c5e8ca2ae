"""Help pages, with options under headings and their defaults, and shell completion."""

import shutil
import sys
import textwrap
from argparse import SUPPRESS, Action, HelpFormatter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from hvdtrain.errors import UsageError

NARROWEST, WIDEST = 40, 100  # columns
OPTION_COLUMNS = 30  # columns for the names of options
SHELLS = ("bash", "zsh")
# The metavars that are completed as paths, with shtab's name for the kind of path.
FILES = {"FILE": "FILE", "SRC": "FILE", "STUDY": "FILE"}
PATHS = FILES | {"DIR": "DIRECTORY", "DEST": "DIRECTORY", "RUN": "DIRECTORY"}


class Formatter(DefaultHelpFormatter):
    """A formatter that shows required options in the usage, and no types or empty defaults."""

    def __init__(self, prog: str, **settings: Any) -> None:
        columns = {"max_help_position": OPTION_COLUMNS, "width": width()}
        super().__init__(prog, **columns | settings)

    def _format_usage(
        self, usage: str | None, actions: Iterable[Action], groups: Any, prefix: str | None
    ) -> str:
        words = [f"{'usage: ' if prefix is None else prefix}{as_typed(self._prog)}"]
        for action in actions:
            if action.required or not action.option_strings:
                values = self._format_args(action, _metavar(action))
                words.append(" ".join([*action.option_strings[:1], values]))
        return " ".join([*words, "[options]"]) + "\n\n"

    def _format_action_invocation(self, action: Action) -> str:
        if is_switch(action):
            value = f" [{action.metavar}]" if action.metavar else ""
            name = action.option_strings[0]
            return f"{name}{value}, --no-{name.removeprefix('--')}"
        return super()._format_action_invocation(action)

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        if action.required and action.option_strings:
            return f"{text} (required)"
        has_none = action.default in (None, [], SUPPRESS) or action.default is False
        if has_none or "(default: " in text:
            return text
        return f"{text} (default: %(default)s)"

    def _get_default_metavar_for_positional(self, action: Action) -> str:
        return _metavar(action)


def is_switch(action: Action) -> bool:
    """Return whether an option may be used without a value, and with `--no-` before its name."""
    return action.const is True and action.nargs == "?"


class SwitchOff(Action):
    """Sets a boolean option to False."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(nargs=0, **settings)

    def __call__(self, parser: Any, namespace: Any, *ignored: Any) -> None:
        """Set the option to False."""
        setattr(namespace, self.dest, False)


def metavar(kind: object) -> str | None:
    """Return the placeholder for a value of a type; None if the type does not imply one."""
    options = [option for option in get_args(kind) if option is not type(None)] or [kind]
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, options))}}}"
    if len(options) == 1 and options[0] is not kind:
        return metavar(options[0])
    return {int: "N", float: "X"}.get(options[0])


def as_typed(prog: str) -> str:
    """Return the words of a command, which jsonargparse writes with [options] between them."""
    return prog.replace(" [options]", "")


def subcommands(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    """Return the commands of a command by name; empty if it has none."""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            return dict(action.choices)
    return {}


def overview(parser: ArgumentParser) -> str:
    """Return the help page of a command that has commands, with one line per command."""
    commands = dict(_leaves(parser))
    program = as_typed(parser.prog or "")
    return "\n".join(
        [
            f"usage: {program} COMMAND [options]\n\n{parser.description}\n\ncommands:",
            *_table([(name, _first_sentence(leaf)) for name, leaf in commands.items()]),
            "\noptions:",
            *_table(_options(parser)),
            f"\n`{program} COMMAND --help` lists the options of a command.\n",
        ]
    )


def width() -> int:
    """Return the width of a help page in columns."""
    return max(NARROWEST, min(shutil.get_terminal_size().columns - 2, WIDEST))


def _metavar(action: Action) -> str:
    return str(action.metavar or action.dest.upper())


def _leaves(parser: ArgumentParser, before: str = "") -> Iterator[tuple[str, ArgumentParser]]:
    for name, command in subcommands(parser).items():
        if subcommands(command):
            yield from _leaves(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _first_sentence(parser: ArgumentParser) -> str:
    return (parser.description or "").partition(". ")[0].removesuffix(".")


def _options(parser: ArgumentParser) -> list[tuple[str, str]]:
    formatter = HelpFormatter("")
    actions = [action for action in parser._actions if action.option_strings]
    shown = [action for action in actions if action.help != SUPPRESS]
    return [(formatter._format_action_invocation(action), action.help or "") for action in shown]


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    column = max(len(name) for name, _ in rows) + 4
    return [
        textwrap.fill(f"  {name:<{column - 2}}{text}", width(), subsequent_indent=" " * column)
        for name, text in rows
    ]


class PrintCompletion(Action):
    """Prints the script of a shell, and ends the process."""

    def __call__(self, parser: Any, namespace: Any, shell: Any, *ignored: Any) -> None:
        """Print the script and exit."""
        print(completion_script(parser, shell))
        sys.exit()  # jsonargparse's parser cannot be used after this


def completion_script(parser: ArgumentParser, shell: str) -> str:
    """Return the script with which a shell completes the words after `hvdtrain`.

    The parser cannot be used after this call.

    Raises:
        UsageError: if shtab, which writes the script, is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise UsageError("--print-completion needs shtab: pip install shtab") from None
    for action in _actions(parser):
        if action.metavar in PATHS:
            action.complete = getattr(shtab, PATHS[action.metavar])  # type: ignore[attr-defined]
        elif isinstance(action, SwitchOff):
            action.help = ""  # shtab leaves out options without help
        elif is_switch(action):
            if action.metavar:  # there are values besides true and false
                action.choices = str(action.metavar).split("|")
            else:
                action.nargs = 0  # else the next word would be completed as its value
    text: str = parser.get_completion_script(f"shtab-{shell}")
    return text


def _actions(parser: ArgumentParser) -> Iterator[Action]:
    yield from parser._actions
    for command in subcommands(parser).values():
        yield from _actions(command)
