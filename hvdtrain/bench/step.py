"""`bench step`: images per second, the part of the machine's matrix rate, and where time goes.

The steps are those of `train` without its records: the same session, loader, interpreter and
control messages. The rest is time that nothing else counts: Python between the actions of a step.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hvdtrain import world
from hvdtrain.backends.pytorch.session import TorchSession
from hvdtrain.backends.pytorch.setup import model_components, open_session
from hvdtrain.bench.options import StepConfig
from hvdtrain.check.plan import CHECKS
from hvdtrain.data import order
from hvdtrain.data.order import Loader
from hvdtrain.device import Mark, is_gpu, mark, now, synchronize
from hvdtrain.engine.feed import Feed, requests, training_feeder
from hvdtrain.engine.progress import Control, Flags, Vitals
from hvdtrain.engine.session import PendingStep, StepOutcome
from hvdtrain.errors import Interrupted, Preempted, UsageError
from hvdtrain.host.output import PROFILER_REMARKS, without
from hvdtrain.host.process import StopRequest
from hvdtrain.models.costs import component_costs
from hvdtrain.parallel.runtime import Step, read_later
from hvdtrain.parallel.stage import AUTOCAST, DTYPES
from hvdtrain.plan.cut import COMMUNICATION, COMPUTE
from hvdtrain.plan.trace import StepMarks
from hvdtrain.planner.chain import Chain, Link, without_gathering

WARM_UP, PROFILED = 3, 3  # steps before the timed ones, and after them
LISTED = 5  # operations in the text
TRAINING_FLOPS = 3  # forwards: itself, gradients of the input, gradients of the weights
SHARES = ("compute", "communication", "bubble", "data", "rest")


@dataclass(frozen=True)
class StepReport:
    """The result of `bench step` over all ranks.

    Attributes:
        setting: model, ranks and batch size in words.
        images: images per step.
        step: median seconds per step.
        quartiles: lower and upper quartile of the seconds per step.
        seconds: seconds per step by what they are spent on: means over steps and ranks.
        rates: matrix operations per second of each rank, measured on all of them at once.
        flops: operations per step over all ranks.
        components: seconds per step of (forward, backward), the mean of the ranks that hold it.
        operations: seconds per step of each of PyTorch's operations without those that it calls,
            the mean of the ranks, longest first; empty on a GPU.
    """

    setting: str
    images: int
    step: float
    quartiles: tuple[float, float]
    seconds: dict[str, float]
    rates: list[float]
    flops: float
    components: dict[str, tuple[float, float]]
    operations: dict[str, float]

    @property
    def images_per_second(self) -> float:
        """Return the images per second."""
        return self.images / self.step

    @property
    def matrix_share(self) -> float:
        """Return the achieved part of the ranks' matrix rates."""
        return self.flops / self.step / sum(self.rates)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `bench step --json` prints."""
        return {
            "setting": self.setting,
            "images_per_second": self.images_per_second,
            "step_seconds": {"median": self.step, "quartiles": self.quartiles},
            "seconds": self.seconds,
            "matrix_flops_per_second": self.rates,
            "step_flops": self.flops,
            "matrix_share": self.matrix_share,
            "components": {
                name: {"forward": forward, "backward": backward}
                for name, (forward, backward) in self.components.items()
            },
            "operations": self.operations,
        }

    def as_text(self) -> str:
        """Return the text that `bench step` prints."""
        rate = sum(self.rates)
        lines = [
            self.setting,
            f"{self.images_per_second:,.1f} images/s: {1e3 * self.step:,.2f} ms per step "
            f"(quartiles {1e3 * self.quartiles[0]:,.2f} to {1e3 * self.quartiles[1]:,.2f})",
            f"{self.flops / self.step / 1e9:,.0f} GFLOP/s, {self.matrix_share:.0%} of the "
            f"{rate / 1e9:,.0f} GFLOP/s at which the ranks multiply matrices",
            "",
        ]
        total = sum(self.seconds.values())
        lines += [
            f"{name:<24} {1e3 * seconds:>10,.3f} ms {seconds / total:>7.1%}"
            for name, seconds in self.seconds.items()
        ]
        computed = sum(map(sum, self.components.values()))
        width = max(len(name) for name in self.components)
        heads = f"{'component':<{width}} {'forward':>10} {'backward':>10}"
        lines += ["", f"{heads}  of all components"]
        lines += [
            f"{name:<{width}} {1e3 * forward:>7,.2f} ms {1e3 * backward:>7,.2f} ms "
            f"{(forward + backward) / computed:>7.1%}"
            for name, (forward, backward) in self.components.items()
        ]
        return "\n".join([*lines, *self._costliest()])

    def _costliest(self) -> list[str]:
        """Return the lines on the longest operations, and one on the rest of the step."""
        longest = list(self.operations.items())[:LISTED]
        if not longest:
            return []
        rows = [*longest, ("others", sum(self.operations.values()) - sum(s for _, s in longest))]
        total = sum(self.operations.values())
        width = max(len(name) for name, _ in rows)
        return [
            "",
            f"{'operation':<{width}} {'per step':>11}  of all operations",
            *(f"{name:<{width}} {1e3 * s:>8,.2f} ms {s / total:>7.1%}" for name, s in rows),
        ]


def bench_step(config: StepConfig, data: str) -> StepReport:
    """Time steps on the ranks of the launcher that started this process. Collective.

    Raises:
        UsageError, DataError: if the options or the data set are wrong.
    """
    job = world.start(config.allreduce, config.threads)
    training = config.training(data)
    session = open_session(training, job, CHECKS)
    if training.batch_size > len(session.train_rows):
        raise UsageError(
            f"--batch-size {training.batch_size} is more than the {len(session.train_rows)} "
            "training images: use a larger set or a smaller batch"
        )
    session.state.agree()
    with StopRequest() as stop:
        times = _timed_steps(session, config.steps, stop)
    job.barrier()
    components = _my_components(session)
    job.barrier()
    rates = job.gather(matrix_rate(session.runtime.device, session.config.precision))
    each_step = [statistics.median(values) for values in zip(*job.gather(times.step), strict=True)]
    quarters = [each_step[0]] * 3
    if len(each_step) > 1:
        quarters = statistics.quantiles(each_step, n=4, method="inclusive")
    seconds = np.mean(job.gather([times.spent[name] for name in SHARES]), axis=0)
    result = StepReport(
        setting=_setting(session),
        images=training.batch_size,
        step=statistics.median(each_step),
        quartiles=(quarters[0], quarters[2]),
        seconds=dict(zip(SHARES, map(float, seconds), strict=True)),
        rates=rates,
        flops=_flops(session),
        components=_by_component(session, components),
        operations=mean_over_ranks(job.gather(times.operations)),
    )
    session.close()
    world.stop()
    return result


@dataclass
class _Times:
    """Seconds of each timed step on this rank, and their mean by what they are spent on."""

    step: list[float]
    spent: dict[str, float]
    operations: dict[str, float]


def _timed_steps(session: TorchSession, count: int, stop: StopRequest) -> _Times:
    config, size = session.config, session.config.batch_size
    rows = order.training_order(session.index, session.train_rows, config.seed, 0)
    whole = [(start, start + size) for start in range(0, len(rows) - size + 1, size)]
    slices = list(islice(cycle(whole), WARM_UP + count + PROFILED))
    program = session.program(size, is_training=True)
    samples = program.cut.samples(session.plan.last, session.world.rank)
    control = Control(session.world, session.device.loss_delay)
    local_rows = partial(session.local_rows, is_training=True)
    feeder = training_feeder(config, session.splits["train"], 0, session.is_resident)
    device = session.runtime.device
    totals = dict.fromkeys(SHARES, 0.0)
    with Loader(feeder, requests(rows, slices, local_rows)) as loader:

        def one_step() -> tuple[Mark, Mark, StepMarks]:
            began = mark(device)
            feed: Feed = next(loader)
            loaded = mark(device)
            step = session.runtime.train(Step(program, feed.images, feed.labels))
            flags = Flags(stop.interrupted, stop.preempted)
            read = read_later(step, device)
            pending = PendingStep(samples, lambda: StepOutcome(*read()))
            agreed, _ = control.post(pending, flags, Vitals(0.0, 0.0))
            if agreed is not None and agreed.stop is not None:
                world.stop()
                kind = Interrupted if agreed.stop == Interrupted.exit_code else Preempted
                raise kind("nothing was measured")
            return began, loaded, step.marks

        session.world.barrier()
        for _ in range(WARM_UP):
            one_step()
        steps = [one_step() for _ in range(count)]
        ends = [*(began for began, _, _ in steps), mark(device)]
        operations = operation_seconds(one_step, PROFILED, device)
        control.drain()
    synchronize(device)
    seconds = [later - earlier for earlier, later in pairwise(ends)]
    for began, loaded, marks in steps:
        step_seconds = marks.seconds()
        busy = step_seconds.spent
        totals["data"] += loaded - began
        totals["compute"] += sum(busy[kind] for kind in (*COMPUTE, "LOAD", "STEP"))
        totals["communication"] += sum(busy[kind] for kind in COMMUNICATION)
        totals["communication"] += step_seconds.exposed + step_seconds.transfer
        totals["bubble"] += step_seconds.bubble
    spent = {name: total / count for name, total in totals.items()}
    spent["rest"] += max(0.0, statistics.mean(seconds) - sum(spent.values()))
    return _Times(seconds, spent, operations)


def _my_components(session: TorchSession) -> dict[str, tuple[float, float]]:
    """Return the seconds per step of this rank's components.

    They are measured on the largest micro-batch and scaled to all of them.
    """
    pieces, rank = session.cut(session.config.batch_size, is_training=True), session.world.rank
    seconds = {}
    with without_gathering(session.plan, session.state.parts):
        for stage, part in session.state.parts.items():
            sizes = [pieces.rows(stage, rank, k) for k in range(pieces.microbatches)]
            largest = max(2, *sizes)
            measured = _chain(session, stage, largest).whole(largest)
            steps = sum(sizes) / largest
            medians = [
                np.median(values, axis=0) for values in (measured.forward, measured.backward)
            ]
            for name, forward, backward in zip(part.model.components, *medians, strict=True):
                seconds[name] = steps * float(forward), steps * float(backward)
    return seconds


def _chain(session: TorchSession, stage: int, rows: int) -> Chain:
    """Return the components of a stage, to be timed without updates on `rows` samples."""
    model, inputs = session.state.parts[stage].model, _input(session, stage, rows)
    return Chain(
        links=[
            Link(call, [value for value in component.parameters() if value.requires_grad])
            for component, call in zip(
                model.components.values(), model.calls.values(), strict=True
            )
        ],
        source=lambda _: inputs,
        device=session.runtime.device,
        is_first=stage == 0,
        is_last=stage == session.plan.last,
        dtype=session.runtime.settings.autocast,
        loss=partial(session.runtime.settings.loss.example_sum, session.index.target_form),
    )


def _input(session: TorchSession, stage: int, rows: int) -> Tensor:
    """Return the input of a stage: images, or random activations."""
    if stage == 0:
        shape = (rows, *session.index.image_shape)
        pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        return session.runtime.settings.images(pixels)
    form = session.runtime.boundaries.forms[stage - 1]
    return form.empty(rows, session.runtime.device).normal_()


def _flops(session: TorchSession) -> float:
    """Return the counted operations of a training step over all ranks."""
    size = session.index.input_size
    costs = component_costs(
        model_components(session.config, session.index),
        size,
        dtype=DTYPES[session.config.precision],
    )
    forward = sum(cost.forward_flops for cost in costs)
    return TRAINING_FLOPS * forward * session.config.batch_size


def _by_component(
    session: TorchSession, mine: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Return the seconds per step of each component, in model order.

    They are means over the ranks that hold the component.
    """
    values: dict[str, list[tuple[float, float]]] = {}
    for components in session.world.gather(mine):
        for name, seconds in components.items():
            values.setdefault(name, []).append(seconds)
    names = [name for stage in session.plan.stages for name in stage.components]
    return {
        name: (
            statistics.mean(forward for forward, _ in values[name]),
            statistics.mean(backward for _, backward in values[name]),
        )
        for name in names
    }


def _setting(session: TorchSession) -> str:
    config, job = session.config, session.world
    return (
        f"{config.model}, {session.parameters:,} parameters, {config.precision}, {job.size} "
        f"rank(s) x {job.threads} thread(s) on {session.device.kind}, {len(session.plan.stages)} "
        f"stage(s), {config.batch_size} images per step"
    )


CPU_SIZE, GPU_SIZE = 2048, 8192
SMALLEST = 256
SECONDS = 1.0


def matrix_rate(device: torch.device, precision: str) -> float:
    """Return the operations per second of a square product, with 2 per multiply-add.

    It is the best rate within SECONDS. The matrices grow until the rate no longer depends on their
    size, unless a product takes too long before that: CPUs without bf16 instructions need minutes
    for a large one.
    """
    dtype = AUTOCAST.get(precision, DTYPES[precision])
    size, best, largest = SMALLEST, 0.0, GPU_SIZE if is_gpu(device) else CPU_SIZE
    until = time.perf_counter() + SECONDS
    while True:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        took = min(_seconds(left, right, out) for _ in range(2))  # the first one prepares kernels
        while time.perf_counter() < until and size == largest:
            took = min(took, _seconds(left, right, out))
        best = max(best, 2 * size**3 / took)
        if size == largest or time.perf_counter() + 16 * took > until:
            return best
        size *= 2


def _seconds(left: Tensor, right: Tensor, out: Tensor) -> float:
    started = now(left.device)
    torch.mm(left, right, out=out)
    return now(left.device) - started


def operation_seconds(
    step: Callable[[], object], steps: int, device: torch.device
) -> dict[str, float]:
    """Run steps under the profiler, and return the seconds per step of each operation.

    An operation has the time of its calls without the operations that they call. On a GPU the
    steps run, too, and nothing is returned: there an operation on the host only starts work.
    """
    if is_gpu(device):
        for _ in range(steps):
            step()
        return {}
    with without(PROFILER_REMARKS), profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            step()
    return {
        event.key.removeprefix("aten::"): event.self_cpu_time_total / 1e6 / steps
        for event in profiled.key_averages()
    }


def mean_over_ranks(seconds: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the mean seconds of each operation, longest first."""
    by_rank = list(seconds)
    names = {name for times in by_rank for name in times}
    means = {name: sum(times.get(name, 0.0) for times in by_rank) / len(by_rank) for name in names}
    return dict(sorted(means.items(), key=lambda item: -item[1]))
