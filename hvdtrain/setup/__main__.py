"""`python -m hvdtrain.setup`: the set-up for an environment in which nothing else is installed.

It takes the options of `hvdtrain setup`, and `--build-only`.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from hvdtrain.errors import HvdtrainError
from hvdtrain.options.sections import flag
from hvdtrain.setup import run
from hvdtrain.setup.run import ABOUT, SetupOptions


def parser() -> argparse.ArgumentParser:
    """Return a parser made of the fields of SetupOptions."""
    made = argparse.ArgumentParser(prog="python -m hvdtrain.setup", description=ABOUT)
    hints = get_type_hints(SetupOptions)
    for item in dataclasses.fields(SetupOptions):
        text, default = item.metadata["help"], item.metadata["default"]
        text = text.replace("%", "%%") + (f" (default: {default})" if default else "")
        settings: dict[str, Any] = {"default": item.default, "help": text}
        if hints[item.name] is bool:
            settings["action"] = "store_false" if item.default else "store_true"
            name = f"--no-{item.name}" if item.default else f"--{item.name}"
            made.add_argument(name, dest=item.name, **settings)
            continue
        choices = [value for kind in get_args(hints[item.name]) for value in get_args(kind)]
        metavar = item.metadata["metavar"] or None
        made.add_argument(flag(item.name), choices=choices or None, metavar=metavar, **settings)
    made.add_argument(
        "--build-only",
        action="store_true",
        help="build Horovod, or find its wheel, print the wheel's path and install nothing",
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    values = vars(parser().parse_args(arguments))
    build_only = values.pop("build_only")
    try:
        options = SetupOptions(**values).check()
        print(run.wheel(options) if build_only else run.set_up(options))
    except HvdtrainError as error:
        print(f"hvdtrain setup: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
