#!/usr/bin/env python
"""Run commands in an empty folder and draw them and their output as a terminal, in SVG.

    python tools/terminal_picture.py docs/terminal.svg

README.md shows the picture. Without arguments after the file, the commands are those of README's
picture: a verified run in which a rank is killed, and its resumption on another number of ranks.
"""

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 112
COMMANDS = (
    "hvdtrain data synth data/synthetic --images 4000 --classes 10",
    "hvdtrain train --model cnn --data data/synthetic --ranks 2 --epochs 2 --run runs/first "
    '--verify --inject "kill step=90 rank=1"',
    "hvdtrain train --model cnn --data data/synthetic --ranks 3 --epochs 2 --run runs/first "
    "--resume",
)
# Fonts of the reader's machine: the picture loads nothing from a network.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def picture(commands: list[str]) -> str:
    """Return the SVG of a terminal in which the commands ran, one after the other."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), legacy_windows=False)
    with tempfile.TemporaryDirectory() as folder:
        for command in commands:
            console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
            done = subprocess.run(
                command,
                shell=True,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            console.print(Text(done.stdout.replace(folder, "~").rstrip()))
    return console.export_svg(title="hvdtrain", code_format=SVG, unique_id="terminal")


def main(arguments: list[str]) -> None:
    """Write the picture to the file that is the first argument."""
    if not arguments:
        sys.exit("usage: python tools/terminal_picture.py FILE [COMMAND...]")
    file, *commands = arguments
    Path(file).write_text(picture(commands or list(COMMANDS)))


if __name__ == "__main__":
    main(sys.argv[1:])
