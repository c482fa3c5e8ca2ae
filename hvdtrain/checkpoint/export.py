"""Export of a run's weights to a file for other programs."""

from pathlib import Path
from typing import Literal

from hvdtrain.backends.pytorch.state import to_tensor
from hvdtrain.checkpoint import store
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host.files import check_target
from hvdtrain.models import weights
from hvdtrain.options import configfile


def export(run: str, file: str, which: Literal["best", "last"] = "best") -> Path:
    """Write the weights of a run's checkpoint with torchvision's names; return the checkpoint.

    Args:
        run: the run folder.
        file: the file to write; `torch.load` and torchvision's `load_state_dict` read it.
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
            f"{run} is a TensorFlow run, whose weights PyTorch cannot read: use its checkpoints, "
            "which are safetensors files with Keras's names"
        )
    checkpoints = folder / "checkpoints"
    best = store.best(checkpoints) if which == "best" else None
    if best is not None:
        saved, path = store.load(best), best
    else:
        newest, newest_path, skipped = store.load_newest(checkpoints)
        if newest is None or newest_path is None:
            raise DataError(
                skipped[0] if skipped else f"{run} holds no checkpoint yet: train it on"
            )
        saved, path = newest, newest_path
    state = {name: to_tensor(array) for name, array in saved.tensors.items()}
    weights.write(Path(file), model, state)
    return path
