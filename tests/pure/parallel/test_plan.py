import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.parallel import plan
from hvdtrain.parallel.plan import Plan, Stage

PARTS = ["stem", "body", "head"]


def write(folder: Path, content: Any) -> str:
    path = folder / "plan.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_the_default_is_single_on_one_rank_and_dp_on_more() -> None:
    assert plan.parse(None, PARTS, 1, 2) == plan.parse("single", PARTS, 1, 2)
    assert plan.parse(None, PARTS, 3, 2) == Plan(
        (Stage(("stem", "body", "head"), (0, 1, 2), (1, 1, 1)),), microbatches=2
    )


def test_a_plan_file_gives_unequal_shares_and_reads_back(tmp_path: Path) -> None:
    text = write(tmp_path, {"stages": [{"ranks": [0, 1], "shares": [2, 1]}], "microbatches": 4})
    made = plan.parse(text, PARTS, 2, 1)
    assert made.stages[0].shares == (2, 1)
    assert made.microbatches == 4
    again = write(tmp_path, made.to_json())
    assert plan.parse(again, PARTS, 2, 1) == made


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ([], "expected an object"),
        ({}, "stages must be a list"),
        ({"stage": []}, "unknown key stage; did you mean stages"),
        ({"stages": [{"ranks": [0, 1], "share": [1]}]}, "unknown key share; did you mean shares"),
        ({"stages": [{"ranks": []}]}, "ranks must be a list of rank numbers"),
        ({"stages": [{"ranks": [0, 0]}]}, "a rank is named twice"),
        ({"stages": [{"ranks": [0, True]}]}, "ranks must be a list"),
        ({"stages": [{"ranks": [0, 5]}]}, "uses rank 5, but there are ranks 0 to 1"),
        ({"stages": [{"ranks": [0]}]}, "leaves rank 1 of 2 without a stage"),
        ({"stages": [{"ranks": [0, 1], "shares": [1]}]}, "each of the 2 ranks"),
        ({"stages": [{"ranks": [0, 1], "shares": [0, 0]}]}, "each of the 2 ranks"),
        ({"stages": [{"ranks": [0, 1], "shares": [-1, 2]}]}, "list of whole numbers"),
        ({"stages": [{"ranks": [0, 1], "components": ["stem"]}]}, "every component once"),
        ({"stages": [{"ranks": [0, 1], "components": ["stme", "body", "head"]}]}, "mean stem"),
        ({"stages": [{"ranks": [0, 1]}], "microbatches": 0}, "microbatches must be"),
        ({"stages": [{"ranks": [0, 1]}], "schedule": "zb"}, "unknown schedule zb"),
        (
            {"stages": [{"ranks": [0], "components": ["stem"]}, {"ranks": [1], "components": []}]},
            "every component once",
        ),
        (
            {
                "stages": [
                    {"ranks": [0], "components": ["stem"]},
                    {"ranks": [1], "components": ["body", "head"]},
                ]
            },
            "this version runs plans of one stage",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, content: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plan.parse(write(tmp_path, content), PARTS, 2, 1)


def test_an_unknown_plan_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="unknown plan dpp; did you mean dp"):
        plan.parse("dpp", PARTS, 2, 1)
    with pytest.raises(UsageError, match="single runs on one rank, not on 2"):
        plan.parse("single", PARTS, 2, 1)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        plan.parse("absent.json", PARTS, 2, 1)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    st.integers(1, 70),
    st.integers(1, 9),
)
def test_replicas_cut_every_batch_into_each_sample_once(
    shares: list[int], batch_size: int, microbatches: int
) -> None:
    stage = Stage(("all",), tuple(range(len(shares))), tuple(shares))
    cuts = [plan.cut(stage, i, batch_size, microbatches) for i in range(len(shares))]
    seen = [row for cut in cuts for start, stop in cut.parts for row in range(start, stop)]
    assert sorted(seen) == list(range(batch_size))
    assert len({len(cut.parts) for cut in cuts}) == 1
    assert [cut.first for cut in cuts].count(True) == 1
    assert next(cut for cut in cuts if cut.samples).first
