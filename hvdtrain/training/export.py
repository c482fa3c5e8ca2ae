"""The weights of a run as a file for other programs."""

from pathlib import Path
from typing import Literal

from hvdtrain import configfile
from hvdtrain.errors import DataError, UsageError
from hvdtrain.files import check_target
from hvdtrain.models import weights
from hvdtrain.training import checkpoint
from hvdtrain.training.tensors import to_tensor


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
    config = configfile.load(folder / "config.yaml")
    model = str(config.get("model"))
    if config.get("framework") == "tensorflow":
        raise UsageError(
            f"{run} is a run in TensorFlow, whose weights PyTorch does not read: its checkpoints "
            "are safetensors files by Keras's names"
        )
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
    state = {name: to_tensor(array) for name, array in saved.tensors.items()}
    weights.write(Path(file), model, state)
    return path
