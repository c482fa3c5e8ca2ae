"""A new plan of `--plan adaptive` is tried with every batch size of the run before it is used."""

from pathlib import Path

from hvdtrain.config import TrainConfig
from hvdtrain.models.costs import component_costs
from hvdtrain.parallel.plan import Plan
from hvdtrain.planner.adapt import Decision
from hvdtrain.planner.play import play
from hvdtrain.planner.solve import Solution
from hvdtrain.planner.tables import Question
from hvdtrain.training import setup
from hvdtrain.training.adapting import Adapter, Thought
from hvdtrain.training.pytorch import TorchSession
from hvdtrain.world import World
from tests.pure.planner.machines import known, network

ALONE = World("none", 0, 1, 0, 1, 1)


def thought(session: TorchSession, microbatches: int) -> Thought:
    """Return the thought that another number of micro-batches would be better."""
    costs = component_costs(session.components, 16, classes=5)
    question = Question(known(costs, [1.0] * len(costs), [1.0], network(1)), 86, "adam")
    plan = Plan(session.plan.stages, microbatches)
    chosen = play(question, plan, "other")
    solution = Solution(chosen, (chosen,), 1.0)
    return Thought("rank 0 is slow", question, solution, 2.0, Decision(True, "it is shorter"))


def test_a_plan_that_cannot_take_the_tail_is_not_taken(small_set: Path) -> None:
    """601 images: batches of 86, and one of 85, which 43 micro-batches cut down to one sample."""
    model = "tests.single.training.models:normed"
    config = TrainConfig(model=model, data=str(small_set), batch_size=86, plan="single").check()
    session = setup.open_session(config, ALONE)
    before = session.plan
    adapter = Adapter(session, None, 0.0)
    adapter.wanted = thought(session, 43)
    event = adapter.change()
    assert event is not None
    assert event["decision"] == "stay"
    assert (
        "component 'head' cannot take 1 sample at once, its part of a batch of 85, the"
        in (event["reason"])
    )
    assert session.plan == before
    assert not adapter.wishes
    adapter.wanted = thought(session, 42)
    event = adapter.change()
    assert event is not None
    assert event["decision"] == "change"
    assert session.plan.microbatches == 42
    session.close()
