"""The configuration that a run folder keeps: written, read, and compared with a new one."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hvdtrain import files, harmless
from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError

# A run may be continued with other values of these: they say where, how and how long it runs. Of
# what a step computes they change rounding, and which samples local batch norm sees together.
MAY_CHANGE_ON_RESUME = frozenset(
    {
        "data",
        "plan",
        "ranks",
        "memory_limit",
        "profile",
        "epochs",
        "max_steps",
        "microbatches",
        "schedule",
        "recompute",
    }
    | {"device", "threads", "compile", "allreduce", "log_every", "eval_every", "ledger"}
    | {"weights", "trace", "run", "resume", "checkpoint_every", "keep_checkpoints"}
    | {"restarts", "min_ranks", "gradient_limit", "on_bad_step", "on_alert", "inject"}
    | {"replicate", "stage", "stall_timeout", "verify"}
)


# Of a run of a study nothing else may: the study would show one run for the other.
MAY_CHANGE_IN_STUDY = frozenset({"run", "resume", "log_every", "keep_checkpoints", "on_alert"})


# What versions that had no such key did.
OF_OLDER_VERSIONS = {"no_decay": "none"}


def as_begun(config: TrainConfig) -> TrainConfig:
    """The same configuration; for a run that an older version began, with what that one did.

    Raises:
        UsageError: if the run folder's configuration is none.
    """
    saved = Path(config.run) / "config.yaml" if config.run else None
    return replace(config, **_not_in(saved)) if saved is not None else config


def _not_in(saved: Path) -> dict[str, Any]:
    """What was done by the version that wrote this file, if it is there, but has no key in it."""
    old = load(saved) if saved.is_file() else OF_OLDER_VERSIONS
    return {name: did for name, did in OF_OLDER_VERSIONS.items() if name not in old}


def differences(
    old: dict[str, Any], new: TrainConfig, may_change: frozenset[str] = MAY_CHANGE_ON_RESUME
) -> list[str]:
    """Say how `new` differs from a saved configuration in what may not change."""
    current, old = asdict(new), OF_OLDER_VERSIONS | old
    if new.weight_decay == 0:
        may_change = may_change | {"no_decay"}
    if new.lr_schedule != "constant":
        may_change = may_change - {"epochs", "max_steps"}  # they stretch the schedule
    return [
        f"{name} was {old[name]!r}, is {current[name]!r}"
        for name in current
        if name not in may_change and name in old and old[name] != current[name]
    ]


def to_yaml(config: TrainConfig, saved: Path | None = None) -> str:
    """The resolved configuration as YAML that `--config` reads back, for this run or a new one.

    Args:
        saved: the file that it takes the place of; what `as_begun` finds it to lack stays absent,
            so that the same command continues the run again.
    """
    import yaml

    absent = _not_in(saved) if saved is not None else {}
    values = asdict(replace(config, resume=False)).items()
    return yaml.safe_dump({n: value for n, value in values if n not in absent}, sort_keys=False)


def public(config: TrainConfig) -> dict[str, Any]:
    """The resolved configuration without what other users should not read."""
    return {name: value for name, value in asdict(config).items() if name != "on_alert"}


def save(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration of a run, which no other user may change.

    The command of `--on-alert` may hold an address or a token: with one, no other may read it.

    Raises:
        DataError: if it cannot be written.
    """
    mode = files.OWN if config.on_alert is None else files.PRIVATE
    files.write_text(path, to_yaml(config, path), "the configuration", DataError, mode)


def load(path: Path) -> dict[str, Any]:
    """Read a saved configuration; a key of another version stays in the dictionary.

    Raises:
        UsageError: if it is none.
    """
    return harmless.read_mapping(path, "configuration")
