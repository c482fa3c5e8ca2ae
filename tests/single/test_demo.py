"""`make demo` without its set-up: the real script on a small data set."""

import os
import struct
import subprocess
from pathlib import Path

import demo
import pytest

from tests import warm
from tests.conftest import ROOT, program_environment

DEMO = f"import runpy; runpy.run_path({str(ROOT / 'tools' / 'demo.py')!r}, run_name='__main__')"
SMALL = ("--images", "512", "--epochs", "1")


def run_demo(
    *arguments: str, code: str = DEMO, **environment: str
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in program_environment().items() if name != "CIFAR_DIR"}
    return subprocess.run(
        [warm.python(), "-c", code, *arguments],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def rows(text: str) -> dict[str, list[str]]:
    """Return the rows of the final table: their cells by name."""
    split = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in split if cells}


def png_size(path: Path) -> tuple[int, ...]:
    """Return width and height in pixels from the header."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    return struct.unpack(">II", content[16:24])


@pytest.mark.proves(
    "The demo compares one rank with several, on CIFAR-10 or else on a synthetic set."
)
def test_the_demo_trains_with_one_rank_and_several_and_shows_both(tmp_path: Path) -> None:
    earlier = tmp_path / "ranks-1" / "config.yaml"
    earlier.parent.mkdir()
    earlier.write_text("model: another\n")
    done = run_demo(*SMALL, "--to", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("images/s    seconds") == 2, "each run streams its own output"
    ranks = min(max(2, len(os.sched_getaffinity(0))), demo.MOST_RANKS)
    assert f"against {ranks} ranks x " in done.stdout
    table = rows(done.stdout)
    assert all(len(cells) == 2 for cells in table.values())
    assert all(float(cell.removesuffix(" s")) > 0 for cell in table["training"])
    one, several = (float(cell.replace(",", "")) for cell in table["images/s"])
    assert table["speed-up"][0] == "1.00"
    assert float(table["speed-up"][1]) == pytest.approx(several / one, rel=0.01)
    assert all(0 <= float(cell) <= 1 for cell in table["test accuracy"])
    assert all(len(cell) == 12 for cell in table["weights, equal on all ranks"])
    width, height = png_size(tmp_path / "curves.png")
    assert (width, height) == (1200, 480)
    assert 10_000 < (tmp_path / "curves.png").stat().st_size < 500_000


@pytest.mark.proves("One rank trains without Horovod and MPI.")
def test_without_mpi_it_says_so_and_shows_one_rank(tmp_path: Path) -> None:
    without = f"import sys; sys.modules['mpi4py'] = None; {DEMO}"
    done = run_demo(*SMALL, "--to", str(tmp_path / "demo"), code=without)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOTICE: mpi4py missing: one rank only" in done.stdout
    assert len(rows(done.stdout)["images/s"]) == 1
    assert (tmp_path / "demo" / "curves.png").exists()


def test_a_step_that_fails_ends_it_with_its_exit_code(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run_demo("--to", str(tmp_path / "demo"), CIFAR_DIR=str(empty))
    assert done.returncode == 3
    assert str(empty) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """Make a folder of CIFAR-10's files with two records each, next to a folder of CIFAR-100's."""
    folder = tmp_path / "cifar" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        folder.joinpath(name).write_bytes(bytes(2 * 3073))
    other = tmp_path / "cifar" / "cifar-100-binary"
    other.mkdir()
    other.joinpath("train.bin").write_bytes(bytes(3074))
    return folder


def test_a_good_copy_of_the_same_source_is_packed_once(
    tmp_path: Path, cifar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def packed_at() -> int:
        return (demo.data_set(tmp_path / "demo", None) / "index.json").stat().st_ino

    monkeypatch.setenv("CIFAR_DIR", str(cifar.parent))
    first = packed_at()
    assert packed_at() == first
    monkeypatch.delenv("CIFAR_DIR")
    assert packed_at() == first, "without CIFAR_DIR the packed copy is used"

    shard = tmp_path / "demo" / "cifar10" / "train-00000.h5"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    monkeypatch.setenv("CIFAR_DIR", str(cifar))
    packed_at()
    assert demo.hvdtrain("data", "verify", shard.parent) == 0, "a damaged copy is packed again"

    moved = cifar.rename(tmp_path / "elsewhere")
    monkeypatch.setenv("CIFAR_DIR", str(moved))
    packed_at()
    assert (tmp_path / "demo" / "cifar10.source").read_text() == str(moved)


def test_without_a_network_a_synthetic_set_takes_the_place_with_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CIFAR_DIR", raising=False)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # the discard port: refused at once
    monkeypatch.setattr(demo, "SYNTHETIC_IMAGES", 60)
    assert demo.data_set(tmp_path, None) == tmp_path / "synthetic-60"
    printed = capfd.readouterr()
    assert "NOTICE: CIFAR-10 could not be fetched" in printed.out
    assert "cannot download" in printed.err
