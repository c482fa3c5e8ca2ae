"""What several commands do: print their results, and refuse a launcher."""

import json
import os
from typing import Any

from hvdtrain import launchers
from hvdtrain.errors import UsageError


def in_one_process(command: str) -> None:
    """Refuse to run under a launcher."""
    if launchers.detect(os.environ).size != 1:
        raise UsageError(
            f"{command} runs in one process: leave the launcher out; --ranks is the plan's"
        )


def as_json(content: Any) -> str:
    """For programs."""
    return json.dumps(content, indent=1)


def as_lines(content: dict[str, Any]) -> str:
    """For people."""
    return "\n".join(f"{name}: {value}" for name, value in content.items())
