"""Export of a run's model, or of its weights, to a file for other programs."""

from pathlib import Path

from hvdtrain.backends.pytorch.state import to_tensor
from hvdtrain.errors import UsageError
from hvdtrain.host.files import check_target
from hvdtrain.models import extrastate, weights
from hvdtrain.options.givenmodel import Model
from hvdtrain.use import graph
from hvdtrain.use.trained import Which, read_config, saved_state, trained_model

WEIGHTS = (".pth", ".pt")
ONNX, PT2 = ".onnx", ".pt2"


def export(
    run: str | Path,
    file: str | Path,
    which: Which = "best",
    model: Model | None = None,
    trust: bool = False,
) -> Path:
    """Write the model of a run's checkpoint, or its weights; return the checkpoint.

    The suffix of the file decides. `.pth` and `.pt` hold the weights with torchvision's names:
    `torch.load` and torchvision's `load_state_dict` read them. `.onnx` and `.pt2` hold the model
    with its normalisation, from pixels of 0 to 255, float32 [batch, 3, size, size], to logits.

    Args:
        run: the run folder.
        file: the file to write.
        which: the best epoch's checkpoint, or the newest that verifies.
        model: the model that was passed in Python, if it was; needed for .onnx and .pt2.
        trust: import the module that the run names also if another user could have written it.

    Raises:
        UsageError: if there is no such run, the suffix is another one, a package is missing, or
            the file cannot be written.
        DataError: if the run holds no checkpoint that verifies.
    """
    check_target(str(file), "the file")
    path = Path(file)
    if path.suffix not in (*WEIGHTS, ONNX, PT2):
        raise UsageError(
            f"{file}: the suffix decides the form: use .pth or .pt (weights), .onnx, or .pt2 "
            "(torch.export)"
        )
    if path.suffix in WEIGHTS:
        name = str(read_config(Path(run)).get("model"))
        saved, checkpoint = saved_state(Path(run), which)
        state, extra = (
            {name: to_tensor(array) for name, array in arrays.items()}
            for arrays in (saved.tensors, saved.extra)
        )
        states = [name for name in extra if name.endswith(extrastate.KEY)]
        decoded = {name: extrastate.decoded(name, extra) for name in states}
        weights.write(path, name, state, decoded)
        return checkpoint
    if path.suffix == ONNX:
        graph.check_packages()
    trained = trained_model(run, which, model, trust)
    write = graph.write_onnx if path.suffix == ONNX else graph.write_pt2
    write(path, trained)
    return trained.checkpoint
