"""Measures the cost of checkpoints: in training, and when saving and loading against the disk.

    python benchmarks/checkpoint.py [--rounds 9]
    python benchmarks/checkpoint.py --part training --data DIR [--images 8] [--steps 220]
                                    [--every 100]
    python benchmarks/checkpoint.py --part copy --data DIR [--images 8] [--steps 220] [--every 20]

Training compares `hvdtrain train` of resnet50 with a checkpoint every `--every` steps to the same
job without one, in turns. Copy times what such a job on one rank waits for each checkpoint. A save
(weights and momentum of resnet50, synced to the disk) is compared with a plain write and read of
the same bytes, a load with a cold page cache with a plain read. The write alone and the load are
compared with safetensors and torch.distributed.checkpoint (DCP), too, which do not hash.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import common
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from comparison import compare
from safetensors.numpy import load_file, save_file

from hvdtrain import cli, models
from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.tensorfile import part_name, write_tensors
from hvdtrain.models.component import tensor_shapes
from hvdtrain.training.run import Saving

PROVES = "Saving runs beside training and costs less than the noise of the machine."

MEGA = 2**20


def main() -> None:
    """Compare the cost in training, or the rates of the disk."""
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.part == "training":
            _training(options, Path(folder))
        elif options.part == "copy":
            _copy(options, Path(folder))
        else:
            _disk(options.rounds, Path(folder))


def _training(options: argparse.Namespace, folder: Path) -> None:
    def seconds(name: str, every: str) -> float:
        run = folder / name
        arguments = f"--model resnet50 --precision bf16 --batch-size {options.images}"
        arguments += f" --max-steps {options.steps} --log-every 10"
        command = common.training(arguments, options.data, run)
        common.run_all([[*command, "--checkpoint-every", every]], os.cpu_count() or 1)
        return float(json.loads((run / "summary.json").read_text())["train_seconds"])

    title = f"resnet50, bf16, {options.images} images, {options.steps} steps of training"
    sides = {
        f"a checkpoint every {options.every} steps": lambda number: seconds(
            f"saving{number}", f"{options.every} steps"
        ),
        "without checkpoints": lambda number: seconds(f"without{number}", "1 epoch"),
    }
    compare(title, "s", sides, options.rounds)


def _copy(options: argparse.Namespace, folder: Path) -> None:
    """Print how long training waits for the copy of each checkpoint."""
    waited, begin = [], Saving.begin

    def timed(saving: Saving) -> None:
        saving.finish()  # not counted: with a checkpoint a minute, the last one has long ended
        began = time.perf_counter()
        begin(saving)
        waited.append(time.perf_counter() - began)

    setattr(Saving, "begin", timed)  # noqa: B010
    arguments = f"train --model resnet50 --precision bf16 --batch-size {options.images}"
    arguments += f" --max-steps {options.steps} --data {options.data} --run {folder / 'run'}"
    status = cli.run([*arguments.split(), "--checkpoint-every", f"{options.every} steps"])
    if not waited:
        sys.exit(status or "no checkpoint: use more --steps than --every")
    typical, longest = statistics.median(waited), max(waited)
    print(
        f"{len(waited)} checkpoints: training waited {1e3 * typical:.0f} ms for each (median; at "
        f"most {1e3 * longest:.0f}): {typical / 60:.2%} of a minute"
    )
    sys.exit(status)


def _disk(rounds: int, folder: Path) -> None:
    """Compare saving and loading with the disk, and with how safetensors and torch do it."""
    tensors = _tensors()
    content = b"".join(tensor.tobytes() for tensor in tensors.values())
    size = f"weights and momentum of resnet50, {len(content) / MEGA:.0f} MiB"
    plain, part, saved = folder / "plain", folder / part_name(0), folder / "step-00000001"
    peer, distributed = folder / "peer.safetensors", folder / "dcp"
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    rates = partial(_rate_of, len(content))
    write = partial(_write, plain, content)

    writes = {
        "hashed while it is written": rates(lambda: write_tensors(part, tensors), without=part),
        "plain write": rates(write, without=plain),
        "SHA-256 alone": rates(lambda: hashlib.sha256(content).hexdigest()),
        "safetensors, synced": rates(lambda: _save_safetensors(peer, tensors), without=peer),
        "torch DCP": rates(
            lambda: dcp.save(state, checkpoint_id=distributed), without=distributed
        ),
    }
    goals = {"plain write": 0.9}
    compare(f"{size}, written", "MiB/s", writes, rounds, warm_up=True, goals=goals)

    def save() -> None:
        store.write_part(folder, saved.name, 0, tensors)
        store.commit(folder, saved.name, [0], {"step": 1, "position": 1}, {})

    def write_and_read() -> None:
        write()
        _forget(plain)
        plain.read_bytes()

    saves = {
        "save: write, read back, commit": rates(save, without=saved),
        "plain write and read": rates(write_and_read, without=plain),
    }
    compare(f"{size}, written and read back", "MiB/s", saves, rounds, warm_up=True)
    reads = {
        "load": rates(lambda: store.load(saved), saved / part_name(0)),
        "plain read": rates(plain.read_bytes, plain),
        "safetensors": rates(lambda: load_file(peer), peer),
        "torch DCP": rates(
            lambda: dcp.load(_empty(state), checkpoint_id=distributed),
            distributed / "__0_0.distcp",
        ),
    }
    compare(f"{size}, read from the disk", "MiB/s", reads, rounds, warm_up=True)


def _tensors() -> dict[str, np.ndarray]:
    """Return weights and momentum of resnet50 by their names in a checkpoint."""
    shapes = tensor_shapes(models.components("resnet50", 10, 32))
    draw = np.random.default_rng(0)
    tensors = {
        f"{store.MODEL}{name}": draw.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    }
    momentum = [name for name in shapes if name.endswith(("weight", "bias"))]
    return tensors | {
        f"{store.OPTIMIZER}{name}/momentum": draw.standard_normal(shapes[name], np.float32)
        for name in momentum
    }


def _empty(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return memory to load into, which all sides take anew."""
    return {name: torch.empty_like(tensor) for name, tensor in state.items()}


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _save_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write as safetensors does, and sync the file, as the other sides do."""
    save_file(dict(tensors), path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _rate_of(
    size: int,
    work: Callable[[], object],
    cold: Path | None = None,
    without: Path | None = None,
) -> Callable[[int], float]:
    """Return a side that measures `work` in MiB/s.

    Args:
        cold: a file that is not in memory before.
        without: a file or folder of the round before, which is removed first, as a run does it in
            the background.
    """

    def rate(number: int) -> float:
        if without is not None:
            shutil.rmtree(without) if without.is_dir() else without.unlink(missing_ok=True)
            os.sync()
        if cold is not None:
            _forget(cold)
        began = time.perf_counter()
        work()
        return size / MEGA / (time.perf_counter() - began)

    return rate


def _forget(path: Path) -> None:
    """Let the kernel drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="packed, for --part training and copy")
    parser.add_argument("--part", choices=("training", "copy", "disk"), default="disk")
    parser.add_argument("--folder", type=Path, default=None, help="folder on the disk to measure")
    parser.add_argument("--images", type=int, default=8, help="images per step")
    parser.add_argument("--steps", type=int, default=220, help="steps per job")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
