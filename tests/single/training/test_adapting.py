"""An adaptive plan is tested with every batch size of the run before the migration."""

from pathlib import Path

from hvdtrain.backends.pytorch import setup
from hvdtrain.backends.pytorch.migration import TorchMigration
from hvdtrain.backends.pytorch.session import TorchSession
from hvdtrain.config import TrainConfig
from hvdtrain.models.costs import component_costs
from hvdtrain.plan.plan import Plan
from hvdtrain.planner.adapt import Decision
from hvdtrain.planner.candidate import play
from hvdtrain.planner.cost import Question
from hvdtrain.planner.solve import Solution
from hvdtrain.training.adapting import Adapter, Replan
from hvdtrain.world import World
from tests.pure.planner.machines import known, network

ALONE = World("none", 0, 1, 0, 1, 1)


def replan(session: TorchSession, microbatches: int) -> Replan:
    """Return a replan by which another number of micro-batches is better."""
    assert isinstance(session.migration, TorchMigration)
    costs = component_costs(session.migration.components, 16, classes=5)
    question = Question(known(costs, [1.0] * len(costs), [1.0], network(1)), 86, "adam")
    plan = Plan(session.plan.stages, microbatches)
    chosen = play(question, plan, "other")
    solution = Solution(chosen, (chosen,), 1.0)
    return Replan("rank 0 is slow", question, solution, 2.0, Decision(True, "it is shorter"))


def test_a_plan_that_cannot_take_the_tail_is_not_taken(small_set: Path) -> None:
    """The last batch has 85 of 601 images: 43 micro-batches leave one sample in the last."""
    model = "tests.single.training.models:normed"
    config = TrainConfig(model=model, data=str(small_set), batch_size=86, plan="single").check()
    session = setup.open_session(config, ALONE)
    before = session.plan
    assert session.migration is not None
    adapter = Adapter(session, session.migration, None, 0.0)
    adapter.pending = replan(session, 43)
    record = adapter.change()
    assert record is not None
    assert record["decision"] == "stay"
    assert (
        "component 'head' cannot take 1 sample at once, its part of a batch of 85, the"
        in (record["reason"])
    )
    assert session.plan == before
    assert not adapter.wants_change
    adapter.pending = replan(session, 42)
    record = adapter.change()
    assert record is not None
    assert record["decision"] == "change"
    assert session.plan.microbatches == 42
    session.close()
