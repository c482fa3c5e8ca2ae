"""tools/reference_pages.py: pages match the program, and figures those of docs/figures.yml."""

import re
from pathlib import Path

import pytest
import reference_pages

from hvdtrain.cli import COMMANDS
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference_pages.pages()


def test_the_pages_are_up_to_date(pages: dict[str, str]) -> None:
    assert reference_pages.outdated(ROOT, pages) == []


def test_each_command_has_its_help_page(pages: dict[str, str]) -> None:
    for command in COMMANDS:
        start = f"## hvdtrain {command}\n\n```text\nusage: hvdtrain {command} "
        assert start in pages["docs/reference/commands.md"]


def test_the_pages_do_not_depend_on_the_terminal(
    pages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert reference_pages.pages() == pages


def test_a_changed_row_and_a_missing_page_are_found(
    pages: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in pages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert reference_pages.outdated(tmp_path, pages) == []
    (tmp_path / "README.md").unlink()
    options = tmp_path / "docs" / "reference" / "options.md"
    options.write_text(options.read_text().replace("| `64` |", "| `65` |"))
    assert reference_pages.outdated(tmp_path, pages) == ["docs/reference/options.md", "README.md"]
    assert "options.md is not up to date: run" in capsys.readouterr().err


def test_figures_that_other_pages_quote_are_those_of_the_file(pages: dict[str, str]) -> None:
    tables = reference_pages.figure_tables()
    assert set(re.findall("<!-- figures: (.*) -->", pages["docs/benchmarks.md"])) == set(tables)
    for table in tables.values():
        for page, texts in table.get("quoted", {}).items():
            for text in texts:
                assert text in reference_pages.figures(table), text
                assert text in (ROOT / page).read_text(), f"{page} does not quote {text}"


def test_the_readme_shows_three_rows_of_figures(pages: dict[str, str]) -> None:
    shown = pages["README.md"].partition("\n## Figures\n")[2].partition("\n## ")[0]
    rows = [line for line in shown.splitlines() if re.match(r"\| \w", line)]
    assert len(rows) == 3
    assert all(row in pages["docs/benchmarks.md"] for row in rows)
