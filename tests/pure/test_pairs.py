"""The steps that tests/mpi/test_pairs.py compares with the serial one."""

import pytest

from tests.mpi.pairs import pairs, pairwise, possible


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_few_cases_hold_every_pair_of_values_that_any_case_holds(ranks: int) -> None:
    cases = possible(ranks)
    chosen = pairwise(cases)
    assert {pair for case in chosen for pair in pairs(case)} == {
        pair for case in cases for pair in pairs(case)
    }
    assert len(chosen) < len(cases) / 10
