"""Writes and reads profiles of ranks and network as files that later runs can plan with."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError, on_one_line
from hvdtrain.host.files import write_text
from hvdtrain.host.harmless import parse_json
from hvdtrain.planner.components import ComponentTimes, Profile, RankTimes
from hvdtrain.planner.network import Contention, Curve, MeasuredNetwork

VERSION = 3
LARGEST = 64 * 2**20  # bytes: enough for 1,000 ranks with 100 components
HALVES = ("input_half", "weight_half")


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
        "ranks": [
            {
                "components": {
                    name: component.to_json() for name, component in rank.components.items()
                },
                "load": _points(rank.load),
                "resident_bytes": rank.resident_bytes,
                "message_seconds": rank.message_seconds,
                "activation_factor": rank.activation_factor,
            }
            for rank in profile.ranks
        ],
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


def load(
    path: Path, subject: str, names: Sequence[str], ranks: int
) -> tuple[Profile, MeasuredNetwork] | str:
    """Read a profile; return its subject if that is another one.

    Raises:
        UsageError: if the file is not a valid profile.
    """
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise UsageError(
                f"{path} is not a valid profile (larger than {LARGEST:,} bytes): "
                "remove it or use another --profile"
            )
        content = parse_json(text)
    except OSError as error:
        raise UsageError(f"the profile {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"the profile {path} cannot be used: {error}") from None
    try:
        if content["version"] == VERSION and content["subject"] != subject:
            return on_one_line(content["subject"], 300)
        return _checked(content, names, ranks)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{path} is not a valid profile ({reason}): remove it or use another --profile"
        ) from None


def _checked(
    content: Any, names: Sequence[str], number_of_ranks: int
) -> tuple[Profile, MeasuredNetwork]:
    """Return the profile of a file's content; raise ValueError or the like if it is wrong."""
    if content["version"] != VERSION:
        raise ValueError(f"it has version {content['version']!r:.20}, not {VERSION}")
    ranks = tuple(_rank(item, names) for item in content["ranks"])
    network = content["network"]
    hosts = tuple(str(host) for host in network["hosts"])
    if len(ranks) != number_of_ranks or len(hosts) != len(ranks):
        raise ValueError(
            f"it has {len(ranks)} ranks on {len(hosts)} hosts, the job has {number_of_ranks} ranks"
        )
    all_reduce: dict[bool, dict[int, Curve]] = {}
    for crosses, number, points in network["all_reduce"]:
        all_reduce.setdefault(bool(crosses), {})[int(_number(number, least=2))] = _curve(points)
    hand_over = {bool(crosses): _curve(points) for crosses, points in network["hand_over"]}
    if len(ranks) > 1 and not (all_reduce and hand_over):
        raise ValueError("its network is empty")
    contention = Contention(*(_number(item, least=1.0) for item in network["contention"]))
    return Profile(ranks), MeasuredNetwork(hosts, all_reduce, hand_over, contention)


def _rank(content: Mapping[str, Any], names: Sequence[str]) -> RankTimes:
    components = content["components"]
    if list(components) != list(names):
        raise ValueError("its components are not those of the model")
    return RankTimes(
        {name: _times(times) for name, times in components.items()},
        _curve(content["load"]),
        int(_number(content["resident_bytes"])),
        _number(content["message_seconds"]),
        _number(content["activation_factor"], least=1.0),
    )


def _times(content: Mapping[str, Any]) -> ComponentTimes:
    input_half, weight_half = (
        _curve(content[name]) if name in content else None for name in HALVES
    )
    return ComponentTimes(
        _curve(content["forward"]),
        _curve(content["backward"]),
        input_half,
        weight_half,
        _number(content["update"]),
        _number(content["spread"]),
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
