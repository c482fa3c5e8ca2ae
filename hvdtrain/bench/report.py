"""The result of `bench step`, as JSON and as text."""

from dataclasses import dataclass
from typing import Any


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
        """Return the images per second."""
        return self.images / self.step

    @property
    def matrix_share(self) -> float:
        """Return the achieved part of the ranks' matrix rates."""
        return self.flops / self.step / sum(self.rates)


def as_json(result: StepReport) -> dict[str, Any]:
    """Return the object that `bench step --json` prints."""
    return {
        "setting": result.setting,
        "images_per_second": result.images_per_second,
        "step_seconds": {"median": result.step, "quartiles": result.quartiles},
        "seconds": result.seconds,
        "matrix_flops_per_second": result.rates,
        "step_flops": result.flops,
        "matrix_share": result.matrix_share,
        "components": {
            name: {"forward": forward, "backward": backward}
            for name, (forward, backward) in result.components.items()
        },
    }


def as_text(result: StepReport) -> str:
    """Return the text that `bench step` prints."""
    rate = sum(result.rates)
    lines = [
        result.setting,
        f"{result.images_per_second:,.1f} images/s: {1e3 * result.step:,.2f} ms per step "
        f"(quartiles {1e3 * result.quartiles[0]:,.2f} to {1e3 * result.quartiles[1]:,.2f})",
        f"{result.flops / result.step / 1e9:,.0f} GFLOP/s, {result.matrix_share:.0%} of the "
        f"{rate / 1e9:,.0f} GFLOP/s at which the ranks multiply matrices",
        "",
    ]
    total = sum(result.seconds.values())
    lines += [
        f"{name:<24} {1e3 * seconds:>10,.3f} ms {seconds / total:>7.1%}"
        for name, seconds in result.seconds.items()
    ]
    computed = sum(map(sum, result.components.values()))
    width = max(len(name) for name in result.components)
    lines += ["", f"{'component':<{width}} {'forward':>10} {'backward':>10}  of all components"]
    lines += [
        f"{name:<{width}} {1e3 * forward:>7,.2f} ms {1e3 * backward:>7,.2f} ms "
        f"{(forward + backward) / computed:>7.1%}"
        for name, (forward, backward) in result.components.items()
    ]
    return "\n".join(lines)
