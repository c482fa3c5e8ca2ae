"""The trained model of a Keras run, in a process of its own: the other one has PyTorch.

    python -m hvdtrain.backends.tensorflow.serve WANTED

WANTED is JSON: the configuration, the checkpoint, and what the model takes. The process reads
pickled arrays uint8 [n, size, size, 3] from its standard input, and answers each with its logits,
until the input ends. With a `file` it writes the model instead: `.keras` with its normalisation,
or `.npz` with PyTorch's names and shapes.
"""

import json
import os
import pickle
import sys
from pathlib import Path
from typing import IO, Any

import keras
import numpy as np

from hvdtrain.backends.tensorflow.models import to_torch
from hvdtrain.backends.tensorflow.step import build_model
from hvdtrain.checkpoint import store
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import UNIT
from hvdtrain.errors import HvdtrainError
from hvdtrain.host.files import write_whole


def main(words: list[str]) -> int:
    """Answer until the input ends, or write the file; errors are one line on standard error."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what TensorFlow prints is no answer
        try:
            wanted = json.loads(words[0])
            model = _model(wanted)
            if wanted["file"] is not None:
                _write(model, wanted, Path(wanted["file"]))
            else:
                _answer(model, wanted, sys.stdin.buffer, answers)
        except HvdtrainError as error:
            print(error, file=sys.stderr)
            return error.exit_code
    return 0


def _model(wanted: dict[str, Any]) -> keras.Model:
    """Return the model with the weights of the checkpoint."""
    config = TrainConfig(**wanted["config"])
    model = build_model(config, wanted["classes"], wanted["image_size"])
    tensors = store.load(Path(wanted["checkpoint"])).tensors
    for weight in model.weights:
        weight.assign(tensors[weight.path])
    return model


def _answer(
    model: keras.Model, wanted: dict[str, Any], questions: IO[bytes], answers: IO[bytes]
) -> None:
    kind = np.float64 if wanted["config"]["precision"] == "fp64" else np.float32
    mean, std = (np.array(wanted[name], kind) for name in ("mean", "std"))
    while questions.peek(1):  # type: ignore[attr-defined]
        images = pickle.load(questions)
        logits = model((images.astype(kind) / UNIT - mean) / std, training=False)
        pickle.dump(np.asarray(logits, kind), answers)
        answers.flush()


def _write(model: keras.Model, wanted: dict[str, Any], path: Path) -> None:
    if path.suffix == ".npz":
        state: dict[str, Any] = to_torch(model)
        write_whole(path, lambda file: np.savez(file, **state))
        return
    size, mean, std = wanted["image_size"], np.array(wanted["mean"]), np.array(wanted["std"])
    whole = keras.Sequential(
        [
            keras.layers.Input((size, size, 3), name="pixels"),
            keras.layers.Rescaling(scale=(1 / UNIT / std).tolist(), offset=(-mean / std).tolist()),
            model,
        ]
    )
    whole.save(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
