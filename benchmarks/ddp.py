"""hvdtrain against PyTorch DistributedDataParallel (gloo): the step time of data parallelism.

    python benchmarks/ddp.py [--model resnet18] [--images 32] [--precision fp32] [--rounds 5]

Both sides train the same model from the same seed on the same images, in channels_last, with
fused SGD, on the same number of ranks with one thread each. A round is one job of each side, in
turn; the first two steps of a job are not counted. hvdtrain's side is the program itself, with
loader, records and all; DDP's side is the plain loop of its documentation (images in memory,
`gradient_as_bucket_view`). The ratio is above 1 where hvdtrain is faster.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

WARM_UP = 2  # steps that no job counts
CLASSES, SIZE = 10, 32


def main() -> None:
    """Run the rounds and print both medians, each round's ratio, and their median."""
    options = _options()
    if options.peer_rank is not None:
        _peer(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        from hvdtrain.data import synth

        synth(data, options.ranks * options.images * (options.steps + 1), CLASSES, size=SIZE)
        rounds = [_round(options, data, Path(folder) / f"run{i}") for i in range(options.rounds)]
    ours, theirs = ([times[side] for times in rounds] for side in (0, 1))
    images = options.ranks * options.images
    print(
        f"{options.model}, {options.precision}, {options.ranks} ranks x 1 thread, {images} images"
    )
    for name, medians in (("hvdtrain", ours), ("DDP (gloo)", theirs)):
        seconds = statistics.median(medians)
        spread = f"{min(medians):.4f} to {max(medians):.4f}"
        print(f"{name:>10}: {seconds:.4f} s a step ({spread}), {images / seconds:,.1f} images/s")
    ratios = sorted(other / own for own, other in rounds)
    print(
        f"     ratio: {statistics.median(ratios):.3f} "
        f"(rounds: {', '.join(f'{ratio:.3f}' for ratio in ratios)})"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--images", type=int, default=32, help="images a rank and step")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=12, help="steps of a job")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peer-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _round(options: argparse.Namespace, data: Path, run: Path) -> tuple[float, float]:
    """Median step seconds of one job of each side; the sides take turns to be first."""
    first = int(run.name[-1]) % 2
    jobs = (_ours, _theirs)
    times = {side: jobs[side](options, data, run) for side in (first, 1 - first)}
    return times[0], times[1]


def _ours(options: argparse.Namespace, data: Path, run: Path) -> float:
    command = f"train --model {options.model} --precision {options.precision} --optimizer sgd"
    command += f" --lr 0.01 --ranks {options.ranks} --batch-size {options.ranks * options.images}"
    command += f" --max-steps {options.steps} --log-every 1 --threads 1 --data {data} --run {run}"
    _run([[sys.executable, "-m", "hvdtrain", *command.split()]])
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    rates = [line["images_per_second"] for line in lines if line["event"] == "step"]
    seconds = [options.ranks * options.images / rate for rate in rates]
    return float(statistics.median(seconds[WARM_UP:]))


def _theirs(options: argparse.Namespace, data: Path, run: Path) -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = [sys.executable, __file__, "--data", str(data), "--port", str(port)]
    for name in ("model", "images", "ranks", "precision", "steps"):
        own += [f"--{name}", str(getattr(options, name))]
    first = _run([[*own, "--peer-rank", str(rank)] for rank in range(options.ranks)])
    seconds = json.loads(first)
    return float(statistics.median(seconds[WARM_UP:]))


def _run(commands: list[list[str]]) -> str:
    """Run commands side by side; what the first printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for command in commands
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"failed: {' '.join(commands[0])}")
    return printed[0]


def _peer(options: argparse.Namespace) -> None:
    """One rank of the DDP side."""
    import numpy as np
    import torch
    from torch import distributed, nn
    from torch.nn import functional

    from hvdtrain import models
    from hvdtrain.data import open_split, read_index
    from hvdtrain.models.component import build_component

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{options.port}"
    distributed.init_process_group(
        "gloo", init_method=address, rank=options.peer_rank, world_size=options.ranks
    )
    components = models.components(options.model, CLASSES, SIZE)
    model: Any = nn.Sequential(*(build_component(component, 0) for component in components))
    model = model.to(memory_format=torch.channels_last)
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, nesterov=True, fused=True)
    index = read_index(options.data)
    mean, std = (
        torch.tensor(values).float().view(1, 3, 1, 1) for values in (index.mean, index.std)
    )
    with open_split(index, "train") as samples:
        everything = samples.gather(np.arange(len(samples)))
    order = np.random.default_rng(0).permutation(len(everything))
    seconds = []
    for step in range(options.steps):
        began = time.perf_counter()
        start = (step * options.ranks + options.peer_rank) * options.images
        rows = order[start : start + options.images]
        images = torch.from_numpy(everything.images[rows]).permute(0, 3, 1, 2).float()
        images = images.div_(255).sub_(mean).div_(std)
        with _autocast(options.precision):
            logits = replica(images)
        loss = functional.cross_entropy(logits.float(), torch.from_numpy(everything.labels[rows]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds))
    distributed.destroy_process_group()


def _autocast(precision: str) -> AbstractContextManager[object]:
    import torch

    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()


if __name__ == "__main__":
    main()
