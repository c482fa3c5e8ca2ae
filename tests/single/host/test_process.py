"""Memory that a step frees is kept by the process, as its page faults show."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# Allocate and free as much as a step of a small network, in blocks as large as its activations.
PROGRAM = """
import ctypes, json, resource, sys
from hvdtrain.host.process import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "kept" else None
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
size = 8 * 2**20
def step():
    blocks = [libc.malloc(size) for _ in range(20)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(json.dumps([kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before]))
"""


def faults(how: str, **environment: str) -> tuple[bool | None, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        | environment,
    )
    kept, count = json.loads(done.stdout)
    return kept, count


@pytest.mark.proves(
    "Memory that a step frees is kept for the next, unless the user has set glibc otherwise."
)
@pytest.mark.skipif(sys.platform != "linux", reason="another C library")
def test_memory_that_a_step_frees_is_there_for_the_next() -> None:
    _, usual = faults("usual")
    kept, with_kept_memory = faults("kept")
    assert kept
    assert usual > 300, "5 x 160 MiB are 204,800 pages of 4 KiB, or 400 of 2 MiB"
    assert with_kept_memory < usual / 20


def test_what_the_user_has_set_stays() -> None:
    assert faults("kept", MALLOC_TRIM_THRESHOLD_="1000000")[0] is False
    assert faults("kept", GLIBC_TUNABLES="glibc.malloc.arena_max=2")[0] is False
