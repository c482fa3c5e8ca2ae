"""Learn how heat spreads over a plate: a regression from fields to a field.

    python examples/heat.py heat.npz             makes the plates
    python examples/heat.py heat.npz RUN heat.png    draws what a run has learned of one of them

A plate has a grid of points, a start temperature and a conductivity at each of them, and an edge
that is kept at 0. The target is the temperature after some time, by explicit Euler steps.
"""

import sys

import numpy as np
import torch
from torch import nn

import hvdtrain

HEIGHT, WIDTH = 24, 32
PLATES = 2200
STEPS = 60
TIME_STEP = 0.2  # stable below 0.25 for conductivities up to 1


def smooth(random: np.random.Generator, count: int, passes: int) -> np.ndarray:
    """Return smooth random fields [count, HEIGHT, WIDTH] between 0 and 1."""
    fields = random.random((count, HEIGHT, WIDTH))
    for _ in range(passes):
        fields = (fields + sum(np.roll(fields, by, axis) for by in (1, -1) for axis in (1, 2))) / 5
    low, high = fields.min((1, 2), keepdims=True), fields.max((1, 2), keepdims=True)
    scaled: np.ndarray = (fields - low) / (high - low)
    return scaled


def heated(start: np.ndarray, conductivity: np.ndarray) -> np.ndarray:
    """Return the temperatures [n, HEIGHT, WIDTH] after STEPS steps."""
    now = np.pad(start, ((0, 0), (1, 1), (1, 1)))
    for _ in range(STEPS):
        inside = now[:, 1:-1, 1:-1]
        around = now[:, :-2, 1:-1] + now[:, 2:, 1:-1] + now[:, 1:-1, :-2] + now[:, 1:-1, 2:]
        now[:, 1:-1, 1:-1] = inside + TIME_STEP * conductivity * (around - 4 * inside)
    return now[:, 1:-1, 1:-1]


def make(path: str) -> None:
    """Write inputs [n, 2, HEIGHT, WIDTH] and targets [n, 1, HEIGHT, WIDTH], float32."""
    random = np.random.default_rng(0)
    start, conductivity = smooth(random, PLATES, 3), smooth(random, PLATES, 6)
    inputs = np.stack([start, conductivity], axis=1).astype(np.float32)
    targets = heated(start, conductivity)[:, None].astype(np.float32)
    np.savez(path, inputs=inputs, targets=targets)


def layer(channels: int) -> nn.Module:
    """Return a layer that sees a neighbourhood of 7 x 7 points."""
    return nn.Sequential(nn.Conv2d(channels, channels, 7, padding=3), nn.GELU())


def build(input_shape: tuple[int, int, int], classes: int) -> list[hvdtrain.Component]:
    """Return a network whose output has one number per point."""
    channels = input_shape[0]
    return [
        hvdtrain.Component("first", lambda: nn.Conv2d(channels, 24, 3, padding=1)),
        *(hvdtrain.Component(f"layer{number}", lambda: layer(24)) for number in range(4)),
        hvdtrain.Component("last", lambda: nn.Conv2d(24, 1, 1)),
    ]


def draw(path: str, run: str, to: str) -> None:
    """Draw the last plate, its temperature after the steps, and what the run's model says."""
    from matplotlib import pyplot

    with np.load(path) as plates:
        inputs, target = plates["inputs"][-1:], plates["targets"][-1, 0]
    model = hvdtrain.load(run, which="last", trust=True)
    with torch.inference_mode():
        learned = model(torch.from_numpy(inputs))[0, 0].numpy()
    panels = {
        "start": inputs[0, 0],
        "conductivity": inputs[0, 1],
        "after some time": target,
        "learned": learned,
    }
    figure, axes = pyplot.subplots(1, 4, figsize=(10, 2.4))
    for place, (title, field) in zip(axes, panels.items(), strict=True):
        top = 1 if title in ("start", "conductivity") else float(target.max())
        place.imshow(field, vmin=0, vmax=top, cmap="inferno")
        place.set_title(title, fontsize=9)
        place.axis("off")
    figure.savefig(to, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        make(sys.argv[1])
    else:
        draw(*sys.argv[1:4])
