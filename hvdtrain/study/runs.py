"""Training runs of a study: started as `hvdtrain train` does, kept, and resumed after a stop."""

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain import configfile, launch
from hvdtrain.config import TrainConfig
from hvdtrain.errors import BY_CODE, DataError, Interrupted, Preempted, RankError, UsageError
from hvdtrain.host import files


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


def check_same(config: TrainConfig) -> None:
    """Raise UsageError if the run folder holds a run of other settings."""
    path = Path(config.run or "") / "config.yaml"
    if path.exists():
        saved = configfile.load(path)
        changed = configfile.differences(saved, config, configfile.NOT_IN_RESULT)
        if changed:
            raise UsageError(
                f"{path.parent} holds a run of other settings ({'; '.join(changed)}): "
                "choose another --to"
            )


def train(config: TrainConfig, ranks: int, folder: Path) -> None:
    """Train as `hvdtrain train --config` does, with this number of ranks on this machine.

    Args:
        folder: for the configuration file.

    Raises:
        HvdtrainError: the error of a run that failed; it resumes the next time.
    """
    run = Path(config.run or "")
    path = folder / f"{run.name}.yaml"
    make_folder(folder)
    files.write_text(path, configfile.to_yaml(config), "the configuration", DataError)
    words = ["train", "--config", str(path), "--resume", "auto"]
    outcome = launch.supervise(ranks, words)
    if outcome.code:
        kind = BY_CODE.get(outcome.code, RankError)
        first = "" if kind in (Interrupted, Preempted) else "fix the cause above, then "
        raise kind(f"{run} stopped: {first}run the same command again to resume")


def make_folder(folder: Path) -> None:
    """Create a folder.

    Raises:
        DataError: if it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be created: {error.strerror}") from None


def run_all(
    arms: Sequence[Arm], repeats: int, to: Path, say: Callable[[str], object]
) -> dict[str, list[Path]]:
    """Train `repeats` runs of each arm, with seeds from 0; return the run folders by arm key.

    The order is random but the same each time, so that slow changes of the machine are spread over
    all arms. Finished runs are kept, without their checkpoints; interrupted runs resume.

    Raises:
        UsageError: if a folder holds a run of other settings.
        HvdtrainError: the error of a run that failed; the other runs stay.
    """
    todo = [(arm, seed) for arm in arms for seed in range(repeats)]
    random.Random(0).shuffle(todo)
    folders: dict[str, list[Path]] = {arm.key: [] for arm in arms}
    for place, (arm, seed) in enumerate(todo, 1):
        folder = to / "runs" / f"{arm.key}-{seed}"
        folders[arm.key].append(folder)
        config = replace(arm.config, seed=seed, run=str(folder))
        check_same(config)
        if (folder / "summary.json").exists():
            say(f"run {place} of {len(todo)}: {folder} is finished")
            continue
        say(f"run {place} of {len(todo)}: {arm.name}, seed {seed}")
        train(config, arm.ranks, to / "configs")
        # Weights and optimizer states of all runs would fill disks: 45 GB for paper B.
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return folders
