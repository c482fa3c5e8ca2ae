"""Faults of a rank at a moment of its run that a test names.

The model of a user is built before the run folder is claimed, and calls `watch_rank`. From then on
each file that is opened, renamed or removed is a line such as `os.rename SOURCE TARGET`, and so
are the model's reports. At the first lines that match $MOMENT the rank does $DEED, and makes
the file $MOMENT_NOTE.
"""

import errno
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")


class Moments:
    """Does its deed at the first `times` moments that match, in one rank.

    Attributes:
        deed: the name of a signal that the rank sends itself, or of an error that the system
            returns.
    """

    def __init__(self, moment: str, deed: str, times: int) -> None:
        self.moment, self.deed, self.left = re.compile(moment), deed, times

    def watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Act as an audit hook."""
        if event in EVENTS:
            self.pass_by(" ".join(map(str, (event, *arguments[:2]))))

    def pass_by(self, line: str) -> None:
        """Do the deed if this is the moment."""
        if not self.left or not self.moment.search(line):
            return
        self.left -= 1
        Path(os.environ["MOMENT_NOTE"]).touch()
        if hasattr(signal, self.deed):
            os.kill(os.getpid(), getattr(signal, self.deed))
        else:
            number = getattr(errno, self.deed)
            raise OSError(number, os.strerror(number))


def watch_rank() -> Moments:
    """Start to watch this rank's moments, if a deed is planned for it."""
    is_chosen = os.environ.get("OMPI_COMM_WORLD_RANK", "0") == os.environ.get("MOMENT_RANK", "0")
    times = int(os.environ.get("MOMENT_TIMES", "1")) if is_chosen and "MOMENT" in os.environ else 0
    moments = Moments(os.environ.get("MOMENT", ""), os.environ.get("DEED", ""), times)
    sys.addaudithook(moments.watch)
    moments.pass_by("build")
    return moments
