"""The protocol between probes and doctor: marked lines of JSON on standard output."""

import json
from typing import Any

MARK = "hvdtrain-doctor-fact "
# Sizes in bytes of the buffers whose all-reduce is watched.
WATCHED_SIZES = (2**13, 2**20, 2**24)


def say(**facts: Any) -> None:
    """Print facts for doctor."""
    print(f"{MARK}{json.dumps(facts)}", flush=True)


def read_facts(output: str) -> dict[str, Any]:
    """Return the facts in a probe's output, and ignore the output of libraries."""
    facts: dict[str, Any] = {}
    for line in output.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            facts |= json.loads(text)
    return facts
