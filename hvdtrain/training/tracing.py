"""Chrome trace of what all ranks did in the first steps of a run, on rank 0's clock."""

from pathlib import Path

from hvdtrain.parallel.runtime import Runtime
from hvdtrain.plan import simulate
from hvdtrain.world import World


def write_trace(runtime: Runtime, world: World, path: str) -> None:
    """Gather the events of all ranks, write them on rank 0, and stop recording. Collective.

    Raises:
        UsageError: if the file cannot be written.
    """
    offset = runtime.exchange.offset_to_first_clock() if runtime.exchange else 0.0
    events = [
        event._replace(start=event.start + offset, end=event.end + offset)
        for event in runtime.events or []
    ]
    runtime.events = None
    everywhere = world.gather_on_first(events)
    if world.rank == 0:
        simulate.write_trace(Path(path), [event for rank in everywhere for event in rank])
