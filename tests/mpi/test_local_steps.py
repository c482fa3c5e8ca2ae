"""Replicas with local steps and meet: against the exact run, and against serial simulations."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvdtrain.models.component import Component
from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.sync import local
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.local import Averages, DiLoCoMeetings, weighted_average
from hvdtrain.world import World
from tests.mpi.apart import (
    ALONE,
    BOUND,
    EPOCH,
    METHODS,
    SEEN,
    SIZE,
    Replicas,
    Trainer,
    config_of,
    difference,
    final,
    stages,
    unequal,
    weights_of,
)
from tests.mpi.common import CLASSES, components_of, names
from tests.mpi.plans import dp, staged

PERIOD_ONE: list[tuple[str, dict[str, Any]]] = [
    ("local:1", {"momentum": 0.0}),
    ("local:1,average-optimizer", {}),
    ("diloco:1,lr=1,momentum=0", {"momentum": 0.0}),
]


@pytest.mark.proves(
    "Each way to agree whose setting leaves nothing out equals exact sums, sent and kept "
    "are the gradient, and a resumed run has the same bits."
)
@pytest.mark.parametrize("layout", [unequal, stages])
@pytest.mark.parametrize(("sync", "options"), PERIOD_ONE)
def test_meetings_after_every_step_are_the_exact_run(
    world: World, sync: str, options: dict[str, Any], layout: Callable[..., Plan]
) -> None:
    plan = unequal(world.size) if layout is unequal else stages(world)
    exact = {"momentum": options.get("momentum", 0.9)}
    expected = final(config_of(**exact), plan, world)
    assert difference(final(config_of(sync, **options), plan, world), expected) <= BOUND


@pytest.mark.parametrize(("sync", "options"), PERIOD_ONE[1:])
def test_batch_norm_statistics_are_those_of_the_exact_run(
    world: World, sync: str, options: dict[str, Any]
) -> None:
    components = names(components_of("resnet", SIZE))
    plan = staged((list(range(world.size)), range(world.size + 1, 1, -1)), microbatches=2)
    exact = config_of(model="resnet", momentum=options.get("momentum", 0.9))
    sizes = {"sizes": (40, 39)}
    expected = final(exact, plan(components), world, 2, **sizes)
    local = final(config_of(sync, "resnet", **options), plan(components), world, 2, **sizes)
    assert any("num_batches_tracked" in name for name in local)
    assert difference(local, expected) <= 1e-10  # batch norm multiplies rounding errors


class Changing(nn.Module):
    """A layer with a buffer of whole numbers that depends on the samples it has seen."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.linear = nn.Linear(3 * SIZE * SIZE, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen * 3 + images[0].flatten()[:3].mul(100).long()
        logits: Tensor = self.linear(images.flatten(1))
        return logits


@pytest.mark.several_ranks
@pytest.mark.parametrize("sync", ["local:1", "diloco:2", "elastic:2"])
def test_other_buffers_become_those_of_the_first_replica(world: World, sync: str) -> None:
    components = [Component("layer", Changing)]
    trainer = Trainer(config_of(sync), dp(world.size)(["layer"]), components, world)
    for part in trainer.runtime.parts.values():
        part.model.changing = frozenset({"layer.seen"})
    for number in range(4):
        trainer.step(number)
    values = world.gather(weights_of(trainer.runtime)["layer.seen"].tolist())
    assert len(set(map(tuple, values))) == 1, "step 4 ends a period"
    trainer.step(4)  # two samples, on different replicas
    apart = world.gather(weights_of(trainer.runtime)["layer.seen"].tolist())
    assert (len(set(map(tuple, apart))) == 1) == (sync == "local:1")
    trainer.meet()
    assert trainer.whole()["layer.seen"].tolist() == apart[0]


@pytest.mark.several_ranks
def test_without_weights_in_the_average_the_comparison_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unweighted(collectives: Collectives, name: str, tensors: Any, _: float) -> Averages:
        return weighted_average(collectives, name, tensors, 1.0)

    plan, config = unequal(world.size), config_of("local:1", momentum=0.0)
    expected = final(config_of(momentum=0.0), plan, world)
    monkeypatch.setattr(local, "weighted_average", unweighted)
    assert difference(final(config, plan, world), expected) > SEEN


def test_exact_epochs_come_before_local_ones(world: World) -> None:
    plan = unequal(world.size)
    exact = Trainer(config_of(), plan, components_of("cnn", SIZE), world)
    switched = Trainer(config_of("local:3@1"), plan, components_of("cnn", SIZE), world)
    epoch = len(EPOCH)
    for ours, theirs in zip(switched.train(0, epoch), exact.train(0, epoch), strict=True):
        assert difference(ours, theirs) == 0
    switched.train(epoch, epoch + 2)
    exact.train(epoch, epoch + 2)
    assert any(meeting.differ for meeting in switched.meetings) == (world.size > 1)
    switched.meet()
    is_equal = difference(switched.whole(), exact.whole()) <= BOUND
    assert is_equal == (world.size == 1)


def test_one_replica_of_an_elastic_run_is_the_exact_run() -> None:
    plan = replicated(names(components_of("cnn", SIZE)), 1, 2, None)
    assert (
        difference(final(config_of("elastic:1"), plan, ALONE), final(config_of(), plan, ALONE))
        == 0
    )


def largest_difference(world: World, method: str, steps: int = 9) -> float:
    """Return the largest difference of this rank's parameters from the simulation in any step."""
    simulate, sync, options = METHODS[method]
    plan, components = unequal(world.size), components_of("cnn", SIZE)
    config = config_of(sync, **options)
    period = config.sync_request.period  # type: ignore[union-attr] # of local steps
    actual = Trainer(config, plan, components, world).train(0, steps)
    expected = simulate(Replicas(config, plan, components), period, steps)
    assert len(actual) == len(expected)
    return max(
        difference({name: ours[name] for name in theirs[world.rank]}, theirs[world.rank])
        for ours, theirs in zip(actual, expected, strict=True)
    )


@pytest.mark.several_ranks
@pytest.mark.parametrize("method", METHODS)
def test_every_step_is_that_of_a_serial_simulation(world: World, method: str) -> None:
    assert largest_difference(world, method) <= BOUND


@pytest.mark.several_ranks
def test_an_average_instead_of_a_sum_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def averaging(*arguments: Any) -> Averages:
        agreed = weighted_average(*arguments)
        return replace(agreed, sums=[value / world.size for value in agreed.sums])

    monkeypatch.setattr(local, "weighted_average", averaging)
    assert largest_difference(world, "elastic") > SEEN


@pytest.mark.several_ranks
@pytest.mark.parametrize("sync", ["local:2", "diloco:2", "elastic:2"])
def test_replicas_differ_between_meetings_only(world: World, sync: str) -> None:
    trainer = Trainer(config_of(sync), unequal(world.size), components_of("cnn", SIZE), world)
    for number in range(3):
        trainer.step(number)
        digests = world.gather(trainer.state.digests())
        are_equal = all(theirs == digests[0] for theirs in digests)
        differ = any(meeting.differ for meeting in trainer.meetings)
        assert differ == (number != 1 or sync == "elastic:2")
        assert are_equal != differ
    trainer.meet()
    trainer.whole()


@pytest.mark.several_ranks
@pytest.mark.parametrize("sync", ["local:5", "diloco:5", "elastic:5"])
def test_bytes_fall_by_the_period(world: World, sync: str) -> None:
    plan, components = unequal(world.size), components_of("cnn", SIZE)
    exact = Trainer(config_of(), plan, components, world)
    apart = Trainer(config_of(sync), plan, components, world)
    exact.train(0, 10)
    apart.train(0, 10)
    assert apart.counted("meetings") == 2
    of_weights = apart.counted("sent_bytes") / 2
    # Each meeting also tells how many samples each replica had.
    counts = 2 * (world.size - 1) / world.size * 8 * world.size
    assert (of_weights - counts) * 10 == pytest.approx(exact.counted("sent_bytes"), rel=1e-12)
    assert apart.counted("drift") > 0


RESUMED: list[tuple[str, dict[str, Any]]] = [
    ("local:3", {}),
    ("local:3,average-optimizer", {"optimizer": "adam"}),
    ("diloco:3", {}),
    ("elastic:3", {}),
]


@pytest.mark.several_ranks
@pytest.mark.parametrize(("sync", "options"), RESUMED)
@pytest.mark.parametrize("stop", [4, 5, 6])
def test_a_run_resumes_inside_a_period_to_the_bit(
    world: World, sync: str, options: dict[str, Any], stop: int
) -> None:
    plan, components = stages(world), components_of("cnn", SIZE)
    config = config_of(sync, **options)
    whole, resumed = (Trainer(config, plan, components, world) for _ in range(2))
    whole.train(0, stop)
    arrays = whole.share()
    resumed.restore(arrays)
    for ours, theirs in zip(resumed.train(stop, 10), whole.train(stop, 10), strict=True):
        assert difference(ours, theirs) == 0
    ours, theirs = resumed.share(), whole.share()
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


@pytest.mark.several_ranks
def test_an_outer_momentum_that_is_forgotten_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, components = unequal(world.size), components_of("cnn", SIZE)
    whole, resumed = (Trainer(config_of("diloco:3"), plan, components, world) for _ in range(2))
    whole.train(0, 4)
    resumed.restore(whole.share())
    for meeting in resumed.meetings:
        assert isinstance(meeting, DiLoCoMeetings)
        for momentum in meeting.momentum:
            momentum.zero_()
    pairs = zip(resumed.train(4, 10), whole.train(4, 10), strict=True)
    assert max(difference(ours, theirs) for ours, theirs in pairs) > SEEN


@pytest.mark.several_ranks
@pytest.mark.parametrize(("sync", "options"), RESUMED)
def test_another_number_of_replicas_continues_from_the_average(
    world: World, sync: str, options: dict[str, Any]
) -> None:
    components = components_of("cnn", SIZE)
    trainer = Trainer(config_of(sync, **options), unequal(world.size), components, world)
    trainer.train(0, 4)
    samples = np.array(world.gather(trainer.meetings[0].samples))
    held = world.gather(weights_of(trainer.runtime))
    arrays = trainer.share()
    pipeline = staged(*(([rank], [1]) for rank in range(world.size)), microbatches=2)
    other = Trainer(config_of(sync, **options), pipeline(names(components)), components, world)
    other.restore(arrays)
    expected = {
        name: np.average([weights[name] for weights in held], axis=0, weights=samples)
        for name in held[0]
    }
    if sync == "elastic:3":
        expected = {name: value.numpy() for name, value in trainer.meetings[0].centre.items()}
    assert difference(other.whole(), expected) <= BOUND
    other.train(4, 6)


@pytest.mark.several_ranks
@pytest.mark.parametrize("sync", ["local:3", "diloco:3", "elastic:3"])
def test_a_replica_of_another_stage_continues_from_the_average(world: World, sync: str) -> None:
    """The other stage starts with the same tensor, but holds more of them."""
    components = components_of("cnn", SIZE)
    trainer = Trainer(config_of(sync), stages(world), components, world)
    trainer.train(0, 4)
    arrays = trainer.share()
    other = Trainer(config_of(sync), unequal(world.size), components, world)
    other.restore(arrays)
    other.whole()  # replicas hold the same weights
    other.train(4, 6)


@pytest.mark.several_ranks
@pytest.mark.parametrize("sync", ["local:3", "diloco:3", "elastic:3"])
def test_a_checkpoint_is_whole_though_a_replica_has_no_samples(world: World, sync: str) -> None:
    shares = [1] * (world.size - 1) + [0]
    plan = staged((list(range(world.size)), shares), microbatches=2)
    components = components_of("cnn", SIZE)
    trainer = Trainer(config_of(sync), plan(names(components)), components, world)
    trainer.train(0, 4)
    arrays = trainer.share()
    trainer.restore(arrays)
    parameters = trainer.runtime.parts[0].model.parameters()
    assert {f"optimizer/{name}/momentum_buffer" for name in parameters} <= arrays.keys()
