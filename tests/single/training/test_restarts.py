"""Starts that lead nowhere: they wait longer and longer, and end."""

import sys
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.training import restarts
from tests import warm


def test_starts_that_save_nothing_come_to_an_end(
    small_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """All restarts were used up within seconds; a long message of a rank ended the launcher."""
    monkeypatch.setattr(restarts, "FIRST_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(sys, "executable", warm.python())
    monkeypatch.setenv("FAULTY_RANKS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told = tmp_path / "told"
    options = ["--model", "tests.single.training.models:raises_much", "--data", str(small_set)]
    options += ["--ranks", "2", "--restarts", "9", "--run", str(tmp_path / "run")]
    code = cli.run(["train", *options, "--on-alert", f"echo $HVDTRAIN_CAUSE >> {told}"])
    assert code == 4
    lines = [line for line in capfd.readouterr().err.splitlines() if "hvdtrain: " in line]
    waits = [line.partition(" in ")[2].partition(",")[0] for line in lines if "again on" in line]
    assert waits == ["0 s", "1 s"]
    said = "hvdtrain: not started again: 3 starts in a row saved no new checkpoint; the last one: "
    assert lines[-1].startswith(f"{said}rank 1 on ")
    assert "RuntimeError: this rank is at fault" in lines[-1]
    assert len(lines[-1]) < 400
    assert told.read_text().splitlines() == ["rank failed"] * 3
