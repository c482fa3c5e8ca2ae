"""The command of `--on-alert`, which receives the cause and the message in its environment.

The command may hold an address or a token. `ps` shows every user the command lines of all
processes, but not their environments. A launcher therefore passes it to its ranks and to the shell
in the environment.
"""

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from hvdtrain.errors import shortened

SECONDS = 60.0  # limit for the command
SECONDS_AT_THE_END = 10.0  # longest wait for the command when the job ends

COMMAND = "HVDTRAIN_ON_ALERT"
OPTION = "--on-alert"


def without_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without the option and its value."""
    kept, rest = [], iter(words)
    for word in rest:
        if word == OPTION:
            next(rest, None)
        elif not word.startswith(f"{OPTION}="):
            kept.append(word)
    return kept


def send(command: str | None, cause: str, message: str, run: str | None) -> list[threading.Thread]:
    """Run a shell command in the background and return its thread, which ends with the command.

    The command's environment has HVDTRAIN_CAUSE (a word), HVDTRAIN_MESSAGE (a line) and
    HVDTRAIN_RUN (the run folder). Its output goes to standard error; its exit code is ignored.
    """
    if command is None:
        return []
    details = {"HVDTRAIN_CAUSE": cause, "HVDTRAIN_RUN": run or ""}
    details["HVDTRAIN_MESSAGE"] = shortened(message)
    thread = threading.Thread(
        target=_run, args=(command, details), name="hvdtrain-alert", daemon=True
    )
    thread.start()
    return [thread]


def send_and_wait(command: str | None, cause: str, message: str, run: str | None) -> None:
    """Send an alert as `send` does, and wait for its command before the process ends."""
    wait(send(command, cause, message, run))


def wait(sent: Sequence[threading.Thread]) -> None:
    """Wait a short time, shared by all, for the commands that were sent to end."""
    until = time.monotonic() + SECONDS_AT_THE_END
    for thread in sent:
        thread.join(max(0.0, until - time.monotonic()))


def _run(command: str, details: dict[str, str]) -> None:
    # The command must not look like a rank of this job, nor receive the signals sent to the job.
    job_variables = (
        "OMPI_",
        "PMIX_",
        "PRTE_",
        "PMI_",
        "HVDTRAIN_ACTIVITY",
        "HVDTRAIN_LAUNCH",
        COMMAND,
    )
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(job_variables)
    }
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            f'eval "${COMMAND}"',
            shell=True,
            check=False,
            env=kept | details | {COMMAND: command},
            stdin=subprocess.DEVNULL,
            stdout=2,
            timeout=SECONDS,
            start_new_session=True,
        )
