"""The examples in README.md and the site run, and print the output that the pages show.

A fenced block below a comment `<!-- test: exit N -->` is run, in the order of the page. Its output
must equal that of the page except for numbers. A line `...` stands for any lines, and `...` before
a `/` for the rest of a path. A block that cannot be run has `<!-- not run: REASON -->` above it.
The commands on pages of the site can use a packed data set at data/synthetic, which README's quick
start makes.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvdtrain import data
from tests import warm
from tests.conftest import ROOT, program_environment
from tests.pure.test_language import PHRASES

README = ROOT / "README.md"
SITE = sorted((ROOT / "docs").rglob("*.md"))
ON_GITHUB = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "data/README.md", "slurm/README.md")
BLOCK = re.compile(r"<!-- test: exit (\d+) -->\n```(\w+)\n(.*?)```", re.DOTALL)
FENCE = re.compile(
    r"(?:^(?P<note><!--[^\n]*-->)\n)?^ *```(?P<language>\w*)[^\n]*\n.*?^ *```$",
    re.DOTALL | re.MULTILINE,
)
NOTE = re.compile(r"<!-- (?:test: exit \d+|not run: \S.*) -->")
RUNNABLE = ("console", "python", "bash", "")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# On busy cores a rank may be reported as a straggler, though the page shows none.
STRAGGLER = re.compile(r"^rank \d+ is slow:.*\n", re.MULTILINE)
NUMBER = re.compile(r"\b\d[\d,.]*(?:e[+-]\d+)?(?:nan)?")


@dataclass(frozen=True)
class Example:
    """A command of a console block with the output that the page shows."""

    command: str
    output: str


def examples(console: str) -> list[Example]:
    """Return the commands of a console block, each from `$ ` on with its here-document."""
    commands = []
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        end = part.index("\nEND\n") + 5 if "<<END" in part else part.index("\n") + 1
        commands.append(Example(part[:end], part[end:]))
    return commands


def comparable(text: str) -> str:
    """Return output with its numbers and widths made uniform."""
    return re.sub(r"\s+", " ", NUMBER.sub("0", text)).strip()


def is_shown(shown: str, printed: str) -> bool:
    """Return whether the page's output equals the printed one, except for numbers."""
    parts = re.split(r"^\.\.\.$|\.\.\.(?=/)", shown, flags=re.MULTILINE)
    first, *others = [comparable(part) for part in parts]
    text = comparable(printed if STRAGGLER.search(shown) else STRAGGLER.sub("", printed))
    if not others:
        return text == first
    place = len(first)
    for part in others[:-1]:
        place = text.find(part, place) + len(part)
        if place < len(part):
            return False
    return text.startswith(first) and text[place:].endswith(others[-1])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the data set of README's quick start."""
    folder = tmp_path_factory.mktemp("packed") / "synthetic"
    data.synth(folder, 2000, 10)
    return folder


@pytest.fixture
def tour(tmp_path: Path) -> Path:
    """Make a folder in which the commands of a page run from top to bottom."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    program = tmp_path / "bin" / "hvdtrain"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{warm.python()}" -m hvdtrain "$@"\n')
    program.chmod(0o755)
    return tmp_path


def run(tour: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = program_environment()
    environment["PATH"] = f"{tour / 'bin'}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        command,
        cwd=tour,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=600,
    )


def pages_with_examples() -> list[str]:
    return [
        str(page.relative_to(ROOT)) for page in (README, *SITE) if BLOCK.search(page.read_text())
    ]


@pytest.mark.proves(
    "The marked examples of README and the site print what the pages show, every other "
    "block of code says why it is not run, options are those of the program, links work, "
    "and the site builds."
)
@pytest.mark.parametrize("page", pages_with_examples())
def test_the_examples_of_a_page_print_what_it_shows(tour: Path, packed: Path, page: str) -> None:
    """One test covers a page, since each example continues where the one before it ended."""
    if page != "README.md":
        (tour / "data").mkdir()
        (tour / "data" / "synthetic").symlink_to(packed)
    for code, language, text in BLOCK.findall((ROOT / page).read_text()):
        if language == "python":
            done = run(tour, [warm.python(), "-c", text])
            assert done.returncode == int(code), done.stdout
            continue
        for example in examples(text):
            done = run(tour, ["bash", "-c", example.command])
            assert done.returncode == int(code), example.command + done.stdout
            assert is_shown(example.output, done.stdout), example.command + done.stdout


@pytest.mark.parametrize("page", [README, *SITE], ids=lambda page: str(page.relative_to(ROOT)))
def test_each_block_of_code_is_run_or_says_why_not(page: Path) -> None:
    blocks = FENCE.finditer(page.read_text())
    unmarked = [
        block[0]
        for block in blocks
        if block["language"] in RUNNABLE and not NOTE.fullmatch(block["note"] or "")
    ]
    assert not unmarked


@pytest.mark.parametrize(
    "page",
    [README, ROOT / "CONTRIBUTING.md", *SITE],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_prose_is_plain_english(page: Path) -> None:
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    assert not [match[0] for match in PHRASES.finditer(" ".join(prose.split()))]


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 180


def test_the_citation_is_that_of_the_last_release() -> None:
    release = re.search(r"^## ([\d.]+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert release is not None
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {release[1]}\ndate-released: {release[2]}\n" in citation


def test_output_that_is_not_the_page_s_is_told_from_it() -> None:
    assert is_shown("loss 1.5\n...\nend 3\n", "loss  12,000.25\nmore\nend 7")
    assert not is_shown("loss 1.5\n", "loss 1.5\nmore")
    assert not is_shown("2 rank(s)\n", "2 ranks")


@pytest.mark.parametrize("page", ON_GITHUB)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in LINK.findall(text):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(linked.read_text()), f"{page} links to {target}"


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub assigns to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
