"""A study on a real Slurm, from its YAML file to its report."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster, wait_for

SIZES = (1, 2, 4)


@pytest.mark.proves("A study becomes jobs of all its sizes and repeats, and ends in a report.")
def test_a_sweep_of_three_sizes_and_two_repeats_ends_in_a_report(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    study, runs, report = tmp_path / "study.yaml", tmp_path / "runs", tmp_path / "report"
    study.write_text(
        f"model: cnn\ndata: {small_set}\nepochs: 2\nranks: [1, 2, 4]\nrepeats: 2\n"
        "ranks_per_node: 2\nin_flight: 2\ntime: '0:20:00'\nlog_every: 2\nseed: 5\n"
    )
    shown = cluster.run("hvdtrain", "jobs", "sweep", study, "--to", runs, "--dry-run")
    assert shown.count("#SBATCH --array=0-1%2") == 3
    assert not runs.exists()
    output = cluster.run("hvdtrain", "jobs", "sweep", study, "--to", runs)
    assert sorted(line.partition(":")[0] for line in output.splitlines()) == [
        f"ranks={n}" for n in SIZES
    ]
    rows: list[dict[str, Any]] = []

    def is_over() -> bool:
        rows[:] = json.loads(cluster.run("hvdtrain", "jobs", "status", runs, "--json"))
        active = [row for row in rows if row["state"] == "RUNNING"]
        assert len(active) <= 2
        return all(row["state"] == "COMPLETED" for row in rows)

    wait_for(is_over, 300, lambda: str(rows))
    assert len(rows) == 6
    wait_for_an_empty_queue(cluster)
    again = cluster.run("hvdtrain", "jobs", "sweep", study, "--to", runs).splitlines()
    assert all(line.endswith("is done already") for line in again)
    assert len(again) == 6
    planned = cluster.run(
        *("hvdtrain", "jobs", "submit", "--model", "cnn", "--data", small_set, "--dry-run"),
        *("--run", runs / "next", "--ranks", 2, "--epochs", 3),
    )
    assert "# time: about " in planned
    assert f"{runs}/ranks=2-seed=" in planned
    cluster.run("hvdtrain", "report", runs, "--to", report)
    text = (report / "report.md").read_text()
    assert "## cnn, dp, fp32, strong scaling, batch 64" in text
    assert "- Seeds: 5, 6." in text
    with (report / "sizes.csv").open() as file:
        sizes = list(csv.DictReader(file))
    assert [int(row["ranks"]) for row in sizes] == list(SIZES)
    for row in sizes[1:]:
        assert float(row["speedup_low"]) <= float(row["speedup"]) <= float(row["speedup_high"])
    pictures = {path.name for path in report.glob("*.png")}
    assert pictures >= {"speedup.png", "time.png", "accuracy.png", "loss.png", "memory.png"}
    assert all(f"]({name})" in text for name in pictures)


@pytest.mark.weekly
def test_only_what_failed_is_made_again(cluster: Cluster, small_set: Path, tmp_path: Path) -> None:
    study, runs = tmp_path / "study.yaml", tmp_path / "runs"
    study.write_text(
        f"model: cnn\ndata: {small_set}\nmax_steps: 12\nranks: 2\nrepeats: 2\n"
        "inject: ['kill step=6 rank=1', 'slow step=6 seconds=0.01']\n"
    )
    cluster.run("hvdtrain", "jobs", "sweep", study, "--to", runs)
    rows: list[dict[str, Any]] = []

    def is_over() -> bool:
        rows[:] = json.loads(cluster.run("hvdtrain", "jobs", "status", runs, "--json"))
        states = sorted(row["state"] for row in rows)
        return states == ["COMPLETED", "COMPLETED", "FAILED", "FAILED"]

    wait_for(is_over, 240, lambda: str(rows))
    assert all("Killed" in row["note"] for row in rows if row["state"] == "FAILED")
    wait_for_an_empty_queue(cluster)
    output = cluster.run("hvdtrain", "jobs", "sweep", study, "--to", runs)
    assert output.count("2 runs, job") == 1
    assert output.count("is done already") == 2

    def is_done() -> bool:
        rows[:] = json.loads(cluster.run("hvdtrain", "jobs", "status", runs, "--json"))
        return all(row["state"] == "COMPLETED" and row["step"] == 12 for row in rows)

    wait_for(is_done, 240, lambda: str(rows))


def wait_for_an_empty_queue(cluster: Cluster) -> None:
    """Wait until no job is in the queue: a run is complete a moment before its job ends."""
    wait_for(lambda: cluster.run("squeue", "--noheader") == "", 60, lambda: cluster.run("squeue"))
