"""The files of a report: one page of HTML, tables for LaTeX, pictures, and a comparison."""

import csv
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown import markdown
from matplotlib import pyplot

from hvdtrain.study import laws, plots, report, sections
from hvdtrain.study.results import Epoch
from hvdtrain.study.series import Series, arrange
from tests.pure.study.test_results import write_run
from tests.pure.study.test_series import a_run

WHOLE = ("report.html", "report.md", "tables.tex", "runs.csv", "sizes.csv", "speedup.pdf")


def write_study(folder: Path, factor: float = 1.0, sizes: Sequence[int] = (1, 2)) -> Path:
    for ranks in sizes:
        for repeat in range(3):
            seconds = factor * 100 * (0.1 + 0.9 / ranks) * (1 + 0.01 * repeat)
            write_run(folder / f"{ranks}-{repeat}", ranks, seconds, [seconds / 10] * ranks)
    return folder


class Page(HTMLParser):
    """Tags that are open, and sources of pictures, of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.pictures: list[str] = []
        self.cells = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
            self.cells += tag == "td"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.pictures.append(str(dict(attrs)["src"]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_report_is_one_page_without_other_files_and_the_same_each_time(tmp_path: Path) -> None:
    runs = write_study(tmp_path / "runs", sizes=(1, 2, 4, 8))
    for name in ("one", "two"):
        report.write([str(runs)], str(tmp_path / name))
    for name in WHOLE:
        first, second = ((tmp_path / to / name).read_bytes() for to in ("one", "two"))
        assert first == second, name
    text = (tmp_path / "one" / "report.md").read_text()
    assert (
        "The simplest law that describes these runs is Amdahl" in text
    )  # it is in the picture, too
    page = Page()
    page.feed((tmp_path / "one" / "report.html").read_text())
    assert page.open == []
    assert page.cells > 20
    assert len(page.pictures) >= 5
    assert all(source.startswith("data:image/png;base64,") for source in page.pictures)


def all_series(factor: float = 1.0, **changes: object) -> list[Series]:
    runs = [
        a_run(ranks, factor * rate + change, **changes)
        for ranks, rate in ((1, 100.0), (2, 190.0), (4, 350.0))
        for change in (0.0, 1.0, 2.0)
    ]
    return arrange(runs)[0]


def test_studies_are_compared_by_size_with_intervals() -> None:
    compared = sections.pairs(all_series(1.2), all_series())
    assert [pair.size.ranks for pair in compared] == [1, 2, 4]
    assert [pair.verdict for pair in compared] == ["faster"] * 3
    for pair in compared:
        assert pair.throughput.value == pytest.approx(1.2, rel=0.01)
        assert pair.throughput.low > 1.1  # type: ignore[operator]
    assert compared[0].speedup is None
    assert compared[2].speedup == pytest.approx(1.0, rel=0.01)
    assert {pair.verdict for pair in sections.pairs(all_series(), all_series(1.2))} == {"slower"}
    assert {pair.verdict for pair in sections.pairs(all_series(), all_series())} == {"not shown"}
    assert sections.pairs(all_series(), all_series(threads=2)) == []
    assert "No size of there can be compared" in sections.comparison_section([], "there")


def test_a_report_holds_the_comparison(tmp_path: Path) -> None:
    runs, base = write_study(tmp_path / "runs", 0.5), write_study(tmp_path / "base")
    report.write([str(runs)], str(tmp_path / "report"), compare=str(base))
    assert f"## Compared with {base}" in (tmp_path / "report" / "report.md").read_text()
    with (tmp_path / "report" / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["ranks"] for row in rows] == ["1", "2"]
    assert [float(row["ratio"]) for row in rows] == pytest.approx([2.0, 2.0])
    assert {row["difference"] for row in rows} == {"faster"}


def test_tables_for_latex_are_whole_and_literal() -> None:
    text = report.latex_tables(all_series(model="a_b%c"))
    assert text.count(r"\\") == 1 + 3, "a head and three sizes"
    assert r"a\_b\%c" in text
    for row in text.splitlines():
        if row.endswith(r"\\"):
            assert row.count("&") == len(report.HEADS) - 1


def test_the_time_to_an_accuracy_is_that_of_the_first_epoch_that_reached_it() -> None:
    def epochs(seconds: float, *accuracies: float | None) -> tuple[Epoch, ...]:
        return tuple(
            Epoch(number, 1.0, 1.0, accuracy, seconds * number)
            for number, accuracy in enumerate(accuracies, 1)
        )

    runs = [a_run(1, 100, epochs=epochs(10.0, 0.5, 0.7, 0.6)) for _ in range(2)]
    runs += [a_run(2, 190, epochs=epochs(6.0, None, 0.7)), a_run(2, 190, epochs=epochs(6.0, 0.6))]
    (series,), _ = arrange(runs)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in sections.target_section(series, 0.7).splitlines()
        if line.startswith("|")
    ]
    one, two = (dict(zip(rows[0], row, strict=True)) for row in rows[2:])
    assert (one["reached it"], two["reached it"]) == ("2 of 2", "1 of 2")
    assert one["seconds"].startswith("20.0")
    assert two["seconds"] == "12.0"
    assert two["speed-up"] == "1.67"
    assert "0 of 2" in sections.target_section(series, 0.9)


def test_a_report_of_single_runs_has_a_table_and_curves(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one", 2, 100.0, [9.0, 9.0])
    write_run(tmp_path / "runs" / "moved", 2, 60.0, [5.0] * 2, starts=[1, 2])
    path = report.write([str(tmp_path / "runs")], str(tmp_path / "report"))
    text = path.read_text()
    assert "| moved | dp | 2 at the end |" in text
    assert "| one | dp | 2 |" in text
    assert "![Training loss by epoch.](runs_train_loss.png)" in text
    assert (path.parent / "runs_train_loss.png").exists()
    assert "one: no run on one rank with the same settings" in text


def test_noisy_repeats_are_said_to_be_so_and_cut_in_the_picture(tmp_path: Path) -> None:
    series = arrange([a_run(1, 100.0), a_run(1, 101.0), a_run(2, 40.0), a_run(2, 400.0)])[0]
    assert series[0].sizes[1].serial_fraction is None, "more than linear"
    runs = [a_run(1, rate) for rate in (99.0, 100.0, 101.0)]
    quiet = arrange([*runs, *(a_run(2, 1.9 * one.images_per_second) for one in runs)])[0]
    wanted = report.ReportOptions()
    assert "the repeats differ widely" in report._section(series[0], wanted)
    assert "the repeats differ widely" not in report._section(quiet[0], wanted)
    figure, axes = pyplot.subplots()
    plots._speedup(axes, series)
    assert axes.get_ylim()[1] <= 1.5 * max(2.0, series[0].sizes[1].speedup.value)
    pyplot.close(figure)


def test_runs_that_trained_nothing_are_left_out(tmp_path: Path) -> None:
    runs = write_study(tmp_path / "runs")
    (write_run(runs / "unfinished", 2, 50.0, [5.0] * 2) / "summary.json").unlink()
    write_run(runs / "none", 2, 50.0, [5.0] * 2, images_per_second=0.0)
    report.write([str(runs)], str(tmp_path / "report"), to_accuracy=0.4)
    text = (tmp_path / "report" / "report.md").read_text()
    assert "unfinished is not finished" in text
    assert "none cannot be read as a finished run: its images_per_second is 0.0" in text
    assert "0 of 3" in text, "epochs without their seconds are not counted"


def test_predictions_of_the_planner_are_beside_what_was_measured(tmp_path: Path) -> None:
    """Steps of 100 images at 20 images/s take 5 s."""
    runs = write_study(tmp_path / "runs")
    for run in runs.glob("2-*"):
        metrics = run / "metrics.jsonl"
        text = metrics.read_text().replace('"step": 0,', '"step": 0, "predicted_seconds": 5.0,', 1)
        metrics.write_text(text)
    report.write([str(runs)], str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.md").read_text()
    row = text.split("The planner's predictions:")[1].splitlines()[4]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == ["2", "5,000.0", "5,555.0"]
    assert cells[3].startswith("-10.0% (")


def test_energy_is_what_counters_counted_and_what_is_estimated_says_so(tmp_path: Path) -> None:
    joules = {"RAPL": {"package-0": 7.2e6}}
    lines = [{"host": "a", "seconds": 101.0, "missing": [], "joules": joules}]
    runs = tmp_path / "runs"
    for seed in range(3):
        write_run(runs / f"1-seed={seed}", 1, 100.0, [100.0] * 2, seed=seed, energy=lines)
        write_run(runs / f"2-seed={seed}", 2, 190.0, [55.0] * 2, seed=seed)
    report.write([str(runs)], str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.md").read_text()
    head, _, *rows = text.split("Nothing is estimated but what says so")[1].splitlines()[2:6]
    cells = dict(zip(head.split(" | "), rows[0].split(" | "), strict=True))
    assert cells["watts"].startswith("71,287.1"), "7.2 MJ in 101 s"
    assert rows[0].endswith("RAPL |")
    assert rows[1].count(" - ") == 3, "what was not counted is not estimated"


NAMES = (
    "a```",
    "b<script>alert(1)<_script>",
    "c[click](javascript:alert(1))",
    "d![x](http:__example.org_x.png)",
    "e<http:__example.org>",
    "f*bold*`code`|~~gone~~",
    "g\n# head",
    "# head",
    "- - item",
    "h![loss](loss.png)",
    "i&lt;b&gt;",
    "=1+2",
    "@SUM(A1)",
)


class Text(HTMLParser):
    """The words of a page, its tags, and the pages that it names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.tags, self.links = "", set[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(value) for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_names_are_text_in_each_file_of_a_report(tmp_path: Path) -> None:
    """Run folders, models and hosts may be named by another user."""
    runs = write_study(tmp_path / "runs")
    for name in NAMES:
        (write_run(runs / name, 2, 60.0, [5.0, 5.0]) / "metrics.jsonl").write_text("{")
    for number in range(2):
        for name in ("=2+3", *NAMES[:7]):
            machine = {"processor": name, "cores": 2, "threads": 1}
            write_run(runs / f"={number}{name}", 2, 60.0, [5.0] * 2, model=name, machine=machine)
    to = tmp_path / "report"
    report.write([str(runs)], str(to))
    pictures = {path.name for path in to.glob("*.png")}
    text = (to / "report.md").read_text()
    # Any program that shows Markdown, the page, and the page of text that is not escaped.
    pages = [markdown(text, extensions=["tables", "fenced_code"]), report.page(text, to)]
    bare = report.page("- ".join(f"{laws.shown(name)}\n\n" for name in ("# T", *NAMES)), to)
    for page in map(Text, (*pages, bare)):
        assert not page.tags & {"script", "a", "b"}
        assert {link for link in page.links if not link.startswith("data:")} <= pictures
    assert [page.count("<h1") for page in pages] == [1, 1]
    for page in map(Text, pages):
        assert all(laws.shown(name) in page.words for name in NAMES)
    assert laws.markdown_table([{"a": "x|y"}]).splitlines()[-1] == "| x&#124;y |"
    with (tmp_path / "report" / "runs.csv").open() as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert "'=0=2+3" in cells
    assert not [cell for cell in cells if cell[:1] in ("=", "@")]
