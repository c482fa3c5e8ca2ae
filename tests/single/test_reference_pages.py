"""tools/reference_pages.py: the pages of commands and options match the program."""

from pathlib import Path

import pytest
import reference_pages

from hvdtrain.cli import COMMANDS


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference_pages.pages()


def test_the_pages_are_up_to_date(pages: dict[str, str]) -> None:
    assert reference_pages.outdated(reference_pages.REFERENCE, pages) == []


def test_each_command_has_its_help_page(pages: dict[str, str]) -> None:
    for command in COMMANDS:
        start = f"## hvdtrain {command}\n\n```text\nusage: hvdtrain {command} "
        assert start in pages["commands.md"]


def test_the_pages_do_not_depend_on_the_terminal(
    pages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert reference_pages.pages() == pages


def test_a_changed_row_and_a_missing_page_are_found(
    pages: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "options.md").write_text(pages["options.md"].replace("| `64` |", "| `65` |"))
    assert reference_pages.outdated(tmp_path, pages) == ["commands.md", "options.md"]
    assert "options.md is not up to date: run" in capsys.readouterr().err
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    assert reference_pages.outdated(tmp_path, pages) == []
