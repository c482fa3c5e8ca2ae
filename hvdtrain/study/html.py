"""A report as one HTML file that needs no other file, on screens and on paper."""

import base64
import re
from html import escape
from pathlib import Path

from markdown import Markdown

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 82rem; padding: 0 1rem;
  color: #1b1b1b; background: #fff; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
p, li { max-width: 45rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: .85rem;
  font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .6rem; text-align: right;
  vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
td small { white-space: nowrap; color: #555; }
thead th { border-bottom: 2px solid #444; }
img { max-width: 30rem; width: 100%; }
pre { background: #f5f5f5; overflow-x: auto; padding: .8rem; font-size: .8rem; }
@media print { body { font-size: 10pt; margin: 0; max-width: none; }
  table { display: table; font-size: 7pt; } h2, img, table { break-inside: avoid; }
  h2 { break-after: avoid; } img { max-width: 9cm; } @page { margin: 1.5cm; size: A4; } }
"""
_INTERVAL = re.compile(r"(<td[^>]*>[^<(]+) \(([^<()]+ to [^<()]+)\)</td>")
_PICTURE = re.compile(r"<p>!\[([^]\"<>]*)\]\(([\w.-]+\.png)\)</p>")
# A report has no links and no HTML, and its pictures are paragraphs: what else looks so is a name.
_FOREIGN = (
    *("html", "link", "image_link", "reference", "image_reference", "short_reference"),
    *("short_image_ref", "autolink", "automail"),
)


def page(text: str, folder: Path) -> str:
    """Return Markdown as an HTML page.

    Args:
        text: the report, whose first line is its title.
        folder: has the pictures that the report shows; the page holds them itself.
    """
    title = text.partition("\n")[0].lstrip("# ")
    reader = Markdown(extensions=["tables", "fenced_code", "sane_lists"])
    reader.preprocessors.deregister("html_block")
    for pattern in _FOREIGN:
        reader.inlinePatterns.deregister(pattern)
    body = reader.convert(text)

    def as_data(match: re.Match[str]) -> str:
        content = base64.b64encode((folder / match[2]).read_bytes()).decode()
        return f'<p><img alt="{match[1]}" src="data:image/png;base64,{content}" /></p>'

    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{_PICTURE.sub(as_data, _INTERVAL.sub(_below, body))}\n</body>\n</html>\n"
    )


def _below(match: re.Match[str]) -> str:
    """Return the cell of a number with its interval on a line of its own."""
    return f"{match[1]}<br /><small>{match[2]}</small></td>"
