"""Energy is that of the counters in a powercap tree: several zones, wrap-around, permission."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.host import energy
from hvdtrain.host.energy import RAPL, Meter, open_meter

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
        monkeypatch.setattr(energy, "POWERCAP", path)
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
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    meter = open_meter(has_gpus=False)
    assert meter.as_json()["joules"] == {}
    assert meter.missing == ["RAPL: this system has no counters of its processors' energy"]
