"""Meetings whose changes travel compressed: nothing is lost, and replicas agree."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from hvdtrain.plan.plan import Plan
from hvdtrain.plan.traffic import as_matrix
from hvdtrain.sync.apart import Apart
from hvdtrain.sync.averaging import PostLocalMeetings
from hvdtrain.sync.changes import CompressedChanges, LeftOver
from hvdtrain.sync.local import Trained
from hvdtrain.sync.powersgd import PowerSums
from hvdtrain.sync.residuals import CompressedSums
from hvdtrain.world import World
from tests.mpi.apart import (
    BOUND,
    EPOCH,
    SEEN,
    SIZE,
    Trainer,
    config_of,
    difference,
    final,
    stages,
    unequal,
)
from tests.mpi.common import components_of, names
from tests.mpi.compression import METHODS, assert_equal_everywhere
from tests.mpi.plans import staged

pytestmark = pytest.mark.usefixtures("horovod")

FRAGMENTS = {"fragments": 2, "overlap": 2}
SYNCS: list[tuple[str, dict[str, Any]]] = [
    ("local:2", {}),
    ("local:3", {"average_optimizer": True}),
    ("post-local:2@1", {}),
    ("diloco:2", {}),
    ("diloco:3", FRAGMENTS),
]


def compressed(sync: str, compress: str, after: int = 0, **options: Any) -> Any:
    return config_of(sync, compress=compress, compress_after=after, **options)


def trainer_of(world: World, config: Any, plan: Plan | None = None) -> Trainer:
    components = components_of(config.model, SIZE)
    return Trainer(config, plan or unequal(world.size), components, world)


def apart(trainer: Trainer) -> list[Apart]:
    """Return the meetings of the stages of this rank, without what switches them on."""
    return [
        meeting.local if isinstance(meeting, PostLocalMeetings) else meeting
        for meeting in trainer.meetings
    ]


def residuals(trainer: Trainer) -> dict[str, np.ndarray]:
    """Return copies of this rank's residuals by the name of the parameter."""
    return {
        name: value.numpy().copy()
        for meeting in apart(trainer)
        for changes in meeting.changes
        if isinstance(changes, CompressedChanges)
        for residual in changes.sums.residuals.values()
        for name, value in residual.by_name().items()
    }


def summed(world: World, named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the sums over all ranks by name; a rank may hold only some of them."""
    totals: dict[str, np.ndarray] = {}
    for theirs in world.gather(named):
        for name, value in theirs.items():
            totals[name] = totals.get(name, np.zeros(())) + value
    return totals


EVERYTHING = [
    *((sync, options, "topk:1") for sync, options in SYNCS),
    ("local:2", {}, "powersgd:1000"),
    ("diloco:3", FRAGMENTS, "powersgd:1000"),
    ("local:2", {}, "topk:0.01"),
]


@pytest.mark.several_ranks
@pytest.mark.parametrize(("sync", "options", "compress"), EVERYTHING)
def test_compression_that_leaves_nothing_out_is_none(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    sync: str,
    options: dict[str, Any],
    compress: str,
) -> None:
    """All values, full rank, or too early to compress; in a pipeline for the second one."""
    monkeypatch.setattr(PowerSums, "shrinks", lambda *_: True)
    plan = stages(world) if compress == "powersgd:1000" else unequal(world.size)
    after = 100 if compress == "topk:0.01" else 0
    expected = final(config_of(sync, **options), plan, world)
    actual = final(compressed(sync, compress, after, **options), plan, world)
    assert difference(actual, expected) <= BOUND


@pytest.mark.several_ranks
def test_statistics_of_batch_norms_travel_whole(world: World) -> None:
    plan = staged((list(range(world.size)), range(world.size + 1, 1, -1)), microbatches=2)
    sizes = {"sizes": (13, 12)}
    plain, other = (
        final(config, plan(names(components_of("resnet", SIZE))), world, 2, **sizes)
        for config in (
            config_of("local:2", "resnet"),
            compressed("local:2", "topk:1", model="resnet"),
        )
    )
    assert difference(plain, other) <= 1e-10  # batch norm multiplies rounding errors


def watch(world: World, trainer: Trainer) -> list[float]:
    """Return a list that gets the part of each average change that is neither sent nor kept."""
    lost: list[float] = []
    for meeting in apart(trainer):
        for changes in meeting.changes:
            assert isinstance(changes, CompressedChanges)
            _watch(world, changes, lost)
    return lost


def _watch(world: World, changes: CompressedChanges, lost: list[float]) -> None:
    start, finish = changes.start, changes.finish
    expected: dict[str, np.ndarray] = {}

    def kept() -> dict[str, np.ndarray]:
        held = [residual.by_name() for residual in changes.sums.residuals.values()]
        return summed(world, {k: v.numpy().copy() for part in held for k, v in part.items()})

    def watched_start(moved: list[Tensor], others: list[Tensor], samples: int) -> Any:
        total = sum(world.gather(samples))
        weighted = {
            name: value.numpy() * (samples / total)
            for name, value in zip(changes.names, moved, strict=True)
        }
        before = kept()
        for name, value in summed(world, weighted).items():
            expected[name] = value + before[name]
        return start(moved, others, samples)

    def watched_finish(travelling: Any) -> Any:
        agreed, after = finish(travelling), kept()
        sent = dict(zip(changes.names, (v.numpy() for v in agreed.averages), strict=False))
        assert_equal_everywhere(world, sent)
        missing = {name: np.abs(sent[name] + after[name] - expected[name]) for name in sent}
        scale = max(float(np.abs(value).max()) for value in expected.values())
        lost.append(max(float(value.max()) for value in missing.values()) / scale)
        return agreed

    changes.start, changes.finish = watched_start, watched_finish  # type: ignore[assignment, method-assign]


SENT = [
    *(("local:3", {}, method) for method in METHODS),
    ("post-local:2@1", {}, "topk:0.1"),
    ("diloco:2", {}, "bf16"),
    ("diloco:3", FRAGMENTS, "topk:0.1"),
    ("diloco:3", FRAGMENTS, "powersgd:2"),
    ("diloco:3", {**FRAGMENTS, "reduce_with": "mpi"}, "bf16"),
]


@pytest.mark.several_ranks
@pytest.mark.parametrize(("sync", "options", "compress"), SENT)
def test_what_is_sent_and_what_is_kept_are_the_change(
    world: World, sync: str, options: dict[str, Any], compress: str
) -> None:
    trainer = trainer_of(world, compressed(sync, compress, **options))
    lost = watch(world, trainer)
    trainer.train(0, 12)
    trainer.meet()
    assert len(lost) >= 3
    assert max(lost) <= BOUND
    assert trainer.counted("residual_norm") > 0 or world.rank
    assert sum(world.gather(trainer.counted("residual_norm"))) > 0
    trainer.whole()  # all replicas hold the same bits


def without_feedback(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = CompressedSums.settle

    def forget(self: CompressedSums) -> None:
        settle(self)
        for residual in self.residuals.values():
            residual.current.zero_()

    monkeypatch.setattr(CompressedSums, "settle", forget)


def without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: Trained, share: Any) -> None:
        self.samples += share.samples
        self.total += share.samples  # of this replica only

    monkeypatch.setattr(Trained, "add", add)


@pytest.mark.several_ranks
@pytest.mark.parametrize("fault", [without_feedback, without_weights])
@pytest.mark.parametrize("sync", ["local:3", "diloco:3"])
def test_a_loss_is_noticed(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    sync: str,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    fault(monkeypatch)
    trainer = trainer_of(world, compressed(sync, "topk:0.1"))
    lost = watch(world, trainer)
    trainer.train(0, 3)
    assert max(lost) > SEEN


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    ("sync", "steps", "meetings"),
    [("local:2", 4, [2, 4]), ("diloco:2", 4, [2, 4]), ("post-local:2@1", 7, [7])],
)
def test_meetings_after_the_first_updates_are_exact(
    world: World, sync: str, steps: int, meetings: list[int]
) -> None:
    """Steps are those of the run: the exact epoch counts, and so does a resume."""
    config = compressed(sync, "topk:0.1", steps)
    trainer = trainer_of(world, config)
    for number in range(steps):
        trainer.step(number)
    trainer.restore(trainer.share())
    assert trainer.counted("meetings") == len(meetings)
    assert sum(world.gather(trainer.counted("residual_norm"))) == 0
    for number in (steps, steps + 1):
        trainer.step(number)
    trainer.meet()
    assert sum(world.gather(trainer.counted("residual_norm"))) > 0


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    ("sync", "compress", "model"),
    [*(("local:2", method, "resnet") for method in METHODS), ("diloco:2", "topk:0.1", "cnn")],
)
def test_the_bytes_are_those_of_what_travels(
    world: World, sync: str, compress: str, model: str
) -> None:
    components = components_of(model, SIZE)
    plan = staged((list(range(world.size)), range(world.size + 1, 1, -1)), microbatches=1)
    config = compressed(sync, compress, model=model)
    trainer = trainer_of(world, config, plan(names(components)))
    for number in range(4):
        trainer.step(number)
    (meeting,) = apart(trainer)
    parameters = list(meeting.replica.parameters.values())
    averaged = [value.numel() for value in meeting.replica.averaged.values()]
    share = (world.size - 1) / world.size
    # Beside the changes: statistics, the number of samples of each replica, and counters.
    predicted = 2 * share * (sum(averaged) + world.size) * (8 if averaged else 4)
    counters = meeting.replica.copied.find().values()
    predicted += 2 * share * 8 * math.ceil(sum(value.nbytes for value in counters) / 8)
    predicted += bytes_of(parameters, compress, world.size)
    assert trainer.counted("meetings") == 2
    assert trainer.counted("sent_bytes") == pytest.approx(2 * predicted, abs=0.1)


def bytes_of(parameters: list[Any], compress: str, size: int) -> float:
    """Return the bytes of the changes of a model in one meeting."""
    share, count = (size - 1) / size, sum(int(value.numel()) for value in parameters)
    if compress.startswith("topk"):
        return float((size - 1) * math.ceil(0.1 * count) * (8 + 4))
    if compress in ("fp16", "bf16"):
        return 2 * share * 2 * math.ceil(count / size) * size
    numbers = 0
    for value in parameters:
        rows, columns = as_matrix(value.shape, value.stride())
        shrinks = value.dim() > 1 and 2 * (rows + columns) < rows * columns
        numbers += 2 * (rows + columns) if shrinks else value.numel()
    return 2 * share * 8 * numbers


RESUMED = [
    ("local:2", {}, "topk:0.1", 8),
    ("local:3", {"average_optimizer": True}, "powersgd:2", 7),
    ("post-local:2@1", {}, "fp16", 3),  # in the exact epoch
    ("post-local:2@1", {}, "topk:0.1", 8),
    ("diloco:2", {}, "powersgd:2", 8),
    ("diloco:3", FRAGMENTS, "topk:0.1", 7),  # with a transfer in flight
]


@pytest.mark.several_ranks
@pytest.mark.parametrize(("sync", "options", "compress", "stop"), RESUMED)
def test_a_run_resumes_inside_a_period_to_the_bit(
    world: World, sync: str, options: dict[str, Any], compress: str, stop: int
) -> None:
    config, plan = compressed(sync, compress, 2, **options), stages(world)
    whole, resumed = (trainer_of(world, config, plan) for _ in range(2))
    whole.train(0, stop)
    resumed.restore(whole.share())
    for ours, theirs in zip(resumed.train(stop, 10), whole.train(stop, 10), strict=True):
        assert difference(ours, theirs) == 0
    ours, theirs = resumed.share(), whole.share()
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


PLACE = "sync/changes/residual/"


@pytest.mark.several_ranks
@pytest.mark.parametrize(("sync", "options"), SYNCS[1:])
def test_another_number_of_replicas_keeps_the_sum_of_residuals(
    world: World, sync: str, options: dict[str, Any]
) -> None:
    """The checkpoint is one of one more replica; then each rank becomes a stage of its own."""
    config, components = compressed(sync, "topk:0.1", **options), components_of("cnn", SIZE)
    trainer = trainer_of(world, config)
    trainer.train(0, 2 * len(EPOCH) - 1)
    arrays, sums = trainer.share(), summed(world, residuals(trainer))
    assert max(float(np.abs(value).max()) for value in sums.values()) > 0
    more = arrays | {f"{PLACE}{world.size}/{name}": value for name, value in sums.items()}
    other = trainer_of(world, config)
    other.restore(more)
    doubled = {name: 2 * value for name, value in sums.items()}
    assert difference(summed(world, residuals(other)), doubled) <= BOUND
    pipeline = staged(*(([rank], [1]) for rank in range(world.size)), microbatches=2)
    single = trainer_of(world, config, pipeline(names(components)))
    single.restore(arrays)
    left = [meeting for meeting in single.meetings if isinstance(meeting, LeftOver)]
    assert len(left) == len(single.meetings)
    held = {k: v.numpy().copy() for meeting in left for k, v in meeting.left_over.items()}
    assert difference(summed(world, held), sums) <= BOUND
    before = single.whole()
    for meeting in left:
        meeting.before_step(0)
        meeting.before_step(0)
    sign = -1 if sync.startswith("diloco") else 1
    expected = {name: value + sign * sums.get(name, 0.0) for name, value in before.items()}
    assert difference(single.whole(), expected) <= BOUND


@pytest.mark.several_ranks
def test_residuals_travel_with_the_next_meeting(world: World) -> None:
    """Once training has stopped, meetings send the rest: all replicas get all of the change."""
    config = compressed("local:1", "topk:0.5", momentum=0.0, weight_decay=0.0)
    plan = unequal(world.size)
    exact = final(config_of("local:1", momentum=0.0, weight_decay=0.0), plan, world, 1)
    trainer = trainer_of(world, config)
    trainer.step(0)
    (meeting,) = apart(trainer)
    assert difference(trainer.whole(), exact) > SEEN
    for _ in range(4):
        meeting.before_step(0)
        meeting.trained.samples += 1
        meeting.trained.total += world.size
        meeting.count_step()
        meeting.meet()
    assert difference(trainer.whole(), exact) <= BOUND
