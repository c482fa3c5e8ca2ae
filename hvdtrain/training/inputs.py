"""The record of what a run's model takes and returns: `inputs.json` in the run folder.

Evaluation, prediction and export need it, also where the data set is gone.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from hvdtrain.data.index import Index, Resize
from hvdtrain.errors import DataError
from hvdtrain.host import files
from hvdtrain.training.feed import Normalisation

FILE = "inputs.json"


@dataclass(frozen=True)
class Inputs:
    """The images that a model takes, and the classes that it returns.

    Attributes:
        image_size: of the model, in pixels.
        stored_size: that the data set's images were scaled to before their centre was cut out.
        resize: how image files get their size; None for a data set of pixels.
        class_names: by class.
        mean, std: per channel, of pixels in 0..1, to normalise by.
    """

    image_size: int
    stored_size: int
    resize: Resize | None
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


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
    path = run / FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        names, mean, std = (tuple(content[key]) for key in ("class_names", "mean", "std"))
        sizes = int(content["image_size"]), int(content["stored_size"])
        resize = content["resize"]
        is_good = len(mean) == len(std) == 3 and names and min(sizes) > 0 and min(std) > 0
        if not is_good or resize not in (None, *get_args(Resize)):
            raise ValueError("a value is out of range")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is damaged ({reason}): restore it") from None
    return Inputs(*sizes, resize, tuple(map(str, names)), mean, std)
