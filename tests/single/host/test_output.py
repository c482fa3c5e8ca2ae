"""Output that cannot be written: training continues, and nothing prints a traceback."""

import fcntl
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvdtrain.host import output
from tests.children import end_of, in_child
from tests.conftest import ROOT, Program, program, program_environment

FULL, CLOSED_PIPE, CLOSED = "No space left on device", "Broken pipe", "Bad file descriptor"
REMARK = "hvdtrain: standard output cannot be written ({}): continuing without it\n"


def lose_output(lost: str, *arguments: object, errors: int = subprocess.PIPE) -> tuple[int, str]:
    """Run the program with a standard output that takes nothing; return its code and errors."""
    command = program(*arguments, cold=lost == CLOSED)
    if lost == CLOSED:
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command,
            stdout=full if lost == FULL else writer,
            stderr=full if errors == subprocess.STDOUT else errors,
            text=True,
            env=program_environment(),
        )
    os.close(writer)
    return done.returncode, done.stderr or ""


@pytest.mark.proves("Output that cannot be written ends no run.")
@pytest.mark.parametrize("lost", [FULL, CLOSED_PIPE, CLOSED])
def test_training_continues_without_its_output(small_set: Path, tmp_path: Path, lost: str) -> None:
    """A run with its log on a full disk, or before `| head -1`, ended with nothing saved."""
    run = tmp_path / "run"
    options = ("--model", "cnn", "--data", small_set, "--batch-size", 300, "--epochs", 2)
    assert lose_output(lost, "train", *options, "--run", run) == (0, REMARK.format(lost))
    assert (run / "summary.json").exists()


def test_training_continues_without_standard_error(small_set: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--model", "cnn", "--data", small_set, "--batch-size", 300, "--max-steps", 1)
    code, _ = lose_output(FULL, "train", *options, "--run", run, errors=subprocess.STDOUT)
    assert code == 0
    assert (run / "summary.json").exists()


def test_what_only_prints_ends_as_other_programs_do(small_set: Path) -> None:
    for command in (("data", "info", small_set), ("train", "--help")):
        assert lose_output(CLOSED_PIPE, *command) == (141, "")
        code, errors = lose_output(FULL, *command)
        assert (code, errors.count("\n"), FULL in errors) == (1, 1, True)


def test_a_verdict_is_kept(small_set: Path) -> None:
    assert lose_output(CLOSED_PIPE, "data", "verify", small_set)[0] == 0


def test_a_pipe_that_must_not_block_takes_all() -> None:
    """A program that shares a terminal may set it so; its writes then raise BlockingIOError."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETFL, os.O_NONBLOCK)

    def print_much() -> None:
        os.dup2(writer, 1)
        os.close(writer)
        sys.stdout = sys.__stdout__
        output.guard()
        print("x" * 10**6)

    child = in_child(print_much)
    os.close(writer)
    read: list[bytes] = []

    def read_all() -> None:
        with os.fdopen(reader, "rb") as pipe:
            read.append(pipe.read())

    thread = threading.Thread(target=read_all)
    thread.start()
    assert end_of(child) == 0
    thread.join()
    assert len(read[0]) == 10**6 + 1


def test_what_cannot_be_forwarded_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a notebook waited where its output failed: nothing read their pipe."""
    with subprocess.Popen(["seq", "100000"], stdout=subprocess.PIPE, text=True) as process:
        full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
        monkeypatch.setattr(sys, "stdout", full)
        output.forward(process.stdout)
        monkeypatch.undo()
    assert process.returncode == 0


def test_a_name_that_the_terminal_cannot_show_ends_nothing(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    options = ("--model", "cnn", "--data", small_set, "--batch-size", 300, "--max-steps", 1)
    run = tmp_path / "é"
    done = hvdtrain("train", *options, "--run", run, PYTHONIOENCODING="ascii", cold=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xe9" in done.stdout


def test_names_that_cannot_be_are_refused_in_one_line(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    common = ("train", "--model", "cnn", "--data", small_set, "--max-steps", 1)
    long, deep = tmp_path / ("x" * 300), tmp_path / "/".join(["y" * 200] * 25)
    for command, words in (
        ((*common, "--run", long), "File name too long: choose another --run"),
        ((*common, "--trace", deep, "--run", tmp_path / "run"), "File name too long: use names"),
        (("data", "info", long), "File name too long: use names"),
        ((*common, "--run", os.fsdecode(b"u\xff")), "'u\\udcff' is not UTF-8 text: rename it"),
    ):
        done = hvdtrain(*command)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert words in done.stderr


def test_a_trace_may_have_the_longest_name(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """The unfinished file has a longer name, and so the run failed at its end."""
    options = ("--model", "cnn", "--data", small_set, "--batch-size", 300, "--max-steps", 2)
    trace = tmp_path / ("t" * 255)
    done = hvdtrain("train", *options, "--trace", trace, "--run", tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert trace.exists()


def test_one_module_makes_rich_consoles() -> None:
    """Another one could take square brackets in a user's name for markup."""
    made = [
        path.name
        for path in (ROOT / "hvdtrain").rglob("*.py")
        if "rich.console" in path.read_text() or "TextColumn" in path.read_text()
    ]
    assert made == ["output.py"]
