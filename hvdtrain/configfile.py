"""The configuration that a run folder keeps: written, read, and compared with a new one."""

from collections.abc import Callable
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files, records
from hvdtrain.options.givenmodel import SEAMS, is_same_code
from hvdtrain.options.names import completed, lost
from hvdtrain.options.requests import parse_compress_request, parse_sync_request
from hvdtrain.options.sections import (
    AUTO_PRECISION,
    FixedPrecision,
    Rule,
    parse_emulate,
    smoothing_of,
)

# A run may resume with other values of these: they decide where, how and how long it runs. In the
# results of a step they change only rounding, and the samples that local batch norm sees together.
MAY_CHANGE_ON_RESUME = frozenset(
    item.name for item in fields(TrainConfig) if Rule.ON_RESUME in item.metadata["rule"]
)
# These do not change the result. In a run of a study only these may change: else the study would
# report one run as another.
NOT_IN_RESULT = frozenset(
    item.name for item in fields(TrainConfig) if Rule.NO_RESULT in item.metadata["rule"]
)
# What a run of a version without an option did, unless `names.completed` knows better.
DEFAULTS = {item.name: item.default for item in fields(TrainConfig) if item.default is not MISSING}
TYPES = get_type_hints(TrainConfig)
SCALAR = str | int | float | bool | None
OF_OTHER_VERSIONS = SCALAR | list[SCALAR]


def identity(config: TrainConfig) -> dict[str, Any]:
    """Return the values that decide the result and are not defaults.

    So an option that is added or removed leaves the identity of a run without it as it is.
    """
    return {
        name: value
        for name, value in asdict(config).items()
        if name not in NOT_IN_RESULT and not (name in DEFAULTS and value == DEFAULTS[name])
    }


def as_started(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Return the configuration with the precision of a run that exists already, and a remark.

    Raises:
        UsageError: if the file in the run folder is not a configuration.
    """
    saved = Path(config.run) / "config.yaml" if config.run else None
    if config.precision == AUTO_PRECISION and saved is not None and saved.is_file():
        precision: Any = load(saved).get("precision")
        if precision in get_args(FixedPrecision):  # else: a job that never started
            remark = f"--precision auto: {precision}, with which this run started"
            return replace(config, precision=precision), [remark]
    return config, []


def differences(
    old: dict[str, Any], new: TrainConfig, may_change: frozenset[str] = MAY_CHANGE_ON_RESUME
) -> list[str]:
    """Return how `new` differs from a saved configuration in values that may not change."""
    current, old = asdict(new), DEFAULTS | completed(old)
    if new.lr_schedule != "constant":
        may_change = may_change - {"epochs", "max_steps"}  # they stretch schedules
    if AUTO_PRECISION in (old.get("precision"), new.precision):
        may_change = may_change | {"precision"}
    removed = [
        f"{name} was {value!r}, which this version cannot continue"
        for name, value in lost(old).items()
    ]
    return removed + [
        f"{name} was {old[name]!r}, is {current[name]!r}"
        for name in current
        if name not in may_change and name in old and not _is_same(name, old[name], current[name])
    ]


# Of options whose values may mean the same in other words.
PARSED: dict[str, Callable[[str], Any]] = {
    "sync": parse_sync_request,
    "compress": parse_compress_request,
    "emulate": lambda text: parse_emulate(text)[0],  # at any speed
    "loss": lambda text: text if (part := smoothing_of(text)) is None else part,
}


def _is_same(name: str, one: Any, other: Any) -> bool:
    """Return whether two values of an option mean the same."""
    if name in ("model", *SEAMS) and is_same_code(one, other):
        return True
    if one == other or None in (one, other) or name not in PARSED:
        return bool(one == other)
    try:
        return bool(PARSED[name](str(one)) == PARSED[name](str(other)))
    except UsageError:  # of a version that had other ones
        return False


def to_yaml(config: TrainConfig) -> str:
    """Return the resolved configuration as YAML that `--config` reads, for this or a new run."""
    import yaml

    return yaml.safe_dump(asdict(replace(config, resume=False)), sort_keys=False)


PRIVATE = frozenset({"on_alert"})  # a command that may hold an address or a token


def public(config: TrainConfig) -> dict[str, Any]:
    """Return the resolved configuration without the values that other users should not read."""
    return {name: value for name, value in asdict(config).items() if name not in PRIVATE}


def save(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration of a run, which no other user may change.

    The command of `--on-alert` may hold an address or a token: a configuration with such a command
    is readable by its owner only.

    Raises:
        DataError: if the file cannot be written.
    """
    mode = files.OWN if config.on_alert is None else files.PRIVATE
    files.write_text(path, to_yaml(config), "the configuration", DataError, mode)


def load(path: Path) -> dict[str, Any]:
    """Read a saved configuration; a key of another version stays in the dictionary.

    Raises:
        UsageError: if the file is not a configuration.
    """
    try:
        with records.opened(path):  # a FIFO would wait
            saved = records.read_mapping(path, "configuration")
        for name, value in saved.items():
            records.build(str, name, "a key")
            records.build(TYPES.get(name, OF_OTHER_VERSIONS), value, name)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}: restore it") from None
    except ValueError as error:
        raise UsageError(f"{path} is not a configuration ({error}): restore it") from None
    return completed(saved)
