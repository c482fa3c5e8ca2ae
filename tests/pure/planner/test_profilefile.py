"""Profiles come back from files as they were, and files of another kind are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.planner.agreement import Coding
from hvdtrain.planner.network import Contention
from hvdtrain.planner.profile import Profile
from hvdtrain.planner.profilefile import load, save
from tests import hostile
from tests.pure.planner.machines import network, rank_times

NAMES = ["a", "b"]
PROFILE = Profile((rank_times(NAMES, [1.0, 2.0], 0.5), rank_times(NAMES, [2.0, 3.0])))
NETWORK = network(2, 1e-6, 1e-9, 2e-9, Contention(1.5, 2.0))


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(path, "cnn", PROFILE, NETWORK)
    assert load(path, "cnn", NAMES, 2) == (PROFILE, NETWORK)
    assert load(path, "vit", NAMES, 2) == "cnn"
    assert load(path, "c*", NAMES, 2) == (PROFILE, NETWORK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 4}, "it has version 4, not 3"),
        ({"ranks": []}, r"it has 0 rank\(s\), the job has 2"),
        ({"network": None}, "is not a valid profile "),
        ({"ranks": [{"components": {}}]}, "its components are not those of the model"),
    ],
)
def test_another_profile_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "profile.json"
    save(path, "cnn", PROFILE, NETWORK)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=message):
        load(path, "cnn", NAMES, 2)
    save(path, "cnn", PROFILE, NETWORK)
    with pytest.raises(UsageError, match=r"it has 2 rank\(s\), the job has 3"):
        load(path, "cnn", NAMES, 3)


@pytest.mark.parametrize("value", [1e308, 1e31, -1.0, True])
def test_seconds_that_nothing_takes_are_refused(tmp_path: Path, value: float) -> None:
    """Two ranks of 1e308 seconds had no ratio, so that none of them was the fastest."""
    path = tmp_path / "profile.json"
    save(path, "cnn", PROFILE, NETWORK)
    content = json.loads(path.read_text())
    for rank in content["ranks"]:
        rank["components"]["a"]["forward"][1][1] = value
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="is not a valid profile"):
        load(path, "cnn", NAMES, 2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.data())
def test_whatever_a_file_holds_ends_in_one_line(tmp_path: Path, data: st.DataObject) -> None:
    """One value anywhere in the file is replaced."""
    path = tmp_path / "profile.json"
    save(path, "cnn", PROFILE, NETWORK)
    content = json.loads(path.read_text())
    place = data.draw(st.sampled_from(hostile.paths_of(content)))
    path.write_text(json.dumps(hostile.changed(content, place, data.draw(hostile.VALUES))))
    loaded = hostile.understood(lambda: load(path, "cnn", NAMES, 2))
    if loaded is not None and not isinstance(loaded, str):
        profile, _ = loaded
        assert profile.names == tuple(NAMES)
        assert all(slowness >= 1 for slowness in profile.slowness)


def test_seconds_of_compression_come_back_and_must_be_there(tmp_path: Path) -> None:
    path, coding = tmp_path / "profile.json", {"bf16": Coding(0.5, 0.25)}
    coded = PROFILE.with_coding(dict.fromkeys(NAMES, coding))
    save(path, "cnn", coded, NETWORK)
    assert load(path, "cnn", NAMES, 2, ["bf16"]) == (coded, NETWORK)
    slower = coded.scaled([1, 2]).ranks[1].components["a"].coding
    assert slower == {"bf16": Coding(1.0, 0.5)}
    with pytest.raises(UsageError, match=r"is not a valid profile \(it has no seconds of fp16\)"):
        load(path, "cnn", NAMES, 2, ["bf16", "fp16"])


def test_contention_is_saved_unscaled(
    tmp_path: Path,
) -> None:
    path = tmp_path / "profile.json"
    (first, second) = PROFILE.ranks
    times = replace(first.components["b"], contention=2.5)
    contended = Profile(
        (replace(first, components={"a": first.components["a"], "b": times}), second)
    )
    save(path, "cnn", contended, NETWORK)
    loaded = load(path, "cnn", NAMES, 2)
    assert loaded == (contended, NETWORK)
    slower = contended.scaled([3, 1]).ranks[0]
    assert slower.components["b"].contention == 2.5
    assert slower.arrays.contention == pytest.approx([np.nan, 2.5], nan_ok=True)


def test_a_profile_of_an_earlier_version_has_no_compression(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(path, "cnn", PROFILE, NETWORK)
    content = json.loads(path.read_text())
    for rank in content["ranks"]:
        for times in rank["components"].values():
            del times["coding"]
    path.write_text(json.dumps(content))
    assert load(path, "cnn", NAMES, 2) == (PROFILE, NETWORK)
