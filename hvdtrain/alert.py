"""The command of `--on-alert`: told of what goes wrong, in its environment.

It may hold an address or a token. `ps` shows every user the command lines of all processes, but
not their environments, so that is how it goes from a launcher to its ranks and to the shell.
"""

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from hvdtrain.errors import shortened

SECONDS = 60.0  # that the command may take
SECONDS_AT_THE_END = 10.0  # that a job which ends waits for it

COMMAND = "HVDTRAIN_ON_ALERT"
OPTION = "--on-alert"


def without_command(words: Sequence[str]) -> list[str]:
    """The words of a command line without the option and its value."""

    def kept(rest: Iterator[str]) -> Iterator[str]:
        for word in rest:
            if word == OPTION:
                next(rest, None)
            elif not word.startswith(f"{OPTION}="):
                yield word

    return list(kept(iter(words)))


def send(command: str | None, cause: str, message: str, run: str | None) -> list[threading.Thread]:
    """Run a shell command beside everything else; the thread that is returned ends with it.

    It finds in its environment HVDTRAIN_CAUSE (a word), HVDTRAIN_MESSAGE (a line) and HVDTRAIN_RUN
    (the run folder). What it writes goes to standard error; how it ends changes nothing.
    """
    if command is None:
        return []
    told = {"HVDTRAIN_CAUSE": cause, "HVDTRAIN_RUN": run or ""}
    told["HVDTRAIN_MESSAGE"] = shortened(message)
    thread = threading.Thread(
        target=_run, args=(command, told), name="hvdtrain-alert", daemon=True
    )
    thread.start()
    return [thread]


def send_and_wait(command: str | None, cause: str, message: str, run: str | None) -> None:
    """As `send`, before a process ends."""
    wait(send(command, cause, message, run))


def wait(sent: Sequence[threading.Thread]) -> None:
    """Give commands that were sent a little time to end, all of them together."""
    until = time.monotonic() + SECONDS_AT_THE_END
    for thread in sent:
        thread.join(max(0.0, until - time.monotonic()))


def _run(command: str, told: dict[str, str]) -> None:
    # Neither a rank of this job nor a signal to it is the command's business.
    strange = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HVDTRAIN_ACTIVITY", "HVDTRAIN_LAUNCH", COMMAND)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            f'eval "${COMMAND}"',
            shell=True,
            check=False,
            env=kept | told | {COMMAND: command},
            stdin=subprocess.DEVNULL,
            stdout=2,
            timeout=SECONDS,
            start_new_session=True,
        )
