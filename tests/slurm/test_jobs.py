"""`hvdtrain jobs` on a real Slurm."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.jobs import watch
from tests.conftest import ROOT, program
from tests.single.training.jobs import (
    assert_each_sample_once,
    changeable_by_others,
    summary_of,
    umask,
)
from tests.slurm.cluster import Cluster, wait_for

SLOW = ("--inject", "slow step=1 seconds=0.2 steps=100000")
IN_AN_HOUR = json.dumps({"options": {"begin": "now+1hour"}})  # of a site's file


def _submit(cluster: Cluster, data: Path, run: Path, *options: object) -> str:
    """Submit a run; return its job number."""
    with umask(0o002):  # usual where groups share folders
        output = cluster.run(
            *("hvdtrain", "jobs", "submit", "--model", "cnn", "--data", data, "--run", run),
            *("--log-every", 1, *options),
        )
    match = re.search(r"job (\d+)$", output.strip())
    assert match, output
    return match[1]


def _status(cluster: Cluster, run: Path) -> dict[str, Any]:
    (row,) = json.loads(cluster.run("hvdtrain", "jobs", "status", run, "--json"))
    assert isinstance(row, dict)
    return row


@pytest.mark.proves(
    "`jobs` makes a run a job of Slurm, shows its state and its log, and cancels it."
)
def test_a_run_becomes_a_job_and_is_recognised(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    run, site = tmp_path / "run", tmp_path / "site.yaml"
    # The job waits, because the second command takes longer than the job would run.
    site.write_text(IN_AN_HOUR)
    options = ("--ranks", 4, "--nodes", 2, "--epochs", 2, "--site", site)
    number = _submit(cluster, small_set, run, *options)
    again = cluster.run(
        *("hvdtrain", "jobs", "submit", "--model", "cnn", "--data", small_set, "--run", run),
        *("--log-every", 1, *options),
    )
    assert again.strip().startswith(f"{run} is job {number} already, as it was submitted")
    cluster.release(number)
    cluster.wait(number, "COMPLETED")
    assert changeable_by_others(run) == []
    summary = summary_of(run)
    assert (summary["ranks"], summary["epochs"]) == (4, 2)
    missing = [line for host in summary["energy"] for line in host["missing"]]
    assert [line for line in missing if line.startswith("Slurm")] == [  # only rank 0 asks
        "Slurm: it counts no energy on this cluster (AcctGatherEnergyType)"
    ]
    row = _status(cluster, run)
    assert (row["job"], row["state"], row["epoch"], row["step"]) == (number, "COMPLETED", 2, 20)
    assert row["accuracy"] == summary["final"]["test_accuracy"]
    assert row["images_per_second"] > 0
    assert "trained 1,202 samples" in cluster.run("hvdtrain", "jobs", "logs", run)
    record = json.loads((run / "job.json").read_text())
    assert record["jobs"] == [number]
    assert record["version"]
    done = cluster.run(
        *("hvdtrain", "jobs", "submit", "--model", "cnn", "--data", small_set, "--run", run),
        *("--log-every", 1, *options),
    )
    assert done.strip() == f"{run} is done already"
    site.write_text("options: {no-such-option: 1}\n")
    before = {name: (run / name).read_bytes() for name in ("config.yaml", "summary.json")}
    refused = cluster.start(
        *("hvdtrain", "jobs", "submit", "--model", "cnn", "--data", small_set, "--run", run),
        *("--ranks", 4, "--nodes", 2, "--epochs", 3, "--site", site),
    )
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused.stderr
    assert "sbatch refused the job" in refused.stderr
    assert {name: (run / name).read_bytes() for name in before} == before


def test_a_ctrl_c_while_slurm_takes_a_job_loses_no_number(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    """The job ran, but no run folder had its number, so status and cancel did not see it."""
    run, site, tools = tmp_path / "run", tmp_path / "site.yaml", tmp_path / "tools"
    site.write_text(IN_AN_HOUR)
    tools.mkdir()
    # As a terminal does, send it to the whole process group, once Slurm has accepted the job.
    answer = tools / "answer"
    (tools / "sbatch").write_text(
        f'#!/bin/bash\n{shutil.which("sbatch")} "$@" > {answer}\nkill -INT 0\ncat {answer}\n'
    )
    (tools / "sbatch").chmod(0o755)
    environment = cluster.environment()
    process = subprocess.Popen(
        program(
            *("jobs", "submit", "--model", "cnn", "--data", small_set, "--run", run),
            *("--chain", 3, "--site", site),
            cold=True,
        ),
        cwd=ROOT,
        env=environment | {"PATH": f"{tools}{os.pathsep}{environment['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    errors = process.communicate(timeout=600)[1]
    (number,) = re.findall(r"\d+", answer.read_text())
    assert process.returncode == 130, errors
    message = f"interrupted after job {number} was submitted: end it with hvdtrain jobs cancel"
    assert f"{message} {run}\n" in errors
    job_record = watch.read(run)
    assert job_record is not None
    assert job_record.jobs == (number,)
    assert f"job {number} cancelled" in cluster.run("hvdtrain", "jobs", "cancel", run)


def test_what_would_be_submitted_is_shown_as_it_is(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(
        "partition: high\naccount: physics\nqos: long\nmem: 8G\nrequeue: false\n"
        "setup: [module load mpi]\n"
    )
    overrides = (
        *("--qos", "short", "--mem", "2G", "--constraint", "a&b"),
        *("--sbatch", "exclusive", "--sbatch", "mail-type=END,FAIL"),
    )
    script = cluster.run(
        *("hvdtrain", "jobs", "submit", "--model", "cnn", "--data", small_set, "--dry-run"),
        *overrides,
        *("--run", tmp_path / "run", "--ranks", 4, "--nodes", 2, "--cpus-per-rank", 2),
        *("--gpus-per-node", 2, "--time", "30:00"),
        HVDTRAIN_SITE=str(site),
    )
    expected = ["partition=high", "account=physics", "nodes=2", "ntasks-per-node=2", "time=30"]
    expected += ["qos=short", "mem=2G", "exclusive", "mail-type=END,FAIL", "cpus-per-task=2"]
    for option in [*expected, "gpus-per-node=2", "no-requeue", "signal=USR2@180"]:
        assert f"#SBATCH --{option}\n" in script
    assert "#SBATCH --constraint='a&b'\n" in script
    assert "\nmodule load mpi\n" in script
    assert re.search(
        r"^srun .*--mpi=pmix --kill-on-bad-exit=1 .*\$block .*hvdtrain\.jobs\.task rank",
        script,
        re.MULTILINE,
    )
    assert "block='env --block-signal=HUP,TERM,USR1,USR2'\n" in script
    assert not (tmp_path / "run" / "config.yaml").exists()
    study = tmp_path / "study.yaml"
    study.write_text(f"model: cnn\ndata: {small_set}\nmem: 4G\nsbatch: hold\ntime: 30:00\n")
    scripts = cluster.run(
        *("hvdtrain", "jobs", "sweep", study, "--to", tmp_path / "runs", "--dry-run"),
        *("--site", site, *overrides),
    )
    for option in (*expected[:2], "time=30", "qos=short", "mem=2G", "exclusive", "hold"):
        assert f"#SBATCH --{option}\n" in scripts
    assert cluster.run("squeue", "--noheader", "--partition=high") == ""


@pytest.mark.weekly
def test_a_preempted_job_goes_back_into_the_queue_by_itself(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    run, ledger = tmp_path / "run", tmp_path / "ledger.csv"
    number = _submit(
        *(cluster, small_set, run, "--ranks", 2, "--nodes", 2, "--epochs", 8),
        *("--ledger", ledger, "--partition", "low", *SLOW),
    )
    cluster.wait_until_it_trains(number, run)
    cluster.preempt()
    cluster.wait(number, "PENDING")
    assert _status(cluster, run)["state"] == "PENDING"
    cluster.release(number)
    assert cluster.wait(number, "COMPLETED")["Restarts"] == "1"
    assert "resumed after step" in cluster.run("hvdtrain", "jobs", "logs", run)
    assert_each_sample_once(ledger, 8)


@pytest.mark.weekly
def test_a_job_that_is_killed_is_seen_with_its_last_words(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    number = _submit(cluster, small_set, run, "--ranks", 2, "--inject", "kill step=12 rank=1")
    assert cluster.wait(number, "FAILED", "COMPLETED")["JobState"] == "FAILED"
    row = _status(cluster, run)
    assert row["state"] == "FAILED"
    assert "Killed" in row["note"]


def test_a_job_that_slurm_accepted_while_sbatch_timed_out_is_recorded(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    """Once, the run was "refused" and its folder removed, and the job was in the queue."""
    study, runs, sbatch = tmp_path / "study.yaml", tmp_path / "runs", tmp_path / "bin" / "sbatch"
    study.write_text(f"model: cnn\ndata: {small_set}\nmax_steps: 2\nrepeats: 2\nsbatch: [hold]\n")
    sbatch.parent.mkdir()

    def sweep(does: str, says: str) -> subprocess.CompletedProcess[str]:
        sbatch.write_text(f"#!/bin/sh\n{does}\necho 'sbatch: error: {says}' >&2; exit 1\n")
        sbatch.chmod(0o755)
        path = f"{sbatch.parent}:{cluster.environment()['PATH']}"
        return cluster.start("hvdtrain", "jobs", "sweep", study, "--to", runs, PATH=path)

    refused = sweep("", "Invalid qos specification")
    assert refused.stderr == (
        "hvdtrain: sbatch refused the job: sbatch: error: Invalid qos specification\n"
    )
    assert (refused.returncode, list(runs.glob("*/config.yaml"))) == (2, [])
    accepted = sweep(f'{shutil.which("sbatch")} "$@" >/dev/null', "Socket timed out on send/recv")
    assert accepted.returncode == 0, accepted.stderr
    (number,) = re.findall(r"2 runs, job (\d+)", accepted.stdout)
    rows = json.loads(cluster.run("hvdtrain", "jobs", "status", runs, "--json"))
    assert sorted((row["job"], row["state"]) for row in rows) == [
        (f"{number}_{element}", "PENDING") for element in (0, 1)
    ]
    cluster.run("hvdtrain", "jobs", "cancel", runs)


@pytest.mark.weekly
def test_a_chain_goes_on_where_requeue_is_forbidden(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    site, run = tmp_path / "site.yaml", tmp_path / "run"
    site.write_text("requeue: false\nwarning_seconds: 90\noptions: {exclusive: true}\n")
    output = cluster.run(
        *("hvdtrain", "jobs", "submit", "--model", "cnn", "--data", small_set, "--run", run),
        *("--ranks", 2, "--epochs", 20, "--time", 20, "--chain", 3, "--site", site, *SLOW),
        *("--log-every", 1),
    )
    first, second, third = re.findall(r"\d+", output.strip().rpartition("job ")[2])
    cluster.wait_until_it_trains(first, run)
    cluster.end_its_time(first, 90)
    assert cluster.wait(first, "FAILED", "COMPLETED")["ExitCode"] == "75:0"
    cluster.wait(second, "COMPLETED")
    cluster.wait(third, "CANCELLED")
    assert _status(cluster, run)["state"] == "COMPLETED"
    assert summary_of(run)["steps"] == 200


@pytest.mark.weekly
def test_a_chain_that_never_saves_ends_with_the_reason(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    """The next jobs of a chain, or the next requeues of a job, started without any progress."""
    run, kills = tmp_path / "run", "; ".join(f"kill step={step}" for step in range(2, 5))
    output = cluster.run(
        *("hvdtrain", "jobs", "submit", "--model", "cnn", "--data", small_set, "--run", run),
        *("--inject", kills, "--chain", 4),
    )
    numbers = re.findall(r"\d+", output.strip().rpartition("job ")[2])
    codes = [cluster.wait(number, "FAILED", "COMPLETED")["ExitCode"] for number in numbers]
    assert codes[3] == "4:0", codes
    assert "4:0" not in codes[:3]
    note = _status(cluster, run)["note"]
    assert "is not restarted: 3 starts in a row by Slurm saved no new checkpoint" in note
    again = cluster.run(
        *("hvdtrain", "jobs", "submit", "--model", "cnn", "--data", small_set, "--run", run),
        *("--inject", kills),
    )
    number = again.strip().rpartition("job ")[2]
    assert cluster.wait(number, "FAILED", "COMPLETED")["JobState"] == "COMPLETED"


def test_a_chain_ends_with_the_run(cluster: Cluster, small_set: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    output = cluster.run(
        *("hvdtrain", "jobs", "submit", "--model", "cnn", "--data", small_set, "--run", run),
        *("--max-steps", 3, "--chain", 3),
    )
    first, *others = re.findall(r"\d+", output.strip().rpartition("job ")[2])
    cluster.wait(first, "COMPLETED")
    for number in others:
        cluster.wait(number, "CANCELLED")
    assert len(list((run / "logs").glob("*_0_log.out"))) == 1


def test_cancelling_leaves_no_process(cluster: Cluster, small_set: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    number = _submit(cluster, small_set, run, "--ranks", 2, "--epochs", 20, *SLOW)
    cluster.wait_until_it_trains(number, run)
    assert len(cluster.processes(str(run))) >= 2
    assert (
        cluster.run("hvdtrain", "jobs", "cancel", run).strip() == f"{run}: job {number} cancelled"
    )
    cluster.wait(number, "CANCELLED")
    wait_for(lambda: not cluster.processes(str(run)), 30, lambda: str(cluster.processes(str(run))))
    assert "no job is waiting or running" in cluster.run("hvdtrain", "jobs", "cancel", run)
    assert cluster.was_never_requeued(number)


def test_what_does_not_fit_the_cluster_is_refused_in_one_line(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("mpi: pmi1\n")
    cases: list[tuple[tuple[object, ...], str]] = [
        (("--partition", "debug"), "partition debug does not exist: use one of high, low"),
        (("--ranks", 3, "--nodes", 2), "--ranks 3 cannot be spread evenly over --nodes 2"),
        (("--time", "soon"), "--time 'soon' is not understood"),
        (("--site", site), "srun does not support --mpi=pmi1: set mpi"),
        (("--plan", "hp:9x1"), "9 stages"),
        (("--time", 3), "--time 3 (3 min) is too short"),
        (("--nodes", 5, "--ranks", 5), "--nodes 5 is more than partition low has: give at most 4"),
        (("--time", "0:20:00", "--restarts", 1), "--restarts is not possible for a job"),
    ]
    for options, reason in cases:
        done = cluster.start(
            *("hvdtrain", "jobs", "submit", "--model", "cnn", "--data", small_set),
            *("--run", tmp_path / "run", *options),
        )
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert reason in done.stderr


@pytest.mark.proves(
    "A Slurm of four nodes starts on one machine, and `doctor --job` examines the ranks of a job."
)
def test_doctor_looks_at_a_job_from_inside(cluster: Cluster) -> None:
    start = ("srun", "--nodes=2", "--ntasks-per-node=2", "--mpi=pmix")
    report = cluster.run(*start, "hvdtrain", "doctor", "--job")
    assert "4 by srun: 2 on n" in report
    assert "24 MiB in " in report
    assert "all ranks see" in report
    assert report.strip().endswith("This job is fit.")
    alone = cluster.start("hvdtrain", "doctor", "--job")
    assert (alone.returncode, len(alone.stderr.splitlines())) == (2, 1)


@pytest.mark.weekly
def test_the_same_job_runs_without_a_cluster(
    cluster: Cluster, small_set: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    _submit(cluster, small_set, run, "--cluster", "local", "--ranks", 2, "--max-steps", 5)
    wait_for(
        lambda: _status(cluster, run)["state"] in ("COMPLETED", "FAILED"),
        120,
        lambda: str(_status(cluster, run)),
    )
    assert summary_of(run)["steps"] == 5
    assert "trained 320 samples" in cluster.run("hvdtrain", "jobs", "logs", run)
