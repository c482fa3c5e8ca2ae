"""`bench allreduce` and `bench exchange` on real ranks."""

import json

import pytest

from hvdtrain.host.launchers import ALGORITHMS
from tests.conftest import Program


def test_sums_of_all_sizes_are_timed(hvdtrain: Program) -> None:
    done = hvdtrain(
        *("bench", "allreduce", "--ranks", 3, "--largest", 5000, "--algorithm", "tree", "--json")
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result["seconds"]) == ["Horovod", "MPI"]
    for seconds in result["seconds"].values():
        assert [int(size) for size in seconds] == [4, 16, 64, 256, 1024, 4096, 16384]
        assert all(value > 0 for value in seconds.values())
    assert "3 ranks, tree" in result["title"]
    assert set(result["contention"]) == {"compute", "reduce"}


def test_hand_overs_of_all_sizes_are_timed(hvdtrain: Program) -> None:
    done = hvdtrain("bench", "exchange", "--ranks", 2, "--largest", 1000)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "transfer of a tensor between two ranks, one way; broadcast to all"
    assert [line.split()[0] for line in lines[2:7]] == ["4", "16", "64", "256", "1024"]
    assert lines[7].startswith("on one host: about ")
    assert lines[8].startswith("to all 2: about ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("allreduce", "--ranks", 1), "--ranks must be at least 2, not 1"),
        (
            ("exchange", "--algorithm", "fast"),
            f"--algorithm fast is unknown: use {', '.join(ALGORITHMS)} or all",
        ),
        (
            ("exchange", "--algorithm", "ring"),
            "--algorithm is not supported by bench exchange: leave it out, or use bench allreduce",
        ),
        (("exchange", "--largest", 0), "--largest must be between 4 and 1073741824 bytes, not 0"),
    ],
)
def test_what_cannot_be_is_one_line(
    hvdtrain: Program, options: tuple[object, ...], message: str
) -> None:
    done = hvdtrain("bench", *options)
    assert (done.returncode, done.stderr) == (2, f"hvdtrain: {message}\n")
