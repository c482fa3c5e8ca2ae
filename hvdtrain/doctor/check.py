"""Results of checks, and their output on a terminal, as plain lines and as JSON."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from hvdtrain.host import output

State = Literal["ok", "note", "fault"]
COLOURS: dict[State, str] = {"ok": "green", "note": "yellow", "fault": "bold red"}


@dataclass(frozen=True)
class Check:
    """One result: the subject of the check, its state, the finding, and the fix (`cure`)."""

    name: str
    state: State
    text: str
    cure: str = ""


# Commands by launcher and number of ranks; the options of `train` must be appended.
LaunchLines = Mapping[str, Mapping[int, str]]


def is_fit(checks: Sequence[Check]) -> bool:
    """Return True if no check found a fault; notes do not count."""
    return all(check.state != "fault" for check in checks)


def verdict(checks: Sequence[Check], lines: LaunchLines) -> str:
    """Return one sentence about what this machine can do."""
    faults = [check.name for check in checks if check.state == "fault"]
    if not faults:
        return "This machine is fit for training on one rank and on several."
    summary = f"{len(faults)} fault{'s' if len(faults) > 1 else ''} ({', '.join(faults)})."
    if set(faults) & {"Python", "PyTorch", "NumPy", "h5py"}:
        return f"{summary} Training does not work until this is fixed."
    if lines:
        return f"{summary} Training works with the lines above."
    return f"{summary} Training on one rank works: hvdtrain train without --ranks."


def report_as_json(checks: Sequence[Check], lines: LaunchLines) -> str:
    """Return the report of `doctor --json`."""
    report = {
        "checks": [asdict(check) for check in checks],
        "fit": is_fit(checks),
        "launch_lines": lines,
    }
    return json.dumps(report, indent=1)


def report_as_text(checks: Sequence[Check], lines: LaunchLines, closing: str | None = None) -> str:
    """Return the report in plain lines; its last line is `closing`, by default the verdict."""
    width = max(len(check.name) for check in checks)
    rows = []
    for check in checks:
        rows.append(f"{check.state:5}  {check.name:{width}}  {check.text}")
        if check.cure:
            rows.append(f"{'':5}  {'':{width}}  fix: {check.cure}")
    return "\n".join([*rows, "", *_launch_rows(lines), closing or verdict(checks, lines)])


def show(checks: Sequence[Check], lines: LaunchLines, closing: str | None = None) -> None:
    """Print the report: in columns and colours on a terminal, in plain lines otherwise."""
    if not sys.stdout.isatty():
        print(report_as_text(checks, lines, closing))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for check in checks:
        table.add_row(Text(check.state, COLOURS[check.state]), Text(check.name), Text(check.text))
        if check.cure:
            table.add_row("", "", Text(f"fix: {check.cure}", "cyan"))
    console = output.console()
    console.print(table)
    # Printed without wrapping, so that the lines can be copied.
    print("", *_launch_rows(lines), sep="\n")
    console.print(Text(closing or verdict(checks, lines), "bold"))


def _launch_rows(lines: LaunchLines) -> list[str]:
    commands = [command for by_ranks in lines.values() for command in by_ranks.values()]
    if not commands:
        return []
    examples = [f"  {command} --model cnn --data DIR" for command in commands]
    return ["Commands that start ranks on this machine (all were just tried):", *examples, ""]
