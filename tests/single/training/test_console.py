"""Output of a run at a terminal."""

import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.conftest import program, program_environment
from tests.single.training.jobs import SOON_SECONDS


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_at_a_terminal_shows_a_bar_and_the_epochs(
    small_set: Path, tmp_path: Path, ranks: int
) -> None:
    run = tmp_path / "x[/b]:b:"  # rich would take it for markup
    command = ["train", "--model", "cnn", "--data", str(small_set), "--run", str(run)]
    command += ["--ranks", str(ranks), "--epochs", "2", "--checkpoint-every", "4 steps"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        program(*command),
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=program_environment() | {"TERM": "xterm-256color"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    _, errors = process.communicate(timeout=SOON_SECONDS)
    assert process.returncode == 0, errors.decode()
    assert errors == b""
    text = shown.decode()
    assert "epoch 1/2" in text
    assert "epoch 2/2" in text
    assert "trained 1,202 samples" in text
    assert text.rstrip().endswith(("x[/b]:b:", "\x1b[?25h"))
