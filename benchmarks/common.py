"""Functions that benchmarks of whole jobs share: jobs of hvdtrain, and a plain PyTorch loop."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdtrain.config import TrainConfig
    from hvdtrain.planner.cost import Known
    from hvdtrain.planner.measure import Subject
    from hvdtrain.world import World

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
CLASSES, SIZE = 10, 32


def training(arguments: str, data: Path, run: Path) -> list[str]:
    """Return the command of a training job that logs every step, or every `--log-every` steps."""
    command = f"train {arguments} --optimizer sgd --lr 0.01 --data {data} --run {run}"
    return [sys.executable, "-m", "hvdtrain", *command.split()]


def without_rate(command: list[str]) -> list[str]:
    """Return the command of a training job with the default optimizer and learning rate."""
    start = command.index("--optimizer")
    return [*command[:start], *command[start + 4 :]]


@contextmanager
def busy(core: int, processes: int = 1) -> Iterator[None]:
    """Let processes that only compute share a core while the block runs."""
    spin = ["taskset", "-c", str(core), sys.executable, "-c", "while True: pass"]
    load = [subprocess.Popen(spin) for _ in range(processes)]
    try:
        yield
    finally:
        for process in load:
            process.kill()
            process.wait()


def step_seconds(run: Path, batch_size: int) -> list[float]:
    """Return the seconds per step of each line that a job has logged."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [batch_size / line["images_per_second"] for line in lines if line["event"] == "step"]


def run_all(commands: Sequence[Sequence[str]], threads: int, **more: str) -> list[str]:
    """Run commands side by side and return what each printed; exit if one fails."""
    environment = os.environ | AS_ROOT | {"OMP_NUM_THREADS": str(threads)} | more
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for command in commands
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"failed: {' '.join(commands[0])}")
    return printed


def rounds(count: int, sides: Sequence[Callable[[int], float]]) -> list[list[float]]:
    """Run all sides once per round, each round starting with another; return values by side."""
    values: list[list[float]] = [[] for _ in sides]
    for number in range(count):
        for turn in range(len(sides)):
            side = (number + turn) % len(sides)
            values[side].append(sides[side](number))
    return values


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Return the median and all values in order as text."""
    ordered = ", ".join(f"{value:{form}}" for value in sorted(values))
    return f"{statistics.median(values):{form}} (rounds: {ordered})"


class PlainLoop:
    """A hand-written PyTorch training loop: images in memory, channels_last, fused SGD.

    On a GPU the images of a step are copied to it as bytes and normalised there.
    """

    def __init__(
        self,
        model: str,
        data: str,
        precision: str,
        channels_last: bool = True,
        device: str = "cpu",
    ) -> None:
        import numpy as np
        import torch
        from torch import nn

        from hvdtrain import models
        from hvdtrain.data import open_split, read_index
        from hvdtrain.host.process import keep_freed_memory
        from hvdtrain.models.component import build_component

        keep_freed_memory()  # as hvdtrain does: by chance, glibc would give it back at each step
        index = read_index(Path(data))
        with open_split(index, "train") as samples:
            everything = samples.gather(np.arange(len(samples)))
        self.images, self.labels = everything.images, everything.labels
        self.order = np.random.default_rng(0).permutation(len(self.labels))
        self.mean, self.std = (
            torch.tensor(values, dtype=torch.float32, device=device).view(1, 3, 1, 1)
            for values in (index.mean, index.std)
        )
        components = models.components(model, index.classes, index.image_shape[0])
        self.module: Any = nn.Sequential(*(build_component(part, 0) for part in components))
        if channels_last:
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module.to(device)
        self.precision, self.device = precision, device
        self.optimizer: Any = torch.optim.SGD(
            self.module.parameters(), 0.01, 0.9, nesterov=True, fused=True
        )

    def step(self, start: int, images: int) -> float:
        """Run one step on the images from `start` on in the shuffled order; return the loss."""
        import torch
        from torch.nn import functional

        rows = self.order[start % len(self.order) :][:images]
        raw = torch.from_numpy(self.images[rows]).to(self.device)
        pixels = raw.permute(0, 3, 1, 2).float()
        pixels = pixels.div_(255).sub_(self.mean).div_(self.std)
        labels = torch.from_numpy(self.labels[rows]).to(self.device)
        with _autocast(self.precision, self.device):
            logits = self.module(pixels)
        loss = functional.cross_entropy(logits.float(), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def _autocast(precision: str, device: str) -> AbstractContextManager[object]:
    import torch

    return torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext()


def measured(model: str, images: int, job: "World") -> "tuple[TrainConfig, Subject, Known]":
    """Return what `--plan auto` measures on the ranks of a job, one thread each. Collective.

    Args:
        images: per step, over all ranks.
    """
    import torch

    from hvdtrain import models
    from hvdtrain.backends.pytorch.measured import subject_of
    from hvdtrain.check.plan import MEAN, STD
    from hvdtrain.config import TrainConfig
    from hvdtrain.data.index import TargetForm
    from hvdtrain.parallel.stage import Images
    from hvdtrain.planner import choose

    torch.set_num_threads(1)
    config = TrainConfig(model=model, data="", plan="auto", optimizer="sgd", batch_size=images)
    components = models.components(model, CLASSES, SIZE)
    normalised = Images(MEAN, STD, torch.device("cpu"), config.precision)
    form = TargetForm((), "int64", CLASSES)
    subject = subject_of(config, components, SIZE, form, normalised)
    return config, subject, choose.measure(subject, job)
