"""Compares a user's loop with hvdtrain.torch, Horovod's optimizer and PyTorch DDP.

    python benchmarks/torch_loop.py [--model resnet18] [--images 32] [--ranks 2] [--rounds 5]

All sides run the same hand-written loop (`PlainLoop`: images in memory, fused SGD) on the same
ranks with one thread each, and differ in the lines that distribute it: `hvdtrain.torch.prepare`,
Horovod's DistributedOptimizer with its defaults, or DistributedDataParallel over gloo with
`gradient_as_bucket_view`. Weights are in channels_last order, but for Horovod's optimizer, which
refuses them. A round is one job of each side, in turns; the first steps of a job do not count. A
ratio is above 1 if hvdtrain.torch is faster.
"""

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import common
import ddp
from comparison import compare

WARM_UP = 3  # steps of each job that do not count
SIDES = {"hvdtrain": "hvdtrain.torch", "horovod": "DistributedOptimizer", "ddp": "DDP (gloo)"}


def main() -> None:
    """Compare the seconds per step of all sides."""
    options = _options()
    if options.side is not None:
        _run_rank(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        from hvdtrain.data import synth

        count = options.ranks * options.images * (options.steps + 1)
        synth(data, count, common.CLASSES, size=common.SIZE)
        jobs = {name: partial(_job, options, data, side) for side, name in SIDES.items()}
        images = options.ranks * options.images
        title = f"a user's loop, {options.model}, fp32, {options.ranks} ranks x 1 thread, "
        compare(title + f"{images} images per step", "s", jobs, options.rounds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--images", type=int, default=32, help="images per rank and step")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15, help="steps per job")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _job(options: argparse.Namespace, data: Path, side: str, number: int) -> float:
    """Run one job; return the median seconds of its steps on rank 0."""
    from hvdtrain import launch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--data", str(data), "--port", str(port), "--side", side]
    for name in ("model", "images", "ranks", "steps"):
        command += [f"--{name}", str(getattr(options, name))]
    if side == "ddp":
        commands = [[*command, "--rank", str(rank)] for rank in range(options.ranks)]
    else:
        commands = [[*launch.mpirun(options.ranks), *command]]
    seconds = json.loads(common.run_all(commands, threads=1)[0])
    median = float(statistics.median(seconds[WARM_UP:]))
    print(f"round {number}, {SIDES[side]}: {median:.4f} s per step", file=sys.stderr, flush=True)
    return median


def _run_rank(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    is_channels_last = options.side != "horovod"
    loop = common.PlainLoop(options.model, options.data, "fp32", channels_last=is_channels_last)
    if options.side == "ddp":
        rank = ddp.join_gloo(loop, options.port, options.rank, options.ranks)
    elif options.side == "horovod":
        rank = ddp.join_horovod(loop)
    else:
        rank = _join_hvdtrain(loop)
    seconds = []
    for step in range(options.steps):
        start = time.perf_counter()
        loop.step((step * options.ranks + rank) * options.images, options.images)
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps(seconds), flush=True)
    if options.side == "ddp":
        ddp.leave_gloo()


def _join_hvdtrain(loop: common.PlainLoop) -> int:
    import hvdtrain.torch as distributed

    rank = distributed.start(threads=1)
    loop.module, loop.optimizer = distributed.prepare(loop.module, loop.optimizer)
    return rank.rank


if __name__ == "__main__":
    main()
