"""Monitor processes watch the ranks of srun: a rank that is stopped ends the job."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hvdtrain.host.activity import AFTER_THE_RANKS_SECONDS
from tests.conftest import ROOT
from tests.single.training.jobs import events_of
from tests.slurm.cluster import Cluster, wait_for

MONITOR = "hvdtrain.health.monitor"
LIMIT = 10  # seconds; five times that during the start, which is a cold one
pytestmark = pytest.mark.weekly


@contextmanager
def job(
    cluster: Cluster, run: Path, *options: object, nodes: int
) -> Iterator["subprocess.Popen[str]"]:
    """Start one rank per node, which would train practically without end."""
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--mpi=pmix", "--kill-on-bad-exit=1"]
    words += ["hvdtrain", "train", "--model", "cnn", "--run", str(run), "--log-every", "1"]
    with subprocess.Popen(
        [*words, *map(str, options)],
        cwd=ROOT,
        env=cluster.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def steps(run: Path) -> int:
    return len(events_of(run, "step")) if (run / "metrics.jsonl").exists() else 0


def ranks_of(cluster: Cluster, run: Path) -> dict[int, psutil.Process]:
    """Return the training processes of a run by rank."""
    processes = cluster.processes(f"hvdtrain train --model cnn --run {run}")
    tasks = [process for process in processes if "SLURM_PROCID" in process.environ()]
    return {int(task.environ()["SLURM_PROCID"]): task for task in tasks}


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_that_is_stopped_ends_the_job(
    cluster: Cluster, small_set: Path, tmp_path: Path, nodes: int
) -> None:
    """A single stopped rank kept its job until the time limit; of several, others were named."""
    run, last = tmp_path / "run", nodes - 1
    options = ("--data", small_set, "--epochs", 100_000, "--stall-timeout", LIMIT)
    with job(cluster, run, *options, nodes=nodes) as process:
        wait_for(lambda: steps(run) > 2, 120, lambda: str(process.poll()))
        assert len(cluster.processes(MONITOR)) == nodes
        start = time.monotonic()
        ranks_of(cluster, run)[last].suspend()
        errors = process.communicate(timeout=600)[1]
        assert time.monotonic() - start < LIMIT + AFTER_THE_RANKS_SECONDS + 45
    assert process.returncode != 0
    lines = [line for line in errors.splitlines() if "hvdtrain: " in line]
    assert f"rank {last} on n" in lines[0]
    assert "has been stuck for longer than --stall-timeout allows, in " in lines[0]
    wait_for(lambda: not cluster.processes(str(run)), 60, lambda: errors)


def test_a_job_that_is_suspended_resumes_and_leaves_no_process(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("--data", small_set, "--epochs", 100_000, "--stall-timeout", LIMIT)
    with job(cluster, run, *options, nodes=2) as process:
        wait_for(lambda: steps(run) > 2, 120, lambda: str(process.poll()))
        ranks = ranks_of(cluster, run)
        number = ranks[0].environ()["SLURM_JOB_ID"]
        cluster.run("scontrol", "suspend", number)
        wait_for(lambda: is_stopped(ranks[1]), 60, lambda: str(ranks))
        done = steps(run)
        time.sleep(LIMIT + 2 * AFTER_THE_RANKS_SECONDS)  # longer than the stall timeout
        cluster.run("scontrol", "resume", number)
        wait_for(lambda: steps(run) > done + 2, 120, lambda: str(process.poll()))
        cluster.run("scancel", "--signal=USR1", f"{number}.0")
        process.communicate(timeout=600)
    assert process.returncode == 75
    assert cluster.processes(MONITOR) == []


def is_stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


def test_what_a_monitor_costs_is_small(cluster: Cluster, small_set: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--data", small_set, "--epochs", 100_000)
    with job(cluster, run, *options, nodes=1) as process:
        wait_for(lambda: steps(run) > 2, 120, lambda: str(process.poll()))
        (monitor,) = cluster.processes(MONITOR)
        assert monitor.memory_full_info().uss < 16 * 2**20
        assert sum(monitor.cpu_times()[:2]) < 1
        assert not {"torch", "mpi"} & {Path(area.path).stem for area in monitor.memory_maps()}
        os.kill(ranks_of(cluster, run)[0].pid, 10)
        process.communicate(timeout=600)
