"""The scripts of slurm/, submitted as a user would."""

import sys
from pathlib import Path

import pytest

from hvdtrain import data
from hvdtrain.host.process import STOP_SIGNALS
from hvdtrain.study.results import plan_name
from tests.single.training.jobs import assert_each_sample_once, summary_of
from tests.slurm.cluster import Cluster, wait_for

SCRIPTS = Path("slurm")
SLOW = ("--inject", "slow step=1 seconds=0.2 steps=100000")


def _options(data: Path, run: Path, epochs: int = 20) -> list[object]:
    """Return options of a run with 10 steps per epoch, saved after each epoch, with a ledger."""
    return [
        *("--model", "cnn", "--data", data, "--epochs", epochs),
        *("--ledger", run.with_suffix(".csv"), "--log-every", 1),
    ]


def _output(tmp_path: Path) -> str:
    return f"--output={tmp_path}/%j.log"


@pytest.mark.proves(
    "A job trains on one node and on several, also as a pipeline and from staged data."
)
@pytest.mark.parametrize(
    ("script", "request_", "plan", "ranks"),
    [
        pytest.param(
            *("train.sbatch", ("--ntasks-per-node=2", "--cpus-per-task=1"), "dp", 2),
            id="one node",
            marks=pytest.mark.weekly,
        ),
        pytest.param("nodes.sbatch", (), "dp", 4, id="two nodes"),
        pytest.param(
            *("nodes.sbatch", ("--ntasks-per-node=1", "--cpus-per-task=1"), "mp", 2),
            id="a pipeline across nodes",
            marks=pytest.mark.weekly,
        ),
        pytest.param("gpus.sbatch", (), "hp:2x1", 2, id="GPUs"),
    ],
)
def test_a_job_trains(
    cluster: Cluster,
    small_set: Path,
    tmp_path: Path,
    script: str,
    request_: tuple[str, ...],
    plan: str,
    ranks: int,
) -> None:
    run, disks = tmp_path / "run", tmp_path / "disk-$SLURM_NODEID"
    number = cluster.submit(
        *(_output(tmp_path), *request_, SCRIPTS / script),
        *("--model", "cnn", "--data", small_set, "--plan", plan, "--max-steps", 5),
        *(("--stage", disks) if ranks == 4 else ()),
        RUN=str(run),
    )
    cluster.wait(number, "COMPLETED")
    for node in range(2 if ranks == 4 else 0):
        (copy,) = (tmp_path / f"disk-{node}").iterdir()
        assert data.verify(copy) == []
    summary = summary_of(run)
    assert (summary["ranks"], summary["steps"]) == (ranks, 5)
    replicas = [len(stage["ranks"]) for stage in summary["plan"]["stages"]]
    assert plan_name(replicas) == ("mp" if plan == "hp:2x1" else plan)


def test_signals_wait_until_the_program_can_obey_them(cluster: Cluster, tmp_path: Path) -> None:
    """Signals were ignored, so a warning that came while Python started was lost."""
    program, mask = tmp_path / "bin" / "hvdtrain", tmp_path / "mask"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable} -S\nfrom pathlib import Path\n"
        f"Path({str(mask)!r}).write_text(Path('/proc/self/status').read_text())\n"
    )
    program.chmod(0o755)
    number = cluster.submit(
        *(_output(tmp_path), "--ntasks-per-node=1", "--cpus-per-task=1", SCRIPTS / "train.sbatch"),
        PATH=f"{program.parent}:{cluster.environment()['PATH']}",
    )
    cluster.wait(number, "COMPLETED")
    blocked = int(mask.read_text().partition("SigBlk:")[2].split()[0], 16)
    assert all(blocked & 1 << number - 1 for number in STOP_SIGNALS)


def test_an_array_repeats_a_run_with_other_seeds(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    number = cluster.submit(
        *("--array=0-1", "--ntasks-per-node=1", f"--output={tmp_path}/%A-%a.log"),
        *(SCRIPTS / "repeats.sbatch", "--model", "cnn", "--data", small_set, "--max-steps", 3),
        RUN=str(tmp_path / "run"),
    )
    for seed in (0, 1):
        cluster.wait(f"{number}_{seed}", "COMPLETED")
    weights = {summary_of(tmp_path / f"run-{seed}")["weights_sha256"] for seed in (0, 1)}
    assert len(weights) == 2


def test_an_element_of_an_array_is_requeued_alone(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    """One element has the number of its array, which Slurm then restarted completely."""
    run = tmp_path / "run"
    number = cluster.submit(
        *("--array=0-1", "--ntasks-per-node=1", f"--output={tmp_path}/%a.log"),
        *(SCRIPTS / "repeats.sbatch", *_options(small_set, run)[:6], "--log-every", 1, *SLOW),
        RUN=str(run),
    )
    for seed in (0, 1):
        cluster.wait_until_it_trains(f"{number}_{seed}", tmp_path / f"run-{seed}")
    (element,) = (seed for seed in (0, 1) if cluster.job(f"{number}_{seed}")["JobId"] == number)
    cluster.run("scancel", "--signal=USR1", f"{number}_{element}")
    cluster.wait(f"{number}_{element}", "PENDING")
    other = cluster.job(f"{number}_{1 - element}")
    assert (other["JobState"], other["Restarts"]) == ("RUNNING", "0")
    cluster.run("scancel", number)


@pytest.mark.proves(
    "A job that is preempted, runs out of time or loses a node saves, is requeued and resumes."
)
@pytest.mark.weekly
def test_a_preempted_job_saves_and_finishes_later(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    number = cluster.submit(
        *(_output(tmp_path), "--partition=low", "--ntasks-per-node=1", "--cpus-per-task=1"),
        *(SCRIPTS / "nodes.sbatch", *_options(small_set, run, epochs=8), *SLOW),
        RUN=str(run),
    )
    cluster.wait_until_it_trains(number, run)
    cluster.preempt()
    _assert_finishes(cluster, number, run, epochs=8)


@pytest.mark.weekly
def test_a_job_whose_time_is_up_saves_and_goes_on(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    number = cluster.submit(
        *(_output(tmp_path), "--ntasks-per-node=2", "--cpus-per-task=1"),
        *("--time=20", "--signal=USR2@90", SCRIPTS / "train.sbatch"),
        *(*_options(small_set, run), *SLOW),
        RUN=str(run),
    )
    cluster.wait_until_it_trains(number, run)
    cluster.end_its_time(number, 90)
    _assert_finishes(cluster, number, run)


def _assert_finishes(cluster: Cluster, number: str, run: Path, epochs: int = 20) -> None:
    """Assert that a job was requeued, resumed, and trained every sample once per epoch."""
    cluster.wait(number, "PENDING")
    assert not (run / "summary.json").exists()
    while cluster.wait(number, "PENDING", "COMPLETED")["JobState"] == "PENDING":
        cluster.release(number)
        cluster.wait(number, "RUNNING", "COMPLETED")
    assert int(cluster.job(number)["Restarts"]) >= 1
    assert "resumed after step" in run.with_name(f"{number}.log").read_text()
    assert summary_of(run)["steps"] == 10 * epochs
    assert_each_sample_once(run.with_suffix(".csv"), epochs)


@pytest.mark.weekly
def test_the_job_of_a_node_that_dies_goes_on_elsewhere(
    own_cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    number = own_cluster.submit(
        *(_output(tmp_path), "--nodelist=n2,n3", "--ntasks-per-node=1", "--cpus-per-task=1"),
        *(SCRIPTS / "nodes.sbatch", *_options(small_set, run), *SLOW),
        RUN=str(run),
    )
    own_cluster.wait_until_it_trains(number, run)
    own_cluster.kill_node("n3")
    own_cluster.wait(number, "PENDING")
    own_cluster.run("scontrol", "update", f"JobId={number}", "ReqNodeList=")
    _assert_finishes(own_cluster, number, run)


@pytest.mark.weekly
def test_a_rank_that_is_killed_fails_the_job(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    number = cluster.submit(
        *(_output(tmp_path), "--ntasks-per-node=2", "--cpus-per-task=1"),
        *(SCRIPTS / "train.sbatch", *_options(small_set, tmp_path / "run")),
        *("--inject", "kill step=12 rank=1"),
        RUN=str(tmp_path / "run"),
    )
    assert cluster.wait(number, "FAILED", "COMPLETED")["JobState"] == "FAILED"
    assert "Killed" in (tmp_path / f"{number}.log").read_text()


@pytest.mark.weekly
def test_a_job_that_is_cancelled_leaves_no_process(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    number = cluster.submit(
        *(_output(tmp_path), "--ntasks-per-node=2", "--cpus-per-task=1"),
        *(SCRIPTS / "train.sbatch", *_options(small_set, run), *SLOW),
        RUN=str(run),
    )
    cluster.wait_until_it_trains(number, run)
    assert len(cluster.processes(str(run))) >= 2
    cluster.run("scancel", number)
    cluster.wait(number, "CANCELLED")
    wait_for(lambda: not cluster.processes(str(run)), 30, lambda: str(cluster.processes(str(run))))
    assert cluster.was_never_requeued(number)
