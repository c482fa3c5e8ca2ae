"""Repeats are added where speed-ups are not known well enough, and no further."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.errors import UsageError
from hvdtrain.jobs import sweep, watch
from hvdtrain.jobs.estimate import (
    LEAST,
    MOST_MORE,
    Need,
    half_width,
    need,
    need_of,
    size_name,
)
from hvdtrain.study.results import Result
from hvdtrain.study.series import arrange
from tests.pure.study.test_results import write_run
from tests.pure.study.test_series import a_run


def runs_of(counts: dict[int, int], noise: dict[int, float]) -> list[Result]:
    draw = np.random.default_rng(0)
    return [
        a_run(
            ranks,
            100 * ranks * float(np.exp(noise[ranks] * draw.normal())),
            path=Path(f"ranks={ranks}-seed={seed}"),
        )
        for ranks, count in counts.items()
        for seed in range(count)
    ]


def needed(done: list[Result], interval: float, hours: float | None) -> Need:
    return need_of(done, Counter(size_name(run.path) for run in done), interval, hours)


def test_a_study_without_runs_needs_three_repeats(tmp_path: Path) -> None:
    assert need(tmp_path / "none", 0.05, None).counts == {}
    assert need(tmp_path, 0.05, None).counts == {}
    (cell,) = load(tmp_path, "repeats: auto\n").cells
    assert [run.seed for run in cell.runs] == list(range(LEAST))


def test_of_a_size_and_its_baseline_the_noisier_one_gets_more() -> None:
    quiet = runs_of({1: 3, 2: 3}, {1: 0.001, 2: 0.001})
    assert needed(quiet, 0.05, None).counts == {"ranks=1": 3, "ranks=2": 3}
    assert needed(quiet, 0.05, None).remarks == []
    noisy_base = needed(runs_of({1: 3, 2: 3}, {1: 0.05, 2: 0.001}), 0.02, None)
    assert noisy_base.counts["ranks=1"] > 3
    assert noisy_base.counts["ranks=2"] == 3
    assert "2 ranks: the speed-up is known to ±" in noisy_base.remarks[0]
    noisy = needed(runs_of({1: 3, 2: 3}, {1: 0.001, 2: 0.05}), 0.02, None)
    assert noisy.counts["ranks=1"] == 3
    assert 3 < noisy.counts["ranks=2"] <= 3 + MOST_MORE


def test_rounds_end_when_all_speedups_are_known_well_enough() -> None:
    counts, noise = {1: 3, 2: 3, 4: 3}, {1: 0.01, 2: 0.03, 4: 0.02}
    for _ in range(20):
        done = runs_of(counts, noise)
        now = needed(done, 0.03, None)
        wanted = {ranks: now.counts[f"ranks={ranks}"] for ranks in counts}
        if wanted == counts:
            break
        assert all(counts[ranks] <= wanted[ranks] for ranks in counts)
        counts = wanted
    (series,), _ = arrange(done)
    assert all((half_width(size.speedup) or 0.0) <= 0.03 for size in series.sizes[1:])
    assert sum(counts.values()) < 60


def test_no_repeats_are_added_beyond_the_budget() -> None:
    done = runs_of({1: 3, 2: 3}, {1: 0.001, 2: 0.05})
    spent = sum(run.core_hours for run in done)
    assert needed(done, 0.02, 100 * spent).counts["ranks=2"] > 3
    stopped = needed(done, 0.02, 1.01 * spent)
    assert stopped.counts == {"ranks=1": 3, "ranks=2": 3}
    assert "would exceed most_core_hours" in stopped.remarks[-1]


def load(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "study.yaml"
    path.write_text(f"model: cnn\ndata: d\n{text}")
    return sweep.load(str(path), str(tmp_path / "runs"))


def test_a_further_sweep_has_the_repeats_that_finished_runs_show_to_be_needed(
    tmp_path: Path,
) -> None:
    for ranks, seconds in ((1, (100.0, 101.0, 99.0)), (2, (50.0, 60.0, 45.0))):
        for seed, train_seconds in enumerate(seconds):
            folder = tmp_path / "runs" / f"ranks={ranks}-seed={seed}"
            write_run(folder, ranks, train_seconds, [train_seconds / 10] * ranks)
    study = load(tmp_path, "repeats: auto\nranks: [1, 2]\n")
    counts = {cell.runs[0].ranks: len(cell.runs) for cell in study.cells}
    assert counts == {1: 3, 2: 3 + MOST_MORE}
    assert "2 ranks: the speed-up is known to ±" in study.remarks[0]
    enough = load(tmp_path, "repeats: auto\nranks: [1, 2]\ninterval: 0.9\n")
    assert {len(cell.runs) for cell in enough.cells} == {3}
    assert enough.remarks == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("interval: 0", "interval must be above 0"),
        ("most_core_hours: -1", "most_core_hours must be above 0"),
        ("repeats: some", "repeats"),
    ],
)
def test_values_out_of_range_are_refused(tmp_path: Path, text: str, message: str) -> None:
    repeats = "" if "repeats" in text else "repeats: auto\n"
    with pytest.raises(UsageError, match=message):
        load(tmp_path, f"{repeats}{text}\n")


def test_failed_runs_do_not_stop_the_rounds_and_active_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted were only finished runs: a study with a failed one got no more repeats."""
    for ranks, seconds in ((1, (100.0, 101.0, 99.0)), (2, (50.0, 60.0, 45.0))):
        for seed, train_seconds in enumerate(seconds):
            folder = tmp_path / "runs" / f"ranks={ranks}-seed={seed}"
            write_run(folder, ranks, train_seconds, [train_seconds / 10] * ranks)
    for seed in (3, 4):  # they failed
        (tmp_path / "runs" / f"ranks=2-seed={seed}").mkdir()
    assert need(tmp_path / "runs", 0.05, None).counts == {"ranks=1": 3, "ranks=2": 5 + MOST_MORE}
    monkeypatch.setattr(
        watch, "active", lambda runs: {run: [] for run in runs} | {Path("x"): ["7"]}
    )
    waiting = need(tmp_path / "runs", 0.05, None)
    assert waiting.counts == {"ranks=1": 3, "ranks=2": 5}
    assert "1 run(s) of " in waiting.remarks[0]


def test_disturbed_runs_are_repeated_and_stay(tmp_path: Path) -> None:
    def sweep_seeds() -> dict[int, list[int]]:
        text = "ranks: [1, 2]\nrepeats: 4\nrepeat_disturbed: true\n"
        return {
            cell.runs[0].ranks: [run.seed for run in cell.runs]
            for cell in load(tmp_path, text).cells
        }

    assert sweep_seeds() == {1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}, "nothing has run"
    for seed in range(4):
        for ranks in (1, 2):
            slow = 1.5 if (ranks, seed) == (2, 1) else 1 + 0.001 * seed
            run = tmp_path / "runs" / f"ranks={ranks}-seed={seed}"
            write_run(run, ranks, slow * 100 / ranks, [9.0] * ranks, options={"seed": seed})
    assert sweep_seeds() == {1: [0, 1, 2, 3], 2: [0, 1, 2, 3, 4]}
    run = tmp_path / "runs" / "ranks=2-seed=4"
    write_run(run, 2, 50.1, [9.0] * 2, options={"seed": 4})
    assert sweep_seeds()[2] == [0, 1, 2, 3, 4], "its repeat was not disturbed"
    assert (
        "ranks=2: 1 more, for disturbed runs"
        in load(tmp_path, "ranks: [1, 2]\nrepeats: 4\nrepeat_disturbed: true\n").remarks
    )


def test_auto_repeats_need_no_other_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave repeat_disturbed out"):
        load(tmp_path, "repeats: auto\nrepeat_disturbed: true\n")
