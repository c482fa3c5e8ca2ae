"""The page of failures names a test for each moment of a run: all of them exist."""

import ast
import re
from collections.abc import Mapping
from functools import cache

import pytest

from tests.conftest import ROOT

MOMENTS = "\n## All moments\n"
TEST = re.compile(r"(tests/[\w/]+/test_\w+\.py)::(test_\w+)")
TEST_FILE = re.compile(r"tests/[\w/]+/test_\w+\.py")
BENCHMARK = re.compile(r"benchmarks/\w+\.py")
SEPARATORS = re.compile(r"(?:<br>|[,\s])*")

SOURCES = {
    "tests/pure/test_a.py": "def test_one():\n    def test_inner(): ...\n\nTEXT = 'test_text'\n",
    "benchmarks/speed.py": "",
}
ONE = "`tests/pure/test_a.py::test_one`"
SPEED = "`benchmarks/speed.py`"


def table_rows(page: str, heading: str, number: int = 0) -> list[list[str]]:
    """Return the cells of each row of a table below a heading, without its head."""
    section = page.partition(heading)[2].partition("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    lines = tables[number].splitlines() if number < len(tables) else []
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]


def cell_faults(cell: str, sources: Mapping[str, str]) -> list[str]:
    """Return a line for each name that does not exist, and for text between the names."""
    parts = cell.split("`")
    texts = [text for text in parts[::2] if not SEPARATORS.fullmatch(text)]
    names = [name for name in parts[1::2] if not exists(name, sources)]
    return [f"not a code span: {text}" for text in texts] + [
        f"does not exist: {name}" for name in names
    ]


def exists(name: str, sources: Mapping[str, str]) -> bool:
    """Return whether a name is that of a benchmark, or of a test function in a file."""
    if BENCHMARK.fullmatch(name):
        return name in sources
    test = TEST.fullmatch(name)
    return test is not None and test[2] in functions(sources.get(test[1], ""))


@cache
def functions(source: str) -> set[str]:
    """Return the names of the top-level functions of a file."""
    return {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def moments_faults(page: str, sources: Mapping[str, str]) -> list[str]:
    """Return a line for each fault of the table of moments and of the list of its tests."""
    listed = table_rows(page, MOMENTS, 1)
    tests = {row[0]: row[1] for row in listed}
    faults = [fault for name in tests.values() for fault in cell_faults(name, sources)]
    faults += ["a number or a test is there twice"] * (len(set(tests.values())) < len(listed))
    used = set[str]()
    for moment, *cells in table_rows(page, MOMENTS):
        faults += [f"an empty cell: {moment}" for cell in cells if not cell]
        used |= {number for cell in cells if cell != "-" for number in cell.split()}
    faults += [f"no test has the number {number}" for number in sorted(used - tests.keys())]
    return faults + [f"never used: {number}" for number in sorted(tests.keys() - used)]


def test_each_number_in_the_table_of_moments_is_that_of_a_test() -> None:
    page = (ROOT / "docs/explanation/failures.md").read_text()
    assert len(table_rows(page, MOMENTS)) >= 8
    sources = {path: (ROOT / path).read_text() for path in set(re.findall(TEST_FILE, page))}
    assert moments_faults(page, sources) == []


@pytest.mark.parametrize(
    ("cells", "listed", "fault"),
    [
        ("1 | 1 2", f"| 1 | {ONE} |\n", "no test has the number 2"),
        ("1 | -", f"| 1 | {ONE} |\n| 2 | {SPEED} |\n", "never used: 2"),
        ("1 | 2", f"| 1 | {ONE} |\n| 2 | {ONE} |\n", "a number or a test is there twice"),
        ("1 | ", f"| 1 | {ONE} |\n", "an empty cell: step"),
        ("1 | -", "| 1 | `tests/pure/test_a.py::test_two` |\n", "does not exist: tests/pure"),
    ],
)
def test_a_fault_of_the_table_of_moments_is_found(cells: str, listed: str, fault: str) -> None:
    head = "| a | b | c |\n|---|---|---|\n"
    page = f"# Page\n{MOMENTS}\n{head}| step | {cells} |\n\n| | test |\n|---|---|\n{listed}"
    (message,) = moments_faults(page, SOURCES)
    assert message.startswith(fault)
