"""A trained model as a graph for other programs: ONNX, or torch.export."""

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

from hvdtrain.errors import UsageError, one_line
from hvdtrain.host.files import write_whole
from hvdtrain.use.trained import Classifier, Trained

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
