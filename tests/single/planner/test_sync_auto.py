"""`train --sync auto`: measured on the ranks of a run, chosen once, and kept by the run."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Program
from tests.single.training.jobs import events_of, summary_of

RUN: tuple[Any, ...] = (
    *("train", "--model", "cnn", "--batch-size", 32, "--threads", 1, "--ranks", 2),
    *("--sync", "auto", "--compress-after", 0, "--eval-every", 0),
)
SLOW, FAST = 1e-6, 1e-13  # seconds per byte


@pytest.fixture(scope="module")
def profile(hvdtrain: Program, small_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return measurements of this machine, which a run with a fixed plan has written."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    run = path.with_name("run")
    options = (*RUN, "--max-steps", 2, "--data", small_set, "--profile", path, "--run", run)
    done = hvdtrain(*options)
    assert done.returncode == 0, done.stderr
    assert "--sync auto: measured in " in done.stdout
    return path


def with_link(profile: Path, path: Path, per_byte: float) -> Path:
    """Write measurements with another network, whose all-reduces slow nothing down."""
    content = json.loads(profile.read_text())
    content["network"]["all_reduce"] = [
        [crosses, ranks, [[0.0, 0.0], [1e9, 1e9 * per_byte]]]
        for crosses, ranks, _ in content["network"]["all_reduce"]
    ]
    content["network"]["contention"] = [1.0, 1.0]
    path.write_text(json.dumps(content))
    return path


def line_of(output: str) -> str:
    """Return the reason for the choice."""
    (line,) = [line for line in output.splitlines() if "per step and rank: exact " in line]
    return line


def test_a_slow_link_is_reported_and_left_exact(
    hvdtrain: Program, small_set: Path, profile: Path, tmp_path: Path
) -> None:
    run, slow = tmp_path / "run", with_link(profile, tmp_path / "slow.json", SLOW)
    options = (*RUN, "--max-steps", 2, "--data", small_set, "--profile", slow, "--run", run)
    done = hvdtrain(*options)
    assert done.returncode == 0, done.stderr
    assert line_of(done.stdout).startswith(
        "--sync auto: exact, without --allow-approximate; powersgd:2 is "
    )
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["sync"], saved["compress"]) == ("exact", "none")
    assert summary_of(run)["agreement"]["compress"] == "none"


def test_a_slow_link_is_compressed_if_that_is_allowed_and_a_resumed_run_keeps_it(
    hvdtrain: Program, small_set: Path, profile: Path, tmp_path: Path
) -> None:
    run, slow = tmp_path / "run", with_link(profile, tmp_path / "slow.json", SLOW)
    options = (*RUN, "--allow-approximate", "--data", small_set, "--run", run)
    done = hvdtrain(*options, "--max-steps", 4, "--profile", slow)
    assert done.returncode == 0, done.stderr
    assert line_of(done.stdout).startswith("--sync auto: --compress powersgd:2, ")
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["sync"], saved["compress"]) == ("exact", "powersgd:2")
    (plan,), (choice,) = events_of(run, "plan"), events_of(run, "agreement")
    counted = summary_of(run)["agreement"]
    assert counted["compress"] == choice["chosen"] == "powersgd:2"
    assert counted["sent_bytes_per_step"] == pytest.approx(plan["predicted_sent_bytes"], rel=1e-9)
    assert counted["residual_norm"] > 0
    fast = with_link(profile, tmp_path / "fast.json", FAST)
    done = hvdtrain(*options, "--max-steps", 6, "--profile", fast, "--resume")
    assert done.returncode == 0, done.stderr
    assert "--sync auto: --compress powersgd:2, with which this run started" in done.stdout
    assert "measured" not in done.stdout and "read from" not in done.stdout
    assert summary_of(run)["agreement"]["compress"] == "powersgd:2"
    assert summary_of(run)["steps"] == 6


@pytest.mark.parametrize("plan", ["dp", "auto"])
def test_a_fast_link_stays_exact(
    hvdtrain: Program, small_set: Path, profile: Path, tmp_path: Path, plan: str
) -> None:
    fast = with_link(profile, tmp_path / "fast.json", FAST)
    options = (*RUN, "--allow-approximate", "--plan", plan, "--max-steps", 2, "--data", small_set)
    done = hvdtrain(*options, "--profile", fast, "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    # A chosen plan may have no replicas.
    alone = "--sync auto: exact, because no stage of the plan has several ranks"
    assert "--sync auto: exact, which no approximation beats by 5%; " in done.stdout or (
        plan == "auto" and alone in done.stdout
    )
    (recorded,) = events_of(tmp_path / "run", "plan")
    assert recorded["predicted_seconds"] > 0


def test_one_rank_has_nothing_to_choose(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    options = (*RUN, "--ranks", 1, "--max-steps", 2, "--data", small_set)
    done = hvdtrain(*options, "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "--sync auto: exact, because no stage of the plan has several ranks" in done.stdout


def test_a_plan_is_chosen_for_compressed_sums(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    options = (*RUN[:-6], "--compress", "bf16", "--compress-after", 0, "--plan", "auto")
    done = hvdtrain(*options, "--max-steps", 2, "--data", small_set, "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "to agree, a rank sends up to " in done.stdout
    assert "exact sums" not in done.stdout
    (plan,) = events_of(tmp_path / "run", "plan")
    counted = summary_of(tmp_path / "run")["agreement"]
    assert counted["sent_bytes_per_step"] == pytest.approx(plan["predicted_sent_bytes"], rel=1e-9)


def test_plan_show_explains_the_choice(hvdtrain: Program) -> None:
    show = ("plan", "show", "--model", "cnn", "--ranks", 16, "--explain", "--cluster")
    auto = ("--sync", "auto", "--allow-approximate", "--plan", "dp")
    slow = hvdtrain(*show, "16-cpu-10g", *auto, "--batch-size", 64, "--json")
    assert slow.returncode == 0, slow.stderr
    shown = json.loads(slow.stdout)
    assert shown["reasons"][0].startswith("--sync auto: ")
    assert len(shown["sent_bytes"]) == 16
    half = hvdtrain("plan", "show", "--model", "cnn", "--ranks", 2, "--compress", "bf16")
    assert half.returncode == 0, half.stderr
    assert "To agree, a rank sends up to " in half.stdout
    refused = hvdtrain("plan", "show", "--model", "cnn", "--ranks", 2, "--sync", "auto")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1 and "--explain" in refused.stderr
