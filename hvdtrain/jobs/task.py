"""The program of a job: `python -m hvdtrain.jobs.task rank RUN`, or `... runs RUN...`.

The arguments are run folders. A job executes what `config.yaml` in such a folder says, so a folder
that another user could have changed since the submission is refused. Before the submission,
`... check` looks at the runs.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hvdtrain.errors import DataError, HvdtrainError, Interrupted, Preempted, UsageError
from hvdtrain.host import files
from hvdtrain.host.process import STOP_SIGNALS

CONFIGURATION = "config.yaml"


def main(words: Sequence[str]) -> int:
    """Run this task; return the exit code."""
    mode, *runs = words
    if mode == "check":
        return check_runs(sys.stdin.read())
    try:
        if mode == "rank":
            exec_train(runs[0])
        return train_in_turn(runs)
    except (DataError, UsageError) as error:
        print(f"hvdtrain: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def check_runs(configurations: str) -> int:
    """Check the configurations of a JSON list as their ranks would; return the exit code.

    What is wrong is the last line of standard output.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the process that submits says what happened
    from hvdtrain.config import TrainConfig
    from hvdtrain.training.starts import check_before_submission

    try:
        check_before_submission(TrainConfig(**values) for values in json.loads(configurations))
    except HvdtrainError as error:
        print(error)
        return error.exit_code
    return 0


def exec_train(run: str) -> NoReturn:
    """Replace this process by `hvdtrain train`, so that every launcher runs the same program.

    Raises:
        DataError, UsageError: as `check`.
    """
    # Blocked and pending signals survive exec, so a signal waits until `train` can handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.execv(sys.executable, _command(run))


def train_in_turn(runs: Sequence[str]) -> int:
    """Train these runs one after the other; return the worst exit code.

    Stop signals, such as the one at the end of the job's time, are forwarded to the run.

    Raises:
        DataError, UsageError: as `check`.
    """
    running: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        for process in running:
            process.send_signal(number)

    for number in (*STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, forward)
    codes = []
    for run in runs:
        running[:] = [subprocess.Popen(_command(run))]
        if received:  # before the process had started
            running[0].send_signal(received[0])
        codes.append(running[0].wait())
        if received or codes[-1] in (Preempted.exit_code, Interrupted.exit_code):
            break
    return max(codes, key=abs)


def check(run: Path) -> None:
    """Refuse the folder of a run if another user may have written its configuration.

    Raises:
        UsageError: if another user can change the folder or its configuration.
        DataError: if one of them does not exist.
    """
    for path in (run, run / CONFIGURATION):
        try:
            fault = files.ownership_problem(path)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}: submit the run again") from None
        if fault:
            raise UsageError(f"{fault}; a job executes what {CONFIGURATION} says")


def _command(run: str) -> list[str]:
    """Return the command of a run, which is the same after each requeue of its job."""
    check(Path(run))
    configuration = str(Path(run) / CONFIGURATION)
    words = ["train", "--config", configuration, "--run", run, "--resume", "auto"]
    return [sys.executable, "-P", "-m", "hvdtrain", *words]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
