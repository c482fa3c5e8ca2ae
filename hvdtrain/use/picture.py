"""The picture of a confusion matrix."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot

from hvdtrain.study.plots import WIDTH, save

STYLE: Any = {"font.size": 8, "savefig.dpi": 300, "savefig.bbox": "tight"}
MOST_NAMED, MOST_NUMBERED = 50, 20  # classes
DARK = 0.5  # share above which numbers are white
LONGEST_NAME = 20  # characters


def draw_confusion(confusion: np.ndarray, class_names: tuple[str, ...], to: Path) -> None:
    """Draw which classes are taken for which: a row per class, shaded by the share of its images.

    Args:
        confusion: [classes, classes], the number of images by class and answer.
        class_names: shown for up to 50 classes; the counts for up to 20.
        to: the PNG file.

    Raises:
        DataError: if the file cannot be written.
    """
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
