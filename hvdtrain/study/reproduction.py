"""Train the runs of a published experiment, one after the other in random order, each once."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
KINDS: tuple[type[HvdtrainError], ...] = (
    *(CheckFailed, UsageError, DataError, RankError, Preempted, Interrupted),
)


@dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Attributes:
        key: first part of the names of its run folders.
        name: name in tables and pictures.
        ranks: number of processes that are started.
        config: configuration of its runs, without seed and run folder.
    """

    key: str
    name: str
    ranks: int
    config: TrainConfig


def run_all(
    arms: Sequence[Arm], repeats: int, to: Path, say: Callable[[str], object]
) -> dict[str, list[Path]]:
    """Train `repeats` runs of each arm, with seeds from 0; return the run folders by arm key.

    The order is random but the same each time, so that slow changes of the machine are spread over
    all arms. Finished runs are kept; interrupted runs resume.

    Raises:
        UsageError: if a folder holds a run of other settings.
        HvdtrainError: the error of a run that failed; the other runs stay.
    """
    todo = [(arm, seed) for arm in arms for seed in range(repeats)]
    random.Random(0).shuffle(todo)
    folders: dict[str, list[Path]] = {arm.key: [] for arm in arms}
    for number, (arm, seed) in enumerate(todo, 1):
        folder = to / "runs" / f"{arm.key}-{seed}"
        folders[arm.key].append(folder)
        config = replace(arm.config, seed=seed, run=str(folder))
        _check_same(folder / "config.yaml", config)
        if (folder / "summary.json").exists():
            say(f"run {number} of {len(todo)}: {folder} is finished")
            continue
        say(f"run {number} of {len(todo)}: {arm.name}, seed {seed}")
        _run(config, arm.ranks, to / "configs")
    return folders


def _check_same(path: Path, config: TrainConfig) -> None:
    """Raise UsageError if the folder holds a run of other settings."""
    if path.exists():
        saved = configfile.load(path)
        changed = configfile.differences(saved, config, configfile.MAY_CHANGE_IN_STUDY)
        if changed:
            raise UsageError(
                f"{path.parent} holds a run of other settings ({'; '.join(changed)}): "
                "choose another --to"
            )


def _run(config: TrainConfig, ranks: int, folder: Path) -> None:
    """Train as `hvdtrain train --config` does, with this number of ranks on this machine."""
    run = Path(config.run or "")
    path = folder / f"{run.name}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be created: {error.strerror}") from None
    files.write_text(path, configfile.to_yaml(config), "the configuration", DataError)
    outcome = launch.supervise(ranks, ["train", "--config", str(path), "--resume", "auto"])
    if outcome.code == 0:
        return
    kind = next((kind for kind in KINDS if kind.exit_code == outcome.code), RankError)
    raise kind(f"{run} stopped: fix the cause above, then run the same command again to resume")
