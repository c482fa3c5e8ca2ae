import json
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.plan import plan
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan, Stage

PARTS = ["stem", "body", "head"]


def write(folder: Path, content: Any) -> str:
    path = folder / "plan.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def parse(text: str | None, ranks: int, *options: Any) -> Plan:
    made = plan.parse_plan(text, PARTS, ranks, *options)
    plan.check(made, PARTS, ranks)
    return made


def test_the_default_is_single_on_one_rank_and_dp_on_more() -> None:
    assert parse(None, 1, 2) == parse("single", 1, 2)
    assert parse(None, 3, 2) == Plan(
        (Stage(("stem", "body", "head"), (0, 1, 2), (1, 1, 1)),), microbatches=2
    )


def test_a_plan_file_gives_unequal_shares_and_reads_back(tmp_path: Path) -> None:
    text = write(tmp_path, {"stages": [{"ranks": [0, 1], "shares": [2, 1]}], "microbatches": 4})
    made = parse(text, 2)
    assert made.stages[0].shares == (2, 1)
    assert made.microbatches == 4
    assert parse(text, 2, 3, "gpipe") == Plan(made.stages, 3, "gpipe"), "options win"
    again = write(tmp_path, made.to_json())
    assert parse(again, 2) == made


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ('{"stages": 1, "stages": 2}', "the key 'stages' is given twice"),
        ([], "expected an object"),
        ({}, "stages must be a list"),
        ({"stage": []}, "unknown key stage; did you mean stages"),
        ({"stages": [{"ranks": [0, 1], "share": [1]}]}, "unknown key share; did you mean shares"),
        ({"stages": [{"ranks": []}]}, "ranks must be a list of rank numbers"),
        ({"stages": [{"ranks": [0, 0]}]}, "names a rank twice"),
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
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, content: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        parse(write(tmp_path, content), 2)


def test_an_unknown_plan_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="unknown plan dpp; did you mean dp"):
        parse("dpp", 2, 1)
    with pytest.raises(UsageError, match="single runs on one rank, not on 2"):
        parse("single", 2, 1)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        parse("absent.json", 2, 1)


def staged(*stages: tuple[list[str], list[int]], **settings: Any) -> Plan:
    made = (Stage(tuple(names), tuple(ranks), (1,) * len(ranks)) for names, ranks in stages)
    return Plan(tuple(made), **settings)


@pytest.mark.proves(
    "`--plan` takes short forms, cut at the best balance, and files with unequal shares "
    "and several stages per rank."
)
def test_short_forms_cut_where_the_most_costly_stage_costs_least() -> None:
    assert plan.parse_plan("mp", PARTS, 2, None, None, lambda: [5.0, 1.0, 1.0]) == staged(
        (["stem"], [0]), (["body", "head"], [1]), microbatches=8
    )
    assert plan.parse_plan("hp:2x2", PARTS, 4, 3, "gpipe", lambda: [1.0, 1.0, 5.0]) == staged(
        (["stem", "body"], [0, 1]), (["head"], [2, 3]), microbatches=3, schedule="gpipe"
    )
    assert parse("mp", 1) == parse("single", 1)


def test_more_stages_than_ranks_go_round_them() -> None:
    parts = list("abcdefgh")
    pipeline = plan.parse_plan("mp", parts, 2, 4, "interleaved")
    assert [stage.ranks for stage in pipeline.stages] == [(0,), (1,), (0,), (1,)]
    pipeline = plan.parse_plan("hp:4x2", parts, 4, 4)
    assert [stage.ranks for stage in pipeline.stages] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert pipeline.stages_of(1) == (0, 2)


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("hp:2x2", 3, "hp:2x2 does not fit 3 ranks: start 2 or 4"),
        ("hp:3x1", 2, "hp:3x1 does not fit 2 ranks: start 1 or 3"),
        ("hp:4x1", 4, "has 4 stages, but the model has 3 component"),
        ("mp", 4, "has 4 stages, but the model has 3 component"),
        ("hp:2", 2, "--plan hp:2 is not valid: use hp:SxR, S stages of R replicas each"),
        ("hp:0x2", 2, "--plan hp:0x2 is not valid: use hp:SxR"),
    ],
)
def test_a_short_form_that_does_not_fit_is_refused(text: str, ranks: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(text, ranks)


def test_a_schedule_that_splits_backward_is_refused_where_that_is_not_exact() -> None:
    made = plan.parse_plan("mp", PARTS, 2, 4, "zb-h1")
    plan.check(made, PARTS, 2)
    with pytest.raises(UsageError, match="zb-h1 splits the backward, which --recompute does not"):
        plan.check(made, PARTS, 2, lambda: "--recompute")


def test_interleaving_needs_several_stages_a_rank() -> None:
    with pytest.raises(UsageError, match="needs several stages per rank"):
        parse("hp:2x1", 2, 4, "interleaved")


def test_interleaving_needs_stages_that_go_round_the_ranks_in_full(tmp_path: Path) -> None:
    four = ["a", "b", "c", "d"]
    plan.check(plan.parse_plan("hp:4x1", four, 2, 4, "interleaved"), four, 2)
    there_and_back = [[0], [1], [0]]
    stages = [
        {"ranks": ranks, "components": [name]}
        for ranks, name in zip(there_and_back, PARTS, strict=True)
    ]
    path = write(tmp_path, {"stages": stages, "schedule": "interleaved"})
    with pytest.raises(UsageError, match="with the same order of ranks each time"):
        parse(path, 2)


def test_a_file_of_several_stages_has_four_microbatches_a_stage(tmp_path: Path) -> None:
    stages = [{"ranks": [i], "components": [name]} for i, name in enumerate(PARTS)]
    assert parse(write(tmp_path, {"stages": stages}), 3).microbatches == 12


def test_labels_say_how_each_component_is_parallel() -> None:
    made = staged((["a"], [0, 1, 2]), (["b"], [0, 2]), (["c", "d"], [1]))
    assert plan.labels(made) == {"a": "DP", "b": "HP", "c": "MP", "d": "MP"}
    assert plan.labels(staged((["a"], [0]))) == {"a": "single"}


def test_a_saved_plan_reads_back(tmp_path: Path) -> None:
    made = plan.parse_plan("hp:2x1", PARTS, 2, 4, "zb-h1")
    plan.save_plan(made, tmp_path / "plan.json")
    assert parse(str(tmp_path / "plan.json"), 2) == made
    with pytest.raises(UsageError, match="cannot be written"):
        plan.save_plan(made, tmp_path / "absent" / "plan.json")


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.data())
def test_no_contiguous_cut_is_better_balanced(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    sizes = plan.balance(costs, parts)
    assert sum(sizes) == len(costs)
    assert min(sizes) > 0

    def cost_of(bounds: tuple[int, ...]) -> int:
        edges = [0, *bounds, len(costs)]
        return max(sum(costs[a:b]) for a, b in pairwise(edges))

    best = min(cost_of(bounds) for bounds in combinations(range(1, len(costs)), parts - 1))
    assert cost_of(tuple(accumulate(sizes))[:-1]) == best


shares = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)


@given(st.lists(shares, min_size=1, max_size=4), st.integers(1, 70), st.integers(1, 9))
def test_every_stage_cuts_every_batch_into_each_sample_once(
    stages: list[list[int]], batch_size: int, microbatches: int
) -> None:
    made = Plan(
        tuple(Stage((f"{i}",), tuple(range(len(s))), tuple(s)) for i, s in enumerate(stages)),
        microbatches,
    )
    batch = cut(made, batch_size)
    for stage, parts in enumerate(batch.parts):
        seen = [row for ranges in parts.values() for part in ranges for row in range(*part)]
        assert sorted(seen) == list(range(batch_size))
        rank_shares = [batch.share(stage, rank) for rank in parts]
        assert [share.first for share in rank_shares].count(True) == 1
        assert sum(share.weight for share in rank_shares) == pytest.approx(1)
        assert next(share for share in rank_shares if share.weight).first
    for (stage, k), pieces in batch.pieces.items():
        for piece in pieces:
            sent = batch.parts[stage][piece.sender][k][0] + piece.sent[0]
            assert sent == batch.parts[stage + 1][piece.receiver][k][0] + piece.received[0]
            assert piece.sent[1] - piece.sent[0] == piece.received[1] - piece.received[0] > 0
        sent_rows = sum(piece.sent[1] - piece.sent[0] for piece in pieces)
        assert sent_rows == sum(batch.rows(stage, rank, k) for rank in batch.parts[stage])


def test_the_last_plan_of_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    """Also of a run that is writing a line."""
    first, last = parse("dp", 2), parse("mp", 2, 3)
    lines = [json.dumps({"event": "plan", "step": 0} | one.to_json()) for one in (first, last)]
    lines.insert(1, json.dumps({"event": "step", "step": 1}))
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, lines[0][:40]]))
    assert parse(str(tmp_path), 2) == last
    assert parse(str(tmp_path), 2, 5).microbatches == 5
    for content in ("", '{"event": "plan"}\n', '{"event": "plan", \n', "[]\n"):
        (tmp_path / "metrics.jsonl").write_text(content)
        with pytest.raises(UsageError, match=f"{tmp_path} is not a run folder with a plan"):
            parse(str(tmp_path), 2)
