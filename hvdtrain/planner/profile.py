"""Profiles: the times of each component on each rank, and the files that hold them.

A profile is measured (`measure.py`), read from a file, or predicted (`clusters.py`). This module
does not import torch.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError, on_one_line
from hvdtrain.host.files import write_text
from hvdtrain.host.harmless import parse_json
from hvdtrain.options.givenmodel import PREFIX
from hvdtrain.planner.agreement import Coding
from hvdtrain.planner.network import Contention, Curve, MeasuredNetwork, Stacked

if TYPE_CHECKING:
    from hvdtrain.models.costs import ComponentCost

VERSION = 3  # of the files
LARGEST = 64 * 2**20  # bytes: enough for 1,000 ranks with 100 components
HALVES = ("input_half", "weight_half")


@dataclass(frozen=True)
class ComponentTimes:
    """Seconds of one component on one rank, by number of samples.

    Attributes:
        input_half, weight_half: of a backward in halves; None if they were not measured.
        update: of the optimizer; does not depend on the samples.
        spread: of the repeats that count, (largest - smallest) / median of the noisiest size.
        coding: of compressing and decompressing its gradients, by the measured methods.
    """

    forward: Curve
    backward: Curve
    input_half: Curve | None = None
    weight_half: Curve | None = None
    update: float = 0.0
    spread: float = 0.0
    coding: Mapping[str, Coding] = field(default_factory=dict)

    def times(self, factor: float) -> "ComponentTimes":
        """Return the times on a rank that is `factor` times slower."""
        input_half, weight_half = (
            None if half is None else half.times(factor)
            for half in (self.input_half, self.weight_half)
        )
        return ComponentTimes(
            forward=self.forward.times(factor),
            backward=self.backward.times(factor),
            input_half=input_half,
            weight_half=weight_half,
            update=factor * self.update,
            spread=self.spread,
            coding={method: code.times(factor) for method, code in self.coding.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the times as a profile file stores them."""
        curves = {
            name: _points(curve)
            for name in ("forward", "backward", *HALVES)
            if (curve := getattr(self, name)) is not None
        }
        coding = {method: list(code) for method, code in self.coding.items()}
        return curves | {"update": self.update, "spread": self.spread, "coding": coding}


class ComponentArrays(NamedTuple):
    """Seconds of all components of a rank, in model order: fp64 [components].

    Attributes:
        forward, backward: called with a number of samples, they return the array.
        update: of the optimizer.
    """

    forward: Stacked
    backward: Stacked
    update: np.ndarray


NOTHING = Curve(((1.0, 0.0),))


@dataclass(frozen=True)
class RankTimes:
    """Measured or predicted times of one rank.

    Attributes:
        components: times by component name.
        load: seconds of preparing images for the first component, by number of samples.
        resident_bytes: bytes of the process besides those counted for a model.
        activation_factor: real bytes of activations divided by the counted ones.
        activation_spread: by how much this factor was larger at another number of samples.
        message_seconds: seconds of posting a receive, sending one byte and receiving it, besides
            the time of the network.
    """

    components: Mapping[str, ComponentTimes]
    load: Curve = NOTHING
    resident_bytes: int = 0
    message_seconds: float = 0.0
    activation_factor: float = 1.0
    activation_spread: float = 0.0

    @cached_property
    def arrays(self) -> ComponentArrays:
        """Return the times of all components as arrays."""
        times = self.components.values()
        return ComponentArrays(
            forward=Stacked([part.forward for part in times]),
            backward=Stacked([part.backward for part in times]),
            update=np.array([part.update for part in times]),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the times as a profile file stores them."""
        return {
            "components": {name: times.to_json() for name, times in self.components.items()},
            "load": _points(self.load),
            "resident_bytes": self.resident_bytes,
            "message_seconds": self.message_seconds,
            "activation_factor": self.activation_factor,
            "activation_spread": self.activation_spread,
        }

    def with_coding(self, coding: Mapping[str, Mapping[str, Coding]]) -> "RankTimes":
        """Return the times with the seconds of compression, by component and method."""
        components = {
            name: replace(times, coding=coding[name]) for name, times in self.components.items()
        }
        return replace(self, components=components)

    def times(self, factor: float) -> "RankTimes":
        """Return the times on a rank that is `factor` times slower."""
        slower = {name: component.times(factor) for name, component in self.components.items()}
        return replace(
            self,
            components=slower,
            load=self.load.times(factor),
            message_seconds=factor * self.message_seconds,
        )


@dataclass(frozen=True)
class Profile:
    """Times of all ranks.

    Attributes:
        ranks: in rank order.
    """

    ranks: tuple[RankTimes, ...]

    @classmethod
    def alike(cls, one: RankTimes, ranks: int) -> "Profile":
        """Return a profile of `ranks` ranks with the same times."""
        return cls((one,) * ranks)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of the components, in model order."""
        return tuple(self.ranks[0].components)

    @cached_property
    def slowness(self) -> tuple[float, ...]:
        """Return the time of each rank for the whole model, divided by that of the fastest rank.

        It is the median over all measured sizes, so that a disturbance at one size does not count.
        """
        curve = next(iter(self.ranks[0].components.values())).forward
        sizes = [size for size, _ in curve.points if size > 0] or [1.0]
        seconds = np.maximum([_whole_model(rank, sizes) for rank in self.ranks], 1e-12)
        ratios: list[float] = np.median(seconds / seconds.min(axis=0), axis=1).tolist()
        return tuple(slow / min(ratios) for slow in ratios)

    def with_coding(self, coding: Mapping[str, Mapping[str, Coding]]) -> "Profile":
        """Return the profile with the same seconds of compression on all ranks.

        Args:
            coding: by component and method.
        """
        alike = {id(rank): rank.with_coding(coding) for rank in self.ranks}
        return Profile(tuple(alike[id(rank)] for rank in self.ranks))

    def scaled(self, factors: Sequence[float]) -> "Profile":
        """Return the profile with each rank slower by its factor."""
        pairs = zip(self.ranks, factors, strict=True)
        return Profile(tuple(rank.times(factor) for rank, factor in pairs))


def _whole_model(rank: RankTimes, sizes: Sequence[float]) -> list[float]:
    """Return the seconds of all components together, for each size."""
    arrays = rank.arrays
    return [float((arrays.forward(size) + arrays.backward(size)).sum()) for size in sizes]


def model_words(config: TrainConfig, costs: "Sequence[ComponentCost]", image_size: int) -> str:
    """Return the model and its images, as the subject of a profile has them."""
    patches = f", patches of {config.patch_size}" if config.patch_size else ""
    content = ""
    if config.model.startswith(PREFIX):  # other models may have the same name
        content = f" {hashlib.sha256(repr(costs).encode()).hexdigest()[:8]}"
    classes = costs[-1].output_shape[-1]
    return f"{config.model}{content}{patches}, {classes} classes, {image_size} px"


def precision_words(config: TrainConfig) -> str:
    """Return what else decides the times of components, as the subject of a profile has it."""
    compiled = ", compiled" if config.compile else ""
    return f"{config.precision}{compiled}, {config.optimizer}"


def subjects_of(config: TrainConfig, costs: "Sequence[ComponentCost]", image_size: int) -> str:
    """Return a pattern of the subjects whose component times are those of a run's model.

    They may have another batch size, other ranks and all-reduces.
    """
    model, precision = model_words(config, costs, image_size), precision_words(config)
    return f"{escape(model)}, * images, {escape(precision)}, *"


def save(path: Path, subject: str, profile: Profile, network: MeasuredNetwork) -> None:
    """Write a profile.

    Args:
        subject: the measured model, sizes and settings in words.

    Raises:
        UsageError: if the file cannot be written.
    """
    content = {
        "version": VERSION,
        "subject": subject,
        "ranks": [rank.to_json() for rank in profile.ranks],
        "network": {
            "hosts": list(network.hosts),
            "all_reduce": [
                [crosses, number, _points(curve)]
                for crosses, curves in network.all_reduce.items()
                for number, curve in curves.items()
            ],
            "hand_over": [
                [crosses, _points(curve)] for crosses, curve in network.hand_over.items()
            ],
            "contention": list(network.contention),
        },
    }
    write_text(path, json.dumps(content) + "\n", "the profile")


def is_profile(path: Path) -> bool:
    """Return whether a file looks like a profile; False if it cannot be read."""
    try:
        content = parse_json(path.read_bytes()) if path.stat().st_size <= LARGEST else None
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "subject" in content


def load(
    path: Path,
    subject: str,
    names: Sequence[str],
    ranks: int,
    methods: Sequence[str] = (),
    advice: str = "remove it or use another --profile",
) -> tuple[Profile, MeasuredNetwork] | str:
    """Read a profile; return its subject if that is another one.

    Args:
        subject: as a pattern, in which * stands for anything.
        methods: of compression whose seconds it must have.
        advice: what to do about a file that is not valid.

    Raises:
        UsageError: if the file is not a valid profile.
    """
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise UsageError(
                f"{path} is not a valid profile (larger than {LARGEST:,} bytes): {advice}"
            )
        content = parse_json(text)
    except OSError as error:
        raise UsageError(f"the profile {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"the profile {path} cannot be used: {error}") from None
    try:
        measured = str(content["subject"])
        if content["version"] == VERSION and not fnmatchcase(measured, subject):
            return on_one_line(measured, 300)
        profile, network = _checked(content, names, ranks)
        _check_methods(profile, methods)
        return profile, network
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} is not a valid profile ({reason}): {advice}") from None


def _checked(
    content: Any, names: Sequence[str], number_of_ranks: int
) -> tuple[Profile, MeasuredNetwork]:
    """Return the profile of a file's content; raise ValueError or the like if it is wrong."""
    if content["version"] != VERSION:
        raise ValueError(f"it has version {content['version']!r:.20}, not {VERSION}")
    ranks = tuple(_rank(item, names) for item in content["ranks"])
    network = content["network"]
    hosts = tuple(str(host) for host in network["hosts"])
    if len(ranks) != number_of_ranks:
        raise ValueError(f"it has {len(ranks)} rank(s), the job has {number_of_ranks}")
    if len(hosts) != len(ranks):
        raise ValueError(f"it has {len(ranks)} rank(s), and names the hosts of {len(hosts)}")
    all_reduce: dict[bool, dict[int, Curve]] = {}
    for crosses, number, points in network["all_reduce"]:
        all_reduce.setdefault(bool(crosses), {})[int(_number(number, least=2))] = _curve(points)
    hand_over = {bool(crosses): _curve(points) for crosses, points in network["hand_over"]}
    if len(ranks) > 1 and not (all_reduce and hand_over):
        raise ValueError("its network is empty")
    compute, reduce = (_number(item, least=1.0) for item in network["contention"])
    contention = Contention(compute, reduce)
    return Profile(ranks), MeasuredNetwork(hosts, all_reduce, hand_over, contention)


def _check_methods(profile: Profile, methods: Sequence[str]) -> None:
    for method in methods:
        if any(method not in c.coding for rank in profile.ranks for c in rank.components.values()):
            raise ValueError(f"it has no seconds of {method}")


def _rank(content: Mapping[str, Any], names: Sequence[str]) -> RankTimes:
    components = content["components"]
    if list(components) != list(names):
        raise ValueError("its components are not those of the model")
    return RankTimes(
        {name: _times(times) for name, times in components.items()},
        load=_curve(content["load"]),
        resident_bytes=int(_number(content["resident_bytes"])),
        message_seconds=_number(content["message_seconds"]),
        activation_factor=_number(content["activation_factor"], least=1.0),
        # A file of an earlier version has none.
        activation_spread=_number(content.get("activation_spread", 0.0)),
    )


def _times(content: Mapping[str, Any]) -> ComponentTimes:
    input_half, weight_half = (
        _curve(content[name]) if name in content else None for name in HALVES
    )
    return ComponentTimes(
        forward=_curve(content["forward"]),
        backward=_curve(content["backward"]),
        input_half=input_half,
        weight_half=weight_half,
        update=_number(content["update"]),
        spread=_number(content["spread"]),
        coding={
            str(method): Coding(_number(encode), _number(decode))
            # A file of an earlier version has none.
            for method, (encode, decode) in content.get("coding", {}).items()
        },
    )


def _points(curve: Curve) -> list[list[float]]:
    return [list(point) for point in curve.points]


def _curve(points: Any) -> Curve:
    pairs = [(_number(size), _number(seconds)) for size, seconds in points]
    sizes = [size for size, _ in pairs]
    if not pairs or sizes != sorted(set(sizes)):
        raise ValueError("the sizes of a curve do not increase")
    return Curve(tuple(pairs))


def _number(value: Any, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r:.20} is not numeric")
    if not math.isfinite(value) or value < least:
        raise ValueError(f"{value!r:.20} is not finite or less than {least:g}")
    return float(value)
