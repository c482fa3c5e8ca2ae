"""Grouping of runs into series, and the causes of lost time."""

from pathlib import Path
from typing import Any

import pytest

from hvdtrain.study.results import Result, plan_name
from hvdtrain.study.series import arrange


def a_run(ranks: int, rate: float, **changes: Any) -> Result:
    number = a_run.count = getattr(a_run, "count", 0) + 1  # type: ignore[attr-defined]
    values: dict[str, Any] = {
        "path": Path(f"run-{number}"),
        "model": "cnn",
        "plan": "single" if ranks == 1 else "dp",
        "ranks": ranks,
        "threads": 1,
        "batch_size": 64,
        "seed": number,
        "settings": {"precision": "fp32"},
        "samples": 1000,
        "seconds": 1000 / rate + 1,
        "startup_seconds": 2.0,
        "train_seconds": 1000 / rate,
        "images_per_second": rate,
        "exposed": 0.0,
        "bubble": 0.0,
        "data": 0.0,
        "imbalance": 0.0,
        "peak_memory_bytes": 2**20,
        "accuracy": 0.5,
        "epochs": (),
        "machine": {},
        "versions": {},
    }
    return Result(**values | changes)


def test_sizes_are_compared_with_one_rank_of_as_many_threads() -> None:
    runs = [a_run(1, 100), a_run(1, 104), a_run(1, 150, threads=2), a_run(2, 180), a_run(2, 190)]
    (series,), left_out = arrange(runs)
    assert (series.scaling, series.plan) == ("strong", "dp")
    assert [size.ranks for size in series.sizes] == [1, 2]
    assert series.sizes[1].speedup.value == pytest.approx(185 / 102)
    assert series.sizes[1].efficiency.value == pytest.approx(185 / 204)
    assert series.sizes[1].speedup_over_best.value == pytest.approx(185 / 150)
    assert series.best_serial[0].threads == 2
    assert not left_out


def test_the_same_batch_is_strong_scaling_and_the_same_share_is_weak() -> None:
    runs = [
        a_run(1, 100),
        a_run(2, 150),
        a_run(4, 380, batch_size=256),
        a_run(2, 195, batch_size=128),
    ]
    all_series, left_out = arrange(runs)
    by_scaling = {series.scaling: [size.ranks for size in series.sizes] for series in all_series}
    assert by_scaling == {"strong": [1, 2], "weak": [1, 2, 4]}
    assert not left_out


def test_other_settings_and_plans_are_other_series() -> None:
    bf16 = {"settings": {"precision": "bf16"}}
    runs = [a_run(1, 100), a_run(2, 150), a_run(2, 120, plan="mp"), a_run(1, 200, **bf16)]
    runs += [a_run(2, 300, **bf16), a_run(4, 200, plan="hp:2x2")]
    all_series, left_out = arrange(runs)
    assert sorted(series.title for series in all_series) == [
        "cnn, dp, bf16, strong scaling, batch 64",
        "cnn, dp, fp32, strong scaling, batch 64",
        "cnn, hp, fp32, strong scaling, batch 64",
        "cnn, mp, fp32, strong scaling, batch 64",
    ]
    assert not left_out


def test_two_hybrid_plans_of_one_size_are_no_repeats_of_each_other() -> None:
    runs = [a_run(1, 100), a_run(8, 500, plan="hp:2x4"), a_run(8, 400, plan="hp:4x2")]
    runs += [a_run(2, 110, plan="a.json"), a_run(2, 120, plan="b.json")]
    all_series, left_out = arrange(runs)
    assert sorted(series.plan for series in all_series) == ["a.json", "b.json", "hp:2x4", "hp:4x2"]
    assert not left_out


def test_each_batch_and_number_of_threads_is_a_series_and_none_is_weak_by_chance() -> None:
    runs = [
        a_run(ranks, 100.0 * ranks, batch_size=batch, threads=threads)
        for ranks in (1, 2)
        for batch in (64, 128)
        for threads in (1, 2)
    ]
    all_series, left_out = arrange(runs)
    assert {series.scaling for series in all_series} == {"strong"}
    shapes = [(series.batch_size, series.sizes[0].runs[0].threads) for series in all_series]
    assert sorted(shapes) == [(64, 1), (64, 2), (128, 1), (128, 2)]
    assert not left_out


def test_a_run_without_a_base_is_left_out_and_named() -> None:
    runs = [a_run(1, 100), a_run(2, 150, threads=2)]
    all_series, left_out = arrange(runs)
    assert not all_series
    assert len(left_out) == 2
    assert "no run on one rank with the same settings and threads" in left_out[1]


def test_lost_time_adds_up_to_the_steps() -> None:
    base = a_run(1, 100, data=0.5)
    slow = a_run(4, 200, exposed=1.2, imbalance=0.7, bubble=0.3, data=0.4)
    recorded = a_run(4, 200, exposed=1.2, imbalance=0.7, evaluation=0.6)
    (series,), _ = arrange([base, slow, slow, recorded])
    lost = series.sizes[1].lost
    assert lost.ideal == pytest.approx(2.5)
    assert lost.imbalance == pytest.approx(0.7)
    assert lost.communication == pytest.approx(0.5)
    assert lost.data == pytest.approx(0.4 - 0.5 / 4)
    parts = [lost.ideal, lost.imbalance, lost.communication, lost.bubble, lost.data]
    assert sum(parts) + lost.computing == pytest.approx(5.0)
    assert lost.evaluation is None, "one of the runs did not record it"


def test_the_most_ranks_worth_paying_for_are_those_used_well_enough() -> None:
    (series,), _ = arrange([a_run(1, 100), a_run(2, 180), a_run(4, 290), a_run(8, 300)])
    assert [series.worth(efficiency) for efficiency in (0.95, 0.9, 0.7, 0.1)] == [1, 2, 4, 8]


def test_plans_have_the_names_of_the_command_line() -> None:
    names = [plan_name(replicas) for replicas in ([1], [4], [1, 1], [2, 2], [3, 1])]
    assert names == ["single", "dp", "mp", "hp:2x2", "plan"]


def test_one_rank_is_the_base_of_all_ways_to_agree() -> None:
    ways = ("exact", "local:8, compress bf16")
    runs = [
        a_run(2, 150 + place, agreement=way, settings={"precision": "fp32", "sync": way})
        for place, way in enumerate(ways)
    ]
    all_series, left_out = arrange([a_run(1, 100), *runs])
    assert [series.title for series in all_series] == [
        "cnn, dp, fp32, strong scaling, batch 64",
        "cnn, dp, fp32, strong scaling, batch 64, local:8, compress bf16",
    ]
    speedups = [series.sizes[1].speedup.value for series in all_series]
    assert speedups == pytest.approx([1.5, 1.51])
    assert not left_out
