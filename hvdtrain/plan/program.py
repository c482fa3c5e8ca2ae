"""Programs: the actions of one rank with their rows, peers and message tags."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from hvdtrain.plan import schedule
from hvdtrain.plan.cut import (
    RECEIPTS,
    SENDS,
    Action,
    Cut,
    Range,
    Share,
    boundary,
    cut,
    is_upstream,
    last_backward,
    offsets,
    receipt_for,
    tag,
)
from hvdtrain.plan.plan import Plan

VERBOSE = {
    "LOAD": "loading",
    "F": "forward",
    "B": "backward",
    "I": "backward of the input",
    "W": "backward of the weights",
    "SEND_F": "sending activations",
    "RECV_F": "receiving activations",
    "SEND_B": "sending gradients",
    "RECV_B": "receiving gradients",
    "REDUCE": "starting the reduction",
    "STEP": "waiting for the reduction, and updating",
}
EVALUATION_IMAGES = 256  # per replica and forward pass

Key = tuple[int, int]  # (stage, micro-batch)


class Lane(NamedTuple):
    """Rows that this rank and `peer` have in common at a boundary.

    Attributes:
        local: the rows, relative to this rank's range of the micro-batch.
        remote: the same rows, relative to the peer's range.
    """

    peer: int
    local: Range
    remote: Range


class Task(NamedTuple):
    """An action with everything that a rank needs to run it.

    Attributes:
        line: the action in words.
        key: of its tensors.
        samples: this rank's samples of the micro-batch in the stage, as a range of the batch.
        lanes: the sources of the rows of a RECV, F, B or I; the receivers of a SEND.
        tag: of the messages.
    """

    action: Action
    line: str
    key: Key
    samples: Range
    lanes: tuple[Lane, ...]
    tag: int

    @property
    def rows(self) -> int:
        """The number of samples."""
        return self.samples[1] - self.samples[0]


@dataclass(frozen=True)
class Program:
    """The actions of one rank for batches of one size.

    Attributes:
        cut: of the batch.
        tasks: in order.
        completing: the last backward of each stage; sums start during it if it is a B, and after
            it if it is a W.
        shares: this rank's share of the batch, by stage.
        images: the range of each micro-batch in this rank's images.
        labels: the range of each micro-batch in this rank's labels.
        output_uses: how many actions of this rank use a stage's output, by (stage, micro-batch).
        gradient_uses: how many use the gradient of a stage's input.
    """

    cut: Cut
    tasks: tuple[Task, ...]
    completing: frozenset[Action]
    shares: dict[int, Share]
    images: tuple[Range, ...]
    labels: tuple[Range, ...]
    output_uses: Counter[Key]
    gradient_uses: Counter[Key]


@lru_cache(maxsize=64)
def program_of(plan: Plan, batch_size: int, rank: int, is_training: bool) -> Program:
    """Return the actions of one rank for a batch of that size."""
    used = plan_for(plan, is_training)
    pieces = cut(used, batch_size)
    make = schedule.training_step if is_training else schedule.evaluation
    return program(used, pieces, make(used, pieces).get(rank, []), rank)


def program(plan: Plan, cut: Cut, actions: Sequence[Action], rank: int) -> Program:
    """Return the program of a rank's list of actions."""
    held = plan.stages_of(rank)
    tasks = tuple(_task(plan, cut, action, rank) for action in actions)
    ends = {last_backward(actions, stage) for stage in held}
    output_uses, gradient_uses = Counter[Key](), Counter[Key]()
    for task in tasks:
        (stage, k), kind = task.key, task.action.kind
        has_local_lane = any(lane.peer == rank for lane in task.lanes)
        output_uses[task.key] += kind in ("B", "I", "SEND_F")
        gradient_uses[task.key] += kind == "SEND_B"
        if has_local_lane and kind == "F":
            output_uses[stage - 1, k] += 1
        if has_local_lane and kind in ("B", "I"):
            gradient_uses[stage + 1, k] += 1
    return Program(
        cut,
        tasks,
        completing=frozenset(action for action in ends if action is not None),
        shares={stage: cut.share(stage, rank) for stage in held},
        images=tuple(offsets(cut.parts[0].get(rank, ()))),
        labels=tuple(offsets(cut.parts[plan.last].get(rank, ()))),
        output_uses=output_uses,
        gradient_uses=gradient_uses,
    )


@lru_cache(maxsize=8)
def plan_for(plan: Plan, is_training: bool) -> Plan:
    """Return the plan with the micro-batches of training or evaluation.

    In evaluation a pipeline has enough micro-batches to keep its stages busy, other plans one.
    """
    stages = len(plan.stages)
    return plan if is_training else replace(plan, microbatches=2 * stages if stages > 1 else 1)


def evaluation_images(plan: Plan, batch_size: int | None = None) -> int:
    """Return the images of an evaluation step, over all ranks.

    Args:
        batch_size: the training batch size, to limit a replica to the images of a training
            micro-batch.
    """
    replicas, images = max(len(stage.ranks) for stage in plan.stages), EVALUATION_IMAGES
    if batch_size is not None:
        images = max(1, min(images, batch_size // (plan.microbatches * replicas)))
    return images * replicas * plan_for(plan, is_training=False).microbatches


def _task(plan: Plan, cut: Cut, action: Action, rank: int) -> Task:
    stage, kind, k = action
    if k is None:
        return Task(
            action, _line(plan, action, rank, ()), (stage, -1), samples=(0, 0), lanes=(), tag=0
        )
    is_exchange = kind in (*SENDS, *RECEIPTS)
    exchange = action if is_exchange else receipt_for(action, plan.last)
    lanes = _lanes(cut, rank, exchange) if exchange else ()
    if is_exchange:
        lanes = tuple(lane for lane in lanes if lane.peer != rank)
    return Task(
        action,
        line=_line(plan, action, rank, lanes),
        key=(stage, k),
        samples=cut.parts[stage][rank][k],
        lanes=lanes,
        tag=tag(stage, kind, k, cut.microbatches) if is_exchange else 0,
    )


def _lanes(cut: Cut, rank: int, exchange: Action) -> tuple[Lane, ...]:
    """Return the lanes of a rank at the boundary that a SEND or RECV crosses."""
    assert exchange.microbatch is not None
    pieces = cut.pieces[boundary(exchange.stage, exchange.kind), exchange.microbatch]
    if is_upstream(exchange):
        return tuple(Lane(p.receiver, p.sent, p.received) for p in pieces if p.sender == rank)
    return tuple(Lane(p.sender, p.received, p.sent) for p in pieces if p.receiver == rank)


def _line(plan: Plan, action: Action, rank: int, lanes: tuple[Lane, ...]) -> str:
    """Return an action in words, for messages about a rank that fails or hangs in it."""
    where = f"stage {action.stage}"
    if action.microbatch is not None:
        where += f", micro-batch {action.microbatch}"
    peers = sorted({lane.peer for lane in lanes} - {rank})
    if action.kind in ("REDUCE", "STEP"):
        peers = [other for other in plan.stages[action.stage].ranks if other != rank]
    with_peers = f", with rank {' and '.join(map(str, peers))}" if peers else ""
    return f"{action}: {VERBOSE[action.kind]} ({where}{with_peers})"
