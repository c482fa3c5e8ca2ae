import time

from hvdtrain.poll import wait_until


def test_a_wait_that_is_over_asks_once() -> None:
    asked = []

    def done() -> bool:
        asked.append(True)
        return True

    wait_until(done)
    assert len(asked) == 1


def test_a_long_wait_sleeps_and_ends_soon_after() -> None:
    began, used = time.perf_counter(), time.thread_time()
    asked = []

    def done() -> bool:
        asked.append(True)
        return time.perf_counter() - began > 1

    wait_until(done)
    # Asking without a sleep would use the core all the time.
    assert time.thread_time() - used < 0.3
    assert len(asked) > 100, "the longest sleep is a millisecond"
