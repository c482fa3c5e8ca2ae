"""An adaptive plan is tested with every batch size of the run before the migration."""

import os
from pathlib import Path

import pytest

from hvdtrain.backends.pytorch import setup
from hvdtrain.backends.pytorch.session import TorchMigration, TorchSession
from hvdtrain.check.plan import CHECKS
from hvdtrain.config import TrainConfig
from hvdtrain.engine.session import Device
from hvdtrain.models.costs import component_costs
from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.planner.adapt import Decision, Drift
from hvdtrain.planner.candidate import WORK, play
from hvdtrain.planner.cost import Question
from hvdtrain.planner.solve import Solution
from hvdtrain.training.adapting import Adapter, Replan, decision_record
from hvdtrain.world import World
from tests.conftest import ROOT, Program
from tests.pure.planner.machines import known, network
from tests.single.training.jobs import assert_adaptive

ALONE = World("none", 0, 1, 0, 1, 1)


def test_an_adaptive_run_on_a_device_that_is_late(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    """Without waiting for the device before times are read, such a run fails."""
    run, paths = tmp_path / "run", f"{ROOT / 'tests' / 'late_start'}{os.pathsep}{ROOT}"
    done = hvdtrain(
        *("train", "--model", "cnn", "--data", small_set, "--run", run, "--batch-size", 16),
        *("--ranks", 2, "--plan", "adaptive", "--inject", "replan step=80", "--epochs", 3),
        *("--schedule", "1f1b", "--reduce-with", "mpi", "--verify"),
        cold=True,
        PYTHONPATH=paths,
    )
    assert done.returncode == 0, done.stderr
    assert_adaptive(run)


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
    session = setup.open_session(config, ALONE, CHECKS)
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


@pytest.mark.parametrize("is_uniform", [True, False])
def test_a_uniform_drift_changes_the_profile_and_not_the_plan(
    small_set: Path, is_uniform: bool
) -> None:
    """The same measurements replan if they are not those of a uniform drift."""
    config = TrainConfig(model="cnn", data=str(small_set), batch_size=32, plan="single").check()
    session = setup.open_session(config, ALONE, CHECKS)
    assert isinstance(session.migration, TorchMigration)
    costs = component_costs(session.migration.components, 16, classes=5)
    names = [cost.name for cost in costs]
    slow = known(costs, [1e-3] * len(costs), [1.0, 1.0], network(2, 0.0, 1e-9, 1e-6))
    question = Question(slow, 32, "sgd")
    session.state.plan = replicated(names, 2, 1, None)  # of a run on two ranks
    before = play(question, session.plan, "")
    slower = tuple(1.5 * seconds for seconds in before.spent_on(WORK))
    drift = Drift("all ranks", slower, 1.5 * before.seconds, is_uniform=is_uniform)
    session.device = Device(dilation=4.0)
    adapter = Adapter(session, session.migration, question, 0.0, steps_left=10**6)
    replanned = adapter._decide(drift, question)
    assert replanned.decision.change != is_uniform
    record = decision_record(replanned, session.device)
    assert {line["seconds"] for line in record["candidates"]} == {
        candidate.seconds / 4 for candidate in replanned.solution.candidates
    }
    kept_or_before = record["predicted_seconds" if is_uniform else "before_seconds"]
    assert kept_or_before == replanned.current_seconds / 4
    assert is_uniform or f"instead of {1e3 * kept_or_before:.1f} saves" in record["reason"]
    assert record["decision"] == ("stay" if is_uniform else "change")
    assert ("drift alike" in record["reason"]) == is_uniform
    slowdown = replanned.current_seconds / before.seconds
    # Otherwise the network keeps its speed.
    assert slowdown == pytest.approx(1.5, rel=0.02) if is_uniform else 1.1 < slowdown < 1.3
    seconds = [
        rank.components["dense"].forward(8) for rank in replanned.question.known.profile.ranks
    ]
    wanted = 1.5 * slow.profile.ranks[0].components["dense"].forward(8)
    assert seconds == pytest.approx([wanted, wanted])
    session.close()
