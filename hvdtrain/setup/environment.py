"""This Python environment: whether packages can be installed in it, and pip.

The output of long commands goes to a log; the terminal shows a percentage and a time.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from hvdtrain.errors import HvdtrainError, UsageError

MAKE_ONE = "make an environment of your own with python3 -m venv DIR, and install hvdtrain in it"
OTHER_DISK = "choose another disk (TMPDIR for temporary files, --cache for wheels)"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
PLAIN_INTERVAL = 20.0  # seconds between two lines if there is no terminal

_MAKE_PERCENT = re.compile(rb"\s*\[\s*(\d{1,3})%\]")
_ERROR = re.compile(r"\berror\b|\bCMake Error\b|undefined reference|No such file|\bKilled\b", re.I)
_FULL = re.compile(r"No space left on device|Disk quota exceeded")


@dataclass(frozen=True)
class Pip:
    """The pip of this environment, and where it takes packages from.

    Attributes:
        log: file that receives its output.
        constraint: file with the versions that packages must have.
        variables: further environment variables.
    """

    log: Path
    constraint: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a command of pip, and of those it starts."""
        quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
        return os.environ | quiet | dict(self.variables)

    def run(self, title: str, command: str, *arguments: str) -> None:
        """Run a command of pip and show its progress.

        Raises:
            CommandFailed: pip failed.
        """
        words = [sys.executable, "-m", "pip", command, *arguments]
        if self.constraint is not None:
            words += ["--constraint", str(self.constraint)]
        run(title, words, self.environment(), self.log)

    def install(self, title: str, *arguments: str) -> None:
        """Install packages in this environment.

        Raises:
            CommandFailed: pip failed.
        """
        self.run(title, "install", *arguments)


def check() -> None:
    """Refuse an environment in which no package can be installed.

    Raises:
        UsageError: with the fix.
    """
    if sys.prefix == sys.base_prefix:
        check_owner(Path(sysconfig.get_path("stdlib")))
    check_writable(Path(sysconfig.get_path("platlib")))
    if importlib.util.find_spec("pip") is None:
        raise UsageError(
            f"{sys.executable} has no pip: run it with -m ensurepip, or run uv pip install pip"
        )


def check_owner(standard_library: Path) -> None:
    """Refuse a Python whose packages the operating system manages, as pip does.

    Raises:
        UsageError: with the fix.
    """
    allowed = os.environ.get("PIP_BREAK_SYSTEM_PACKAGES", "0") in ("1", "true", "yes", "on")
    if Path(standard_library, "EXTERNALLY-MANAGED").is_file() and not allowed:
        raise UsageError(f"{sys.executable} belongs to the operating system: {MAKE_ONE}")


def check_writable(packages: Path) -> None:
    """Refuse a folder of packages that this user cannot write.

    Raises:
        UsageError: with the fix.
    """
    if not os.access(packages, os.W_OK | os.X_OK):
        raise UsageError(f"{packages} is not writable: {MAKE_ONE}")


def check_space(folder: Path, size: int) -> None:
    """Refuse to start where the disk of a folder has less room than `size` bytes.

    Raises:
        UsageError: naming the folder.
    """
    free = shutil.disk_usage(folder).free
    if free < size:
        raise UsageError(
            f"{folder} has {free >> 20:,} MB free, and {size >> 20:,} MB are needed: free "
            f"some, or {OTHER_DISK}"
        )


def no_space(error: OSError) -> UsageError | None:
    """Return the error of a full disk in one line with its fix, None for another error."""
    if error.errno not in NO_SPACE:
        return None
    place = error.filename or "the disk"
    return UsageError(f"no space is left for {place}: free some, or {OTHER_DISK}")


class CommandFailed(HvdtrainError):
    """A command that exited with a code other than zero; the message names the log."""


def error_lines(text: str, limit: int = 8) -> list[str]:
    """Return the last lines of a log that look like errors, or its last lines if none do.

    Lines are cut to 200 characters.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # A compiler call may name files such as error.cc, so command lines are excluded.
    matches = [line for line in lines if _ERROR.search(line) and " -c " not in line]
    return [line[:200] for line in (matches or lines)[-limit:]]


def run(title: str, command: list[str], env: Mapping[str, str], log: Path) -> None:
    """Run `command`, append its output to `log`, and show `title`, percent and elapsed time.

    The command runs in a separate process group, which ends with this process, so that Ctrl-C
    leaves no compiler behind.

    Raises:
        CommandFailed: the command failed; the message holds the last error lines and the log.
        UsageError: the disk is full.
    """
    with log.open("ab") as stream:
        offset = stream.tell()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )
        percent = [0]
        reader = threading.Thread(target=_copy, args=(process, stream, percent))
        try:
            reader.start()
            code = _wait(title, process, reader, percent)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if reader.ident is not None:
                reader.join()
    if code != 0:
        text = log.read_bytes()[offset:].decode(errors="replace")
        if _FULL.search(text):
            raise UsageError(
                f"{title}: no space is left on the disk: free some, or choose another one (TMPDIR "
                "for temporary files, --cache for wheels)"
            )
        details = "\n".join(f"  {line}" for line in error_lines(text))
        raise CommandFailed(f"{title}: failed (exit {code})\n{details}\nthe whole log: {log}")


def _wait(
    title: str, process: subprocess.Popen[bytes], reader: threading.Thread, percent: list[int]
) -> int:
    """Show progress until the command has closed its output; return its exit code."""
    started = time.monotonic()
    terminal = sys.stderr.isatty()
    next_line = started + PLAIN_INTERVAL
    while reader.is_alive():
        reader.join(0.5)
        now = time.monotonic()
        if terminal or now >= next_line:
            next_line += PLAIN_INTERVAL
            show(title, percent[0], now - started, terminal)
    code = process.wait()
    outcome = "done" if code == 0 else "failed"
    end = f"{title}: {outcome} in {clock(time.monotonic() - started)}"
    print(f"\r\033[K{end}" if terminal else end, file=sys.stderr, flush=True)
    return code


def _copy(process: subprocess.Popen[bytes], log: IO[bytes], percent: list[int]) -> None:
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            log.write(line)
            log.flush()
            if match := _MAKE_PERCENT.match(line):
                percent[0] = max(percent[0], int(match[1]))


def show(title: str, percent: int, seconds: float, terminal: bool) -> None:
    """Print the progress: in place on a terminal, else on a separate line."""
    share = f"{percent:3d} %  " if percent else ""
    text = f"{title}: {share}{clock(seconds)}"
    print(f"\r\033[K{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr)
    sys.stderr.flush()


def clock(seconds: float) -> str:
    """Return minutes and seconds, such as `3:05`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
