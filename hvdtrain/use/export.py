"""Export of a run's model, or of its weights, to a file for other programs."""

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

from hvdtrain.backends.pytorch.state import to_tensor
from hvdtrain.errors import UsageError, one_line
from hvdtrain.host.files import check_target, write_whole
from hvdtrain.models import weights
from hvdtrain.options.givenmodel import Model
from hvdtrain.use.trained import (
    Classifier,
    Trained,
    Which,
    read_config,
    saved_state,
    trained_model,
)

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
        states = [name for name in extra if name.endswith(weights.KEY)]
        decoded = {name: weights.decoded(name, extra) for name in states}
        weights.write(path, name, state, decoded)
        return checkpoint
    if path.suffix == ONNX:
        check_packages()
    trained = trained_model(run, which, model, trust)
    write = write_onnx if path.suffix == ONNX else write_pt2
    write(path, trained)
    return trained.checkpoint


INPUT, OUTPUT = "pixels", "logits"
ONNX_PACKAGES = ("onnx", "onnxscript")
FIXED = "specialized it to be a constant"  # torch's words for a batch of one size only
EXAMPLE_IMAGES = 2  # torch.export would take a batch of one as a constant


def check_packages() -> None:
    """Refuse ONNX, before the work, without the packages that it needs.

    Raises:
        UsageError: with the command that installs them.
    """
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"a file of ONNX needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )


def write_onnx(path: Path, trained: Trained) -> None:
    """Write a model as ONNX: float32 `pixels` [batch, 3, size, size] of 0 to 255 to `logits`.

    Raises:
        UsageError: if torch cannot export the model, or the file cannot be written.
    """

    def content() -> bytes:
        # From a module torch.onnx.export would fix the number of images without an error.
        program = torch.onnx.export(
            _program(trained),
            dynamo=True,
            input_names=[INPUT],
            output_names=[OUTPUT],
            verbose=False,
        )
        assert program is not None
        serialised: bytes = program.model_proto.SerializeToString()
        return serialised

    _write(path, trained, content)


def write_pt2(path: Path, trained: Trained) -> None:
    """Write a model for `torch.export.load`: float32 pixels [batch, 3, size, size] to logits.

    Raises:
        UsageError: if torch cannot export the model, or the file cannot be written.
    """

    def content() -> bytes:
        file = io.BytesIO()
        torch.export.save(_program(trained), file)
        return file.getvalue()

    _write(path, trained, content)


def _program(trained: Trained) -> torch.export.ExportedProgram:
    """Return the graph of a model on the CPU, for any number of images."""
    size = trained.inputs.image_size
    images = torch.zeros(EXAMPLE_IMAGES, 3, size, size)
    shapes = {INPUT: {0: torch.export.Dim.DYNAMIC}}
    return torch.export.export(Classifier(trained).cpu().eval(), (images,), dynamic_shapes=shapes)


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Silence remarks of torch, such as that torchvision is not installed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _write(path: Path, trained: Trained, content: Callable[[], bytes]) -> None:
    try:
        with warnings.catch_warnings(), _without_remarks():
            warnings.simplefilter("ignore")  # on torch's own use of its old functions
            exported = content()
    except Exception as error:
        model = trained.config.model
        if FIXED in str(error):
            raise UsageError(
                f"model {model} cannot be exported, because its code fixes the number of images, "
                "as len(x) does: use x.shape[0]"
            ) from error
        raise UsageError(
            f"torch cannot export model {model} ({one_line(error)}): export its weights to a .pth "
            "file instead"
        ) from error
    try:
        write_whole(path, lambda file: file.write(exported))
    except OSError as error:
        raise UsageError(f"the model {path} cannot be written: {error.strerror}") from None
