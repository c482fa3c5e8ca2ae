"""What tells one schedule from another: how much may be in flight, and what comes first."""

from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.parallel.actions import Action
from hvdtrain.parallel.plan import Plan

Key = tuple[int, ...]
UNLIMITED = 10**9


@dataclass(frozen=True)
class Pipeline:
    """A step as the policies see it: stages on groups of ranks; a group is all ranks of a stage.

    Attributes:
        group: of each stage; they count in the order of the stages.
    """

    microbatches: int
    stages: int
    groups: int
    group: tuple[int, ...]

    def sharing(self, stage: int) -> list[int]:
        """The stages of a stage's group, itself included."""
        return [other for other in range(self.stages) if self.group[other] == self.group[stage]]


def as_pipeline(plan: Plan, microbatches: int) -> Pipeline:
    """How the stages of a plan lie on groups of ranks."""
    held = [stage.ranks for stage in plan.stages]
    groups = list(dict.fromkeys(held))
    group = tuple(groups.index(ranks) for ranks in held)
    return Pipeline(microbatches, len(held), len(groups), group)


@dataclass(frozen=True)
class Policy:
    """What a schedule prefers; all of it that is not common to all schedules.

    Attributes:
        cap: micro-batches that may be in flight (forward begun, backward not ended) at a stage.
        priorities: kinds of actions, the most urgent first.
        order: of actions of one kind: the smaller the sooner.
        is_grouped: whether the stages of a group of ranks share one cap, and wait for the one of
            them whose turn it is in the order.
        splits: whether the backward is split, where its input gradients are waited for at all.
        unfinished: micro-batches that may be waiting for weight gradients, those in flight
            included.
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
    """What leaves the pipeline soonest, then the lower micro-batch."""
    return -action.stage, action.microbatch or 0


def no_cap(pipeline: Pipeline, stage: int) -> int:
    """All micro-batches may be in flight."""
    return UNLIMITED


def remaining_stages(pipeline: Pipeline, stage: int) -> int:
    """What keeps each later stage busy until the first backward comes back (1F1B)."""
    return pipeline.stages - stage


def turns(pipeline: Pipeline) -> int:
    """Parts of the step in which micro-batches go through all stages of a group in turn.

    None is too short to fill the pipeline, if there are enough. Megatron, which takes only whole
    multiples of the groups, has the same ones.
    """
    return max(1, pipeline.microbatches // pipeline.groups)


def megatron_order(pipeline: Pipeline, action: Action) -> Key:
    """All micro-batches of a turn through one stage of a group, then through its next.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, 2.2.
    """
    microbatch = action.microbatch or 0
    stage = action.stage if action.kind == "F" else -action.stage
    return microbatch * turns(pipeline) // pipeline.microbatches, stage, microbatch


def megatron_cap(pipeline: Pipeline, stage: int) -> int:
    """Forwards of a group's warm-up, and the one that the first backward follows."""
    behind = pipeline.groups - pipeline.group[stage] - 1
    longest_turn = -(-pipeline.microbatches // turns(pipeline))
    return 2 * behind + (pipeline.stages // pipeline.groups - 1) * longest_turn + 1


ONE_F_ONE_B = Policy(remaining_stages, "BF", later_stage_first)
POLICIES = {
    "gpipe": Policy(no_cap, "BF", later_stage_first, forwards_first=True),
    "1f1b": ONE_F_ONE_B,
    "interleaved": Policy(megatron_cap, "FB", megatron_order, is_grouped=True),
    # Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, 2.3. Were backwards to go first,
    # those of the first stages, which come at twice the pace, would hold up the forwards.
    "zb-h1": Policy(
        *(remaining_stages, "FBIW", later_stage_first),
        splits=True,
        unfinished=lambda pipeline: pipeline.stages,
    ),
}
FORWARD_ONLY = Policy(no_cap, "F", later_stage_first)


def choose(plan: Plan, pipeline: Pipeline) -> Policy:
    """The policy of a plan's schedule; 1F1B's where the stages do not lie as it needs them.

    One group has no wait to fill, and interleaving is for stages that go round their groups.
    """
    if plan.schedule != "gpipe" and pipeline.groups == 1:
        return ONE_F_ONE_B
    if plan.schedule == "interleaved" and not plan.goes_round():
        return ONE_F_ONE_B
    return POLICIES[plan.schedule]
