"""The configuration that a run folder keeps: written, read, and compared with a new one."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hvdtrain import files, harmless
from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError
from hvdtrain.ranges import flag

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
    | {"replicate", "stage", "stall_timeout", "verify", "change_batch_norm"}
)


# Of a run of a study nothing else may: the study would show one run for the other.
MAY_CHANGE_IN_STUDY = frozenset({"run", "resume", "log_every", "keep_checkpoints", "on_alert"})


# What versions did that had no such key. By it they are known.
OF_OLDER_VERSIONS = {"no_decay": "none"}


def as_begun(config: TrainConfig) -> TrainConfig:
    """The same configuration; for a run that an older version began, with what that one did.

    Raises:
        UsageError: if the run folder's configuration is none.
    """
    saved = Path(config.run) / "config.yaml" if config.run else None
    if saved is None or not saved.is_file():
        return config
    did = done_by_older(load(saved))
    if config.normalise != "meanstd":
        did.pop("normalise", None)
    if not config.weight_decay:
        did.pop("no_decay", None)
    return replace(config, **did)


def done_by_older(old: dict[str, Any]) -> dict[str, Any]:
    """What the version that wrote a configuration did, where it says nothing or another thing."""
    did: dict[str, Any] = {n: value for n, value in OF_OLDER_VERSIONS.items() if n not in old}
    if did and old.get("holdout") and old.get("normalise", "meanstd") == "meanstd":
        did["normalise"] = "split"
    return did


def differing(one: TrainConfig, other: TrainConfig) -> str:
    """The options in which the first one differs, as they are typed."""
    others = vars(other)
    differs = [name for name, value in vars(one).items() if others[name] != value]
    return " ".join(f"{flag(name)} {getattr(one, name)}" for name in differs)


def differences(
    old: dict[str, Any], new: TrainConfig, may_change: frozenset[str] = MAY_CHANGE_ON_RESUME
) -> list[str]:
    """Say how `new` differs from a saved configuration in what may not change."""
    current, old = asdict(new), old | done_by_older(old)
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

    values = asdict(replace(config, resume=False))
    if saved is not None and saved.is_file():
        old = load(saved)
        for name in OF_OLDER_VERSIONS.keys() - old.keys():
            del values[name]
        if "normalise" in done_by_older(old) and config.normalise == "split":
            values["normalise"] = "meanstd"
    return yaml.safe_dump(values, sort_keys=False)


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
