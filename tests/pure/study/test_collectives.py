"""The study of all-reduces on invented measurements: options, verdicts, report and tables."""

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import DataError, UsageError
from hvdtrain.host.launchers import ALGORITHMS
from hvdtrain.study.collectives import report, tables, verdicts
from hvdtrain.study.collectives.arms import Arm, arms, step_groups
from hvdtrain.study.collectives.cells import Cell, SumCell, this_machine, write_result
from hvdtrain.study.collectives.options import StudyOptions, doublings
from hvdtrain.study.collectives.results import Group, arrange
from hvdtrain.study.collectives.study import measure_all
from hvdtrain.study.collectives.textbook import Crossing, Network, counts, predicted_crossing
from hvdtrain.study.statistics import Estimate

SIZES = doublings(4 * 2**20)
NETWORK = Network(2e-6, 4e-6, 3e-10)
COUNTED = ("ring", "recursive-doubling", "rabenseifner", "tree")


def by_textbook(algorithm: str, ranks: int, size: int) -> float:
    work = counts(algorithm, ranks)
    return 1e-3 if work is None else work.seconds(NETWORK, size)


def contents(
    ranks: int,
    seconds: Callable[[str, int, int], float] = by_textbook,
    names: tuple[str, ...] = COUNTED,
    repeats: int = 3,
) -> list[tuple[SumCell, Mapping[str, Any]]]:
    """Return what the files of a group would hold; repeats differ by a percent."""
    cells = [SumCell(name, ranks, repeat, SIZES) for name in names for repeat in range(repeats)]
    return [
        (
            cell,
            {
                "seconds": {
                    "mpi": {
                        str(size): seconds(cell.algorithm, ranks, size) * (1 + 0.01 * cell.repeat)
                        for size in SIZES
                    }
                },
                "not_measured": {"horovod": "Horovod is not installed"},
                "machine": "a processor, 8 cores",
                "mpi": "Open MPI v5",
                "versions": {"torch": "2"},
                "algorithm": cell.algorithm,
            },
        )
        for cell in cells
    ]


def group_of(ranks: int, **values: Any) -> Group:
    (group,) = arrange(contents(ranks, **values), cores=8)
    return group


def test_fits_of_a_group_are_those_of_its_network() -> None:
    group = group_of(8)
    assert group.network is not None
    assert group.network == pytest.approx(Network(*(1.01 * value for value in NETWORK)), rel=1e-6)
    ring = group.sums["ring"]
    latency = ring.fit_of_repeats(lambda line: line.fixed)
    assert latency.low is not None
    assert latency.high is not None
    assert latency.low < latency.value < latency.high
    assert latency.value == pytest.approx(1.01 * (2e-6 + 14 * 4e-6))
    assert group.textbook("ring") == pytest.approx(ring.medians)


def test_a_trade_off_that_is_the_textbooks_is_confirmed() -> None:
    group = group_of(8)
    judged = verdicts.judgements([group])
    assert [item.verdict for item in judged] == [verdicts.HOLDS] * 6
    for judgement in judged:
        assert judgement.measured is not None
        assert judgement.measured.value == pytest.approx(judgement.textbook)
    for item in verdicts.crossovers([group]):
        assert item.verdict == verdicts.HOLDS
        assert item.factor == pytest.approx(1, abs=0.3)


def test_a_trade_off_that_is_reversed_is_refuted() -> None:
    """The control: each algorithm gets the seconds of its partner."""
    partner = {"ring": "tree", "tree": "ring"}

    def swapped(algorithm: str, ranks: int, size: int) -> float:
        return by_textbook(partner[algorithm], ranks, size)

    group = group_of(8, seconds=swapped, names=("ring", "tree"))
    assert [item.verdict for item in verdicts.judgements([group])] == [verdicts.FAILS] * 2
    (crossing,) = verdicts.crossovers([group])
    assert crossing.verdict == verdicts.FAILS
    assert (crossing.measured.below, crossing.measured.above) == ("ring", "tree")


def test_equal_counts_are_not_judged() -> None:
    judged = {item.claim: item for item in verdicts.judgements([group_of(2)])}
    assert judged["small sums: tree is faster than ring"].verdict == verdicts.SAME_COUNT
    assert judged["large sums: ring is faster than tree"].verdict == verdicts.HOLDS
    large = judged["large sums: ring is faster than recursive-doubling"]
    assert (large.verdict, large.measured) == (verdicts.SAME_COUNT, None)


def test_a_fit_without_a_cost_of_messages_predicts_no_crossover_of_them() -> None:
    group = group_of(2)
    unseen = Network(1e-4, 0.0, 3e-10)
    pair = ("recursive-doubling", "ring")
    predicted = predicted_crossing(*pair, 2, unseen)
    crossover = verdicts.Crossover(group, pair, predicted, Crossing("ring", "ring"))
    assert crossover.verdict == verdicts.NO_PREDICTION
    same = replace(crossover, pair=("ring", "rabenseifner"))
    assert same.verdict == verdicts.SAME_COUNT


def test_a_hierarchy_is_not_judged_on_one_host() -> None:
    group = group_of(4, names=("auto", "hierarchical"))
    (item,) = verdicts.judgements([group])
    assert item.verdict == "one host has one level: not applicable"
    assert item.measured is not None
    assert group.network is None
    assert verdicts.crossovers([group]) == []


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.1, 1.4, verdicts.HOLDS),
        (0.7, 0.9, verdicts.FAILS),
        (0.9, 1.1, verdicts.NOISE),
        (None, None, verdicts.ONE_REPEAT),
    ],
)
def test_the_interval_decides(low: float | None, high: float | None, verdict: str) -> None:
    assert verdicts.judge(Estimate(1.2, low, high)) == verdict


def test_latency_is_compared_between_groups_that_have_a_core_per_rank() -> None:
    groups = [group_of(2), group_of(8)]
    ring, tree = verdicts.growth(groups)
    assert "latency grows 5.80x from 2 to 8 ranks; the textbook counts 7.00x" in ring
    assert "latency grows 2.60x from 2 to 8 ranks; the textbook counts 3.00x" in tree
    short = arrange([*contents(2), *contents(8)], cores=2)
    assert [group.is_oversubscribed for group in short] == [False, True]
    (line,) = verdicts.growth(short)
    assert "is not decided" in line


def test_the_report_names_machine_groups_fits_crossovers_and_reasons() -> None:
    options = StudyOptions(to="d", ranks="2,8", largest=SIZES[-1], models="none").check()
    measured = [*contents(2), *contents(8)]
    groups = arrange(measured, cores=4)
    findings = report.Findings(options, groups, [], [content for _, content in measured])
    crossings = verdicts.crossovers(groups)
    text = report.as_markdown(findings, crossings)
    for phrase in (
        "- Machine: a processor, 8 cores. All ranks are on it.",
        "- Not measured: Horovod with ring: Horovod is not installed.",
        "Oversubscribed groups have more ranks",
        "### MPI, 8 ranks (oversubscribed)",
        "(allreduce-mpi-8.png)",
        "| MPI, 8 (oversubscribed) | tree / ring | tree below ",
        "overhead 2.0 us, alpha 4.0 us per message, beta 0.303 ns per byte",
        "| MPI, 2 | recursive-doubling | 1 | 1.00 |",
    ):
        assert phrase in text, phrase
    assert "training step" not in text.split("## How this was measured")[0]
    rows = list(csv.DictReader(io.StringIO(tables.sums_csv(groups))))
    assert len(rows) == 2 * len(COUNTED) * len(SIZES)
    assert float(rows[0]["textbook"]) == pytest.approx(float(rows[0]["seconds"]), rel=1e-6)
    assert len(tables.fits_csv(groups).splitlines()) == 1 + 2 * len(COUNTED)
    assert len(tables.crossovers_csv(crossings).splitlines()) == 1 + len(crossings)
    assert len(tables.steps_csv([]).splitlines()) == 1


@pytest.mark.parametrize(
    ("crossing", "words"),
    [
        (Crossing(), "no difference"),
        (Crossing("tree", "tree"), "tree at all sizes"),
        (Crossing("tree", "ring", 3 * 2**16), "tree below 192 KiB, ring above"),
        (
            Crossing("tree", "ring", 2**20, (2**19, 2**21)),
            "tree below 1 MiB, ring above (512 KiB to 2 MiB)",
        ),
    ],
)
def test_a_crossover_in_words(crossing: Crossing, words: str) -> None:
    assert report.crossing_words(crossing) == words


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ranks": "1,2"}, "--ranks must be between 2 and 64, not 1,2"),
        ({"ranks": "2;3"}, "--ranks 2;3 is not a list of numbers"),
        ({"ranks": ""}, "--ranks  is not a list of numbers"),
        ({"repeats": 0}, "--repeats must be at least 1, not 0"),
        ({"steps": 0}, "--steps must be at least 1, not 0"),
        ({"largest": 512}, "--largest must be between 2048 and 1073741824 bytes, not 512"),
        ({"algorithms": "ring,star"}, "--algorithms star is unknown: use auto, ring"),
        ({"models": "cnm"}, "--models cnm is unknown: use cnn"),
    ],
)
def test_an_option_out_of_range_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StudyOptions(to="d", **values).check()


def test_steps_are_measured_where_each_rank_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    options = StudyOptions(to="d", ranks="4,2,3").check()
    assert options.groups == [2, 3, 4]
    module = "hvdtrain.study.collectives.arms.free_cores"
    for cores, groups in ((1, [2]), (3, [2, 3]), (9, [2, 3, 4])):
        monkeypatch.setattr(module, lambda cores=cores: cores)
        assert step_groups(options) == groups


def test_the_arms_are_the_algorithms_that_their_library_has() -> None:
    compared = arms(StudyOptions(to="d", ranks="2").check(), "d", ["mpi", "horovod"])
    names = {
        name: [arm.algorithm for arm in compared if arm.engine == name]
        for name in ("mpi", "horovod")
    }
    assert names["horovod"] == list(ALGORITHMS)
    assert names["mpi"] == [name for name in ALGORITHMS if name != "hierarchical"]
    for arm in compared:
        arm.config().check()
    assert len({arm.key for arm in compared}) == len(compared)


def test_a_result_of_other_settings_or_damaged_is_refused(tmp_path: Path) -> None:
    cell = SumCell("ring", 2, 0, SIZES)
    path = cell.path(tmp_path)
    path.parent.mkdir()
    same = cell.settings | {"machine": this_machine()}
    write_result(path, same)
    assert cell.read(tmp_path) == same
    with pytest.raises(UsageError, match=r"sizes was .*: choose another --to"):
        replace(cell, sizes=SIZES[:-1]).read(tmp_path)
    write_result(path, same | {"machine": "another one"})
    with pytest.raises(UsageError, match="machine was 'another one'"):
        cell.read(tmp_path)
    path.write_text("{")
    with pytest.raises(DataError, match="remove it to measure again"):
        cell.read(tmp_path)


def test_each_cell_is_measured_once_and_none_before_all_are_checked(tmp_path: Path) -> None:
    measured: list[str] = []

    def cell(name: str, is_wrong: bool = False) -> Cell:
        def check() -> None:
            if is_wrong:
                raise UsageError("other settings")

        def measure() -> None:
            measured.append(name)
            (tmp_path / name).touch()

        return Cell(name, tmp_path / name, check, measure)

    cells = [cell(name) for name in "abcdef"]
    with pytest.raises(UsageError):
        measure_all([*cells, cell("g", is_wrong=True)], print)
    assert measured == []
    lines: list[str] = []
    (tmp_path / "c").touch()
    measure_all(cells, lines.append)
    assert sorted(measured) == list("abdef")
    assert measured != sorted(measured)  # in random order
    assert [line.endswith("c is finished") for line in lines].count(True) == 1
    measure_all(cells, print)
    assert len(measured) == 5


def test_an_arm_names_its_runs() -> None:
    assert Arm("cnn", 2, "mpi", "ring", "d", 60).run(Path("to"), 1) == Path(
        "to/runs/cnn-2-mpi-ring-1"
    )


def test_the_choice_of_the_library_is_compared_with_the_fastest() -> None:
    def like_tree(algorithm: str, ranks: int, size: int) -> float:
        return by_textbook("tree" if algorithm == "auto" else algorithm, ranks, size)

    group = group_of(8, seconds=like_tree, names=("auto", "ring", "tree"))
    (line,) = verdicts.choices_of_library([group])
    assert "auto is nearest to tree, 1.00x apart" in line
    largest = by_textbook("tree", 8, SIZES[-1]) / by_textbook("ring", 8, SIZES[-1])
    assert f"at most {largest:.2f}x slower than ring, at 4 MiB." in line
    alone = group_of(8, seconds=like_tree, names=("auto", "tree"))
    (line,) = verdicts.choices_of_library([alone])
    assert line.endswith("and at no size clearly slower than another.")


def test_one_repeat_decides_nothing() -> None:
    group = group_of(8, repeats=1)
    assert {item.verdict for item in verdicts.judgements([group])} == {verdicts.ONE_REPEAT}
    assert {item.verdict for item in verdicts.crossovers([group])} == {verdicts.ONE_REPEAT}
