import contextlib
import resource
import signal

import pytest

from hvdtrain.errors import Preempted
from hvdtrain.host.output import without_launcher_banners
from hvdtrain.launch import (
    AT_ONCE,
    BEFORE_TRAINING,
    RanksStop,
    explain,
    judge,
    supervise,
)
from tests.children import end_of, in_child

FRAME = "-" * 74 + "\n"
KILLED = """\
prterun noticed that process rank 1 with PID 3866 on node vm exited on
signal 9 (Killed).
""".splitlines(keepends=True)


def test_a_rank_that_was_killed_is_named_with_its_signal() -> None:
    assert explain(137, KILLED).startswith("rank 1 on vm was ended by signal 9 (Killed)")


def test_an_end_without_reason_is_said_to_be_one() -> None:
    assert explain(213, ["There are not enough slots", "available"]) == (
        "mpirun ended with 213: There are not enough slots available"
    )
    assert explain(5, []) == "mpirun ended with 5: it gave no reason"


def test_too_few_open_files_are_named() -> None:
    def open_few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
        reason = "it gave no reason; it may open 24 files only: raise ulimit -n"
        assert explain(186, []) == f"mpirun ended with 186: {reason}"

    assert end_of(in_child(open_few)) == 0


def test_what_mpirun_could_not_start_is_in_the_line() -> None:
    banners: list[str] = []
    reason = "The PMIx server's listener thread failed to start. We cannot\n"
    assert not list(without_launcher_banners([FRAME, reason, "continue.\n", FRAME], banners))
    assert explain(213, banners).endswith("listener thread failed to start. We cannot continue.")


ABORT = "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD"


STARTING = ["process rank 0 with PID 1 on node vm exited on", "signal 10 (User defined signal 1)."]
IMPORTING = ["process rank 0 with PID 1 on node vm exited on", "signal 15 (Terminated)."]


def stopped(*numbers: signal.Signals, ended: str = "") -> RanksStop:
    """Return the launcher's stop request after these signals."""
    with RanksStop() as stop:
        for number in numbers:
            with contextlib.suppress(KeyboardInterrupt):  # no rank runs
                signal.raise_signal(number)
    stop.ended = ended
    return stop


@pytest.mark.proves("Exit codes mean what the table says.")
@pytest.mark.parametrize(
    ("code", "banners", "stop", "expected"),
    [
        (0, [], stopped(), (0, None)),
        (2, [ABORT], stopped(), (2, None)),
        (1, [ABORT], stopped(), (1, None)),
        (1, ["no slots"], stopped(), (4, "mpirun ended with 1: no slots")),
        (75, [], stopped(signal.SIGUSR1), (75, None)),
        (75, [], stopped(signal.SIGTERM), (75, None)),
        (75, [], stopped(signal.SIGTERM, signal.SIGHUP), (75, None)),
        (75, [], stopped(signal.SIGUSR1, signal.SIGTERM), (75, None)),
        (75, [], stopped(signal.SIGINT), (130, None)),
        (138, STARTING, stopped(signal.SIGINT), (130, BEFORE_TRAINING)),
        (138, STARTING, stopped(signal.SIGTERM), (75, BEFORE_TRAINING)),
        (143, IMPORTING, stopped(signal.SIGTERM), (75, BEFORE_TRAINING)),
        (
            143,
            IMPORTING,
            stopped(),
            (4, "rank 0 on vm was ended by signal 15 (Terminated); the job"),
        ),
        (130, [], stopped(signal.SIGTERM, ended=BEFORE_TRAINING), (75, BEFORE_TRAINING)),
        (143, [], stopped(signal.SIGINT, ended=AT_ONCE), (130, AT_ONCE)),
        # A rank that could not save reports that, whatever signal requested the stop.
        (3, [ABORT], stopped(signal.SIGTERM), (3, None)),
        (4, [ABORT], stopped(signal.SIGINT), (4, None)),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_spoke(
    code: int, banners: list[str], stop: RanksStop, expected: tuple[int, str | None]
) -> None:
    exit_code, reason = judge(code, banners, stop)
    assert exit_code == expected[0]
    assert (reason or "").startswith(expected[1] or "")
    assert bool(reason) == bool(expected[1])


def test_a_launcher_that_was_asked_to_leave_starts_no_ranks() -> None:
    """A SIGTERM may arrive between two starts of --restarts, while no rank runs."""
    with RanksStop() as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Preempted, match="ended before training started"):
            supervise(2, ["train", "--model", "none"], stop=stop)


def test_75_is_never_said_of_a_rank_that_was_killed_while_it_saved() -> None:
    code, reason = judge(137, [line.strip() for line in KILLED], stopped(signal.SIGTERM))
    assert code == 4
    assert reason is not None
    assert "signal 9" in reason
