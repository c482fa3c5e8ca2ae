"""The commands: one short function per command, and what several of them need."""

import json
import os
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.host import launchers


def started_ranks() -> launchers.Launch:
    """Return how this process was started, with what other ranks.

    Raises:
        UsageError: if the launcher's PMIx does not work with this MPI.
    """
    started = launchers.detect(os.environ)
    launchers.check_pmix(started, os.environ)
    return started


def in_one_process(command: str) -> None:
    """Refuse to run under a launcher."""
    if launchers.detect(os.environ).size != 1:
        raise UsageError(
            f"{command} runs in one process: start it without a launcher (--ranks sets the ranks "
            "of the plan)"
        )


def as_json(content: Any) -> str:
    """Return the content as JSON, for programs."""
    return json.dumps(content, indent=1)


def as_lines(content: dict[str, Any]) -> str:
    """Return the content as lines of `name: value`, for people."""
    return "\n".join(f"{name}: {value}" for name, value in content.items())
