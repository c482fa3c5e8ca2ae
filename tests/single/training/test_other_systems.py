"""One rank trains where the calls and files that only Linux has are missing, as on macOS."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import program_environment

# Libraries keep what they use: what hvdtrain's own code asks of the system is what counts.
WITHOUT_LINUX = """
import ctypes, errno, os, sys, time
from importlib.util import find_spec
from pathlib import Path

for module, names in {
    os: ("sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fadvise"),
    time: ("CLOCK_BOOTTIME",),
}.items():
    for name in names:
        delattr(module, name)
PACKAGE = str(Path(find_spec("hvdtrain").origin).parent)
FILES = ("/proc/", "/sys/", "/dev/shm")
FUNCTIONS = ("prctl", "mallopt", "malloc_trim", "sync_file_range")

def refuse(event, arguments):
    is_file = event in ("open", "os.mkdir") and str(arguments[0]).startswith(FILES)
    if not is_file and (event != "ctypes.dlsym" or arguments[1] not in FUNCTIONS):
        return
    frame = sys._getframe(1)
    while frame and any(name in frame.f_code.co_filename for name in ("pathlib", "ctypes")):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(PACKAGE):
        return
    if not is_file:
        raise AttributeError(arguments[1])
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(arguments[0]))

sys.addaudithook(refuse)
from hvdtrain import cli
from hvdtrain.host.counters import read_load
from hvdtrain.host.process import keep_freed_memory

# The hook works: Linux answers both.
assert not read_load().busy and not keep_freed_memory()
"""
TRAIN = """
for words in (
    "data synth data --images 40 --classes 4 --size 16",
    "train --model cnn --data data --epochs 2 --batch-size 10 --run run",
    "train --model cnn --data data --epochs 3 --batch-size 10 --run run --resume",
    "evaluate run --data data",
    "report run --to report",
):
    code = cli.run(words.split())
    assert not code, (words, code)
"""
BIND = """
sys.exit(cli.run("train --model cnn --data data --bind --run bound".split()))
"""


def python(program: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a program of Python in a folder."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={
            name: value
            for name, value in program_environment().items()
            if name != "GLIBC_TUNABLES" and not name.startswith("MALLOC_")
        },
        capture_output=True,
        text=True,
    )


@pytest.mark.proves(
    "One rank trains, resumes and reports without the calls of Linux that hvdtrain uses."
)
def test_one_rank_trains_without_the_calls_of_linux(tmp_path: Path) -> None:
    done = python(WITHOUT_LINUX + TRAIN, tmp_path)
    assert done.returncode == 0, done.stderr
    bound = python(WITHOUT_LINUX + BIND, tmp_path)
    assert bound.returncode == 2
    assert "--bind needs Linux" in bound.stderr
