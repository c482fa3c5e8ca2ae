"""Write the parts of the documentation that have another source.

    python tools/reference_pages.py            (writes the pages)
    python tools/reference_pages.py --check    (exits with 1 if a page is not up to date)

docs/reference/commands.md and options.md are written from the program's own parser, claims.md from
the marks `proves` of tests and the names PROVES of benchmarks, and the tables
of figures in README.md and docs/benchmarks.md from docs/figures.yml and docs/compared.yml.
"""

import argparse
import ast
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from jsonargparse import ArgumentParser

from hvdtrain import cli
from hvdtrain.cli import COMMANDS
from hvdtrain.config import TrainConfig
from hvdtrain.options.parser import Parser, add_config, add_dataclass, subcommands
from hvdtrain.options.sections import flag

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures.yml"
COMPARED = ROOT / "docs" / "compared.yml"  # written by `python -m benchmarks --write`
TABLE = re.compile(
    r"(<!-- figures: ([\w-]+)([ \d]*) -->\n).*?(?=<!-- end of figures -->)", re.DOTALL
)
COLUMNS = 80  # width of the help pages

ABOUT_COMMANDS = """\
# Commands

Find here every command of `hvdtrain`, with the output of `hvdtrain COMMAND --help`, or of
`--help-all` where there is one.

<!-- Written by tools/reference_pages.py: change the program's help texts, and run it again. -->

`python -m hvdtrain` is the same program. `hvdtrain` alone lists the commands, and `hvdtrain train
--help` lists the options of a first run, `--help-all` all by subject. [Options of
train](options.md) has them as a table. [Exit codes](exit-codes.md) explains how a command ends.

## Completion in the shell

Put this line into `~/.bashrc`. Bash then completes commands, options, the values of options, and
the names of files:

<!-- not run: it belongs in the start-up file of an interactive shell -->
```bash
source <(hvdtrain --print-completion bash)
```

`hvdtrain --print-completion zsh` prints the script for zsh. Not tested: zsh.
"""

ABOUT_CLAIMS = """\
# What proves what

Find here each claim of README and of this site, and the test or the benchmark that shows it.

<!-- Written by tools/reference_pages.py from the tests: change a mark there, and run it again. -->

| claim | shown by |
|---|---|
"""

ABOUT_OPTIONS = """\
# Options of train

Look up here what each option of `hvdtrain train` does, and its default.

<!-- Written by tools/reference_pages.py: change hvdtrain/config.py, and run it again. -->

Each option is also a key of a YAML file, with `_` for `-`: see
[Keep settings in a file](../how-to/settings.md). An option with `--no-` in front of its name can
also be written `--option=true` or `--option=false`. `hvdtrain train --help-all` prints the same
options [by subject](commands.md#hvdtrain-train), and
[`TrainConfig`](python.md) has them as fields.

| option | default | |
|---|---|---|
"""


def main() -> None:
    """Write the pages, or exit with 1 if one is not up to date."""
    if parse_arguments().check:
        sys.exit(bool(outdated(ROOT, pages())))
    for name, text in pages().items():
        (ROOT / name).write_text(text)


def pages() -> dict[str, str]:
    """Return the text of each page by its path from the root of the repository."""
    tables = figure_tables()
    return {
        "docs/reference/commands.md": commands_page(),
        "docs/reference/options.md": options_page(),
        "docs/reference/claims.md": claims_page(),
        "docs/benchmarks.md": with_figures(ROOT / "docs" / "benchmarks.md", tables),
        "README.md": with_figures(ROOT / "README.md", tables),
    }


def figure_tables() -> dict[str, Any]:
    """Return all tables of figures by name."""
    return {
        name: table
        for file in (FIGURES, COMPARED)
        for name, table in (yaml.safe_load(file.read_text()) or {}).items()
    }


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line; `--help` prints this module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare the pages")
    return parser.parse_args()


def outdated(folder: Path, texts: dict[str, str]) -> list[str]:
    """Print and return the pages of a folder that differ from these texts, or are missing."""
    names = []
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            reason = "is not up to date: run python tools/reference_pages.py"
            print(f"{path} {reason}", file=sys.stderr)
            names.append(name)
    return names


def commands_page() -> str:
    """Return the page of commands: a heading and the help page of each."""
    program = cli._parser()
    with eighty_columns():
        parts = [section("All commands", program.format_help())]
        for command in COMMANDS:
            parser: ArgumentParser = program
            for word in command.split():
                parser = subcommands(parser)[word]
            parts.append(section(f"hvdtrain {command}", parser.format_help()))
    return "\n".join([ABOUT_COMMANDS, *parts])


def section(heading: str, help_page: str) -> str:
    """Return a heading with the help page below it."""
    return f"## {heading}\n\n```text\n{help_page}```\n"


@contextlib.contextmanager
def eighty_columns() -> Iterator[None]:
    """Print as on a terminal of `COLUMNS` columns without colours, wherever this runs."""
    plain = {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "PYTHON_COLORS": "0", "TERM": "dumb"}
    with mock.patch.dict(os.environ, plain):
        os.environ.pop("FORCE_COLOR", None)
        yield


def claims_page() -> str:
    """Return the page of claims, each with the test or benchmark that shows it."""
    claims = {
        claim: place
        for folder in ("tests", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for claim, place in claims_of(path.read_text(), str(path.relative_to(ROOT)))
    }
    return ABOUT_CLAIMS + "".join(f"| {text} | `{claims[text]}` |\n" for text in sorted(claims))


def claims_of(source: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield each claim that a file marks, and the name of what shows it."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PROVES":
            yield ast.literal_eval(node.value), path
        elif isinstance(node, ast.FunctionDef):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.proves":
                    yield ast.literal_eval(call.args[0]), f"{path}::{node.name}"


def options_page() -> str:
    """Return the page of the options of `hvdtrain train`."""
    return ABOUT_OPTIONS + "".join(f"{row}\n" for row in [config_row(), *option_rows()])


def config_row() -> str:
    """Return the row of `--config`, which is not a field of a run."""
    parser = Parser()
    add_config(parser)
    (action,) = [action for action in parser._actions if "--config" in action.option_strings]
    return f"| `--config {action.metavar}` |  | {action.help} |"


def option_rows() -> list[str]:
    """Return the rows of all fields of a run: the name as in the help, the default, the text."""
    parser = Parser()
    add_dataclass(parser, TrainConfig)
    with eighty_columns():
        text = parser.format_help()
    names = re.findall(r"^  (--.*?)(?:  .*)?$", text, flags=re.MULTILINE)
    typed = {words.split()[0].rstrip(","): words for words in names}
    rows = []
    for field in dataclasses.fields(TrainConfig):
        default = f"`{field.default}`"
        if field.default is dataclasses.MISSING:
            default = "required"
        elif field.default is None or field.default is False:
            default = field.metadata["default"]
        rows.append(f"| `{typed[flag(field.name)]}` | {default} | {field.metadata['help']} |")
    return rows


def with_figures(page: Path, tables: dict[str, Any]) -> str:
    """Return the text of a page with the tables of figures that its comments name."""

    def filled(match: re.Match[str]) -> str:
        start, name, numbers = match.groups()
        return f"{start}\n{figures(tables[name], [int(number) for number in numbers.split()])}\n"

    return TABLE.sub(filled, page.read_text())


def figures(table: dict[str, Any], numbers: Sequence[int] = ()) -> str:
    """Return a table of figures with its command and date, or its rows of these numbers alone."""
    rows = [table["rows"][number - 1] for number in numbers] or table["rows"]
    lines = [table["columns"], ["---"] * len(table["columns"]), *rows]
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    if numbers:
        return text
    return f"{text}\nCommand: {table['command']}, {table['date']}. Spread: {table['spread']}.\n"


if __name__ == "__main__":
    main()
