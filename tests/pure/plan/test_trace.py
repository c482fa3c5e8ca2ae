"""Events as text, and as a Chrome trace."""

import json
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.plan import schedule
from hvdtrain.plan.cut import Action, cut
from hvdtrain.plan.simulate import simulate, unit_costs
from hvdtrain.plan.trace import Event, chrome_trace, draw, write_trace
from tests.pure.parallel.plans import a_pipeline

# Measured times: the clock does not start at 0.
EVENTS = [
    Event(1, Action(1, "F", 0), 100.5, 101.0, "compute"),
    Event(0, Action(0, "F", 0), 100.0, 100.25, "compute"),
    Event(0, Action(0, "SEND_F", 0), 100.25, 100.375, "communication"),
    Event(0, Action(0, "REDUCE"), 100.375, 100.375, "communication"),
    Event(0, Action(0, "STEP"), 100.375, 101.0, "wait"),
    Event(0, Action(0, "STEP"), 101.0, 102.0, "compute"),
]


def test_a_chrome_trace_has_a_named_thread_a_rank_and_microseconds_from_the_start() -> None:
    made = chrome_trace(EVENTS)["traceEvents"]
    assert made[:2] == [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
        {
            "name": "thread_name",
            "ph": "M",
            "pid": 0,
            "tid": 1,
            "args": {"name": "rank 1"},
        },
    ]
    assert [(e["name"], e["cat"], e["tid"], e["ts"], e["dur"]) for e in made[2:]] == [
        ("0F0", "compute", 0, 0, 250_000),
        ("0SEND_F0", "communication", 0, 250_000, 125_000),
        ("0REDUCE", "communication", 0, 375_000, 0),
        ("0STEP", "wait", 0, 375_000, 625_000),
        ("0STEP", "compute", 0, 1_000_000, 1_000_000),
        ("1F0", "compute", 1, 500_000, 500_000),
    ]
    assert {(e["ph"], e["pid"]) for e in made[2:]} == {("X", 0)}
    assert made[2]["args"] == {"stage": 0, "microbatch": 0}
    assert made[4]["args"] == {"stage": 0, "microbatch": None}


def test_a_trace_file_is_json_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, EVENTS)
    assert json.loads(path.read_text()) == chrome_trace(EVENTS)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match=r"trace .*b\.json cannot be written: No such file"):
        write_trace(tmp_path / "absent" / "b.json", EVENTS)
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        write_trace(path / "c.json", EVENTS)


def test_a_picture_shows_what_each_rank_computes_in_each_slice_of_time() -> None:
    assert draw(EVENTS, (0, 1), width=8).splitlines() == [
        "0 0...----",
        "1 ..00....",
        "0-9: forward, a-z: backward or its input half, A-Z: weight half; -: other work, "
        ".: idle; a character is 0.25 s",
    ]


def test_micro_batches_beyond_the_signs_begin_again() -> None:
    kinds = [("F", 11), ("B", 27), ("W", 53), ("I", 25)]
    events = [
        Event(0, Action(1, kind, k), i, i + 1, "compute") for i, (kind, k) in enumerate(kinds)
    ]
    assert draw(events, (0, 10), width=4).splitlines()[:2] == [" 0 1bBz", "10 ...."]


def test_nothing_is_drawn_as_idle() -> None:
    assert draw([], (0,), width=5).splitlines()[0] == "0 ....."
    assert chrome_trace([])["traceEvents"] == []


def test_a_simulated_step_is_a_trace_too() -> None:
    plan = a_pipeline("1f1b", 2, 2)
    made = cut(plan, 2)
    line = simulate(schedule.training_step(plan, made), plan, made, unit_costs())
    spans = [e for e in chrome_trace(line.events)["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(line.events)
    assert draw(line.events, line.ranks, 9).splitlines()[0] == "0 01..aa.bb"
