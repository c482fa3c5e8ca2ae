"""`bench step`: images a second, the part of the machine's matrix rate, and where the time goes.

The steps are those of `train`: the same session, loader, interpreter and control messages. What
no record covers is the rest: Python, and the little that nobody else counts.
"""

import statistics
import time
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdtrain import world
from hvdtrain.bench.components import component_seconds
from hvdtrain.bench.matrix import matrix_rate
from hvdtrain.bench.options import StepConfig
from hvdtrain.data.loader import Loader
from hvdtrain.models.costs import component_costs
from hvdtrain.parallel.actions import COMPUTE
from hvdtrain.parallel.stage import DTYPES
from hvdtrain.parallel.step import Step
from hvdtrain.training.control import Control
from hvdtrain.training.feed import Feed, Feeder, augmentation, requests
from hvdtrain.training.layout import agree_on_weights
from hvdtrain.training.setup import Session, model_components, open_session
from hvdtrain.training.stop import StopRequest

WARM_UP = 3
TRAINING_FLOPS = 3  # of a forward: itself, gradients of the input, gradients of the weights
SHARES = ("compute", "communication", "bubble", "data", "rest")


@dataclass(frozen=True)
class Found:
    """What `bench step` found, over all ranks.

    Attributes:
        step: median seconds of a step. fastest, slowest: its quartiles.
        seconds: of a step, by what it is spent on, the mean of the ranks.
        rates: matrix operations a second of each rank, measured on all of them at once.
        flops: operations of a step, over all ranks.
        components: seconds of (forward, backward) a step, the mean of the ranks that hold it.
    """

    setting: str
    images: int
    step: float
    fastest: float
    slowest: float
    seconds: dict[str, float]
    rates: list[float]
    flops: float
    components: dict[str, tuple[float, float]]

    @property
    def images_per_second(self) -> float:
        """Images of a step over its seconds."""
        return self.images / self.step

    @property
    def matrix_share(self) -> float:
        """Part of what the ranks' matrix rates would allow."""
        return self.flops / self.step / sum(self.rates)


def bench_step(config: StepConfig, data: str) -> Found:
    """Time steps on the ranks of the launcher that started this process. Collective.

    Raises:
        UsageError, DataError: for whatever a user can get wrong.
    """
    here = world.start(config.allreduce, config.threads)
    training = config.training(data)
    session = open_session(training, here)
    agree_on_weights(session)
    times = _timed_steps(session, config.steps)
    rows = session.cut(training.batch_size, is_training=True)
    inputs = {
        stage: _input(session, stage, max(1, max(_rows(session, stage))))
        for stage in session.parts
    }
    here.barrier()
    components = component_seconds(session.runtime, inputs)
    here.barrier()
    rates = here.gather(matrix_rate(session.device, training.precision))
    each_step = [
        statistics.median(values) for values in zip(*here.gather(times.step), strict=True)
    ]
    quarters = statistics.quantiles(each_step, n=4) if len(each_step) > 1 else each_step * 3
    spent = np.mean(here.gather([times.spent[name] for name in SHARES]), axis=0)
    found = Found(
        setting=_setting(session),
        images=training.batch_size,
        step=statistics.median(each_step),
        fastest=quarters[0],
        slowest=quarters[2],
        seconds=dict(zip(SHARES, map(float, spent), strict=True)),
        rates=rates,
        flops=_flops(session),
        components=_by_component(session, components, rows.microbatches),
    )
    session.close()
    world.stop()
    return found


@dataclass
class _Times:
    """Seconds of the timed steps on this rank: each of them, and their mean by what it is for."""

    step: list[float]
    spent: dict[str, float]


def _timed_steps(session: Session, count: int) -> _Times:
    config, runtime = session.config, session.runtime
    control, stop = Control(session.world, session.device), StopRequest()
    rows = np.arange(len(session.train_rows))
    size = min(config.batch_size, len(rows))
    whole = [(start, start + size) for start in range(0, len(rows) - size + 1, size)]
    slices = list(islice(cycle(whole), WARM_UP + count))
    program = session.program(size, is_training=True)
    samples = program.cut.samples(session.plan.last, session.world.rank)
    feeder = Feeder(session.splits["train"], augmentation(config, session.index, 0))
    totals, marks = dict.fromkeys(SHARES, 0.0), []
    with Loader(feeder, requests(session, session.train_rows, slices, True)) as loader:
        session.world.barrier()
        for number in range(len(slices)):
            if number >= WARM_UP:
                marks.append(_now(session))
            began = time.perf_counter()
            feed: Feed = next(loader)
            waited = time.perf_counter() - began
            step = runtime.run(program, Step(feed.images, feed.labels))
            control.post(step.loss_sum, samples, 0.0, stop)
            if number >= WARM_UP:
                _count(totals, step, waited)
        marks.append(_now(session))
        control.drain()
    seconds = [later - earlier for earlier, later in pairwise(marks)]
    spent = {name: total / count for name, total in totals.items()}
    spent["rest"] = max(0.0, (marks[-1] - marks[0]) / count - sum(spent.values()))
    return _Times(seconds, spent)


def _count(totals: dict[str, float], step: Step, waited: float) -> None:
    totals["data"] += waited
    totals["compute"] += sum(step.seconds[kind] for kind in (*COMPUTE, "LOAD", "STEP"))
    totals["communication"] += step.reduction.exposed + step.waited.transfer
    totals["bubble"] += step.waited.bubble


def _now(session: Session) -> float:
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
    return time.perf_counter()


def _rows(session: Session, stage: int) -> list[int]:
    """Samples of each micro-batch that this rank has in a stage."""
    pieces = session.cut(session.config.batch_size, is_training=True)
    rank = session.world.rank
    return [pieces.rows(stage, rank, k) for k in range(pieces.microbatches)]


def _input(session: Session, stage: int, rows: int) -> Tensor:
    """What a stage reads: images, or random activations."""
    if stage == 0:
        shape = (rows, *session.index.image_shape)
        pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        return session.runtime.images(pixels)
    form = session.runtime.handover.forms[stage - 1]
    return form.empty(rows, session.device).normal_().requires_grad_()


def _flops(session: Session) -> float:
    """Counted operations of a training step of all ranks."""
    size = session.index.image_shape[0]
    costs = component_costs(
        model_components(session.config, session.index),
        size,
        classes=session.index.classes,
        dtype=DTYPES[session.config.precision],
    )
    forward = sum(cost.forward_flops for cost in costs)
    return TRAINING_FLOPS * forward * session.config.batch_size


def _by_component(
    session: Session, mine: dict[str, tuple[float, float]], microbatches: int
) -> dict[str, tuple[float, float]]:
    """Seconds a step, averaged over the ranks that hold a component, in the model's order."""
    found: dict[str, list[tuple[float, float]]] = {}
    for of_rank in session.world.gather(mine):
        for name, seconds in of_rank.items():
            found.setdefault(name, []).append(seconds)
    names = [name for stage in session.plan.stages for name in stage.components]
    return {
        name: (
            microbatches * statistics.mean(forward for forward, _ in found[name]),
            microbatches * statistics.mean(backward for _, backward in found[name]),
        )
        for name in names
    }


def _setting(session: Session) -> str:
    config, here = session.config, session.world
    return (
        f"{config.model}, {session.parameters:,} parameters, {config.precision}, {here.size} "
        f"rank(s) x {here.threads} thread(s) on {session.device.type}, {len(session.plan.stages)} "
        f"stage(s), {config.batch_size} images a step"
    )


def as_json(found: Found) -> dict[str, Any]:
    """What `bench step --json` prints."""
    return {
        "setting": found.setting,
        "images_per_second": found.images_per_second,
        "seconds": {"step": found.step} | found.seconds,
        "quartiles": [found.fastest, found.slowest],
        "matrix_flops_per_second": found.rates,
        "step_flops": found.flops,
        "matrix_share": found.matrix_share,
        "components": {
            name: {"forward": forward, "backward": backward}
            for name, (forward, backward) in found.components.items()
        },
    }


def as_text(found: Found) -> str:
    """What `bench step` prints."""
    rate = sum(found.rates)
    lines = [
        found.setting,
        f"{found.images_per_second:,.1f} images/s: {found.step:.4g} s a step "
        f"(quartiles {found.fastest:.4g} to {found.slowest:.4g})",
        f"{found.flops / found.step / 1e9:,.0f} GFLOP/s, {found.matrix_share:.0%} of the "
        f"{rate / 1e9:,.0f} GFLOP/s at which the ranks multiply matrices",
        "",
    ]
    total = sum(found.seconds.values())
    lines += [
        f"{name:<24} {seconds:>10.4g} s {seconds / total:>7.1%}"
        for name, seconds in found.seconds.items()
    ]
    computed = sum(map(sum, found.components.values()))
    width = max(len(name) for name in found.components)
    lines += ["", f"{'component':<{width}} {'forward':>10} {'backward':>10}  of all components"]
    lines += [
        f"{name:<{width}} {forward:>9.3g}s {backward:>9.3g}s "
        f"{(forward + backward) / computed:>7.1%}"
        for name, (forward, backward) in found.components.items()
    ]
    return "\n".join(lines)
