"""Training runs of a study: started as `hvdtrain train` does, kept, and resumed after a stop."""

from collections.abc import Mapping
from pathlib import Path

from hvdtrain import launch
from hvdtrain.config import TrainConfig
from hvdtrain.errors import (
    CheckFailed,
    DataError,
    HvdtrainError,
    Interrupted,
    Preempted,
    RankError,
    UsageError,
)
from hvdtrain.host import files
from hvdtrain.options import configfile

# The exit code of a run that stopped selects the error.
KINDS: dict[int, type[HvdtrainError]] = {
    kind.exit_code: kind
    for kind in (CheckFailed, UsageError, DataError, RankError, Preempted, Interrupted)
}


def error_of(code: int, what: str) -> HvdtrainError:
    """Return the error of ranks that ended with an exit code.

    Args:
        what: what is missing, such as "runs/1 stopped".
    """
    kind = KINDS.get(code, RankError)
    first = "" if kind in (Interrupted, Preempted) else "fix the cause above, then "
    return kind(f"{what}: {first}run the same command again to resume")


def check_same(config: TrainConfig) -> None:
    """Raise UsageError if the run folder holds a run of other settings."""
    path = Path(config.run or "") / "config.yaml"
    if path.exists():
        saved = configfile.load(path)
        changed = configfile.differences(saved, config, configfile.MAY_CHANGE_IN_STUDY)
        if changed:
            raise UsageError(
                f"{path.parent} holds a run of other settings ({'; '.join(changed)}): "
                "choose another --to"
            )


def train(
    config: TrainConfig, ranks: int, folder: Path, environment: Mapping[str, str] | None = None
) -> None:
    """Train as `hvdtrain train --config` does, with this number of ranks on this machine.

    Args:
        folder: for the configuration file.
        environment: variables for the ranks.

    Raises:
        HvdtrainError: the error of a run that failed; it resumes the next time.
    """
    run = Path(config.run or "")
    path = folder / f"{run.name}.yaml"
    make_folder(folder)
    files.write_text(path, configfile.to_yaml(config), "the configuration", DataError)
    words = ["train", "--config", str(path), "--resume", "auto"]
    outcome = launch.supervise(ranks, words, environment)
    if outcome.code:
        raise error_of(outcome.code, f"{run} stopped")


def make_folder(folder: Path) -> None:
    """Create a folder.

    Raises:
        DataError: if it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be created: {error.strerror}") from None
