"""Compares the peak memory of the ranks with the limit of --plan during a run.

All ranks compare the same numbers: those of the control vector. A run that needs a little more
than its limit is reported and continues. It ends, with its state saved, if it exceeds the limit by
more than the reserve of the planner: then its prediction was wrong.
"""

from collections.abc import Sequence

from hvdtrain.planner.memory import GIB, RESERVE
from hvdtrain.training.run import Run


def check_memory(run: Run, peaks: Sequence[float]) -> bool:
    """Report the rank with the highest peak memory once, if that exceeds the limit of --plan.

    Args:
        peaks: bytes by rank.

    Returns:
        Whether the run has to end: the same on all ranks.
    """
    limit = run.session.config.memory_gib
    if limit is None or max(peaks) <= limit * GIB:
        return False
    if not run.reported_memory:
        run.reported_memory = True
        run.journal.report(run.progress.step, "memory limit", excess(run, peaks))
    return max(peaks) > (1 + RESERVE) * limit * GIB


def agreed_excess(run: Run) -> str:
    """Return by how much the run exceeds the limit of --plan, in words of rank 0. Collective."""
    world = run.session.world
    peaks = world.gather(run.session.device.peak_memory_bytes())
    message: str = world.broadcast(excess(run, peaks) if world.rank == 0 else "")
    return message


def excess(run: Run, peaks: Sequence[float]) -> str:
    """Return which rank exceeds the limit, by how much, and what to do about it."""
    limit, used = run.session.config.memory_gib or 0.0, max(peaks)
    more = used / (limit * GIB) - 1
    return (
        f"rank {list(peaks).index(used)} used {used / GIB:.3f} GiB, {more:.1%} more than "
        f"--plan {run.session.config.plan} allows: {_advice(run, used)}"
    )


def _advice(run: Run, used: float) -> str:
    """Return the options with which the plan would keep the limit; on rank 0, which knows."""
    from hvdtrain.planner.candidate import play  # loads the planner, unneeded by other runs
    from hvdtrain.planner.solve import ways_out

    session, ways = run.session, list[str]()
    question = session.migration.question if session.migration else None
    if question is not None and session.config.memory_gib is not None:
        predicted = max(play(question, session.plan, "").rank_bytes)
        # The prediction of another plan is as far from what it needs as that of this one.
        allowed = session.config.memory_gib * GIB * min(1.0, predicted / used)
        ways = ways_out(question, session.plan, (allowed,) * question.ranks)
    old = ", or remove the file of --profile if it is old" if session.config.profile else ""
    return ", ".join(ways) or f"raise the limit of --plan or use a smaller --batch-size{old}"
