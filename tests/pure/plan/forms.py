"""Schedules as text, one line per rank: `0: 0LOAD0 0F0 0B0`."""

import re

from hvdtrain.plan.cut import Action, Schedule


def to_text(schedule: Schedule) -> str:
    """Return a schedule as text."""
    lines = (f"{rank}: {' '.join(map(str, schedule[rank]))}".rstrip() for rank in sorted(schedule))
    return "".join(f"{line}\n" for line in lines)


def from_text(text: str) -> Schedule:
    """Return the schedule in a text, whose empty lines do not count."""
    schedule: Schedule = {}
    for line in filter(str.strip, text.splitlines()):
        rank, _, actions = line.partition(":")
        schedule[int(rank)] = [_action(word) for word in actions.split()]
    return schedule


def from_csv(text: str) -> Schedule:
    """Return the schedule in the output of `to_csv`."""
    rows = (row.partition(",") for row in text.splitlines())
    return {
        int(rank): [_action(cell) for cell in cells.split(",") if cell] for rank, _, cells in rows
    }


def _action(text: str) -> Action:
    match = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)?", text)
    assert match, text
    return Action(int(match[1]), match[2], None if match[3] is None else int(match[3]))
