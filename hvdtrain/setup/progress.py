"""Long commands: their output goes to a log, the terminal shows a percentage and a time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from hvdtrain.errors import HvdtrainError, UsageError

PLAIN_INTERVAL = 20.0  # seconds between two lines if there is no terminal

_MAKE_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]")
_NINJA_COUNT = re.compile(r"^\s*\[(\d+)/(\d+)\]")
_ERROR = re.compile(r"\berror\b|\bCMake Error\b|undefined reference|No such file|\bKilled\b", re.I)
_FULL = re.compile(r"No space left on device|Disk quota exceeded")


class CommandFailed(HvdtrainError):
    """A command that exited with a code other than zero; the message names the log."""


def percent_of(line: str) -> int | None:
    """Return the progress in percent in a line of make's, ninja's or CMake's output, or None."""
    if match := _MAKE_PERCENT.match(line):
        return int(match[1])
    if match := _NINJA_COUNT.match(line):
        return 100 * int(match[1]) // max(1, int(match[2]))
    return None


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
            progress = percent_of(line.decode(errors="replace"))
            if progress is not None:
                percent[0] = max(percent[0], progress)


def show(title: str, percent: int, seconds: float, terminal: bool) -> None:
    """Print the progress: in place on a terminal, else on a separate line."""
    share = f"{percent:3d} %  " if percent else ""
    text = f"{title}: {share}{clock(seconds)}"
    print(f"\r\033[K{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr)
    sys.stderr.flush()


def clock(seconds: float) -> str:
    """Return minutes and seconds, such as `3:05`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
