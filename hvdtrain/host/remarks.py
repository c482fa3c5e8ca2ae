"""mpirun's own remarks among the lines that the ranks write on standard error."""

import re
from collections.abc import Iterable, Iterator

EDGE = "-" * 70
LAUNCHER_WORDS = (
    r"not enough slots|prterun|prted|PRTE|PRRTE|PMIx server|mpirun|MPI_ABORT|Open MPI|open-mpi"
)
# Lines without a frame that mpirun's libraries write while it ends, and on which nobody can act:
# those of PMIx, and those of libevent on an epoll of a pipe that is already closed.
WARNINGS = r"\[[^\]]+\] PMIX ERROR|\[warn\] Epoll "


def without_launcher_banners(lines: Iterable[str], banners: list[str]) -> Iterator[str]:
    """Yield the lines of the ranks, and collect mpirun's own framed remarks in `banners`."""
    frame: list[str] = []
    for line in _whole_lines(lines):
        is_edge = line.startswith(EDGE)
        if not frame and not is_edge:
            if not re.match(WARNINGS, line):
                yield line
            continue
        frame.append(line)
        if is_edge and len(frame) > 1:
            if re.search(LAUNCHER_WORDS, " ".join(" ".join(frame).split())):
                banners += [text.rstrip("\n") for text in frame[1:-1]]
            else:
                yield from frame
            frame = []
    yield from frame


def _whole_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines without NULs; a frame's edge starts a new line, even after a partial line."""
    for line in lines:
        line = line.replace("\0", "")
        start = line.find(EDGE)
        if start > 0:
            yield line[:start] + "\n"
            line = line[start:]
        yield line
