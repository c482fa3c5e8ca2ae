"""Whole runs of several ranks, started and ended as users do, without simulation."""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvdtrain.host.files import SHARED_SETTINGS
from hvdtrain.host.launchers import own_mpirun
from hvdtrain.host.process import SAME_CTRL_C_SECONDS
from hvdtrain.launch import mpirun
from hvdtrain.training.loop import MEASURED
from tests import warm
from tests.conftest import Program, program, program_environment
from tests.single.training.jobs import (
    SOON_SECONDS,
    begin,
    clients_of,
    events_of,
    is_stopped,
    ranks_of,
    resume,
    start,
    summary_of,
    suspend,
    wait_for,
    wait_for_end,
)

LONG = ("--model", "cnn", "--batch-size", "10", "--epochs", "100000", "--log-every", "1")


TORCHRUN = ("torchrun", "--no-python", "--nproc-per-node", "2", "--")


@pytest.mark.proves(
    "The same command trains under `--ranks`, `mpirun`, `horovodrun`, `torchrun` and `srun`."
)
@pytest.mark.parametrize("start", ["own", "mpirun", "horovodrun", "torchrun"])
def test_every_launcher_trains_the_same_run(
    hvdtrain: Program, small_set: Path, tmp_path: Path, start: str
) -> None:
    run, ledger = tmp_path / "run", tmp_path / "ledger.csv"
    options = ["train", "--model", "cnn", "--epochs", 2, "--batch-size", 50, "--data", small_set]
    options += ["--run", run, "--ledger", ledger]
    ranks = {"own": 2, "mpirun": 3, "horovodrun": 4, "torchrun": 2}[start]
    launcher: tuple[str, ...] = ()
    if start == "own":
        options += ["--ranks", ranks]
    else:
        launcher = (start, "-np", str(ranks))  # as typed, whatever the number of cores
        if start == "torchrun":
            launcher = TORCHRUN
            options += ["--clip-norm", 1, "--batch-norm", "sync", "--checkpoint-every", "5 steps"]
        if start == "mpirun" and own_mpirun() is None:  # a site's Open MPI needs options
            launcher = tuple(mpirun(ranks))
    done = hvdtrain(*options, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = summary_of(run)
    assert summary["ranks"] == ranks
    assert len(summary["peak_memory_bytes"]) == ranks
    assert 0 < summary["communication"]["exposed_fraction"] < 1
    assert done.stdout.count("test acc") == 1, "one rank prints"
    rows = [line.split(",") for line in ledger.read_text().splitlines()[1:]]
    assert {row[2] for row in rows} == {str(rank) for rank in range(ranks)}
    for epoch in ("1", "2"):
        assert len({row[3] for row in rows if row[0] == epoch}) == 601
    assert len(rows) == 2 * 601


def test_folders_that_killed_launchers_left_are_in_nobodys_way(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """Open MPI names them by its process number, and ends with 213 if the folder exists."""
    left, sessions = tmp_path / "left", {"PRTE_MCA_prte_tmpdir_base": str(tmp_path / "left")}
    leave = f"mkdir -p {left}/ompi.$$ && touch {left}/ompi.$$/pmix.{socket.gethostname()}.tool.$$"
    command = ["sh", "-c", f"{leave} && exec {shlex.join(mpirun(1))} true"]
    done = subprocess.run(command, env=program_environment() | sessions, capture_output=True)
    assert done.returncode == 213
    # Folders with the numbers of the processes that start next must not disturb hvdtrain.
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    new = int(subprocess.check_output(["sh", "-c", "echo $$"]))
    for number in ((new + more) % most for more in range(4000)):
        (left / f"ompi.{number}").mkdir(exist_ok=True)
        (left / f"ompi.{number}" / f"pmix.{socket.gethostname()}.tool.{number}").touch()
    options = ("train", "--model", "cnn", "--data", small_set, "--ranks", 2, "--max-steps", 1)
    trained = hvdtrain(*options, "--run", tmp_path / "run", **sessions)
    assert trained.returncode == 0, trained.stderr
    assert not list(left.glob("hvdtrain-*"))


def test_ranks_train_without_home_and_without_output(small_set: Path, tmp_path: Path) -> None:
    """Cron and services set no HOME. mpirun ends its ranks after 10 lines into a closed pipe."""
    options = ("--model", "cnn", "--data", small_set, "--batch-size", 300, "--epochs", 20)
    environment = program_environment()
    environment.pop("HOME", None)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        program("train", *options, "--ranks", 2, "--run", tmp_path / "run"),
        stdout=writer,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("standard output cannot be written") == done.stderr.count("\n") == 1
    assert summary_of(tmp_path / "run")["epochs"] == 20


def test_ctrl_z_suspends_the_ranks_too(small_set: Path, tmp_path: Path) -> None:
    options = (*LONG, "--data", small_set, "--ranks", 2, "--run", tmp_path / "run")
    # A process group of its own, as a shell gives it: Ctrl-Z is ignored where nobody continues it.
    job = subprocess.Popen(
        program("train", *options, cold=True),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=program_environment(),
        process_group=0,
    )
    wait_for(job, (tmp_path / "run" / "checkpoints").exists)
    everyone = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    assert len(everyone) >= 4  # the launcher, mpirun and two ranks
    del everyone[1]  # mpirun runs on, to end the ranks if the launcher is killed
    job.send_signal(signal.SIGTSTP)
    wait_for(job, lambda: all(map(is_stopped, everyone)))
    job.send_signal(signal.SIGCONT)
    wait_for(job, lambda: not any(map(is_stopped, everyone)))
    job.send_signal(signal.SIGINT)
    assert job.wait(SOON_SECONDS) == 130, job.communicate()


def test_a_suspended_launcher_that_is_killed_takes_its_ranks_with_it(
    small_set: Path, tmp_path: Path
) -> None:
    options = (*LONG, "--data", small_set, "--ranks", 2, "--run", tmp_path / "run")
    job = subprocess.Popen(
        program("train", *options, cold=True),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        env=program_environment(),
        process_group=0,
    )
    wait_for(job, (tmp_path / "run" / "checkpoints").exists)
    mpirun_and_ranks = psutil.Process(job.pid).children(recursive=True)
    job.send_signal(signal.SIGTSTP)
    wait_for(job, lambda: is_stopped(psutil.Process(job.pid)))
    job.kill()
    gone, alive = psutil.wait_procs(mpirun_and_ranks, timeout=SOON_SECONDS)
    assert not alive
    assert len(gone) >= 3


@pytest.mark.proves(
    "Two jobs of one user on one machine share no memory, and what killed jobs leave "
    "there goes with the next job."
)
def test_what_ranks_share_is_their_jobs_own_and_gone_after_it() -> None:
    """Open MPI names it by 16 bits of a hash: one in 65,536 pairs of jobs would share it."""
    show = "from hvdtrain import world; import os; world.start()"
    show += f"; print(os.environ['{SHARED_SETTINGS[0]}'], flush=True); world.stop()"
    jobs = [
        subprocess.Popen(
            [*mpirun(2), warm.python(), "-c", show],
            env=program_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    folders = [set(job.communicate(timeout=SOON_SECONDS)[0].split()) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert [len(paths) for paths in folders] == [1, 1], "all ranks of a job share one"
    assert not folders[0] & folders[1]
    assert not any(Path(path).exists() for path in folders[0] | folders[1])


def test_one_rank_and_three_see_the_same_samples_and_reach_the_same_loss(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    finals, steps = [], []
    for ranks in (1, 3):
        run, ledger = tmp_path / f"run{ranks}", tmp_path / f"ledger{ranks}.csv"
        done = hvdtrain(
            *("train", "--model", "cnn", "--epochs", 1, "--batch-size", 50, "--precision", "fp64"),
            *("--data", small_set, "--augment", "crop-flip", "--ranks", ranks),
            *("--run", run, "--ledger", ledger),
        )
        assert done.returncode == 0, done.stderr
        finals.append(summary_of(run)["final"])
        rows = [line.split(",") for line in ledger.read_text().splitlines()[1:]]
        steps.append({(row[1], row[3]) for row in rows})
    assert steps[0] == steps[1]
    assert finals[0]["train_loss"] == pytest.approx(finals[1]["train_loss"], rel=1e-10)
    assert finals[0]["test_loss"] == pytest.approx(finals[1]["test_loss"], rel=1e-10)
    assert finals[0]["test_accuracy"] == finals[1]["test_accuracy"]


def test_two_runs_on_the_same_ranks_end_in_the_same_bits_and_a_resumed_one_too(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    common = ["train", "--model", "resnet18", "--data", small_set, "--ranks", 2]
    common += ["--batch-size", 8, "--max-steps", 3, "--lr-schedule", "constant"]
    common += ["--eval-every", 0]
    digests = []
    for name in ("first", "second"):
        run = tmp_path / name
        if name == "second":
            done = hvdtrain(*common, "--run", run, "--max-steps", 2)
            assert done.returncode == 0, done.stderr
        done = hvdtrain(*common, "--run", run, *(["--resume"] if name == "second" else []))
        assert done.returncode == 0, done.stderr
        digests.append(summary_of(run)["weights_sha256"])
    assert digests[0] == digests[1]


def test_a_plan_file_gives_ranks_unequal_shares(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    plan, run, ledger = tmp_path / "plan.json", tmp_path / "run", tmp_path / "ledger.csv"
    plan.write_text('{"stages": [{"ranks": [0, 1], "shares": [2, 1]}], "microbatches": 2}')
    done = hvdtrain(
        *("train", "--model", "cnn", "--data", small_set, "--epochs", 1, "--batch-size", 60),
        *("--ranks", 2, "--plan", plan, "--run", run, "--ledger", ledger),
    )
    assert done.returncode == 0, done.stderr
    assert summary_of(run)["plan"]["stages"][0]["shares"] == [2, 1]
    ranks = [line.split(",")[2] for line in ledger.read_text().splitlines()[1:]]
    # Ten steps of 60 and a tail of one sample.
    assert (ranks.count("0"), ranks.count("1")) == (401, 200)


@pytest.mark.proves(
    "A rank that raises ends the job within seconds, and its traceback is shown once."
)
@pytest.mark.parametrize(("start", "faulty"), [("own", "1"), ("own", "0,1"), ("mpirun", "1")])
def test_a_rank_that_raises_ends_all_with_its_traceback_shown_once(
    hvdtrain: Program, small_set: Path, tmp_path: Path, start: str, faulty: str
) -> None:
    options = ["train", "--model", "tests.single.training.models:raises", "--data", small_set]
    options += ["--run", tmp_path / "run", *(["--ranks", 2] if start == "own" else [])]
    options += ["--on-alert", f'echo "$HVDTRAIN_MESSAGE" > {tmp_path / "alert"}']
    launcher = tuple(mpirun(2)) if start == "mpirun" else ()
    done = hvdtrain(*options, launcher=launcher, FAULTY_RANKS=faulty)
    raised = float((tmp_path / "run" / "raised").read_text())
    assert time.time() - raised < SOON_SECONDS
    assert done.returncode == 4
    assert done.stderr.count("RuntimeError: this rank is at fault") == 1, done.stderr
    assert done.stderr.count("Traceback") == 1
    if start == "own":
        assert "MPI_ABORT" not in done.stderr
        assert "prterun" not in done.stderr
        assert "this rank is at fault" in (tmp_path / "alert").read_text()
    wait_for_end(tmp_path)


def test_a_user_error_of_all_ranks_is_said_once(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    done = hvdtrain(
        *("train", "--model", "vit_tiny", "--patch-size", 5, "--data", small_set, "--ranks", 3),
        *("--run", tmp_path / "run"),
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "do not divide into patches" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--data", "{absent}"), 3, "no such folder"),
        (("--model", "ccn"), 2, "did you mean cnn"),
        (("--plan", "single"), 2, "--plan single runs on one rank"),
    ],
)
def test_what_can_be_checked_is_checked_before_ranks_start(
    small_set: Path, tmp_path: Path, arguments: tuple[str, str], code: int, message: str
) -> None:
    options = {"--model": "cnn", "--data": str(small_set), "--run": str(tmp_path / "run")}
    options[arguments[0]] = arguments[1].format(absent=tmp_path / "absent")
    words = [part for pair in options.items() for part in pair]
    process = subprocess.Popen(
        program("train", "--ranks", 2, *words),
        stderr=subprocess.PIPE,
        text=True,
        env=program_environment(),
    )
    started = set()
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = warm.fork_of(psutil.Process(process.pid))
            started |= {child.name() for child in launcher.children()}
        time.sleep(0.005)
    assert process.stderr is not None
    errors = process.stderr.read()
    assert (process.returncode, len(errors.splitlines())) == (code, 1), errors
    assert message in errors
    assert not any("run" in name for name in started), started


def test_ranks_that_disagree_with_the_launcher_are_refused(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    done = hvdtrain(
        *("train", "--model", "cnn", "--data", small_set, "--ranks", 4),
        launcher=tuple(mpirun(2)),
    )
    assert done.returncode == 2
    assert done.stderr.count("--ranks 4, but the launcher started 2") == 1


def test_a_rank_that_fails_when_the_first_has_gone_is_not_heard(tmp_path: Path) -> None:
    """The launcher of a loaded machine may end the second rank only after it has failed too."""
    script = tmp_path / "fail.py"
    script.write_text(
        "import sys\n"
        "from hvdtrain.health import failure\n"
        "from hvdtrain.errors import UsageError\n"
        "failure.SECONDS_TO_BE_ENDED = 0\n"
        "failure.fail(UsageError(f'rank {sys.argv[1]} was wrong'))\n"
    )
    ranks = [f"OMPI_COMM_WORLD_SIZE=2 '{sys.executable}' '{script}' {rank}" for rank in range(2)]
    done = subprocess.run(
        [*mpirun(1), "sh", "-c", "; ".join(ranks)],
        capture_output=True,
        text=True,
        env=program_environment(),
        timeout=600,
    )
    assert done.returncode == 2
    assert re.findall("rank . was wrong", done.stderr) == ["rank 0 was wrong"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--plan", "mp"), "--plan mp, which has 2 stages, needs MPI"),
        (("--plan", "auto"), "--plan auto needs MPI"),
        (("--sync", "server"), "--sync server needs MPI"),
        (("--reduce-with", "mpi"), "--reduce-with mpi needs MPI"),
    ],
)
def test_a_failure_under_torchrun_is_one_line(
    hvdtrain: Program, small_set: Path, tmp_path: Path, options: tuple[str, ...], what: str
) -> None:
    """MPI does not connect its ranks."""
    command = ("train", "--model", "cnn", "--data", small_set, "--run", tmp_path / "run")
    done = hvdtrain(*command, *options, launcher=TORCHRUN)
    assert done.returncode == 1, "torchrun's own"
    assert "exitcode  : 2" in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain: ")]
    assert line.startswith(f"hvdtrain: {what}")


def test_torchrun_ends_a_job_whose_rank_is_killed_and_resumes_it(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    command = ["train", "--model", "cnn", "--data", small_set, "--run", tmp_path / "run"]
    command += ["--epochs", 2, "--checkpoint-every", "3 steps"]
    done = hvdtrain(*command, "--inject", "kill step=8 rank=1", launcher=TORCHRUN)
    assert done.returncode == 1
    assert "exitcode  : -9" in done.stderr
    done = hvdtrain(*command, "--resume", launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert "resumed after step " in done.stdout
    whole = hvdtrain(*command[:6], tmp_path / "whole", *command[7:], "--ranks", 2)
    assert whole.returncode == 0, whole.stderr
    hashes = {summary_of(tmp_path / name)["weights_sha256"] for name in ("run", "whole")}
    assert len(hashes) == 1


@pytest.mark.proves("A launcher that starts worlds of one rank is refused in one line.")
def test_a_launcher_of_another_mpi_gives_worlds_of_one_and_one_line(
    hvdtrain: Program, small_set: Path
) -> None:
    """The process believes that it is one of two, as under the mpirun of another MPI."""
    done = hvdtrain(
        *("train", "--model", "cnn", "--data", small_set),
        OMPI_COMM_WORLD_RANK="0",
        OMPI_COMM_WORLD_SIZE="2",
    )
    assert done.returncode == 2
    assert "mpirun started 2 ranks, but MPI sees 1" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.proof
@pytest.mark.proves("An MPI that one thread at a time may use trains; Horovod is refused there.")
def test_an_mpi_without_multiple_threads_trains_without_horovod(
    small_set: Path, tmp_path: Path
) -> None:
    words = ("train", "--model", "cnn", "--data", small_set, "--ranks", 2, "--max-steps", 2)
    environment = program_environment() | {"MPI4PY_RC_THREAD_LEVEL": "serialized"}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = program(*words, "--run", tmp_path / "-".join(("run", *more)), *more, cold=True)
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    done, refused = run(), run("--reduce-with", "horovod")
    assert done.returncode == 0, done.stderr
    assert "needs: MPI sums the gradients" in done.stdout + done.stderr
    assert refused.returncode == 2
    assert "this MPI does not support MPI_THREAD_MULTIPLE" in refused.stderr


@pytest.fixture(params=["warm", pytest.param("cold", marks=pytest.mark.weekly)])
def long_run(
    request: pytest.FixtureRequest, small_set: Path, tmp_path: Path
) -> Iterator["subprocess.Popen[str]"]:
    """Start a run of two ranks, and yield it after its first steps."""
    run = tmp_path / "run"
    options = ["train", *LONG, "--ranks", "2", "--data", str(small_set), "--run", str(run)]
    process = begin(options, lambda: has_steps(run), cold=request.param == "cold")
    yield process
    if process.poll() is None:
        process.kill()


def has_steps(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and '"event": "step"' in metrics.read_text()


@pytest.mark.proves(
    "Ctrl-C and the signals of a scheduler save the state of all ranks at the same step."
)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_ends_all_ranks_with_their_state_saved(
    long_run: "subprocess.Popen[str]", tmp_path: Path, number: signal.Signals, code: int
) -> None:
    long_run.send_signal(number)
    _, errors = long_run.communicate(timeout=SOON_SECONDS)
    assert long_run.returncode == code
    assert len(errors.splitlines()) == 1, errors
    assert "state saved" in errors
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    wait_for_end(tmp_path)


@pytest.mark.parametrize(
    ("first", "second"), [(signal.SIGTERM, signal.SIGHUP), (signal.SIGUSR1, signal.SIGTERM)]
)
def test_the_signals_of_a_scheduler_are_one_request(
    small_set: Path, tmp_path: Path, first: signal.Signals, second: signal.Signals
) -> None:
    """systemd and Slurm send a second signal within the grace period, to every process of the job.

    The second signal must not end the ranks at once, nor make `--restarts` start them again.
    """
    run = tmp_path / "run"
    options = ["train", *LONG, "--ranks", "2", "--data", str(small_set), "--run", str(run)]
    process = begin([*options, "--restarts", "1"], lambda: has_steps(run))
    ranks, clients = ranks_of(process), clients_of(process)
    mpirun = clients[0].parent()
    assert mpirun is not None
    suspend(ranks)  # the second signal arrives before the first one takes effect
    process.send_signal(first)
    wait_for(process, lambda: all(is_pending(rank, signal.SIGUSR1) for rank in ranks))
    process.send_signal(second)
    mpirun.send_signal(second)
    for rank in ranks:
        rank.send_signal(second)
    client = psutil.Process(process.pid)
    launchers = client, warm.fork_of(client)
    wait_for(process, lambda: not any(is_pending(launcher, second) for launcher in launchers))
    resume(ranks)
    _, errors = process.communicate(timeout=SOON_SECONDS)
    assert process.returncode == 75, errors
    assert len(errors.splitlines()) == 1, errors
    assert "state saved" in errors
    wait_for_end(tmp_path)


def is_pending(process: psutil.Process, number: signal.Signals) -> bool:
    """Return whether a process has been sent a signal that it has not handled yet."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    pending = [int(mask, 16) for mask in re.findall(r"^S\w*Pnd:\s*(\w+)", status, re.MULTILINE)]
    return any(mask & 1 << number - 1 for mask in pending)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_before_the_first_step_ends_all_ranks_too(
    small_set: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """SIGTERM must end the job with 75, so that it is requeued, and not with 130."""
    options = ["train", "--model", "tests.single.training.models:hangs", "--ranks", "2"]
    options += ["--data", str(small_set), "--run", str(tmp_path / "run")]
    process = start(options, environment={"FAULTY_RANKS": "0,1"})
    wait_for(process, lambda: len(ranks_of(process)) == 2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=SOON_SECONDS)
    assert process.returncode == code, errors
    assert errors == "hvdtrain: ended before training started\n"
    wait_for_end(tmp_path)


def test_a_stop_during_set_up_ends_all_ranks_before_the_first_step(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """A first step may take longer than the scheduler waits."""
    run = tmp_path / "run"
    options = ["train", "--model", "tests.single.training.models:is_asked_to_stop"]
    options += ["--data", str(small_set), "--run", str(run), "--max-steps", "3"]
    launcher = tuple(mpirun(2))
    done = hvdtrain(*options, launcher=launcher, ASKED_RANKS="1")
    assert done.returncode == 75, done.stderr
    assert f"stopped before the first step: continue with --resume --run {run}" in done.stderr
    assert events_of(run, "checkpoint") == []
    done = hvdtrain(*options, "--resume", launcher=launcher, ASKED_RANKS="")
    assert done.returncode == 0, done.stderr
    assert summary_of(run)["steps"] == 3


def test_a_stop_during_evaluation_leaves_it_and_resume_repeats_it(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """The rest of the evaluation and another step may take longer than the scheduler waits."""
    model = "tests.single.training.models:is_asked_to_stop_in_evaluation"
    options = ["train", "--model", model, "--data", small_set, "--ranks", 2, "--epochs", 2]
    options += ["--batch-size", 50, "--holdout", 0.3, "--run"]
    run, whole = tmp_path / "run", tmp_path / "whole"
    done = hvdtrain(*options, run, FAULTY_RANKS="1")
    assert done.returncode == 75, done.stderr
    assert "stopped after step 9, state saved" in done.stderr  # the last one of the epoch
    assert events_of(run, "epoch") == []
    for folder in (run, whole):
        again = ["--resume"] if folder == run else []
        done = hvdtrain(*options, folder, *again, FAULTY_RANKS="")
        assert done.returncode == 0, done.stderr
    assert summary_of(run)["weights_sha256"] == summary_of(whole)["weights_sha256"]
    measured = [
        [{name: line[name] for name in ("epoch", "step", *MEASURED)} for line in lines]
        for lines in (events_of(run, "epoch"), events_of(whole, "epoch"))
    ]
    assert measured[0] == measured[1]


def test_a_job_that_has_just_saved_leaves_with_that_checkpoint(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """A second checkpoint, after one more step, would double the time."""
    run, model = tmp_path / "run", "tests.single.training.models:is_asked_to_stop_in_evaluation"
    options = ["train", "--model", model, "--data", small_set, "--ranks", 2, "--run", run]
    done = hvdtrain(*options, "--epochs", 2, FAULTY_RANKS="1")
    assert done.returncode == 75, done.stderr
    (before,) = events_of(run, "checkpoint")
    done = hvdtrain(*options, "--epochs", 2, "--resume", FAULTY_RANKS="1")
    assert done.returncode == 75, done.stderr
    (after,) = events_of(run, "checkpoint")
    assert after == before


def test_a_second_ctrl_c_ends_at_once(long_run: "subprocess.Popen[str]", tmp_path: Path) -> None:
    ranks = ranks_of(long_run)
    suspend(ranks)  # so that they do not react to the first Ctrl-C
    long_run.send_signal(signal.SIGINT)
    wait_for(long_run, lambda: all(is_pending(rank, signal.SIGUSR1) for rank in ranks))
    time.sleep(SAME_CTRL_C_SECONDS)
    assert long_run.poll() is None
    long_run.send_signal(signal.SIGINT)
    _, errors = long_run.communicate(timeout=SOON_SECONDS)
    assert long_run.returncode == 130
    assert errors == "hvdtrain: ended at once: the last checkpoint is unchanged\n"
    wait_for_end(tmp_path)


def test_a_rank_that_is_killed_ends_the_job_and_is_named(
    long_run: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    ranks = ranks_of(long_run)
    assert len(ranks) == 2
    shared = [Path(client.environ()[SHARED_SETTINGS[0]]) for client in clients_of(long_run)]
    assert len(list(shared[0].iterdir())) == 2
    ranks[0].send_signal(signal.SIGKILL)
    _, errors = long_run.communicate(timeout=SOON_SECONDS)
    assert long_run.returncode == 4
    assert "was ended by signal 9" in errors
    wait_for_end(tmp_path)
    assert not any(folder.exists() for folder in shared)


def test_nothing_lives_on_when_the_launcher_is_killed(
    long_run: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    long_run.kill()
    wait_for_end(tmp_path)


def test_a_users_own_script_that_raises_on_one_rank_ends_on_all(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "from hvdtrain import world\nfrom hvdtrain.health import failure\n"
        "current = world.start()\n"
        "failure.end_all_on_exception()\n"
        "if current.rank == 1:\n"
        "    raise ValueError('of my own')\n"
        "current.barrier()\n"
    )
    done = subprocess.run(
        [*mpirun(3), sys.executable, str(script)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=600,
        env=program_environment(),
    )
    assert done.returncode == 4
    assert done.stderr.count("ValueError: of my own") == 1


@pytest.mark.weekly
def test_a_module_of_the_current_folder_takes_no_other_s_place(
    small_set: Path, tmp_path: Path
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('this is not queue')\n")
    command = [str(Path(sys.executable).with_name("hvdtrain")), "train", "--model", "cnn"]
    command += ["--data", str(small_set), "--ranks", "2", "--max-steps", "2", "--run", "run"]
    done = subprocess.run(
        command, cwd=tmp_path, env=program_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert summary_of(tmp_path / "run")["ranks"] == 2
