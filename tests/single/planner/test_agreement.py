"""Plans and predictions of runs with a given way to agree."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Program
from tests.single.training.jobs import events_of, summary_of

RUN: tuple[Any, ...] = (
    *("train", "--model", "cnn", "--batch-size", 32, "--threads", 1, "--ranks", 2),
    *("--compress", "bf16,after=0", "--eval-every", 0),
)


def test_a_plan_is_chosen_for_compressed_sums(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    options = (*RUN, "--plan", "auto", "--max-steps", 2)
    done = hvdtrain(*options, "--data", small_set, "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "to agree, a rank sends up to " in done.stdout
    assert "exact sums" not in done.stdout
    (plan,) = events_of(tmp_path / "run", "plan")
    counted = summary_of(tmp_path / "run")["agreement"]
    assert counted["sent_bytes_per_step"] == pytest.approx(plan["predicted_sent_bytes"], rel=1e-9)


def test_plan_show_predicts_a_given_way(hvdtrain: Program) -> None:
    show = ("plan", "show", "--model", "cnn")
    half = hvdtrain(*show, "--ranks", 2, "--compress", "bf16")
    assert half.returncode == 0, half.stderr
    assert "To agree, a rank sends up to " in half.stdout
    options = ("--ranks", 16, "--batch-size", 64, "--plan", "dp", "--compress", "powersgd:2")
    explained = hvdtrain(*show, *options, "--explain", "--cluster", "16-cpu-10g", "--json")
    assert explained.returncode == 0, explained.stderr
    assert len(json.loads(explained.stdout)["sent_bytes"]) == 16
