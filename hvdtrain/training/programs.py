"""Programs of a rank for a batch under a plan, in training and in evaluation."""

from dataclasses import replace
from functools import lru_cache

from hvdtrain.parallel import schedule
from hvdtrain.parallel.cut import cut
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.program import Program, program

EVALUATION_IMAGES = 256  # per replica and forward pass


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


@lru_cache(maxsize=64)
def program_of(plan: Plan, batch_size: int, rank: int, is_training: bool) -> Program:
    """Return the actions of one rank for a batch of that size."""
    used = plan_for(plan, is_training)
    pieces = cut(used, batch_size)
    make = schedule.training_step if is_training else schedule.evaluation
    return program(used, pieces, make(used, pieces)[rank], rank)
