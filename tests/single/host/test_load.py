"""Counters of the system show what else used the cores of a run."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.host import counters
from hvdtrain.host.counters import Disturbance, Load, disturbance

SPIN = "import time\nend = time.monotonic() + {}\nwhile time.monotonic() < end: pass"


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_the_own_time_is_not_that_of_others_but_a_spinning_process_is() -> None:
    before = counters.read_load()
    spin(1.0)
    alone = counters.read_load().since(before)
    before = counters.read_load()
    with subprocess.Popen([sys.executable, "-c", SPIN.format(2.0)]) as process:
        while counters.read_load().since(before).elapsed < 1.0:
            time.sleep(0.1)
        beside = disturbance([counters.read_load().since(before)])
    assert process.returncode == 0
    assert 0.05 < alone.used <= 1.1  # on a busy machine it gets only a part of a core
    assert beside.other_cores > 0.3


def test_ranks_of_a_host_add_up_and_cores_that_they_share_count_once() -> None:
    one = Load(10.0, 8.0, {0: 9.0, 1: 10.0}, {0: 0.5, 1: 0.0}, {0: 0.0, -1: 1.0})
    other = Load(10.0, 9.0, {1: 10.0, 2: 1.0}, {1: 0.0, 2: 0.5}, {1: 2.0})
    shared = disturbance([one, other])
    assert shared.cores == 3
    assert shared.other_cores == pytest.approx(0.3)
    assert (shared.stolen_cores, shared.throttled_fraction) == (0.1, 0.2)
    assert disturbance([one, other]).is_large
    assert not Disturbance(4, 0.1, 0.05, 0.01).is_large
    assert Disturbance(4, 0.1, 0.15, 0.0).is_large


def test_counters_that_a_system_lacks_are_zero(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("STAT", "PROCESSORS", "GROUPS"):
        monkeypatch.setattr(counters, name, tmp_path / "none")
    counted = counters.read_load()
    assert counted.busy == {}
    assert set(counted.throttled.values()) == {0.0}
    assert disturbance([counted]).other_cores == 0.0


def test_thermal_counters_and_the_limit_of_a_control_group_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stat").write_text("cpu 9 9 9\ncpu0 100 20 30 900 5 4 6 50 10 0 0\nctxt 5\n")
    thermal = tmp_path / "cpu0" / "thermal_throttle"
    thermal.mkdir(parents=True)
    (thermal / "core_throttle_total_time_ms").write_text("1500\n")
    group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    (tmp_path / group).mkdir(parents=True, exist_ok=True)
    (tmp_path / group / "cpu.stat").write_text("usage_usec 5\nthrottled_usec 250000\n")
    monkeypatch.setattr(counters, "STAT", tmp_path / "stat")
    monkeypatch.setattr(counters, "PROCESSORS", tmp_path)
    monkeypatch.setattr(counters, "GROUPS", tmp_path)
    monkeypatch.setattr(counters.os, "sched_getaffinity", lambda _: {0})
    counted = counters.read_load()
    tick = 1 / counters.os.sysconf("SC_CLK_TCK")
    assert counted.busy == {0: pytest.approx(160 * tick)}
    assert counted.stolen == {0: pytest.approx(50 * tick)}
    assert counted.throttled == {0: 1.5, -1: 0.25}
