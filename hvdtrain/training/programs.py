"""What a rank does for a batch under a plan: in training, and in evaluation."""

from dataclasses import replace
from functools import lru_cache

from hvdtrain.parallel import schedule
from hvdtrain.parallel.cut import cut
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.program import Program, program

EVALUATION_IMAGES = 256  # a replica and a forward pass


@lru_cache(maxsize=8)
def plan_for(plan: Plan, is_training: bool) -> Plan:
    """A pipeline evaluates in as many micro-batches as keep its stages busy, others in one."""
    stages = len(plan.stages)
    return plan if is_training else replace(plan, microbatches=2 * stages if stages > 1 else 1)


def evaluation_images(plan: Plan, batch_size: int | None = None) -> int:
    """Images of an evaluation step, over all ranks.

    Args:
        batch_size: of training, if a replica shall work on no more of them at once than there.
    """
    replicas, images = max(len(stage.ranks) for stage in plan.stages), EVALUATION_IMAGES
    if batch_size is not None:
        images = max(1, min(images, batch_size // (plan.microbatches * replicas)))
    return images * replicas * plan_for(plan, is_training=False).microbatches


@lru_cache(maxsize=64)
def program_of(plan: Plan, batch_size: int, rank: int, is_training: bool) -> Program:
    """The actions of one rank for a batch of that size."""
    used = plan_for(plan, is_training)
    pieces = cut(used, batch_size)
    make = schedule.training_step if is_training else schedule.evaluation
    return program(used, pieces, make(used, pieces)[rank], rank)
