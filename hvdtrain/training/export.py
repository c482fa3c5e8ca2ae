"""The weights of a run as a file for other programs."""

from pathlib import Path
from typing import Literal

from hvdtrain import configfile
from hvdtrain.errors import DataError, UsageError
from hvdtrain.files import check_target
from hvdtrain.models import weights
from hvdtrain.training import checkpoint


def export(run: str, file: str, which: Literal["best", "last"] = "best") -> Path:
    """Write the weights of a run's checkpoint in torchvision's form, and return the checkpoint.

    Args:
        run: the run folder.
        file: to write; `torch.load` and torchvision's `load_state_dict` read it.
        which: the best epoch's checkpoint, or the newest that verifies.

    Raises:
        UsageError: if there is no such run, or the file cannot be written.
        DataError: if the run holds no checkpoint that verifies.
    """
    check_target(file, "the file")
    folder = Path(run)
    if not (folder / "config.yaml").is_file():
        raise UsageError(f"{run} is not the folder of a run: there is no config.yaml in it")
    model = str(configfile.load(folder / "config.yaml").get("model"))
    checkpoints = folder / "checkpoints"
    best = checkpoint.best(checkpoints) if which == "best" else None
    if best is not None:
        saved, path = checkpoint.load(best), best
    else:
        newest, found, skipped = checkpoint.load_newest(checkpoints)
        if newest is None or found is None:
            raise DataError(
                skipped[0] if skipped else f"{run} holds no checkpoint: it has saved none yet"
            )
        saved, path = newest, found
    weights.write(Path(file), model, saved.tensors)
    return path
