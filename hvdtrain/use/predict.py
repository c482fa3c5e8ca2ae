"""Prediction of the classes of image files with a run's model."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.data.images import centre, decode, shown
from hvdtrain.data.images import resize as resized
from hvdtrain.data.index import Resize
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host.records import as_csv
from hvdtrain.options.givenmodel import Model
from hvdtrain.plan.program import EVALUATION_IMAGES
from hvdtrain.training.run import Inputs
from hvdtrain.use.trained import Trained, Which, trained_model

DEFAULT: Resize = "shorter"
DIGITS = 6  # of a probability


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of an image, the most probable first.

    Attributes:
        image: its file.
        classes: numbers of the classes.
        names: of the classes.
        probabilities: of the classes, by softmax.
    """

    image: str
    classes: tuple[int, ...]
    names: tuple[str, ...]
    probabilities: tuple[float, ...]


def predict(
    run: str | Path,
    images: Sequence[str | Path],
    top: int = 1,
    which: Which = "best",
    resize: Resize | None = None,
    model: Model | None = None,
    trust: bool = False,
) -> list[Prediction]:
    """Return the most probable classes of image files, in their order.

    An image is decoded and scaled to the size that the run's data set was packed with, and its
    centre is cut out where the run trains on smaller images. How it is scaled is known of a data
    set of image files alone: one of pixels does not record how `data pack` resized its images.

    Args:
        run: the run folder.
        images: JPEG, PNG, WebP, BMP or PPM files.
        top: classes per image.
        which: the best epoch's checkpoint, or the newest that verifies.
        resize: "shorter", "squash" or "pad": give the one that a data set of pixels was packed
            with; by default as in a data set of image files, else "shorter".
        model: the model that was passed in Python, if it was.
        trust: import the module that the run names also if another user could have written it.

    Raises:
        UsageError: if there is no such run, or it has fewer classes than `top`.
        DataError: naming an image that is missing or damaged, before any result; if the run holds
            no checkpoint that verifies.
    """
    paths = [Path(image) for image in images]
    for path in paths:
        _check_file(path)
    trained = trained_model(run, which, model, trust)
    classes = len(trained.inputs.class_names)
    if not classes:
        raise UsageError(f"{run} has no classes to predict: use hvdtrain.load for its outputs")
    if not 1 <= top <= classes:
        raise UsageError(f"--top {top}, but the model has {classes} classes: give 1 to {classes}")
    how = resize or trained.inputs.resize or DEFAULT
    predictions: list[Prediction] = []
    for start in range(0, len(paths), EVALUATION_IMAGES):
        batch = paths[start : start + EVALUATION_IMAGES]
        pixels = np.stack([_pixels(path, trained.inputs, how) for path in batch])
        predictions += _predictions(trained, batch, pixels, top)
    return predictions


def as_table(predictions: Sequence[Prediction], form: str) -> str:
    """Return predictions as CSV with one row per image and class, or as one JSON line per image.

    Args:
        form: "csv" or "jsonl".
    """
    if form == "jsonl":
        return "".join(json.dumps(_as_json(one)) + "\n" for one in predictions)
    rows = [
        [shown(one.image), place, number, name, f"{probability:.{DIGITS}f}"]
        for one in predictions
        for place, (number, name, probability) in enumerate(_classes(one), 1)
    ]
    return as_csv(["image", "place", "class", "name", "probability"], rows)


def _classes(one: Prediction) -> Iterator[tuple[int, str, float]]:
    return zip(one.classes, one.names, one.probabilities, strict=True)


def _as_json(one: Prediction) -> dict[str, object]:
    return {
        "image": shown(one.image),
        "classes": [
            {"class": number, "name": name, "probability": round(probability, DIGITS)}
            for number, name, probability in _classes(one)
        ],
    }


def _check_file(path: Path) -> None:
    """Raise DataError unless a path is a file."""
    name = shown(path)
    try:
        if path.is_dir():
            raise DataError(f"{name} is a folder: name the files, such as {name}/*.png")
        if not path.exists():
            raise DataError(f"{name}: there is no such file")
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}") from None


def _pixels(path: Path, inputs: Inputs, how: Resize) -> np.ndarray:
    """Return an image file as the model takes it: uint8 [size, size, 3]."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{shown(path)} cannot be read: {error.strerror}") from None
    side = max(inputs.stored_size, inputs.image_size)
    image = resized(decode(content, str(path)), side, how, str(path))
    return centre(image, inputs.image_size)


def _predictions(
    trained: Trained, batch: Sequence[Path], pixels: np.ndarray, top: int
) -> list[Prediction]:
    probabilities, classes = trained.logits(pixels).double().softmax(1).topk(top, 1)
    names = trained.inputs.class_names
    return [
        Prediction(str(path), tuple(numbers), tuple(names[n] for n in numbers), tuple(values))
        for path, numbers, values in zip(
            batch, classes.tolist(), probabilities.tolist(), strict=True
        )
    ]
