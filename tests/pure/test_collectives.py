"""benchmarks/collectives.py: counts, fits, crossovers and verdicts on curves of known truth."""

import importlib.util
import math
import sys

import numpy as np
import pytest

from hvdtrain.study.laws import Estimate
from tests.conftest import ROOT

SPEC = importlib.util.spec_from_file_location(
    "benchmark_collectives", ROOT / "benchmarks" / "collectives.py"
)
assert SPEC is not None
assert SPEC.loader is not None
collectives = importlib.util.module_from_spec(SPEC)
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])  # its neighbours
    SPEC.loader.exec_module(collectives)

COUNTED = ("ring", "recursive-doubling", "rabenseifner", "tree")
SIZES = collectives.doublings(16 * 2**20)
TRUTH = collectives.Network(3e-6, 5e-6, 2e-10)
Sums = dict[str, dict[int, list[float]]]


def by_textbook(
    ranks: int, names: tuple[str, ...] = COUNTED, noise: float = 0.0, rounds: int = 3
) -> Sums:
    """Return seconds that follow the textbook, each with a random relative error."""
    dice = np.random.default_rng(0)
    return {
        name: {
            size: [
                collectives.counts(name, ranks).seconds(TRUTH, size)
                * (1 + noise * float(dice.standard_normal()))
                for _ in range(rounds)
            ]
            for size in SIZES
        }
        for name in names
    }


def test_sizes_are_doublings() -> None:
    assert collectives.doublings(8191) == [1024, 2048, 4096]
    assert (SIZES[0], SIZES[-1], len(SIZES)) == (1024, 16 * 2**20, 15)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "expected"),
    [
        ("ring", 2, (2, 1.0)),
        ("ring", 3, (4, 4 / 3)),
        ("ring", 8, (14, 1.75)),
        ("recursive-doubling", 2, (1, 1)),
        ("recursive-doubling", 8, (3, 3)),
        ("recursive-doubling", 3, (3, 3)),
        ("rabenseifner", 2, (2, 1.0)),
        ("rabenseifner", 8, (6, 1.75)),
        ("rabenseifner", 6, (6, 3.5)),
        ("tree", 2, (2, 2)),
        ("tree", 5, (6, 6)),
        ("tree", 8, (6, 6)),
    ],
)
def test_counts_are_those_of_the_textbook(
    algorithm: str, ranks: int, expected: tuple[int, float]
) -> None:
    assert collectives.counts(algorithm, ranks) == pytest.approx(expected)


def test_an_algorithm_that_the_library_chooses_has_no_count() -> None:
    assert collectives.counts("auto", 4) is None
    assert collectives.fitted_network({"auto": {1024: [1e-5]}}, 4) is None


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 13])
def test_a_network_is_fitted_from_all_algorithms_together(ranks: int) -> None:
    exact = collectives.fitted_network(by_textbook(ranks), ranks)
    assert exact == pytest.approx(TRUTH, rel=1e-6)
    noisy = collectives.fitted_network(by_textbook(ranks, noise=0.02), ranks)
    assert noisy.beta == pytest.approx(TRUTH.beta, rel=0.05)
    assert noisy.overhead + noisy.alpha == pytest.approx(8e-6, rel=0.2)


def test_a_crossover_is_predicted_where_the_seconds_are_equal() -> None:
    crossing = collectives.predicted_crossing("ring", "tree", 8, TRUTH)
    assert crossing[:2] == ("tree", "ring")
    assert crossing.size == pytest.approx(8 * 5e-6 / (4.25 * 2e-10))


def test_an_algorithm_that_is_better_in_both_counts_never_loses() -> None:
    predicted = collectives.predicted_crossing
    assert predicted("recursive-doubling", "tree", 8, TRUTH)[0] == "recursive-doubling"
    assert predicted("ring", "tree", 2, TRUTH) == ("ring", "ring", None)
    assert predicted("ring", "rabenseifner", 2, TRUTH) == ("", "", None)
    free = TRUTH._replace(alpha=0.0)
    assert predicted("ring", "tree", 8, free) == ("ring", "ring", None)


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("pair", [("tree", "ring"), ("ring", "recursive-doubling")])
def test_a_crossover_is_measured_near_the_truth(pair: tuple[str, str], noise: float) -> None:
    truth = collectives.predicted_crossing(*pair, 8, TRUTH)
    crossing = collectives.measured_crossing(*pair, by_textbook(8, noise=noise))
    assert crossing[:2] == truth[:2]
    assert abs(math.log2(crossing.size / truth.size)) < 0.5


def test_a_disturbed_size_makes_no_crossover() -> None:
    sums = by_textbook(8)
    truth = collectives.measured_crossing("tree", "ring", sums)
    sums["tree"][SIZES[2]] = [9.0 * value for value in sums["tree"][SIZES[2]]]
    assert collectives.measured_crossing("tree", "ring", sums) == truth


def test_equal_algorithms_do_not_cross() -> None:
    sums = by_textbook(2, noise=0.02)
    assert collectives.measured_crossing("ring", "rabenseifner", sums) == ("", "", None)
    assert collectives.measured_crossing("tree", "ring", sums) == ("ring", "ring", None)


def test_a_trade_off_that_is_the_textbooks_is_confirmed() -> None:
    rows = list(collectives.verdicts(by_textbook(8, noise=0.005), 8))
    assert [row["verdict"] for row in rows] == [collectives.HOLDS] * 9


def test_a_trade_off_that_is_reversed_is_refuted() -> None:
    """The control: each algorithm gets the seconds of its partner."""
    sums = by_textbook(8, ("ring", "tree"), noise=0.005)
    swapped = {"ring": sums["tree"], "tree": sums["ring"]}
    rows = list(collectives.verdicts(swapped, 8))
    assert [row["verdict"] for row in rows] == [collectives.FAILS] * 3


def test_equal_counts_are_not_judged() -> None:
    claims = [row["claim"] for row in collectives.verdicts(by_textbook(2), 2)]
    assert claims == [
        "large sums: ring is faster than tree",
        "crossover of tree and ring",
        "small sums: recursive-doubling is faster than ring",
        "crossover of recursive-doubling and ring",
        "small sums: recursive-doubling is faster than rabenseifner",
        "crossover of recursive-doubling and rabenseifner",
    ]


def test_one_round_decides_nothing() -> None:
    rows = collectives.verdicts(by_textbook(8, rounds=1), 8)
    assert {row["verdict"] for row in rows} == {collectives.ONE_ROUND}


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.1, 1.4, collectives.HOLDS),
        (0.7, 0.9, collectives.FAILS),
        (0.9, 1.1, collectives.NOISE),
    ],
)
def test_the_interval_decides(low: float, high: float, verdict: str) -> None:
    assert collectives.judge(Estimate(1.2, low, high)) == verdict


def test_the_report_shows_times_the_fit_and_the_choice_of_the_library() -> None:
    sums = by_textbook(8, ("ring", "tree"))
    text = collectives.report("MPI", {"auto": sums["tree"], **sums}, 8)
    assert "| 1 KiB | 34 | 73 (73) |" in text
    assert "overhead 3.0 us, alpha 5.0 us per message, beta 0.200 ns per byte." in text
    assert "tree below 46 KiB, ring above" in text
    loss = sums["tree"][SIZES[-1]][0] / sums["ring"][SIZES[-1]][0]
    assert f"auto is at most {loss:.2f}x slower than another algorithm: ring, at 16 MiB." in text
