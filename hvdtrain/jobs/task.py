"""What a job does: `python -m hvdtrain.jobs.task rank RUN`, or `... runs RUN...`.

The arguments are folders of runs. What is executed is what their `config.yaml` says, so a folder
that another user could have changed since the job was made is refused.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hvdtrain import files
from hvdtrain.errors import DataError, UsageError
from hvdtrain.stop import STOP_SIGNALS

CONFIGURATION = "config.yaml"


def main(words: Sequence[str]) -> int:
    """Run this task; the exit code."""
    how, *runs = words
    try:
        if how == "rank":
            become(runs[0])
        return one_after_the_other(runs)
    except (DataError, UsageError) as error:
        print(f"hvdtrain: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def become(run: str) -> NoReturn:
    """Become `hvdtrain train`, so that a rank is the same program however it was started.

    Raises:
        DataError, UsageError: as `check`.
    """
    # A signal waits until the program can obey it: blocked and pending outlive exec.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.execv(sys.executable, _command(run))


def one_after_the_other(runs: Sequence[str]) -> int:
    """Make these runs, in processes that hear of the end of the job's time; the worst exit code.

    Raises:
        DataError, UsageError: as `check`.
    """
    running: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        asked.append(number)
        for process in running:
            process.send_signal(number)

    for number in (*STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, pass_on)
    codes = []
    for run in runs:
        running[:] = [subprocess.Popen(_command(run))]
        if asked:  # before there was a process to tell
            running[0].send_signal(asked[0])
        codes.append(running[0].wait())
        if asked or codes[-1] in (75, 130):
            break
    return max(codes, key=abs)


def check(run: Path) -> None:
    """Refuse the folder of a run whose configuration another user may have written.

    Raises:
        UsageError: if it can be changed by another user.
        DataError: if it or its configuration is not there.
    """
    for path in (run, run / CONFIGURATION):
        try:
            fault = files.fault_of_owner(path)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}: submit the run again") from None
        if fault:
            raise UsageError(f"{fault}; a job executes what {CONFIGURATION} says")


def _command(run: str) -> list[str]:
    """The command of a run, which is the same each time its job is requeued."""
    check(Path(run))
    configuration = str(Path(run) / CONFIGURATION)
    words = ["train", "--config", configuration, "--run", run, "--resume", "auto"]
    return [sys.executable, "-P", "-m", "hvdtrain", *words]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
