"""The site of docs/ builds without a warning, and README leads to its pages."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors, pages that are in no menu, and names in the Python pages are checked.

    With --quiet, which drops warnings before they are counted, --strict finds nothing.
    """
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").exists()
    outside = re.compile(r'<(?:link|script|img)[^>]*(?:href|src)="https?://')
    pages = [path for path in tmp_path.rglob("*.html") if outside.search(path.read_text())]
    assert not pages, "the site is read offline, too"


def test_questions_of_users_are_two_clicks_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    for page in ("start/own-data.md", "how-to/resume.md", "tutorials/choose-plan.md"):
        assert f"(docs/{page})" in text
