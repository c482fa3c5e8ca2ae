"""What all ranks did in the first steps of a run, as one Chrome trace on rank 0's clock."""

from pathlib import Path

from hvdtrain.parallel import trace
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.world import World


def write_trace(runtime: Runtime, here: World, path: str) -> None:
    """Gather the events of all ranks, write them on rank 0, and keep no more. Collective.

    Raises:
        UsageError: if the file cannot be written.
    """
    offset = runtime.exchange.to_first_clock() if runtime.exchange else 0.0
    mine = [
        event._replace(start=event.start + offset, end=event.end + offset)
        for event in runtime.events or []
    ]
    runtime.events = None
    found = here.gather_on_first(mine)
    if here.rank == 0:
        trace.write_trace(Path(path), [event for rank in found for event in rank])
