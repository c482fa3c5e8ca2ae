"""`hvdtrain --print-completion SHELL`: the script that completes commands and options."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from jsonargparse import ArgumentParser

from hvdtrain.errors import UsageError
from hvdtrain.options import helptext
from hvdtrain.options.parser import SwitchOff

SHELLS = ("bash", "zsh")
# The metavars that are completed as paths, with shtab's name for the kind of path.
FILES = {"FILE": "FILE", "SRC": "FILE", "STUDY": "FILE"}
PATHS = FILES | {"DIR": "DIRECTORY", "DEST": "DIRECTORY", "RUN": "DIRECTORY"}


class PrintCompletion(argparse.Action):
    """Prints the script of a shell, and ends the process."""

    def __call__(self, parser: Any, namespace: Any, shell: Any, *ignored: Any) -> None:
        """Print the script and exit."""
        print(script(parser, shell))
        sys.exit()  # jsonargparse's parser cannot be used after this


def script(parser: ArgumentParser, shell: str) -> str:
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
        elif helptext.is_switch(action):
            if action.metavar:  # there are values besides true and false
                action.choices = str(action.metavar).split("|")
            else:
                action.nargs = 0  # else the next word would be completed as its value
    text: str = parser.get_completion_script(f"shtab-{shell}")
    return text


def _actions(parser: ArgumentParser) -> Iterator[argparse.Action]:
    yield from parser._actions
    for command in helptext.subcommands(parser).values():
        yield from _actions(command)
