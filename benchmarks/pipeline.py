"""Compares the step time of a pipeline with torch.distributed.pipelining (gloo).

    python benchmarks/pipeline.py [--model resnet18,vit_tiny] [--schedule gpipe,1f1b,zb-h1]
        [--images 64] [--microbatches 8] [--precision fp32] [--steps 8] [--rounds 5]

Both sides train the same two stages on two ranks with one thread each: the same components from
the same seed, cut at the same place, on the same images, in channels_last, with fused SGD. A round
is one job of each side, in turns. A step is timed from a barrier to its end on the slowest rank,
normalising included. PyTorch's side is its documented loop. Gloo sends no channels_last tensors,
so its stages send NHWC views of the same memory, which costs nothing. By chance, glibc may return
freed memory to the system and fetch it again page by page, which takes up to a tenth of a step;
both sides set it to keep the memory. The ratio is above 1 if hvdtrain is faster.

hvdtrain's jobs also profile their stages before, between and after the steps. They print how far a
simulation with these costs is from the measured step, and the time of the interpreter's own loop.
"""

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from typing import Any

import common
import exchange
import torch
from actiontimes import Table, measured_costs, profile_parts
from comparison import add_row, compare, figure, ratio
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.nn import functional

from hvdtrain import launch, models, world
from hvdtrain.backends.pytorch.build import build_runtime
from hvdtrain.backends.pytorch.parts import build_model
from hvdtrain.backends.pytorch.setup import make_plan
from hvdtrain.check.plan import MEAN, STD, local_batch, random_batch
from hvdtrain.config import TrainConfig
from hvdtrain.models.component import Component
from hvdtrain.parallel.runtime import Runtime, Step
from hvdtrain.parallel.stage import Images
from hvdtrain.plan import schedule
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.schedule import program
from hvdtrain.plan.simulate import Simulation, simulate
from hvdtrain.world import World

RANKS, CLASSES, SIZE, SEED = 2, 10, 32, 0
WARM_UP = 2  # steps of each job that do not count
EMPTY_STEPS, TRIPS = 50, 20
NAMES = ("model", "schedule", "microbatches", "precision")  # options of TrainConfig, too
CPU = torch.device("cpu")
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
COLUMNS = [
    "",
    "hvdtrain",
    "PyTorch",
    "times as fast",
    "exposed",
    "idle (simulated)",
    "simulated step",
]
PEERS: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "zb-h1": pipelining.ScheduleInterleavedZeroBubble,  # ZB1P with one stage per rank
}


def main() -> None:
    """Run the rounds of every model and schedule, or one rank of a job."""
    options = _options()
    if options.job == "ours":
        _ours(options)
    elif options.job == "theirs":
        _theirs(options)
    else:
        for model in options.model.split(","):
            for kind in options.schedule.split(","):
                _compare(options, model, kind)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18", help="one, or several separated by commas")
    parser.add_argument(
        "--schedule", default="gpipe,1f1b,zb-h1", help="one, or several separated by commas"
    )
    parser.add_argument("--images", type=int, default=64, help="images per step")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--precision", choices=("fp32", "fp64"), default="fp32")
    parser.add_argument("--steps", type=int, default=8, help="steps per job")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--job", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _compare(options: argparse.Namespace, model: str, kind: str) -> None:
    """Run all rounds of one model under one schedule."""
    setting = vars(options) | {"model": model, "schedule": kind}
    command = [sys.executable, __file__]
    command += [f"--{name}={setting[name]}" for name in ("images", "steps", *NAMES)]
    jobs: list[Any] = []

    def ours(number: int) -> float:
        jobs.append(_run([[*launch.mpirun(RANKS), *command, "--job", "ours"]]))
        return float(jobs[-1]["seconds"])

    def theirs(number: int) -> float:
        return float(_run(_peers(command))["seconds"])

    title = f"{model}, {kind}, {options.precision}, {RANKS} ranks x 1 thread, "
    title += f"{options.images} images in {options.microbatches} micro-batches"
    peer = f"PyTorch, {PEERS[kind].__name__}"
    comparison = compare(
        title, "s", {"hvdtrain": ours, peer: theirs}, options.rounds, goals={peer: 1.1}
    )
    counted = set(comparison.values["hvdtrain"])
    jobs = [job for job in jobs if job["seconds"] in counted]
    if not jobs:  # every round was disturbed
        return
    _print(jobs)
    medians = {name: statistics.median(job[name] for job in jobs) for name in jobs[0]}
    shown = [
        f"{model}, {kind}",
        *(figure(comparison, side) for side in comparison.values),
        ratio(comparison, peer),
        f"{medians['transfer']:.2%}",
        f"{medians['idle']:.1%} ({medians['simulated_idle']:.1%})",
        f"{statistics.median(job['predicted'] / job['seconds'] - 1 for job in jobs):+.1%}",
    ]
    add_row(COLUMNS, shown, len(jobs), jobs)


def _peers(command: list[str]) -> list[list[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = [*command, "--job", "theirs", "--port", str(port)]
    return [[*shared, "--rank", str(rank)] for rank in range(RANKS)]


def _run(commands: list[list[str]]) -> dict[str, Any]:
    """Run commands side by side; return the JSON object that the first one printed."""
    with tempfile.NamedTemporaryFile() as activity:  # ranks record actions as under the launcher
        more = KEEP_MEMORY | {"HVDTRAIN_ACTIVITY": activity.name}
        return dict(json.loads(common.run_all(commands, 1, **more)[0]))


def _print(ours: list[Any]) -> None:
    """Print where the time of our steps goes, and what was predicted."""

    def median(name: str) -> float:
        return float(statistics.median(job[name] for job in ours))

    print(
        f"   exchange: {median('transfer'):.2%} of a step exposed; bubble {median('bubble'):.2%}, "
        f"idle in all {median('idle'):.2%}, simulated {median('simulated_idle'):.2%}"
    )
    errors = sorted(job["predicted"] / job["seconds"] - 1 for job in ours)
    print(
        f"  simulated: {median('predicted'):.4f} s per step, {statistics.median(errors):+.1%} of "
        f"the measured one (rounds: {', '.join(f'{error:+.1%}' for error in errors)})"
    )
    print(f"       loop: {1e6 * median('loop'):.0f} us per step, {median('overhead'):.3%} of it")


def _setting(options: argparse.Namespace) -> tuple[TrainConfig, list[Component], Plan]:
    """Return the configuration, components and plan that both sides share."""
    torch.set_num_threads(1)
    named = {name: getattr(options, name) for name in NAMES}
    named |= {"optimizer": "sgd", "lr": 0.01, "batch_size": options.images}
    config = TrainConfig(data="", plan="mp", seed=SEED, **named)
    components = models.components(options.model, CLASSES, SIZE)
    return config, components, make_plan(config, components, SIZE, RANKS)


def _ours(options: argparse.Namespace) -> None:
    """Run one rank of hvdtrain's side."""
    job = world.start(threads=1)
    config, components, plan = _setting(options)
    images = Images(MEAN, STD, CPU, config.precision)
    runtime = build_runtime(config, plan, components, images, SIZE, job)
    pieces = cut(plan, options.images)
    actions = schedule.training_step(plan, pieces)
    ready = program(plan, pieces, actions[job.rank], job.rank)
    whole = random_batch(options.images, SIZE, CLASSES, SEED)
    mine = Step(ready, *local_batch(plan, pieces, job.rank, *whole))
    steps, profiles = [], []
    for count in (WARM_UP, options.steps // 2, options.steps - options.steps // 2):
        steps += [_timed_step(runtime, mine, job) for _ in range(count)]
        profiles.append(profile_parts(runtime, plan, pieces, SIZE, job))
    alpha, beta = _transfer_seconds(runtime, options.images // options.microbatches, job)
    tables = dict(enumerate(job.gather(_medians(profiles))))
    costs = measured_costs(plan, pieces, runtime.boundaries.forms, tables, alpha, beta)
    result = _summary(job.gather(steps), simulate(actions, plan, pieces, costs))
    result["loop"] = _loop_seconds(runtime, mine)
    result["overhead"] = result["loop"] / result["seconds"]
    if job.rank == 0:
        print(json.dumps(result))
    runtime.observer.close()
    world.stop()


def _timed_step(runtime: Runtime, mine: Step, job: World) -> dict[str, float]:
    """Run one step of this rank; return its seconds, its loss and its waiting times."""
    job.barrier()
    began = time.perf_counter()
    step = runtime.run(Step(mine.program, mine.images, mine.labels))
    seconds = time.perf_counter() - began
    loss = 0.0 if step.loss_sum is None else float(step.loss_sum) / mine.program.cut.batch_size
    spent = step.marks.seconds()
    waited = {"bubble": spent.bubble, "transfer": spent.transfer}
    return {"seconds": seconds, "loss": loss} | waited


def _summary(steps: list[list[dict[str, float]]], timeline: Simulation) -> dict[str, float]:
    """Return the medians over steps of what the ranks measured, and the simulated values."""
    values = []
    for ranks in list(zip(*steps, strict=True))[WARM_UP:]:
        longest = max(rank["seconds"] for rank in ranks)
        bubble, transfer = (sum(rank[kind] for rank in ranks) for kind in ("bubble", "transfer"))
        bubble += sum(longest - rank["seconds"] for rank in ranks)  # done before the slowest
        whole = RANKS * longest
        idle = {"bubble": bubble / whole, "transfer": transfer / whole}
        values.append({"seconds": longest, "idle": sum(idle.values())} | idle)
    medians = {name: statistics.median(step[name] for step in values) for name in values[0]}
    simulated = {"predicted": timeline.seconds, "simulated_idle": timeline.bubble_fraction}
    return medians | simulated | {"loss": sum(rank[0]["loss"] for rank in steps)}


def _medians(profiles: list[Table]) -> Table:
    return {key: statistics.median(profile[key] for profile in profiles) for key in profiles[0]}


def _transfer_seconds(runtime: Runtime, rows: int, job: World) -> tuple[float, float]:
    """Return the latency, and the seconds per byte, of a transfer of a micro-batch."""
    medians = []
    for size in (8, rows * runtime.boundaries.forms[0].row_bytes):
        sent, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        trip = exchange.ours(runtime.exchange, 1 - job.rank, sent, target)
        seconds = statistics.median(exchange.seconds_of(trip, job, 1) for _ in range(TRIPS))
        medians.append(job.broadcast(seconds))
    return medians[0], max(0.0, medians[1] - medians[0]) / size


def _loop_seconds(runtime: Runtime, mine: Step) -> float:
    """Return the seconds of a step whose actions do nothing."""
    runtime.do = dict.fromkeys(runtime.do, lambda step, task: None)
    began = time.perf_counter()
    for _ in range(EMPTY_STEPS):
        runtime.run(Step(mine.program, mine.images, mine.labels))
    return (time.perf_counter() - began) / EMPTY_STEPS


class _PeerStage(nn.Module):
    """A stage of PyTorch's side; it sends images as NHWC because gloo sends no other order."""

    def __init__(self, parts: list[nn.Module], is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.parts, self.is_first, self.is_last = nn.Sequential(*parts), is_first, is_last

    def forward(self, activations: Tensor) -> Tensor:
        if activations.dim() == 4 and not self.is_first:
            activations = activations.permute(0, 3, 1, 2)
        output: Tensor = self.parts(activations)
        return output.permute(0, 2, 3, 1) if output.dim() == 4 and not self.is_last else output


def _theirs(options: argparse.Namespace) -> None:
    """Run one rank of PyTorch's side."""
    config, components, plan = _setting(options)
    rank, address = options.rank, f"tcp://127.0.0.1:{options.port}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    held = [part for part in components if part.name in plan.stages[rank].components]
    parts = list(build_model(held, config, CPU).components.values())
    module = _PeerStage(parts, is_first=rank == 0, is_last=rank == plan.last)
    stage = pipelining.PipelineStage(module, rank, RANKS, CPU)
    held_stages = [stage] if options.schedule == "zb-h1" else stage
    pipeline = PEERS[options.schedule](held_stages, plan.microbatches, functional.cross_entropy)
    optimizer = torch.optim.SGD(module.parameters(), 0.01, 0.9, nesterov=True, fused=True)
    images, labels = random_batch(options.images, SIZE, CLASSES, SEED)
    normalise = Images(MEAN, STD, CPU, config.precision)
    steps = []
    for _ in range(WARM_UP + options.steps):
        distributed.barrier()
        began = time.perf_counter()
        losses: list[Tensor] = []
        if rank == 0:
            pipeline.step(normalise(images))
        else:
            pipeline.step(target=torch.from_numpy(labels), losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).detach().mean().item() if losses else 0.0
        steps.append((time.perf_counter() - began, loss))
    everyone: list[Any] = [None] * RANKS
    distributed.all_gather_object(everyone, steps)
    seconds = [max(rank[0] for rank in ranks) for ranks in zip(*everyone, strict=True)]
    loss = sum(rank[0][1] for rank in everyone)
    print(json.dumps({"seconds": statistics.median(seconds[WARM_UP:]), "loss": loss}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
