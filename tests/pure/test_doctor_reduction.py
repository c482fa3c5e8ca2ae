"""The checks that doctor derives from the way in which an all-reduce was summed."""

from typing import Any

import pytest

from hvdtrain.doctor import machine
from hvdtrain.doctor.check import WATCHED_SIZES, Answer

# Pieces by rank of real all-reduces of 1024 elements on 4 ranks with Open MPI 5.0.11.
RING = [
    [[256, 8, 1], [256, 12, 1], [256, 14, 1]],
    [[256, 1, 2], [256, 9, 2], [256, 13, 2]],
    [[256, 2, 4], [256, 3, 4], [256, 11, 4]],
    [[256, 4, 8], [256, 6, 8], [256, 7, 8]],
]
RABENSEIFNER = [
    [[512, 2, 1], [256, 12, 3]],
    [[512, 1, 2], [256, 12, 3]],
    [[512, 8, 4], [256, 3, 12]],
    [[512, 4, 8], [256, 3, 12]],
]
DOUBLING = [
    [[1024, 1, 2], [1024, 3, 12]],
    [[1024, 1, 2], [1024, 3, 12]],
    [[1024, 4, 8], [1024, 3, 12]],
    [[1024, 4, 8], [1024, 3, 12]],
]
LINEAR = [[[1024, 8, 4], [1024, 12, 2], [1024, 14, 1]], [], [], []]
SEGMENTED = [[[count // 2, a, b] for count, a, b in pieces for _ in range(2)] for pieces in RING]


@pytest.mark.parametrize(
    ("trace", "name"),
    [
        (RING, "ring"),
        (SEGMENTED, "ring in segments"),
        (RABENSEIFNER, "Rabenseifner (recursive halving)"),
        (DOUBLING, "recursive doubling"),
        (LINEAR, "reduce to one rank, then broadcast"),
        ([[[512, 2, 1]], [[512, 1, 2]]], machine.HALVES),
        ([[[1024, 1, 2]], [[1024, 1, 2]]], "recursive doubling"),
        ([[], [], [], []], "an unknown algorithm"),
        ([RING[0], [], [], []], "an unknown algorithm"),
    ],
)
def test_an_algorithm_is_named_by_the_pieces_that_ranks_add(trace: Any, name: str) -> None:
    assert machine.name_algorithm(trace, 1024) == name


def watched(trace: Any, sums: int, errors: str = "") -> Answer:
    pieces = {
        size: [[[count * size // 8192, a, b] for count, a, b in row] for row in trace]
        for size in WATCHED_SIZES
    }
    facts = {str(size): {"trace": pieces[size], "sums": sums} for size in WATCHED_SIZES}
    return Answer(facts | {"size": 4}, "", errors)


def test_ring_counts_as_honoured_only_if_every_size_and_mpis_own_sums_go_round() -> None:
    automatic = watched(RABENSEIFNER, 1)
    good = machine.algorithm_check(Answer(), automatic, watched(RING, 3), "Open MPI", [])
    assert good.state == "ok"
    assert "8 KB and 1 MB and 16 MB: Rabenseifner" in good.text
    for ring in (watched(RABENSEIFNER, 1), watched(RING, 1)):
        bad = machine.algorithm_check(Answer(), automatic, ring, "Open MPI", [])
        assert (bad.state, bad.cure) == ("note", "use --allreduce auto")
        assert "NOT honoured" in bad.text


def test_a_users_own_tuning_is_named_and_its_removal_is_the_cure() -> None:
    variable = "OMPI_MCA_coll_tuned_allreduce_algorithm"
    same = watched(RABENSEIFNER, 1)
    check = machine.algorithm_check(Answer(), same, same, "Open MPI", [variable])
    assert f"from {variable}: 4 ranks" in check.text
    assert check.cure == f"unset {variable}"


def test_the_component_is_the_last_that_is_enabled_for_the_world() -> None:
    log = """\
[vm:1] coll:base:comm_select: new communicator: MPI_COMM_WORLD (cid 0)
[vm:1] coll:base:comm_select: selecting       adapt, priority   0, Disabled
[vm:1] coll:base:comm_select: selecting       basic, priority  10, Enabled
[vm:1] coll:base:comm_select: selecting       tuned, priority  30, Enabled
[vm:1] coll:base:comm_select: new communicator: MPI_COMM_SELF (cid 1)
[vm:1] coll:base:comm_select: selecting        self, priority  75, Enabled
"""
    assert machine.chosen_component(log) == "tuned"
    assert machine.chosen_component("no such log") == ""


def test_two_ranks_that_did_not_start_or_did_not_meet_are_a_fault() -> None:
    for answer, text in (
        (Answer({}, "it hung and was killed after 90 s"), "it hung"),
        (Answer({"size": 1}), "MPI sees 1"),
    ):
        (check,) = machine.allreduce_checks(answer, horovod_loads=True)
        assert check.state == "fault"
        assert text in check.text
        assert check.cure


def test_a_wrong_sum_is_a_fault_of_the_library_that_gave_it() -> None:
    facts = {"size": 2, "mpi_right": True, "mpi_milliseconds": 0.2}
    wrong = Answer(facts | {"horovod_right": False, "horovod_milliseconds": 1.0})
    by_mpi, by_horovod = machine.allreduce_checks(wrong, horovod_loads=True)
    assert by_mpi.state == "ok"
    assert by_horovod.state == "fault"
    assert "WRONG" in by_horovod.text
