"""Runs of a published experiment: made one after the other in random order, each once."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain import configfile, files, launch
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

# By their exit codes a run that stopped says why.
KINDS: tuple[type[HvdtrainError], ...] = (
    *(CheckFailed, UsageError, DataError, RankError, Preempted, Interrupted),
)


@dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Attributes:
        key: folder of its runs. name: in tables and pictures.
        ranks: that are started.
    """

    key: str
    name: str
    ranks: int
    config: TrainConfig


def run_all(
    arms: Sequence[Arm], repeats: int, to: Path, say: Callable[[str], object]
) -> dict[str, list[Path]]:
    """Make `repeats` runs of each arm, with seeds from 0; the run folders by the arms' keys.

    In an order that depends on nothing but the arms: what changes on the machine with time is
    spread over all of them. Runs that are finished are kept, those that were ended go on.

    Raises:
        UsageError: if a folder holds a run of other settings.
        HvdtrainError: as the run that failed; the others stay.
    """
    todo = [(arm, seed) for arm in arms for seed in range(repeats)]
    random.Random(0).shuffle(todo)
    found: dict[str, list[Path]] = {arm.key: [] for arm in arms}
    for number, (arm, seed) in enumerate(todo, 1):
        folder = to / "runs" / f"{arm.key}-{seed}"
        found[arm.key].append(folder)
        config = replace(arm.config, seed=seed, run=str(folder))
        _check_same(folder / "config.yaml", config)
        if (folder / "summary.json").exists():
            say(f"run {number} of {len(todo)}: {folder} is finished")
            continue
        say(f"run {number} of {len(todo)}: {arm.name}, seed {seed}")
        _run(config, arm.ranks, to / "configs")
    return found


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
    """Train as `hvdtrain train --config` does, on so many ranks of this machine."""
    run = Path(config.run or "")
    path = folder / f"{run.name}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made: {error.strerror}") from None
    files.write_text(path, configfile.to_yaml(config), "the configuration", DataError)
    outcome = launch.supervise(ranks, ["train", "--config", str(path), "--resume", "auto"])
    if outcome.code == 0:
        return
    kind = next((kind for kind in KINDS if kind.exit_code == outcome.code), RankError)
    raise kind(f"{run} has stopped; the same command goes on from here once that is mended")
