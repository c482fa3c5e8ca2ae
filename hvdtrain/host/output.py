"""Standard output and standard error, whose loss never ends a run, and rich's console on them.

And the remarks of libraries and of mpirun, which are removed from them.
"""

import codecs
import errno
import io
import os
import re
import select
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from hvdtrain.errors import HvdtrainError

if TYPE_CHECKING:
    from rich.console import Console

PIECE_BYTES = 2**16
CLOSED_PIPE_EXIT = 141  # as shells report a program that SIGPIPE has ended

# Whether the output is all that the command makes. Then its loss ends the command.
is_the_product = True


class _Stream(io.FileIO):
    """A descriptor that drops what it cannot write, after one remark."""

    is_lost = False

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # another program made it non-blocking
                select.select((), (self,), ())
            return written
        except OSError as error:
            if not self.is_lost:
                self.is_lost = True
                self._report(error)
            return len(data)

    def _report(self, error: OSError) -> None:
        if self.fileno() != 1:
            return
        reason = f"standard output cannot be written ({error.strerror})"
        if is_the_product and threading.current_thread() is threading.main_thread():
            if error.errno == errno.EPIPE:
                raise SystemExit(CLOSED_PIPE_EXIT)
            raise HvdtrainError(f"{reason}: redirect it elsewhere")
        with suppress(OSError):
            print(f"hvdtrain: {reason}: continuing without it", file=sys.stderr, flush=True)


def guard() -> None:
    """Make this process's output streams drop what cannot be written, in any encoding.

    A descriptor that the caller closed is taken, since a file of the run would get its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)  # writes still fail
        before = getattr(sys, name)
        if number == 0 or before is not getattr(sys, f"__{name}__"):
            continue  # a test or a notebook has replaced it
        encoding = before.encoding if before else None
        stream = io.TextIOWrapper(
            io.BufferedWriter(_Stream(number, "w", closefd=False)),
            encoding,
            "backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def forward(source: IO[str] | None) -> None:
    """Write to standard output, at once, what a process writes to a pipe.

    It reads to the end also where nothing can be written: a full pipe would block the process.
    """
    assert source is not None
    decoder = codecs.getincrementaldecoder(sys.stdout.encoding or "utf-8")("replace")
    while piece := os.read(source.fileno(), PIECE_BYTES):
        with suppress(OSError, ValueError):  # without `guard`, in a user's program
            sys.stdout.write(decoder.decode(piece))
            sys.stdout.flush()


def console(**settings: Any) -> "Console":
    """Return a console that prints names as they are: to rich, `x[/b]` and `:b:` are markup."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **settings)


# Lines that TensorFlow writes to standard error whatever its log level is.
TENSORFLOW_REMARKS = ("oneDNN custom operations are on", "absl::InitializeLog()")
PROFILER_REMARKS = ("SyncActivityProfilerHandler.cpp",)  # and PyTorch's profiler


@contextmanager
def without(remarks: Sequence[str]) -> Iterator[None]:
    """Drop the lines that contain one of `remarks` and are written to descriptor 2 in the block.

    All other lines are written when the block ends, also after an exception.
    """
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            held.seek(0)
            for line in held:
                if not any(remark.encode() in line for remark in remarks):
                    os.write(2, line)


# mpirun frames its own remarks with these lines.
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
