"""Counts of messages and bytes, fits and crossovers, on curves whose truth is known."""

import math

import numpy as np
import pytest

from hvdtrain.study.collectives.options import doublings
from hvdtrain.study.collectives.textbook import (
    Counts,
    Crossing,
    Network,
    Seconds,
    counts,
    fitted_line,
    fitted_network,
    measured_crossing,
    medians,
    predicted_crossing,
    worst_error,
)

COUNTED = ("ring", "recursive-doubling", "rabenseifner", "tree")
SIZES = doublings(16 * 2**20)
TRUTH = Network(3e-6, 5e-6, 2e-10)


def measured(
    ranks: int, network: Network = TRUTH, noise: float = 0.0, repeats: int = 3
) -> dict[str, Seconds]:
    """Return seconds that follow the textbook, each with a random relative error."""
    generator = np.random.default_rng(0)
    return {
        name: {
            size: [
                work.seconds(network, size) * (1 + noise * float(generator.standard_normal()))
                for _ in range(repeats)
            ]
            for size in SIZES
        }
        for name in COUNTED
        if (work := counts(name, ranks)) is not None
    }


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
    assert counts(algorithm, ranks) == pytest.approx(Counts(*expected))


def test_what_the_library_chooses_has_no_count() -> None:
    assert counts("auto", 4) is None
    assert counts("hierarchical", 4) is None


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 13])
def test_a_network_is_fitted_from_all_algorithms_together(ranks: int) -> None:
    exact = {name: medians(seconds) for name, seconds in measured(ranks).items()}
    assert fitted_network(exact, ranks) == pytest.approx(TRUTH, rel=1e-6)
    noisy = {name: medians(seconds) for name, seconds in measured(ranks, noise=0.02).items()}
    fitted = fitted_network(noisy, ranks)
    assert fitted is not None
    assert fitted.beta == pytest.approx(TRUTH.beta, rel=0.05)
    assert fitted.overhead + fitted.alpha == pytest.approx(8e-6, rel=0.2)


def test_nothing_is_fitted_to_what_has_no_count() -> None:
    assert fitted_network({"auto": {1024: 1e-5}}, 4) is None


@pytest.mark.parametrize("name", COUNTED)
def test_a_line_of_one_algorithm_has_its_latency_and_bandwidth(name: str) -> None:
    seconds = medians(measured(8)[name])
    work, line = counts(name, 8), fitted_line(seconds)
    assert work is not None
    assert line.fixed == pytest.approx(TRUTH.overhead + work.messages * TRUTH.alpha)
    assert line.per_unit == pytest.approx(work.volume * TRUTH.beta)
    fitted = {size: line.fixed + line.per_unit * size for size in SIZES}
    assert worst_error(fitted, seconds) == pytest.approx(1)


def test_counts_of_another_algorithm_do_not_fit() -> None:
    """The control: a curve of the ring is far from what the textbook counts for the tree."""
    ring, tree = medians(measured(8)["ring"]), counts("tree", 8)
    assert tree is not None
    assert worst_error({size: tree.seconds(TRUTH, size) for size in SIZES}, ring) > 2


def test_a_crossover_is_predicted_where_the_seconds_are_equal() -> None:
    crossing = predicted_crossing("ring", "tree", 8, TRUTH)
    assert (crossing.below, crossing.above) == ("tree", "ring")
    assert crossing.size is not None
    equal = [
        work.seconds(TRUTH, crossing.size)
        for name in ("ring", "tree")
        if (work := counts(name, 8)) is not None
    ]
    assert equal[0] == pytest.approx(equal[1])
    assert crossing.size == pytest.approx(8 * 5e-6 / (4.25 * 2e-10))


def test_an_algorithm_that_is_better_in_both_counts_never_loses() -> None:
    assert predicted_crossing("recursive-doubling", "tree", 8, TRUTH) == Crossing(
        "recursive-doubling", "recursive-doubling"
    )
    assert predicted_crossing("ring", "tree", 2, TRUTH) == Crossing("ring", "ring")
    assert predicted_crossing("ring", "rabenseifner", 2, TRUTH) == Crossing()
    free = TRUTH._replace(alpha=0.0)
    assert predicted_crossing("ring", "tree", 8, free) == Crossing("ring", "ring")


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("pair", [("tree", "ring"), ("ring", "recursive-doubling")])
def test_a_crossover_is_measured_near_the_truth(pair: tuple[str, str], noise: float) -> None:
    truth = predicted_crossing(*pair, 8, TRUTH)
    crossing = measured_crossing(*pair, measured(8, noise=noise))
    assert (crossing.below, crossing.above) == (truth.below, truth.above)
    assert truth.size is not None
    assert crossing.size is not None
    assert crossing.between is not None
    assert abs(math.log2(crossing.size / truth.size)) < 0.5
    low, high = crossing.between
    assert low < truth.size < high <= 8 * low


def test_a_disturbed_size_makes_no_crossover() -> None:
    seconds = measured(8)
    slow = {size: [9.0 * value for value in seconds["tree"][size]] for size in SIZES[2:3]}
    disturbed = {**seconds, "tree": {**seconds["tree"], **slow}}
    truth, crossing = (measured_crossing("tree", "ring", item) for item in (seconds, disturbed))
    assert crossing == truth


def test_equal_algorithms_do_not_cross() -> None:
    seconds = measured(2, noise=0.02)
    assert measured_crossing("ring", "rabenseifner", seconds) == Crossing()


def test_an_algorithm_that_is_always_faster_does_not_cross() -> None:
    seconds = measured(2, noise=0.02)
    assert measured_crossing("tree", "ring", seconds).size is None
    assert measured_crossing("tree", "ring", seconds).below == "ring"
