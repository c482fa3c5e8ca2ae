"""The table of `jobs status`."""

import io
import shutil
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hvdtrain.jobs.watch import Row

COLUMNS = ("run", "job", "state", "nodes", "elapsed", "epoch", "step", "accuracy", "images/s")


def as_text(rows: Sequence[Row]) -> str:
    """Return a table as wide as the terminal, followed by the last messages of failed jobs."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (*COLUMNS, "last heartbeat"):
        is_text = name in ("run", "job", "state", "nodes")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(
            *(row.run, row.job, row.state, row.nodes, row.elapsed),
            *(_known(row.epoch), _known(row.step, ","), _known(row.accuracy, ".4f")),
            *(_known(row.images_per_second, ",.0f"), _ago(row.heartbeat_seconds)),
        )
    text = io.StringIO()
    width = max(shutil.get_terminal_size((160, 24)).columns, 100)
    Console(file=text, width=width, highlight=False).print(table)
    notes = [f"{row.run}: {row.note}" for row in rows if row.note]
    return "\n".join([*(line.rstrip() for line in text.getvalue().splitlines()), *notes])


def _known(value: Any, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
