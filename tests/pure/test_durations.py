"""The order in which a run executes its tests."""

from tests.durations import in_order


def test_the_longest_files_come_first_in_each_workers_part() -> None:
    tests = [("a", f"a{number}") for number in range(3)] + [("b", "b0"), ("c", "c0")]
    tests += [("short", f"short{number}") for number in range(7)]
    order = in_order(tests, {"a1": 3.0, "b0": 10.0, "c0": 4.0}, workers=2)
    assert sorted(order) == list(range(len(tests)))
    assert order[0] == tests.index(("b", "b0"))
    second = order[len(tests) // 2 :]
    assert [tests[place][1] for place in second[:4]] == ["c0", "a0", "a1", "a2"]


def test_one_worker_makes_all_with_the_longest_file_first() -> None:
    tests = [("short", "s"), ("a", "a0"), ("b", "b0"), ("b", "b1")]
    assert in_order(tests, {"a0": 1.0, "b1": 2.0}, workers=1) == [2, 3, 1, 0]
    assert in_order(tests, {}, workers=1) == [0, 1, 2, 3]
