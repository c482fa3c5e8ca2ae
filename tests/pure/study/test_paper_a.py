"""The verdict on a published claim, for given measurements."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.study import paper_a
from hvdtrain.study.paper_a import KERAS, MIRRORED, ONE_MIRROR, SINGLE, SINGLE_TORCH, TORCH
from hvdtrain.study.results import Epoch, Result

NAMES = {arm.key: arm.name for arm in paper_a.arms("d", 10, 2)}


def runs(seconds: list[float], accuracy: float = 0.69, **changes: Any) -> list[Result]:
    values: dict[str, Any] = {
        "path": Path("run"),
        "model": "cnn",
        "plan": "single",
        "ranks": 1,
        "threads": 2,
        "batch_size": 64,
        "seed": 0,
        "settings": {},
        "samples": 6400,
        "startup_seconds": 2.0,
        "train_seconds": 10.0,
        "images_per_second": 640.0,
        "exposed": 0.0,
        "bubble": 0.0,
        "data": 0.0,
        "imbalance": 0.0,
        "peak_memory_bytes": 1,
        "accuracy": accuracy,
        "epochs": (),
        "machine": {},
        "versions": {},
    }
    return [Result(**values | {"seconds": value} | changes) for value in seconds]


def test_the_arms_differ_in_nothing_but_how_they_are_distributed() -> None:
    arms = paper_a.arms("d", 10, 2)
    assert [arm.key for arm in arms] == [SINGLE, MIRRORED, ONE_MIRROR, KERAS, SINGLE_TORCH, TORCH]
    settings = [vars(arm.config) for arm in arms]
    different = {name for name in settings[0] if len({str(arm[name]) for arm in settings}) > 1}
    assert different == {"framework", "plan"}
    config = arms[0].config
    assert (config.model, config.batch_size, config.lr, config.epochs) == ("cnn", 64, 0.001, 10)
    assert (config.optimizer, config.normalise, config.holdout) == ("adam", "unit", 0.2)
    for arm in [*arms, *paper_a.small_arms("d", 2)]:
        arm.config.check()


@pytest.mark.parametrize(
    ("seconds", "accuracy", "phrases"),
    [
        (
            [80, 81, 82],
            0.695,
            ["19.0% less time", "is shown (p = 0.000). The claim holds"],
        ),
        ([50, 51, 52], 0.69, ["49.0% less time", "the gain is more than the paper's"]),
        ([95, 96, 97], 0.69, ["4.0% less time", "the gain is less than the paper's"]),
        ([120, 125, 130], 0.69, ["25.0% more time", "The claim does not hold here"]),
        ([95, 100, 105], 0.69, ["within the noise"]),
        ([80, 81, 82], 0.65, ["-4.00 points", "is not shown (p = 1.000)", "for the time alone"]),
        ([80], 0.69, ["no interval", "not shown: that needs", "neither confirmed nor refuted"]),
    ],
)
def test_the_verdict_is_what_the_intervals_say(
    seconds: list[float], accuracy: float, phrases: list[str]
) -> None:
    base = runs([99.9, 100.0, 100.1][: len(seconds)] if len(seconds) > 1 else [100.0])
    main = dict.fromkeys(NAMES, base) | {MIRRORED: runs(seconds, accuracy)}
    text = paper_a.verdict(main, NAMES).splitlines()[1]
    for phrase in phrases:
        assert phrase in text


def test_horovod_is_compared_with_one_device_of_its_framework() -> None:
    main = {SINGLE: runs([100, 101]), MIRRORED: runs([100, 101]), KERAS: runs([90, 91])}
    main[ONE_MIRROR] = main[SINGLE]
    main |= {SINGLE_TORCH: runs([50, 51]), TORCH: runs([75, 76])}
    lines = paper_a.verdict(main, NAMES).splitlines()
    assert "Horovod, TensorFlow took 10.0% less time" in lines[3]
    assert "Horovod, PyTorch took 49.5% more time" in lines[4]


def test_what_could_explain_the_saving_is_judged_by_its_interval() -> None:
    def trained(first: float, others: float, startup: float) -> list[Result]:
        """Return three runs of three epochs."""
        return [
            replace(
                run,
                startup_seconds=startup,
                epochs=tuple(
                    Epoch(number + 1, 1.0, 1.0, 0.5, first + number * others)
                    for number in range(3)
                ),
            )
            for run in runs([first + 2 * others + more for more in (-0.1, 0.0, 0.1)])
        ]

    main = {
        SINGLE: trained(14.0, 10.0, 6.0),
        MIRRORED: trained(14.0, 10.0, 0.5),
        ONE_MIRROR: trained(5.0, 10.0, 6.0),
    }
    fits = {
        ("single", "single"): [[[20.0, 10.0], [10.0, 10.0 + n / 10]] for n in range(3)],
        ("single", "mirrored"): [[[20.0, 10.0], [20.0, 15.0 + n / 10]] for n in range(3)],
    }
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in paper_a.explanations(main, fits).splitlines()
        if line.startswith("| ")
    ][2:]
    assert [row[2] for row in rows] == [
        *("contradicted: too little", "a part of it", "contradicted: too little"),
        *("shown", "shown", "contradicted: too little"),
        *("a part of it", "contradicted: it takes longer"),
    ]
    assert rows[1][1].startswith("+13.7 (")
    assert rows[6][0].endswith("plain Keras, 10 epochs extrapolated")
    alone = {key: one[:1] for key, one in main.items()}
    assert "not shown (one run of each)" in paper_a.explanations(alone, {})


def test_the_cost_of_mirrors_is_told_from_what_the_images_cost() -> None:
    def step(milliseconds: float) -> list[Result]:
        return runs([1.0], step_seconds=milliseconds / 1e3)

    results = {SINGLE: step(14.0), MIRRORED: step(20.0)}
    results |= {f"small-{SINGLE}": step(2.0), f"small-{MIRRORED}": step(7.0)}
    text = paper_a.cost_of_mirrors(results)
    assert "14.00 ms on the single device and 20.00 ms on the mirrors" in text
    assert "add a fixed 5.00 ms to each step, and +1.00 ms" in text


@pytest.mark.parametrize(
    ("epochs", "repeats", "ranks", "option"),
    [(0, 1, 2, "--epochs"), (1, 0, 2, "--repeats"), (1, 1, 1, "--ranks")],
)
def test_numbers_that_make_no_comparison_are_refused(
    tmp_path: Path, epochs: int, repeats: int, ranks: int, option: str
) -> None:
    with pytest.raises(UsageError, match=option):
        paper_a.reproduce("d", str(tmp_path), epochs, repeats, ranks, print)
