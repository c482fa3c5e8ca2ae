"""Time limits in every format that Slurm accepts and prints."""

import pytest

from hvdtrain.options.requests import minutes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("30", 30), ("90", 90), ("0", 0)),
        *(("30:00", 30), ("1:30", 2), ("90:00", 90), ("0:01", 1)),
        *(("1:00:00", 60), ("1:30:00", 90), ("0:00:01", 1), ("24:00:00", 1440), ("1:2:3", 63)),
        *(("1-12", 2160), ("0-1", 60)),
        *(("1-12:30", 2190), ("1-0:05", 1445)),
        *(("1-12:30:00", 2190), ("2-01:00:30", 2941), ("1-00:00:00", 1440)),
    ],
)
def test_a_limit_is_read_as_slurm_reads_it(text: str, expected: int) -> None:
    assert minutes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "soon", "-5", "infinite", "n/a", "1h", "1.5", " 30", "30 "),
        *("1:2:3:4", "1-2:3:4:5", "1-", "-", ":30", "1:", "1--2", "1-2-3", "1:-2"),
        *("1:75:00", "0:75:00", "1:00:60", "1:60", "1-0:60", "1-0:00:60", "1:100", "1:00:100"),
        *("\u0663", "9" * 5000),
    ],
)
def test_any_other_text_is_no_limit(text: str) -> None:
    assert minutes(text) is None
