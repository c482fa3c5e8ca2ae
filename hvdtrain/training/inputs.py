"""The record of what a run's model takes and returns: `inputs.json` in the run folder.

Evaluation, prediction and export need it, also where the data set is gone.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from hvdtrain.data.index import Index, Resize
from hvdtrain.engine.feed import Normalisation
from hvdtrain.errors import DataError
from hvdtrain.host import files, records

FILE = "inputs.json"
LARGEST_SIZE = 2**16  # pixels


@dataclass(frozen=True)
class Inputs:
    """The images that a model takes, and the classes that it returns.

    Attributes:
        image_size: of the model, in pixels.
        stored_size: that the data set's images were scaled to before their centre was cut out.
        resize: how image files get their size; None for a data set of pixels.
        class_names: by class; none for targets that are not class labels.
        outputs: of a model without classes.
        mean, std: per channel, of pixels in 0..1, to normalise by.
    """

    image_size: int
    stored_size: int
    resize: Resize | None
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    outputs: int = 0

    @property
    def classes(self) -> int:
        """The number of classes, or of outputs, that the model's function gets."""
        return len(self.class_names) or self.outputs


def inputs_of(index: Index, normalisation: Normalisation) -> Inputs:
    """Return what the model of a run on a data set takes."""
    mean, std = normalisation
    return Inputs(
        image_size=index.image_shape[0],
        stored_size=min(index.stored_shape[:2]),
        resize=index.resize,
        class_names=index.class_names,
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
        outputs=0 if index.targets is None else index.classes,
    )


def save(inputs: Inputs, run: Path) -> None:
    """Write the record of a run.

    Raises:
        DataError: if it cannot be written.
    """
    text = json.dumps(asdict(inputs), indent=1) + "\n"
    files.write_text(run / FILE, text, "the record of the inputs", DataError, files.OWN)


def load(run: Path) -> Inputs | None:
    """Return the record of a run; None for a run of a version without one.

    Raises:
        DataError: if the file is damaged.
    """
    inputs = records.read(run / FILE, Inputs)
    if inputs is not None:
        sizes = inputs.image_size, inputs.stored_size
        has_channels = len(inputs.mean) == len(inputs.std) == 3 and min(inputs.std) > 0
        is_resized = inputs.resize in (None, *get_args(Resize))
        if not (0 < min(sizes) <= max(sizes) <= LARGEST_SIZE and has_channels and is_resized):
            raise DataError(f"{run / FILE} has a value that is out of range: restore it")
        if not inputs.classes > 0:
            raise DataError(f"{run / FILE} names no class: restore it")
    return inputs
