"""What `bench step` found, as JSON and as text."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Found:
    """What `bench step` found, over all ranks.

    Attributes:
        step: median seconds of a step. quartiles: its lower and upper quartile.
        seconds: of a step, by what it is spent on: means over steps and ranks.
        rates: matrix operations a second of each rank, measured on all of them at once.
        flops: operations of a step, over all ranks.
        components: seconds of (forward, backward) a step, the mean of the ranks that hold it.
    """

    setting: str
    images: int
    step: float
    quartiles: tuple[float, float]
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


def as_json(found: Found) -> dict[str, Any]:
    """What `bench step --json` prints."""
    return {
        "setting": found.setting,
        "images_per_second": found.images_per_second,
        "step_seconds": {"median": found.step, "quartiles": found.quartiles},
        "seconds": found.seconds,
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
        f"{found.images_per_second:,.1f} images/s: {1e3 * found.step:,.2f} ms a step "
        f"(quartiles {1e3 * found.quartiles[0]:,.2f} to {1e3 * found.quartiles[1]:,.2f})",
        f"{found.flops / found.step / 1e9:,.0f} GFLOP/s, {found.matrix_share:.0%} of the "
        f"{rate / 1e9:,.0f} GFLOP/s at which the ranks multiply matrices",
        "",
    ]
    total = sum(found.seconds.values())
    lines += [
        f"{name:<24} {1e3 * seconds:>10,.3f} ms {seconds / total:>7.1%}"
        for name, seconds in found.seconds.items()
    ]
    computed = sum(map(sum, found.components.values()))
    width = max(len(name) for name in found.components)
    lines += ["", f"{'component':<{width}} {'forward':>10} {'backward':>10}  of all components"]
    lines += [
        f"{name:<{width}} {1e3 * forward:>7,.2f} ms {1e3 * backward:>7,.2f} ms "
        f"{(forward + backward) / computed:>7.1%}"
        for name, (forward, backward) in found.components.items()
    ]
    return "\n".join(lines)
