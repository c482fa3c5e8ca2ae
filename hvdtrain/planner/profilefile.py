"""Files of profiles: what was measured of a model and a network, for later runs and studies."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import InputSize
from hvdtrain.errors import UsageError, on_one_line
from hvdtrain.host.files import write_text
from hvdtrain.host.records import parse_json
from hvdtrain.options.givenmodel import PREFIX
from hvdtrain.planner.agreement import Coding
from hvdtrain.planner.network import Contention, Curve, MeasuredNetwork
from hvdtrain.planner.profile import HALVES, ComponentTimes, Profile, RankTimes

if TYPE_CHECKING:
    from hvdtrain.models.costs import ComponentCost

VERSION = 3  # of the files
MOST = 1e30  # a number in a file: sums of larger ones may overflow
LARGEST = 64 * 2**20  # bytes: enough for 1,000 ranks with 100 components


def model_words(
    config: TrainConfig, costs: "Sequence[ComponentCost]", image_size: InputSize
) -> str:
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


def subjects_of(
    config: TrainConfig, costs: "Sequence[ComponentCost]", image_size: InputSize
) -> str:
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
                [crosses, number, curve.as_lists()]
                for crosses, curves in network.all_reduce.items()
                for number, curve in curves.items()
            ],
            "hand_over": [
                [crosses, curve.as_lists()] for crosses, curve in network.hand_over.items()
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
        # A file of an earlier version, or of ranks that sum by MPI, has none.
        contention=_number(content["contention"], least=1.0) if "contention" in content else None,
        coding={
            str(method): Coding(_number(encode), _number(decode))
            # A file of an earlier version has none.
            for method, (encode, decode) in content.get("coding", {}).items()
        },
    )


def _curve(points: Any) -> Curve:
    pairs = [(_number(size), _number(seconds)) for size, seconds in points]
    sizes = [size for size, _ in pairs]
    if not pairs or sizes != sorted(set(sizes)):
        raise ValueError("the sizes of a curve do not increase")
    return Curve(tuple(pairs))


def _number(value: Any, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r:.20} is not numeric")
    if not least <= value <= MOST:  # nan is in no range
        raise ValueError(f"{value!r:.20} is not between {least:g} and {MOST:g}")
    return float(value)
