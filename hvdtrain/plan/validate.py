"""Prove that a schedule is a correct step of its plan, wherever it comes from.

A correct schedule is complete and in order, its message tags are unique and within the MPI
library's limit, and it has no deadlock, whether sends are buffered or block. An error shows the
place as a grid of ranks and actions.
"""

from collections.abc import Iterator, Set

from hvdtrain.plan import cut as cuts
from hvdtrain.plan.cut import RECEIPTS, SENDS, Action, Cut, Schedule, ScheduleError, peers, tag
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.schedule import training_step
from hvdtrain.plan.simulate import Deadlock, simulate, unit_costs

TAG_LIMIT = 32767  # the largest tag that every MPI library allows (MPI 4.1, 9.1.2)
WINDOW = 4  # actions that a grid shows on each side of a mark

# (earlier kind, later kind) for actions of the same stage and micro-batch,
ORDER = (
    ("LOAD", "F"),
    ("RECV_F", "F"),
    ("F", "SEND_F"),
    ("F", "B"),
    ("F", "I"),
    ("I", "W"),
    ("RECV_B", "B"),
    ("RECV_B", "I"),
    ("B", "SEND_B"),
    ("I", "SEND_B"),
)
# and for actions of the same stage.
ORDER_OF_STAGE = (
    ("B", "REDUCE"),
    ("W", "REDUCE"),
    ("REDUCE", "STEP"),
    ("SEND_F", "STEP"),
    ("SEND_B", "STEP"),
)

Place = tuple[int, int]  # rank, index in its list


def prove(plan: Plan, batch_size: int, is_synchronised: bool) -> None:
    """Prove that the plan's own schedule is a correct training step.

    Args:
        is_synchronised: whether batch norms of replicas wait for each other.

    Raises:
        ScheduleError: as `validate`.
    """
    pieces = cuts.cut(plan, batch_size)
    together = plan.replicated_stages if is_synchronised else frozenset()
    validate(training_step(plan, pieces), plan, pieces, synchronised=together)


def validate(
    schedule: Schedule,
    plan: Plan,
    cut: Cut,
    *,
    synchronised: Set[int] = frozenset(),
    tag_limit: int = TAG_LIMIT,
) -> None:
    """Check a training step.

    Args:
        synchronised: stages whose replicas start each forward and backward together; the schedule
            must have no deadlock with and without that.
        tag_limit: the largest message tag that the MPI library allows.

    Raises:
        ScheduleError: the first line is the error; a grid that shows the place follows.
    """
    if odd := sorted(set(schedule) ^ set(plan.ranks)):
        raise ScheduleError(
            f"the schedule is for ranks {sorted(schedule)}, the plan for {list(plan.ranks)}: "
            f"rank {odd[0]} is in one of them only\n{grid(schedule)}"
        )
    for rank in plan.ranks:
        _check_tags(schedule, cut, rank, tag_limit)
    for rank in plan.ranks:
        _check_complete(schedule, plan, cut, rank)
    for rank in plan.ranks:
        _check_order(schedule, rank)
    _check_deadlocks(schedule, plan, cut, synchronised)


def grid(schedule: Schedule, mark: Place | None = None) -> str:
    """Return the schedule as a table: a row per rank, a column per action.

    Args:
        mark: gets an arrow; only the columns around it are shown.
    """
    longest = max(map(len, schedule.values()), default=0)
    first, last = 0, longest
    if mark:
        first, last = max(0, mark[1] - WINDOW), min(longest, mark[1] + WINDOW + 1)
    rows = [["step", *map(str, range(first, last))]]
    for rank in sorted(schedule):
        cells = [str(action) for action in schedule[rank][first:last]]
        if mark and mark[0] == rank and cells:
            cells[mark[1] - first] = f"-> {cells[mark[1] - first]}"
        rows.append([f"rank {rank}", *cells, *[""] * (last - first - len(cells))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _fail(message: str, schedule: Schedule, rank: int, index: int) -> ScheduleError:
    return ScheduleError(f"{message}\n{grid(schedule, (rank, index))}")


def _check_tags(schedule: Schedule, cut: Cut, rank: int, limit: int) -> None:
    """Check that all messages between this rank and a peer have different tags."""
    seen: dict[tuple[int, bool, int], Action] = {}
    for index, action in enumerate(schedule[rank]):
        stage, kind, k = action
        if kind not in (*SENDS, *RECEIPTS) or k is None:
            continue
        number = tag(stage, kind, k, cut.microbatches)
        for peer in peers(cut, rank, action):
            if number > limit:
                # A user can cause this by a large plan: one line, as a grid would not help.
                raise ScheduleError(
                    f"rank {rank}: the tag {number} of {action} is above the MPI library's limit "
                    f"of {limit}: use fewer micro-batches or stages"
                )
            key = peer, kind in SENDS, number
            if key in seen:
                raise _fail(
                    f"rank {rank}: {action} uses the tag {number} of {seen[key]} with rank "
                    f"{peer} again",
                    schedule,
                    rank,
                    index,
                )
            seen[key] = action


def _expected(plan: Plan, cut: Cut, rank: int) -> Iterator[Action]:
    """Yield all actions that a rank must have except backwards, which may be whole or split."""
    for stage in plan.stages_of(rank):
        for k in range(cut.microbatches):
            if stage in (0, plan.last):
                yield Action(stage, "LOAD", k)
            yield Action(stage, "F", k)
            for kind in (*SENDS, *RECEIPTS):
                if peers(cut, rank, Action(stage, kind, k)):
                    yield Action(stage, kind, k)
        yield Action(stage, "REDUCE")
        yield Action(stage, "STEP")


def _check_complete(schedule: Schedule, plan: Plan, cut: Cut, rank: int) -> None:
    """Check that a rank has every required action once, and no other."""
    actions, held = schedule[rank], plan.stages_of(rank)
    due = set(_expected(plan, cut, rank))
    seen: set[Action] = set()
    for index, action in enumerate(actions):
        fault = f"does {action} twice" if action in seen else ""
        if action.stage not in held:
            fault = f"does {action}, but does not hold stage {action.stage}"
        elif (action.microbatch or 0) >= cut.microbatches:
            fault = f"does {action}, but the micro-batches are 0 to {cut.microbatches - 1}"
        elif action.kind in ("B", "I", "W"):
            fault = fault or _backward_fault(action, seen)
        elif action not in due:
            fault = f"does {action}, but there is nothing to {action.kind.split('_')[0].lower()}"
        if fault:
            raise _fail(f"rank {rank} {fault}", schedule, rank, index)
        seen.add(action)
    for forward in [action for action in due if action.kind == "F"]:
        halves = {forward._replace(kind="I"), forward._replace(kind="W")}
        due |= halves if seen & halves else {forward._replace(kind="B")}
    if missing := sorted(due - seen, key=lambda a: (a.stage, a.microbatch or 0, a.kind)):
        raise _fail(f"rank {rank} lacks {missing[0]}", schedule, rank, _place(actions, missing[0]))


def _backward_fault(action: Action, seen: Set[Action]) -> str:
    """Return the fault of a backward, or of half a backward, after `seen`; "" if it has none."""
    if action.stage == 0 and action.kind != "B":
        return f"does {action}, but stage 0 runs whole backwards"
    others = "IW" if action.kind == "B" else "B"
    besides = [other for kind in others if (other := action._replace(kind=kind)) in seen]
    if not besides:
        return ""
    return f"does {action} in addition to {besides[0]}, but a backward is either whole or split"


def _place(actions: list[Action], missing: Action) -> int:
    """Return the index at which an action is missing."""
    for index, action in enumerate(actions):
        pairs = (missing.kind, action.kind), (action.kind, missing.kind)
        if action[::2] == missing[::2] and (pairs[0] in ORDER or pairs[1] in ORDER):
            return index
    of_stage = [index for index, action in enumerate(actions) if action.stage == missing.stage]
    return (of_stage or [len(actions) - 1])[-1]


def _check_order(schedule: Schedule, rank: int) -> None:
    """Check ORDER and ORDER_OF_STAGE for all actions of a rank."""
    places = {action: index for index, action in enumerate(schedule[rank])}
    for action, index in places.items():
        later = [action._replace(kind=after) for kind, after in ORDER if kind == action.kind]
        later += [
            Action(action.stage, after) for kind, after in ORDER_OF_STAGE if kind == action.kind
        ]
        for after in later:
            if (place := places.get(after, index)) < index:
                raise _fail(f"rank {rank} does {after} before {action}", schedule, rank, place)


def _check_deadlocks(schedule: Schedule, plan: Plan, cut: Cut, synchronised: Set[int]) -> None:
    """Check for deadlocks: with eager and blocking sends, local and synchronised batch norm."""
    for together in (frozenset[int](), synchronised) if synchronised else (frozenset[int](),):
        for rendezvous in (False, True):
            try:
                simulate(
                    schedule,
                    plan,
                    cut,
                    unit_costs(),
                    rendezvous=rendezvous,
                    synchronised=together,
                )
            except Deadlock as error:
                rank, (action, _) = next(iter(error.stuck.items()))
                sends = "rendezvous" if rendezvous else "eager"
                also = " and synchronised batch norm" if together else ""
                message = f"{error}, under {sends} sends{also}"
                index = schedule[rank].index(action)
                raise _fail(message, schedule, rank, index) from None
