#!/usr/bin/env python
"""Draw the simulated step of a pipeline under each schedule, below each other in one SVG.

    python tools/schedule_picture.py docs/explanation/schedules.svg

docs/explanation/plans.md shows the picture. The times are those of `hvdtrain plan show --trace`.
"""

import json
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

PLAN = "hvdtrain plan show --model resnet18 --plan mp --ranks 3 --microbatches 6"
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
ACTION = re.compile(r"\d+([FBIW])(\d+)")
KINDS = {
    "F": ("forward", "#7db4e6"),
    "B": ("backward", "#f0a35e"),
    "I": ("backward, input half", "#f4c08f"),
    "W": ("backward, weight half", "#8fc98f"),
}
LEFT, WIDTH, ROW, GAP = 64, 560, 24, 40  # pixels
SIZE = 'width="{width}" viewBox="0 0 {width} {height}"'
STYLE = "<style>text { font: 13px sans-serif; fill: #222 } .n { text-anchor: middle }</style>\n"


def events(schedule: str) -> list[dict[str, Any]]:
    """Return the forwards and backwards of a simulated step, as events of a Chrome trace."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        command = [*PLAN.split(), "--schedule", schedule, "--trace", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        trace = json.loads(file.read_text())["traceEvents"]
    return [
        event
        for event in trace
        if event.get("cat") == "compute" and ACTION.fullmatch(event["name"])
    ]


def box(x: float, y: float, width: float, color: str, text: str) -> str:
    """Return a coloured box with a text in its middle."""
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 4}" fill="{color}"'
        f' stroke="white"/><text class="n" x="{x + width / 2:.1f}" y="{y + 15}">{text}</text>\n'
    )


def timeline(schedule: str, step: list[dict[str, Any]], top: int, scale: float) -> str:
    """Return the lines of all ranks under one schedule."""
    text = f'<text x="4" y="{top - 8}">{escape(schedule)}</text>\n'
    for rank in sorted({event["tid"] for event in step}):
        text += f'<text x="4" y="{top + rank * ROW + 15}">rank {rank}</text>\n'
    for event in step:
        match = ACTION.fullmatch(event["name"])
        assert match is not None
        x, y = LEFT + event["ts"] * scale, top + event["tid"] * ROW
        text += box(x, y, event["dur"] * scale, KINDS[match[1]][1], match[2])
    return text


def picture() -> str:
    """Return the SVG: a timeline per schedule on the same scale of time, and a legend."""
    steps = {schedule: events(schedule) for schedule in SCHEDULES}
    longest = max(event["ts"] + event["dur"] for step in steps.values() for event in step)
    top, body = GAP, ""
    for schedule, step in steps.items():
        body += timeline(schedule, step, top, WIDTH / longest)
        top += ROW * (1 + max(event["tid"] for event in step)) + GAP
    for number, (name, color) in enumerate(KINDS.values()):
        x, y = LEFT + 240 * (number % 2), top - 16 + ROW * (number // 2)
        body += box(x, y, 20, color, "") + f'<text x="{x + 28}" y="{y + 15}">{name}</text>\n'
    size = SIZE.format(width=LEFT + WIDTH + 4, height=top + 16 + ROW)
    ground = '<rect width="100%" height="100%" fill="white"/>\n'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{STYLE}{ground}{body}</svg>\n'


def main() -> None:
    """Write the picture to the file that the command line names."""
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/schedule_picture.py FILE")
    Path(sys.argv[1]).write_text(picture())


if __name__ == "__main__":
    main()
