"""Something happens to a rank at a moment of its run that a test names.

The model of a user is built before the run folder is taken; `here` is called there. From then on
each file that is opened, renamed or removed is a line such as `os.rename SOURCE TARGET`, and so is
what the model tells. At the first ones that match $MOMENT the rank does what $DEED says, and makes
the file $MOMENT_NOTE.
"""

import errno
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")  # a mode says nothing of bytes or text


class Moments:
    """Does its deed at the first `times` moments that match, in one rank.

    Attributes:
        deed: the name of a signal, which the rank sends itself; or of an error, which the system
            then gives it.
    """

    def __init__(self, moment: str, deed: str, times: int) -> None:
        self.moment, self.deed, self.left = re.compile(moment), deed, times

    def watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook."""
        if event in EVENTS:
            self.pass_by(" ".join(map(str, (event, *arguments[:2]))))

    def pass_by(self, line: str) -> None:
        """Do it if this is the moment."""
        if not self.left or not self.moment.search(line):
            return
        self.left -= 1
        Path(os.environ["MOMENT_NOTE"]).touch()
        if hasattr(signal, self.deed):
            os.kill(os.getpid(), getattr(signal, self.deed))
        else:
            number = getattr(errno, self.deed)
            raise OSError(number, os.strerror(number))


def here() -> Moments:
    """What is to happen to this rank, if anything; from now on."""
    is_here = os.environ.get("OMPI_COMM_WORLD_RANK", "0") == os.environ.get("MOMENT_RANK", "0")
    times = int(os.environ.get("MOMENT_TIMES", "1")) if is_here and "MOMENT" in os.environ else 0
    moments = Moments(os.environ.get("MOMENT", ""), os.environ.get("DEED", ""), times)
    sys.addaudithook(moments.watch)
    moments.pass_by("build")
    return moments
