"""The policies of schedules: how many micro-batches may be in flight, and which action is next."""

from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.parallel.actions import Action
from hvdtrain.parallel.plan import Plan

Key = tuple[int, ...]
UNLIMITED = 10**9


@dataclass(frozen=True)
class Pipeline:
    """The stages of a plan on groups of ranks; a group is the set of ranks of a stage.

    Attributes:
        microbatches: per step.
        stages: the number of stages.
        groups: the number of different groups.
        group: the group of each stage, numbered in the order of the stages.
    """

    microbatches: int
    stages: int
    groups: int
    group: tuple[int, ...]

    def sharing(self, stage: int) -> list[int]:
        """Return all stages of a stage's group, including itself."""
        return [other for other in range(self.stages) if self.group[other] == self.group[stage]]


def as_pipeline(plan: Plan, microbatches: int) -> Pipeline:
    """Return the stages of a plan on groups of ranks."""
    held = [stage.ranks for stage in plan.stages]
    groups = list(dict.fromkeys(held))
    group = tuple(groups.index(ranks) for ranks in held)
    return Pipeline(microbatches, len(held), len(groups), group)


@dataclass(frozen=True)
class Policy:
    """The rules in which one schedule differs from another.

    Attributes:
        cap: the most micro-batches in flight (forward started, backward not ended) at a stage.
        priorities: kinds of actions, the most urgent first.
        order: sort key of the actions of one kind.
        is_grouped: whether the stages of a group of ranks share one cap and follow `order`
            strictly: a stage waits until it is its turn.
        splits: whether the backward is split where other ranks wait for its input gradients.
        unfinished: the most micro-batches whose weight gradients are not done, including those
            in flight.
        forwards_first: whether a rank does all its forwards before any backward.
    """

    cap: Callable[[Pipeline, int], int]
    priorities: str
    order: Callable[[Pipeline, Action], Key]
    is_grouped: bool = False
    splits: bool = False
    unfinished: Callable[[Pipeline], int] = lambda pipeline: UNLIMITED
    forwards_first: bool = False


def later_stage_first(pipeline: Pipeline, action: Action) -> Key:
    """Return the sort key that prefers later stages, then earlier micro-batches."""
    return -action.stage, action.microbatch or 0


def no_cap(pipeline: Pipeline, stage: int) -> int:
    """Return a cap that is never reached."""
    return UNLIMITED


def remaining_stages(pipeline: Pipeline, stage: int) -> int:
    """Return the cap of 1F1B: one micro-batch for this stage and for each later one."""
    return pipeline.stages - stage


def turns(pipeline: Pipeline) -> int:
    """Return the number of turns: sets of micro-batches that go through a group's stages in turn.

    Each turn has at least as many micro-batches as there are groups, if there are enough, so that
    it fills the pipeline. For whole multiples of the groups, the only numbers that Megatron
    accepts, the turns are the same as Megatron's.
    """
    return max(1, pipeline.microbatches // pipeline.groups)


def megatron_order(pipeline: Pipeline, action: Action) -> Key:
    """Return the sort key that runs all micro-batches of a turn on one stage, then on the next.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, 2.2.
    """
    microbatch = action.microbatch or 0
    stage = action.stage if action.kind == "F" else -action.stage
    return microbatch * turns(pipeline) // pipeline.microbatches, stage, microbatch


def megatron_cap(pipeline: Pipeline, stage: int) -> int:
    """Return the cap of interleaved 1F1B: the group's warm-up forwards and one more."""
    behind = pipeline.groups - pipeline.group[stage] - 1
    longest_turn = -(-pipeline.microbatches // turns(pipeline))
    return 2 * behind + (pipeline.stages // pipeline.groups - 1) * longest_turn + 1


ONE_F_ONE_B = Policy(remaining_stages, "BF", later_stage_first)
POLICIES = {
    "gpipe": Policy(no_cap, "BF", later_stage_first, forwards_first=True),
    "1f1b": ONE_F_ONE_B,
    "interleaved": Policy(megatron_cap, "FB", megatron_order, is_grouped=True),
    # Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, 2.3. Forwards come first: otherwise
    # the backwards of the first stages, which arrive twice as fast, would delay them.
    "zb-h1": Policy(
        *(remaining_stages, "FBIW", later_stage_first),
        splits=True,
        unfinished=lambda pipeline: pipeline.stages,
    ),
}
FORWARD_ONLY = Policy(no_cap, "F", later_stage_first)


def choose(plan: Plan, pipeline: Pipeline) -> Policy:
    """Return the policy of a plan's schedule; 1F1B's if the schedule does not fit the stages.

    With one group there is no bubble to fill, and interleaving needs stages that repeat the groups
    in the same order.
    """
    if plan.schedule != "gpipe" and pipeline.groups == 1:
        return ONE_F_ONE_B
    if plan.schedule == "interleaved" and not plan.repeats_groups():
        return ONE_F_ONE_B
    return POLICIES[plan.schedule]
