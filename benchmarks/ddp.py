"""Compares the data-parallel step time of hvdtrain with PyTorch DDP and Horovod's own optimizer.

    python benchmarks/ddp.py [--model resnet18] [--images 32] [--precision fp32] [--rounds 5]
                             [--peer ddp|horovod]

Both sides train the same model from the same seed on the same images, with fused SGD, on the same
number of ranks with one thread each. A round is one job of each side, in turns; the first steps of
a job do not count. hvdtrain's side is the program itself, with its loader and records. The peers
are the loops of their documentation with images in memory: DistributedDataParallel over gloo in
channels_last with `gradient_as_bucket_view`, or Horovod's DistributedOptimizer with its defaults,
which refuses weights in channels_last. The ratio is above 1 if hvdtrain is faster.
"""

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import common
from comparison import compare

PROVES = (
    "The figures compare steps, transfers and Keras with PyTorch, Horovod, mpi4py and plain loops."
)

WARM_UP = 3  # steps of each job that do not count
PEERS = {"ddp": "DDP (gloo)", "horovod": "Horovod"}


def main() -> None:
    """Compare the seconds per step of both sides."""
    options = _options()
    if options.job is not None:
        _peer(options)
        return
    images = options.ranks * options.images
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        from hvdtrain.data import synth

        synth(data, images * (options.steps + 1), common.CLASSES, size=common.SIZE)
        compare(
            f"{options.model}, {options.precision}, {options.ranks} ranks x 1 thread, "
            f"{images} images per step",
            "s",
            {
                "hvdtrain": lambda number: _ours(options, data, Path(folder) / f"run{number}"),
                PEERS[options.peer]: lambda _: _theirs(options, data),
            },
            options.rounds,
            goals={PEERS["ddp"]: 1.2 if options.model == "cnn" else 1.1},
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--images", type=int, default=32, help="images per rank and step")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--peer", choices=tuple(PEERS), default="ddp")
    parser.add_argument("--steps", type=int, default=12, help="steps per job")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _ours(options: argparse.Namespace, data: Path, run: Path) -> float:
    images = options.ranks * options.images
    arguments = f"--model {options.model} --precision {options.precision} --threads 1"
    arguments += f" --ranks {options.ranks} --batch-size {images}"
    arguments += f" --max-steps {options.steps} --log-every 1"
    common.run_all([common.training(arguments, data, run)], threads=1)
    return statistics.median(common.step_seconds(run, images)[WARM_UP:])


def _theirs(options: argparse.Namespace, data: Path) -> float:
    from hvdtrain import launch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--data", str(data), "--port", str(port)]
    for name in ("model", "images", "ranks", "precision", "peer", "steps"):
        command += [f"--{name}", str(getattr(options, name))]
    if options.peer == "horovod":
        commands = [[*launch.mpirun(options.ranks), *command, "--job", "-1"]]
    else:
        commands = [[*command, "--job", str(rank)] for rank in range(options.ranks)]
    seconds = json.loads(common.run_all(commands, threads=1)[0])
    return float(statistics.median(seconds[WARM_UP:]))


def _peer(options: argparse.Namespace) -> None:
    """Run one rank of the other side."""
    import torch

    torch.set_num_threads(1)
    loop = common.PlainLoop(
        options.model, options.data, options.precision, channels_last=options.peer == "ddp"
    )
    rank = (
        join_horovod(loop)
        if options.peer == "horovod"
        else join_gloo(loop, options.port, options.job, options.ranks)
    )
    seconds = []
    for step in range(options.steps):
        began = time.perf_counter()
        loop.step((step * options.ranks + rank) * options.images, options.images)
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps(seconds), flush=True)
    if options.peer == "ddp":
        leave_gloo()


def join_gloo(loop: common.PlainLoop, port: int, rank: int, ranks: int) -> int:
    """Wrap the model of a loop in DDP; return the rank."""
    from torch import distributed, nn

    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    loop.module = nn.parallel.DistributedDataParallel(loop.module, gradient_as_bucket_view=True)
    return rank


def leave_gloo() -> None:
    """End the process group: otherwise gloo's threads may abort the process."""
    from torch import distributed

    distributed.destroy_process_group()


def join_horovod(loop: common.PlainLoop) -> int:
    """Wrap the optimizer of a loop in Horovod's; return the rank."""
    import horovod.torch as horovod

    horovod.init()
    horovod.broadcast_parameters(loop.module.state_dict(), root_rank=0)
    loop.optimizer = horovod.DistributedOptimizer(
        loop.optimizer, named_parameters=loop.module.named_parameters()
    )
    return int(horovod.rank())


if __name__ == "__main__":
    main()
