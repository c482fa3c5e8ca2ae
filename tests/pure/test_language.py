"""Names, docstrings, comments and messages are plain English, as far as a pattern can tell.

`python tests/pure/test_language.py PATH...` prints every violation under these paths.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = ("hvdtrain", "tests", "tools", "benchmarks", "examples", "slurm", "recipes")
# A docstring starts with a verb or a noun phrase. What starts with one of these only makes sense
# with the name in front of it, or refers to something outside of the docstring.
FRAGMENTS = frozenset(
    {"of", "that", "what", "whether", "how", "as", "by", "in", "on", "for", "those", "where"}
    | {"when", "which", "from", "to", "with", "it", "they", "its", "their", "and", "or", "at"}
    | {"only", "none", "than", "then", "so", "here", "there", "because", "until", "while"}
    | {"into", "both"}
)
PHRASES = re.compile(
    r"\b("
    r"stands? still|stood still"
    r"|(?:is|are|was|were|be) (?:no|not a) numbers?"
    r"|hand(?:s|ed|ing)?[- ](?:it |them )?over|hand-?overs?"
    r"|(?:think|thinks|thought|thinking) (?:it |the plan |a plan )?over"
    r"|(?:bring|brings|brought) in"
    r"|times as (?:long|much|many)"
    r"|(?:hold|holds|held) (?:the )?others up"
    r"|mend(?:s|ed|ing)?"
    r"|made to happen|make[s]? (?:it )?happen"
    r"|for ever|in silence"
    r"|ask(?:s|ed|ing)? for"
    r"|wish(?:es|ed)?"
    r"|(?:go|goes|went|going|gone) on"
    r"|said|told"
    r"|begun|began|begins?|beginning"
    r"|(?:is|are|was|were) to be"
    r"|of (?:which|whom)|thereof|whereof"
    r"|so (?:many|often|much)"
    r")\b",
    re.IGNORECASE,
)
NAMES = {"found", "own", "here", "each", "given", "asked", "taken", "said", "told"}
MOST_NAMES = 20  # of NAMES, in the whole project


@dataclass(frozen=True)
class Violation:
    """One text that breaks the rules.

    Attributes:
        kind: "docstring", "phrase" or "name".
        text: the words that break the rule.
    """

    path: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        """Return the violation as a compiler would print it."""
        return f"{self.path}:{self.line}: {self.kind}: {self.text}"


def violations(path: Path) -> Iterator[Violation]:
    """Yield every violation in a Python file, or in the comments of a shell script."""
    text = path.read_text()
    if path.suffix != ".py" and not text.startswith("#!/usr/bin/env python"):
        for number, line in enumerate(text.splitlines(), 1):
            if line.lstrip().startswith("#"):
                yield from _phrases(path, number, line)
        return
    tree = ast.parse(text)
    yield from _docstrings(path, tree)
    yield from _strings(path, tree)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _phrases(path, token.start[0], token.string)
    yield from _names(path, tree)


def _docstrings(path: Path, tree: ast.AST) -> Iterator[Violation]:
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = (ast.get_docstring(node) or "").partition("\n")[0]
        word = re.match(r"[A-Za-z]+\b", first)
        if word and word[0].lower() in FRAGMENTS:
            yield Violation(path, node.body[0].lineno, "docstring", first)


def _strings(path: Path, tree: ast.AST) -> Iterator[Violation]:
    """Yield the phrases in docstrings and in strings of several words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from _phrases(path, node.lineno, re.sub(r"`[^`\n]*`", "", node.value))


def _phrases(path: Path, line: int, text: str) -> Iterator[Violation]:
    for number, part in enumerate(text.splitlines()):
        for match in PHRASES.finditer(part):
            yield Violation(path, line + number, "phrase", f"{match[0]!r} in {part.strip()!r}")


def _names(path: Path, tree: ast.AST) -> Iterator[Violation]:
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        if name in NAMES:
            yield Violation(path, getattr(node, "lineno", 0), "name", name)


def sources(*places: Path) -> list[Path]:
    """Return the Python files and the scripts under some files and folders."""
    files = [
        path
        for place in places
        for path in ([place] if place.is_file() else sorted(place.rglob("*")))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return [path for path in files if path.suffix in (".py", ".sh") or _is_script(path)]


def _is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def test_text_is_plain_english() -> None:
    this = Path(__file__).resolve()
    everything = [
        violation
        for path in sources(*(ROOT / place for place in PLACES))
        if path.resolve() != this
        for violation in violations(path)
    ]
    assert not [str(violation) for violation in everything if violation.kind != "name"]
    names = [str(violation) for violation in everything if violation.kind == "name"]
    assert len(names) <= MOST_NAMES, names


def test_what_is_not_plain_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""Of a step."""\n'
        "found = 1  # what was asked for\n"
        "def name(each: int) -> str:\n"
        '    """Return the rank that waits for ever."""\n'
        '    return "it goes on"\n'
    )
    kinds = sorted((violation.line, violation.kind) for violation in violations(path))
    assert kinds == [
        (1, "docstring"),
        (2, "name"),
        (2, "phrase"),
        (3, "name"),
        (4, "phrase"),
        (5, "phrase"),
    ]


if __name__ == "__main__":
    for source in sources(*map(Path, sys.argv[1:])):
        for violation in violations(source):
            print(violation)
