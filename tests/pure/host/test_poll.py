import pytest

from hvdtrain.host.process import LONGEST_SLEEP, SPIN_SECONDS, wait_until

POLL_SECONDS = 1e-6


class Wait:
    """A wait of `seconds` by a clock that advances with each poll and each sleep."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.polls = seconds, 0.0, 0
        self.sleeps: list[float] = []

    def done(self) -> bool:
        """Return whether the wait is over."""
        self.polls += 1
        self.now += POLL_SECONDS
        return self.now > self.seconds

    def sleep(self, seconds: float) -> None:
        """Advance the clock, and record the sleep."""
        self.sleeps.append(seconds)
        self.now += seconds


def waited(seconds: float) -> Wait:
    wait = Wait(seconds)
    assert wait_until(wait.done, lambda: wait.now, wait.sleep) is True
    return wait


def test_a_wait_that_is_over_asks_once() -> None:
    wait = waited(0.0)
    assert (wait.polls, wait.sleeps) == (1, [])


def test_a_short_wait_does_not_sleep() -> None:
    assert waited(0.9 * SPIN_SECONDS).sleeps == []


@pytest.mark.proves("Ranks that wait sleep and leave their cores to others.")
@pytest.mark.parametrize("seconds", [0.0012, 0.003, 0.05, 2.0])
def test_a_long_wait_sleeps_and_ends_soon_after(seconds: float) -> None:
    wait = waited(seconds)
    # All but the first millisecond is slept, apart from the polls between the sleeps.
    assert sum(wait.sleeps) > 0.98 * (seconds - SPIN_SECONDS)
    assert max(wait.sleeps) <= LONGEST_SLEEP
    assert wait.now < 1.1 * seconds + POLL_SECONDS
