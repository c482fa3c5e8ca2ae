"""Events of a cluster file: their checks, and what they slow."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdtrain.errors import UsageError
from hvdtrain.planner.clusters import (
    DEVICES,
    LINKS,
    PRESETS,
    ClusterNetwork,
    Event,
    load,
    slowdown,
)

NUMBERS = {
    "ranks": 4,
    "ranks_per_node": 4,
    "gflops": 1000,
    "memory_gbytes": 100,
    "memory_gib": 16,
    "gbytes": 10,
}


def written(folder: Path, events: Any) -> str:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(NUMBERS | {"events": events}))
    return str(path)


def test_an_event_slows_its_ranks_during_its_steps_only() -> None:
    event = Event(DEVICES, 2.0, ranks=(1,), from_step=10, to_step=20)
    assert [slowdown([event], DEVICES, [1], step) for step in (9, 10, 19, 20)] == [1, 2, 2, 1]
    assert slowdown([event], DEVICES, [0], 10) == 1
    assert slowdown([event], LINKS, [1], 10) == 1


def test_events_at_the_same_time_multiply() -> None:
    events = [Event(LINKS, 2.0), Event(LINKS, 3.0, ranks=(2,))]
    assert slowdown(events, LINKS, [0, 1], 1) == 2
    assert slowdown(events, LINKS, [0, 2], 1) == 6


def test_a_file_with_events_is_read(tmp_path: Path) -> None:
    name = written(tmp_path, [{"slows": "devices", "factor": 2, "ranks": [3], "from_step": 5}])
    assert load(name).events == (Event(DEVICES, 2.0, (3,), 5, None),)


def test_a_prediction_is_for_the_first_step(tmp_path: Path) -> None:
    events = [
        {"slows": "links", "factor": 4, "ranks": [0]},
        {"slows": "links", "factor": 100, "from_step": 2},
    ]
    slow = ClusterNetwork(load(written(tmp_path, events)))
    fast = ClusterNetwork(load(written(tmp_path, [])))
    assert slow.send_seconds(0, 1, 1000) == pytest.approx(4 * fast.send_seconds(0, 1, 1000))
    assert slow.send_seconds(1, 2, 1000) == fast.send_seconds(1, 2, 1000)
    assert slow.reduce_seconds((0, 1), 1000) == 4 * fast.reduce_seconds((0, 1), 1000)


def test_ranks_that_are_alike_share_their_times() -> None:
    assert len({id(rank) for rank in PRESETS["8-v100"].profile([], 0).ranks}) == 1


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ("slow", "events must be a list"),
        ([3], "event 1 must have the keys slows and factor"),
        ([{"slows": "devices", "factr": 2}], "unknown key factr; did you mean factor"),
        ([{"slows": "device", "factor": 2}], "slows must be devices or links, not device"),
        ([{"slows": "links"}], "factor must be a number between 0.001 and 1000, not None"),
        ([{"slows": "links", "factor": True}], "factor must be a number"),
        ([{"slows": "links", "factor": float("nan")}], "factor must be a finite number, not nan"),
        ([{"slows": "links", "factor": 1001}], "between 0.001 and 1000, not 1001"),
        ([{"slows": "links", "factor": 2, "from_step": -1}], "from_step must be a step"),
        (
            [{"slows": "links", "factor": 2, "from_step": 5, "to_step": 5}],
            "to_step must be above from_step 5, not 5",
        ),
        ([{"slows": "links", "factor": 2, "ranks": []}], "ranks must be a list of ranks"),
        ([{"slows": "links", "factor": 2, "ranks": ["a"]}], "a is not a rank"),
        ([{"slows": "links", "factor": 2, "ranks": [4]}], "rank 4, and the cluster has ranks 0"),
    ],
)
def test_mistakes_in_events_are_one_line_that_names_them(
    tmp_path: Path, events: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load(written(tmp_path, events))
    assert "\n" not in str(caught.value)
