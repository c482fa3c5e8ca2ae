"""How a probe hands facts to doctor: marked lines of JSON on its standard output."""

import json
from typing import Any

MARK = "hvdtrain-doctor-fact "
# Bytes of the buffers whose all-reduce is watched.
WATCHED_SIZES = (2**13, 2**20, 2**24)


def say(**facts: Any) -> None:
    """Print facts for the doctor."""
    print(f"{MARK}{json.dumps(facts)}", flush=True)


def read_facts(output: str) -> dict[str, Any]:
    """Gather the facts from all that a probe printed; the rest is others' talk."""
    facts: dict[str, Any] = {}
    for line in output.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            facts |= json.loads(text)
    return facts
