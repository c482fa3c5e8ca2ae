"""tests/later.txt names tests that exist."""

import re

from tests.conftest import LATER, ROOT


def test_each_line_names_tests_that_exist() -> None:
    for mark, start in LATER:
        path, _, name = start.partition("::")
        assert mark in ("proof", "weekly")
        function = re.match(r"\w*", name)
        assert function
        assert f"def {function[0]}" in (ROOT / path).read_text(), start
