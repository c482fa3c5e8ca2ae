"""A run's model on a split, with its confusion matrix, and the classes of image files."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hvdtrain.data import order
from hvdtrain.data.images import centre, decode, shown
from hvdtrain.data.images import resize as resized
from hvdtrain.data.index import Index, Resize, read_index
from hvdtrain.data.shards import open_split
from hvdtrain.engine.feed import views
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files
from hvdtrain.host.records import as_csv
from hvdtrain.options.givenmodel import Model
from hvdtrain.options.names import nearest
from hvdtrain.options.sections import CROSS_ENTROPY, smoothing_of
from hvdtrain.plan.schedule import EVALUATION_IMAGES
from hvdtrain.training.run import Inputs
from hvdtrain.use.trained import KerasModel, Trained, Which, answering, read_config

TOP = 5
FILES = ("evaluation.json", "classes.csv", "confusion.csv", "confusion.png")
MOST_SHOWN = 20  # classes on the terminal
# Of the picture of a confusion matrix.
STYLE: Any = {"font.size": 8, "savefig.dpi": 300, "savefig.bbox": "tight"}
MOST_NAMED, MOST_NUMBERED = 50, 20  # classes
DARK = 0.5  # share above which numbers are white
LONGEST_NAME = 20  # characters


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        checkpoint: the evaluated checkpoint.
        data, split: the evaluated images.
        loss: mean cross-entropy.
        top5_accuracy: share of images whose class is among the five largest logits; None with
            five classes or fewer.
        class_names: by class.
        confusion: int64 [classes, classes], the number of images by class and answer.
        views: how many of each image there are; their weighted mean counts.
    """

    checkpoint: Path
    data: str
    split: str
    loss: float
    top5_accuracy: float | None
    class_names: tuple[str, ...]
    confusion: np.ndarray
    views: int = 1

    @property
    def images(self) -> int:
        """The number of images."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return int(np.trace(self.confusion)) / self.images

    def by_class(self) -> list[dict[str, Any]]:
        """Return for each class its images, right answers, and shares of right answers.

        `recall` is the share of the images of the class, and `precision` the share of the answers
        that name it; None where there are none. `mistaken_for` is the most frequent wrong answer.
        """
        rows = []
        for number, name in enumerate(self.class_names):
            answers, named = self.confusion[number], self.confusion[:, number]
            right, others = int(answers[number]), answers.copy()
            others[number] = 0
            wrong = self.class_names[int(others.argmax())] if others.any() else None
            rows.append(
                {
                    "class": number,
                    "name": name,
                    "images": int(answers.sum()),
                    "right": right,
                    "recall": right / int(answers.sum()) if answers.any() else None,
                    "precision": right / int(named.sum()) if named.any() else None,
                    "mistaken_for": wrong,
                }
            )
        return rows

    def as_json(self) -> dict[str, Any]:
        """Return the content of evaluation.json."""
        return {
            "checkpoint": str(self.checkpoint),
            "data": self.data,
            "split": self.split,
            "images": self.images,
            "views": self.views,
            "accuracy": self.accuracy,
            "top5_accuracy": self.top5_accuracy,
            "loss": self.loss,
            "classes": self.by_class(),
        }

    def as_text(self) -> str:
        """Return the result as lines, with the classes of the lowest recall."""
        top5 = self.top5_accuracy
        top = "" if top5 is None else f", top-5 accuracy {top5:.4f}"
        views = "" if self.views == 1 else f", as the mean over {self.views} views of each image"
        rows = [row for row in self.by_class() if row["images"]]
        rows.sort(key=lambda row: row["recall"])
        width = max(len(str(row["name"])) for row in rows)
        lines = [
            f"{self.checkpoint} on {self.images:,} images of {self.split} in {self.data}",
            f"accuracy {self.accuracy:.4f}{top}, loss {self.loss:.4f}{views}",
            f"{'class':<{width}}  images  recall  precision  mistaken for",
        ]
        for row in rows[:MOST_SHOWN]:
            precision = "-" if row["precision"] is None else f"{row['precision']:.4f}"
            lines.append(
                f"{row['name']:<{width}}  {row['images']:>6,}  {row['recall']:.4f}  "
                f"{precision:>9}  {row['mistaken_for'] or '-'}"
            )
        if len(rows) > MOST_SHOWN:
            lines.append(f"({len(rows) - MOST_SHOWN} classes with a higher recall are not shown)")
        return "\n".join(lines)


def evaluate(
    run: str | Path,
    data: str | Path | None = None,
    split: str = "test",
    which: Which = "best",
    to: str | Path | None = None,
    model: Model | None = None,
    trust: bool = False,
) -> Evaluation:
    """Evaluate the model of a run on a split of a packed data set.

    Args:
        run: the run folder.
        data: the data set; that of the run by default.
        split: "train" or "test".
        which: the best epoch's checkpoint, or the newest that verifies.
        to: folder for evaluation.json, classes.csv, confusion.csv and confusion.png; None writes
            no file.
        model: the model that was passed in Python, if it was.
        trust: import the module that the run names also if another user could have written it.

    Raises:
        UsageError: if there is no such run or split, it is no classifier, the classes differ, or
            a file cannot be written.
        DataError: if the run holds no checkpoint that verifies, or the data set is damaged.
    """
    loss = read_config(Path(run), of_keras=True).get("loss", CROSS_ENTROPY)
    if smoothing_of(loss) is None:
        raise UsageError(
            f"evaluate counts classes, and {run} has the loss {loss!r}: its "
            "summary.json holds what it measured, and hvdtrain.load returns the model"
        )
    trained = answering(run, which, model, trust)
    folder = Path(trained.config.data if data is None else data)
    index = _index(folder, trained)
    if split not in index.splits:
        names = tuple(index.splits)
        raise UsageError(f"--split {split} is not a split of {folder}{nearest(split, names)}")
    if to is not None:
        _make_folder(Path(to))
    result = _measure(trained, index, split)
    if to is not None:
        write(result, Path(to))
    return result


def _index(folder: Path, trained: Trained | KerasModel) -> Index:
    """Return the index of a data set with the classes and the image size of the model."""
    index = read_index(folder).at_size(None if trained.inputs.shape else trained.inputs.image_size)
    names = trained.inputs.class_names
    if len(index.class_names) != len(names):
        raise UsageError(
            f"{folder} has {len(index.class_names)} classes, and the model was trained on "
            f"{len(names)}: use a data set with the same classes"
        )
    for number, (theirs, ours) in enumerate(zip(index.class_names, names, strict=True)):
        if theirs != ours:
            raise UsageError(
                f"class {number} is {theirs!r} in {folder}, and {ours!r} in the data set of the "
                "run: use a data set with the same classes in the same order"
            )
    return index


def _measure(trained: Trained | KerasModel, index: Index, split: str) -> Evaluation:
    """Return the evaluation, in the batches of an evaluation during training on one rank."""
    classes = index.classes
    confusion = np.zeros(classes**2, np.int64)
    loss_sum, in_top = 0.0, 0
    with open_split(index, split) as samples:
        rows = np.arange(index.splits[split].count)
        for start, stop in order.step_slices(len(rows), EVALUATION_IMAGES):
            batch = samples.gather(rows[start:stop])
            logits, labels = trained.logits(batch.images), torch.from_numpy(batch.labels)
            labels = labels.to(logits.device)
            loss_sum += float(functional.cross_entropy(logits, labels, reduction="sum").double())
            answers = logits.argmax(1)
            confusion += torch.bincount(
                (labels * classes + answers).cpu(), minlength=classes**2
            ).numpy()
            if classes > TOP:
                in_top += int((logits.topk(TOP, 1).indices == labels[:, None]).sum())
    return Evaluation(
        checkpoint=trained.checkpoint,
        data=str(index.folder),
        split=split,
        loss=loss_sum / len(rows),
        top5_accuracy=in_top / len(rows) if classes > TOP else None,
        class_names=index.class_names,
        views=len(views(trained.config)) if isinstance(trained, Trained) else 1,
        confusion=confusion.reshape(classes, classes),
    )


def write(result: Evaluation, folder: Path) -> None:
    """Write evaluation.json, classes.csv, confusion.csv and confusion.png.

    Raises:
        UsageError: if a file cannot be written.
    """
    text = json.dumps(result.as_json(), indent=1) + "\n"
    files.write_text(folder / "evaluation.json", text, "the evaluation")
    rows = result.by_class()
    table = as_csv(list(rows[0]), [list(row.values()) for row in rows])
    files.write_text(folder / "classes.csv", table, "the table of classes")
    names = list(result.class_names)
    matrix = [
        [name, *counts] for name, counts in zip(names, result.confusion.tolist(), strict=True)
    ]
    table = as_csv(["class \\ answer", *names], matrix)
    files.write_text(folder / "confusion.csv", table, "the confusion matrix")
    draw_confusion(result.confusion, result.class_names, folder / "confusion.png")


def draw_confusion(confusion: np.ndarray, class_names: tuple[str, ...], to: Path) -> None:
    """Draw which classes are taken for which: a row per class, shaded by the share of its images.

    Args:
        confusion: [classes, classes], the number of images by class and answer.
        class_names: shown for up to 50 classes; the counts for up to 20.
        to: the PNG file.

    Raises:
        DataError: if the file cannot be written.
    """
    from matplotlib import pyplot

    from hvdtrain.study.plots import WIDTH, save

    classes = len(class_names)
    shares = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    side = max(WIDTH, min(classes, MOST_NAMED) * 0.32 + 1)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(side, side))
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xlabel("answer")
        axes.set_ylabel("class")
        if classes <= MOST_NAMED:
            names = [name[:LONGEST_NAME].replace("$", r"\$") for name in class_names]
            axes.set_xticks(range(classes), names, rotation=90)
            axes.set_yticks(range(classes), names)
        if classes <= MOST_NUMBERED:
            for row, column in np.argwhere(confusion):
                colour = "white" if shares[row, column] > DARK else "black"
                count = str(confusion[row, column])
                axes.text(column, row, count, ha="center", va="center", color=colour, fontsize=6)
        save(figure, to)


def _make_folder(folder: Path) -> None:
    """Create the folder for the files, before the work.

    Raises:
        UsageError: if it cannot be created.
    """
    try:
        files.make_folders(folder)
    except OSError as error:
        raise UsageError(f"--to {folder} cannot be created: {error.strerror}") from None
    files.check_target(str(folder / "evaluation.json"), "--to")


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
    trained = answering(run, which, model, trust)
    classes = len(trained.inputs.class_names)
    if not classes:
        raise UsageError(f"{run} has no classes to predict: use hvdtrain.load for its outputs")
    if trained.inputs.shape or trained.inputs.dtype != "uint8":
        raise UsageError(f"the inputs of {run} are no images: use hvdtrain.load for its outputs")
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
    trained: Trained | KerasModel, batch: Sequence[Path], pixels: np.ndarray, top: int
) -> list[Prediction]:
    probabilities, classes = trained.logits(pixels).double().softmax(1).topk(top, 1)
    names = trained.inputs.class_names
    return [
        Prediction(str(path), tuple(numbers), tuple(names[n] for n in numbers), tuple(values))
        for path, numbers, values in zip(
            batch, classes.tolist(), probabilities.tolist(), strict=True
        )
    ]
