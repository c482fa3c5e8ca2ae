"""Energy is that of the counters in a powercap tree, or of Slurm if it counts any."""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.host import counters
from hvdtrain.host.counters import RAPL, Disturbance, Load, Meter, disturbance, open_meter

LARGEST = 262_143_328_850  # microjoules


def zone(tree: Path, number: str, name: str, microjoules: int) -> Path:
    folder = tree / f"intel-rapl:{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{LARGEST}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a tree of two packages, one with cores and memory, that all users may enter."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        monkeypatch.setattr(counters, "POWERCAP", path)
        zone(path, "0", "package-0", 1_000_000)
        zone(path, "0:0", "core", 400_000)
        zone(path, "0:1", "dram", 50_000)
        zone(path, "1", "package-1", LARGEST - 2_000_000)
        zone(path, "2", "psys", 9_000_000)  # the whole system: it contains the packages
        yield path


def joules(meter: Meter) -> dict[str, float]:
    return dict(meter.as_json()["joules"].get(RAPL, {}))


def test_packages_and_memory_are_counted_once_and_over_a_new_start_at_zero(tree: Path) -> None:
    meter = open_meter(has_gpus=False)
    assert set(joules(meter)) == {"package-0", "package-1", "dram 0"}
    zone(tree, "0", "package-0", 4_500_000)
    zone(tree, "1", "package-1", 1_000_000)
    assert joules(meter) == {"package-0": 3.5, "package-1": 3.0, "dram 0": 0.0}
    meter.restart()
    zone(tree, "0", "package-0", 5_000_000)
    assert joules(meter) == {"package-0": 0.5, "package-1": 0.0, "dram 0": 0.0}
    assert meter.missing == []


def test_what_may_not_be_read_is_named_and_nothing_is_estimated(tree: Path) -> None:
    for folder in tree.iterdir():
        (folder / "energy_uj").chmod(0o000)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        meter = open_meter(has_gpus=False)
    finally:
        os.seteuid(user)
    assert joules(meter) == {}
    assert len(meter.missing) == 3
    assert all("no permission to read" in line for line in meter.missing)


def test_a_counter_that_disappears_is_named(tree: Path) -> None:
    meter = open_meter(has_gpus=False)
    (tree / "intel-rapl:1" / "energy_uj").unlink()
    assert set(joules(meter)) == {"package-0", "dram 0"}
    assert meter.missing[0].startswith("RAPL package-1: ")


def test_a_system_without_counters_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(counters, "POWERCAP", tmp_path / "none")
    meter = open_meter(has_gpus=False)
    assert meter.as_json()["joules"] == {}
    assert meter.missing == ["RAPL: this system has no counters of its processors' energy"]


STEP = "7.0"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder of commands that answer as those of a cluster whose plugin reads IPMI.

    The clusters of the tests have no plugin that counts: tests/slurm has the real answer to that.
    """
    monkeypatch.setattr(counters, "POWERCAP", tmp_path / "none")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answers(tmp_path, "scontrol", "AcctGatherEnergyType    = acct_gather_energy/ipmi")
    return tmp_path


def answers(folder: Path, command: str, answer: str, code: int = 0) -> None:
    """Make a command that notes its arguments, prints an answer and ends."""
    path = folder / command
    lines = (f'echo "$@" >> {path}.log', f"echo {shlex.quote(answer)}", f"exit {code}")
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o755)


def test_the_energy_of_a_step_is_read_at_both_ends_only(slurm: Path) -> None:
    answers(slurm, "sstat", "4000")
    meter = open_meter(has_gpus=False, step=STEP)
    answers(slurm, "sstat", "5000")
    meter.ask()
    meter.restart()
    (slurm / "sstat.log").unlink()
    meter.sample()
    assert not (slurm / "sstat.log").exists()
    answers(slurm, "sstat", "5700")
    assert meter.as_json()["joules"] == {"Slurm": {"step 7.0": 700.0}}
    assert (slurm / "sstat.log").read_text().split()[-2:] == ["--jobs", "7.0"]


@pytest.mark.parametrize(
    ("command", "answer", "code", "reason"),
    [
        ("scontrol", "AcctGatherEnergyType    = (null)", 0, "it counts no energy on this cluster"),
        ("scontrol", "", 1, "scontrol failed: without a message"),
        ("sstat", "", 0, "sstat shows no energy of step 7.0"),
    ],
)
def test_why_slurm_counts_no_energy_is_named(
    slurm: Path, command: str, answer: str, code: int, reason: str
) -> None:
    answers(slurm, "sstat", "4000")
    answers(slurm, command, answer, code)
    content = open_meter(has_gpus=False, step=STEP).as_json()
    assert content["joules"] == {}
    assert content["missing"][1].startswith(f"Slurm: {reason}")


def test_slurm_that_does_not_answer_delays_a_run_for_seconds_only(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "ANSWER_SECONDS", 2.0)
    (slurm / "sstat").write_text("#!/bin/sh\nexec sleep 60\n")
    (slurm / "sstat").chmod(0o755)
    meter = open_meter(has_gpus=False, step=STEP)
    assert meter.missing[1].startswith("Slurm: sstat took more than")


def test_a_counter_of_slurm_that_falls_is_named_and_does_not_count(slurm: Path) -> None:
    """A fault of a sensor sets the count of its host to zero."""
    answers(slurm, "sstat", "5000")
    meter = open_meter(has_gpus=False, step=STEP)
    answers(slurm, "sstat", "100")
    content = meter.as_json()
    assert content["joules"] == {}
    assert content["missing"][1] == "Slurm step 7.0: the counter fell"


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
