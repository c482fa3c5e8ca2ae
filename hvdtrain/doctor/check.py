"""Results of checks and their output, and programs that run in separate processes.

A program or probe may fail, crash or hang there without harm.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import psutil

from hvdtrain.host import output
from hvdtrain.host.launchers import needed_by_mpirun
from hvdtrain.host.output import without_launcher_banners
from hvdtrain.launch import LAUNCHER_VARIABLES

State = Literal["ok", "note", "fault"]
COLOURS: dict[State, str] = {"ok": "green", "note": "yellow", "fault": "bold red"}


@dataclass(frozen=True)
class Check:
    """One result: the subject of the check, its state, the finding, and the fix (`cure`)."""

    name: str
    state: State
    text: str
    cure: str = ""


# Commands by launcher and number of ranks; the options of `train` must be appended.
LaunchLines = Mapping[str, Mapping[int, str]]


def is_fit(checks: Sequence[Check]) -> bool:
    """Return True if no check found a fault; notes do not count."""
    return all(check.state != "fault" for check in checks)


def verdict(checks: Sequence[Check], lines: LaunchLines) -> str:
    """Return one sentence about what this machine can do."""
    faults = [check.name for check in checks if check.state == "fault"]
    if not faults:
        return "This machine is fit for training on one rank and on several."
    summary = f"{len(faults)} fault{'s' if len(faults) > 1 else ''} ({', '.join(faults)})."
    if set(faults) & {"Python", "PyTorch", "NumPy", "h5py"}:
        return f"{summary} Training does not work until this is fixed."
    if lines:
        return f"{summary} Training works with the lines above."
    return f"{summary} Training on one rank works: hvdtrain train without --ranks."


def report_as_json(checks: Sequence[Check], lines: LaunchLines) -> str:
    """Return the report of `doctor --json`."""
    report = {
        "checks": [asdict(check) for check in checks],
        "fit": is_fit(checks),
        "launch_lines": lines,
    }
    return json.dumps(report, indent=1)


def report_as_text(checks: Sequence[Check], lines: LaunchLines, closing: str | None = None) -> str:
    """Return the report in plain lines; its last line is `closing`, by default the verdict."""
    width = max(len(check.name) for check in checks)
    rows = []
    for check in checks:
        rows.append(f"{check.state:5}  {check.name:{width}}  {check.text}")
        if check.cure:
            rows.append(f"{'':5}  {'':{width}}  fix: {check.cure}")
    return "\n".join([*rows, "", *_launch_rows(lines), closing or verdict(checks, lines)])


def show(checks: Sequence[Check], lines: LaunchLines, closing: str | None = None) -> None:
    """Print the report: in columns and colours on a terminal, in plain lines otherwise."""
    if not sys.stdout.isatty():
        print(report_as_text(checks, lines, closing))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for check in checks:
        table.add_row(Text(check.state, COLOURS[check.state]), Text(check.name), Text(check.text))
        if check.cure:
            table.add_row("", "", Text(f"fix: {check.cure}", "cyan"))
    console = output.console()
    console.print(table)
    # Printed without wrapping, so that the lines can be copied.
    print("", *_launch_rows(lines), sep="\n")
    console.print(Text(closing or verdict(checks, lines), "bold"))


def _launch_rows(lines: LaunchLines) -> list[str]:
    commands = [command for by_ranks in lines.values() for command in by_ranks.values()]
    if not commands:
        return []
    examples = [f"  {command} --model cnn --data DIR" for command in commands]
    return ["Commands that start ranks on this machine (all were just tried):", *examples, ""]


# A first import from a network file system is slow.
PROBE_SECONDS = 90.0
SECONDS_TO_END = 3.0
MARK = "hvdtrain-doctor-fact "  # starts a line of JSON that a probe prints
# Sizes in bytes of the buffers whose all-reduce is watched.
WATCHED_SIZES = (2**13, 2**20, 2**24)


@dataclass(frozen=True)
class Outcome:
    """The exit code of a process (None: ended after `seconds`), and its output."""

    code: int | None
    output: str
    errors: str
    seconds: float

    @property
    def reason(self) -> str:
        """The reason of a failure in one line; empty if the process succeeded."""
        if self.code == 0:
            return ""
        if self.code is None:
            return f"it hung and was killed after {self.seconds:.0f} s"
        if self.code < 0:
            return f"it was killed by {signal.Signals(-self.code).name}"
        return failure(self.errors) or f"it exited with {self.code} and printed no reason"


@dataclass(frozen=True)
class Answer:
    """The facts from a probe, and the reason why it ended early; empty if it did not."""

    facts: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    errors: str = ""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment without the variables that a launcher has set for its ranks."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    return kept | dict(extra or {})


def run(command: Sequence[str], seconds: float, extra: Mapping[str, str] | None = None) -> Outcome:
    """Run a program for at most `seconds`, and end it with all its children after that."""
    try:
        process = subprocess.Popen(
            command,
            env=environment(extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return Outcome(127, "", f"{command[0]}: {error.strerror}", seconds)
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process.pid)
        output, errors = process.communicate()
        return Outcome(None, output, errors, seconds)
    return Outcome(process.returncode, output, errors, seconds)


def words(command: Sequence[str]) -> str:
    """Return the output of a program such as `mpirun --version` in one line; empty if it fails."""
    outcome = run(command, 10)
    return " ".join(outcome.output.split()) if outcome.code == 0 else ""


def first_line(command: Sequence[str]) -> str:
    """Return the first output line of a program such as `c++ --version`; empty if it fails."""
    outcome = run(command, 10)
    return outcome.output.strip().partition("\n")[0] if outcome.code == 0 else ""


def probe(
    *arguments: str,
    launcher: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
) -> Answer:
    """Run one probe of `hvdtrain.doctor.probe`, on several ranks if a launcher is given."""
    command = [*launcher, sys.executable, "-P", "-m", "hvdtrain.doctor.probe", *arguments]
    if launcher:
        extra = {**needed_by_mpirun(), **(extra or {})}
    outcome = run(command, PROBE_SECONDS, extra)
    return Answer(read_facts(outcome.output), outcome.reason, outcome.errors)


def say(**facts: Any) -> None:
    """Print facts for doctor."""
    print(f"{MARK}{json.dumps(facts)}", flush=True)


def read_facts(output: str) -> dict[str, Any]:
    """Return the facts in a probe's output, and ignore the output of libraries."""
    facts: dict[str, Any] = {}
    for line in output.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            facts |= json.loads(text)
    return facts


def failure(errors: str) -> str:
    """Return the line of a program's standard error that gives the reason of a failure.

    It is the last exception if there is one, else a launcher's framed remark, else the last line.
    """
    banners: list[str] = []
    lines = [line.strip() for line in without_launcher_banners(errors.splitlines(), banners)]
    lines = [line for line in lines if line]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|hvdtrain)\b.*:", line)]
    remark = " ".join(" ".join(banners).split())
    text = (raised[-1:] or [remark] if remark or raised else lines[-1:] or [""])[0]
    return text if len(text) <= 300 else f"{text[:300]}..."


def _end(number: int) -> None:
    """End a process and its children with SIGTERM, then with SIGKILL."""
    try:
        parent = psutil.Process(number)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for member in family:
            if member.is_running():
                end(member)
        _, family = psutil.wait_procs(family, SECONDS_TO_END)
