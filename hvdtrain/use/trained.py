"""The model of a run: loaded after a check of who could have written its code, and exported."""

import atexit
import io
import json
import logging
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain import configfile, models
from hvdtrain import device as devices
from hvdtrain.backends.pytorch.parts import build_model
from hvdtrain.backends.pytorch.state import to_tensor
from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.store import Checkpoint
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.index import read_index
from hvdtrain.engine.feed import normalisation, views
from hvdtrain.errors import DataError, UsageError, one_line
from hvdtrain.host.files import check_target, ownership_problem, write_whole
from hvdtrain.models import REGISTRY, weights
from hvdtrain.models.component import Component, tensor_shapes
from hvdtrain.models.find import input_shape
from hvdtrain.options.givenmodel import GivenModel, Model
from hvdtrain.parallel.stage import AUTOCAST, Images, StageModel
from hvdtrain.training.run import Inputs, inputs_of, load_inputs
from hvdtrain.world import World

WEIGHTS = (".pth", ".pt")
ONNX, PT2, KERAS = ".onnx", ".pt2", ".keras"
Which = Literal["best", "last"]
ALONE = World("none", 0, 1, 0, 1, 1)


@dataclass(frozen=True)
class Trained:
    """The model of a run in evaluation mode, with the weights of a checkpoint.

    Attributes:
        checkpoint: the folder of the checkpoint.
        inputs: what the model takes and returns.
        model: the components.
        images: prepares images for the model, on its device.
    """

    config: TrainConfig
    checkpoint: Path
    inputs: Inputs
    model: StageModel
    images: Images

    def logits(self, images: np.ndarray) -> Tensor:
        """Return the logits [n, classes] of images, uint8 [n, size, size, 3], as training does.

        They are the mean over the views that an augmentation has.
        """
        seen = views(self.config)
        logits = [weight * self._logits(view(images)) for weight, view in seen]
        return torch.stack(logits).sum(0) if len(seen) > 1 else logits[0]

    def _logits(self, images: np.ndarray) -> Tensor:
        with torch.inference_mode(), self._autocast():
            logits = self.model(self.images(images))
        return logits if logits.dtype == torch.float64 else logits.float()

    def _autocast(self) -> AbstractContextManager[object]:
        return devices.autocast(self.images.device, AUTOCAST.get(self.config.precision))


class KerasModel:
    """The trained model of a Keras run, which answers from a process of its own.

    Attributes:
        config, checkpoint, inputs: as of `Trained`.

    Raises:
        UsageError: if the run used a model that was passed in Python.
    """

    def __init__(self, run: Path, which: Which, trust: bool) -> None:
        self.config = _config(run, None, of_keras=True)
        self.checkpoint = saved_state(run, which)[1]
        self.inputs = load_inputs(run) or _inputs_from_data(self.config, run)
        check(run, self.config.model, trust)
        self._process: subprocess.Popen[bytes] | None = None

    def logits(self, images: np.ndarray) -> Tensor:
        """Return the logits [n, classes] of images, uint8 [n, size, size, 3]."""
        if self._process is None:
            self._process = self._started(None)
            atexit.register(self._process.kill)
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None and answers is not None
        try:
            pickle.dump(images, questions)
            questions.flush()
            return torch.from_numpy(pickle.load(answers))
        except (OSError, EOFError, pickle.UnpicklingError):
            raise self._fault() from None

    def write(self, path: Path) -> None:
        """Write the model as a file of Keras, or its weights as PyTorch has them."""
        self._process = self._started(path)
        self._process.communicate()
        if self._process.returncode:
            raise self._fault()

    def _started(self, file: Path | None) -> "subprocess.Popen[bytes]":
        wanted = {
            "config": asdict(self.config),
            "checkpoint": str(self.checkpoint),
            "classes": self.inputs.classes,
            "image_size": self.inputs.image_size,
            "mean": self.inputs.mean,
            "std": self.inputs.std,
            "file": None if file is None else str(file),
        }
        words = [sys.executable, "-m", "hvdtrain.backends.tensorflow.serve", json.dumps(wanted)]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        pipe = subprocess.PIPE
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=self._said)

    def _fault(self) -> UsageError:
        assert self._process is not None
        self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines() or ["it ended"]
        return UsageError(f"the Keras model of {self.checkpoint} cannot be used: {lines[-1]}")


def answering(
    run: str | Path, which: Which = "best", model: Model | None = None, trust: bool = False
) -> "Trained | KerasModel":
    """Return the model of a run of either framework, for its logits.

    Raises:
        UsageError, DataError: as `trained_model`.
    """
    if read_config(Path(run), of_keras=True).get("framework") == "tensorflow":
        return KerasModel(Path(run), which, trust)
    return trained_model(run, which, model, trust)


class Classifier(nn.Module):
    """A trained model with its normalisation, without hvdtrain.

    It takes pixels of 0 to 255 as floating numbers, [n, 3, size, size], and returns logits
    [n, classes].
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.register_buffer("scale", trained.images.scale)
        self.register_buffer("shift", trained.images.shift)
        self.components = nn.Sequential(*trained.model.components.values())

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        logits: Tensor = self.components(pixels.to(self.scale.dtype) * self.scale + self.shift)
        return logits


def load_classifier(
    run: str | Path, which: Which = "best", model: Model | None = None, trust: bool = False
) -> nn.Module:
    """Return the trained model of a run as a torch module in evaluation mode.

    It takes pixels of 0 to 255, [n, 3, size, size] of any dtype, and returns logits [n, classes]:
    the normalisation is part of it. Its device is that of the run, if this machine has one.

    Args:
        run: the run folder.
        which: the best epoch's checkpoint, or the newest that verifies.
        model: the model that was passed in Python, if it was; its own weights do not matter.
        trust: import the module that the run names also if another user could have written it.

    Raises:
        UsageError: if there is no such run, or the model is another one.
        DataError: if the run holds no checkpoint that verifies.
    """
    return Classifier(trained_model(run, which, model, trust)).eval()


def trained_model(
    run: str | Path, which: Which = "best", model: Model | None = None, trust: bool = False
) -> Trained:
    """Return the trained model of a run.

    Raises:
        UsageError: if there is no such run, the model is another one, or its code is not trusted.
        DataError: if the run holds no checkpoint that verifies.
    """
    config = _config(Path(run), model)
    saved, checkpoint = saved_state(Path(run), which)
    inputs = load_inputs(Path(run)) or _inputs_from_data(config, Path(run))
    for name in (config.model, config.augment):
        if not isinstance(name, GivenModel):
            check(Path(run), name, trust)
    components = models.components(
        config.model,
        inputs.classes,
        inputs.size,
        config.patch_size,
        config.seed,
    )
    _check(components, saved.tensors, config, checkpoint)
    device = torch.device("cpu") if config.device == "cpu" else devices.gpu_if_there_is_one()
    devices.choose_algorithms(config.precision, config.deterministic)
    stage = build_model(components, config, device)
    stage.put({name: to_tensor(value) for name, value in saved.tensors.items()})
    stage.put_extra({name: to_tensor(value) for name, value in saved.extra.items()})
    stage.train(False)
    images = Images(inputs.mean, inputs.std, device, config.precision)
    return Trained(config, checkpoint, inputs, stage, images)


def saved_state(run: Path, which: Which) -> tuple[Checkpoint, Path]:
    """Return a checkpoint of a run, and its folder.

    Raises:
        DataError: if the run holds no checkpoint that verifies.
    """
    checkpoints = run / "checkpoints"
    best = store.best(checkpoints) if which == "best" else None
    if best is not None:
        return store.load(best), best
    newest, path, skipped = store.load_newest(checkpoints)
    if newest is None or path is None:
        raise DataError(skipped[0] if skipped else f"{run} holds no checkpoint yet: train it on")
    return newest, path


def read_config(run: Path, of_keras: bool = False) -> dict[str, Any]:
    """Return the saved configuration of a run.

    Args:
        of_keras: whether it may be a TensorFlow run.

    Raises:
        UsageError: if there is no such run, or it is a TensorFlow run, or was emulated.
    """
    if not (run / "config.yaml").is_file():
        raise UsageError(f"{run} is not the folder of a run: there is no config.yaml in it")
    config = configfile.load(run / "config.yaml")
    if config.get("framework") == "tensorflow" and not of_keras:
        raise UsageError(
            f"{run} is a TensorFlow run, which is no model of PyTorch: hvdtrain export {run} "
            "FILE.keras writes one that Keras loads"
        )
    if config.get("emulate"):
        raise UsageError(
            f"{run} was emulated (--emulate {config['emulate']}), so its weights mean nothing: "
            "train without --emulate"
        )
    return config


def _config(run: Path, model: Model | None, of_keras: bool = False) -> TrainConfig:
    saved = read_config(run, of_keras)
    names = {item.name for item in fields(TrainConfig)}
    values = {name: value for name, value in saved.items() if name in names}
    if model is not None:
        values["model"] = model
    if "model" not in values or "data" not in values:
        raise UsageError(f"{run / 'config.yaml'} is not the configuration of a run: restore it")
    return TrainConfig(**values | {"compile": False, "recompute": None})


def _inputs_from_data(config: TrainConfig, run: Path) -> Inputs:
    """Return the inputs of a run of a version that did not record them, from its data set."""
    try:
        index = read_index(config.data).at_size(config.image_size)
    except DataError as error:
        raise DataError(
            f"{run} has no inputs.json, so it needs its data set, which cannot be read: {error}"
        ) from None
    count = index.splits["train"].count
    rows, _ = order.holdout(count, config.holdout, index.hash, config.seed)
    return inputs_of(index, normalisation(config.normalise, index, rows, ALONE))


def _check(
    components: list[Component],
    tensors: Mapping[str, np.ndarray],
    config: TrainConfig,
    checkpoint: Path,
) -> None:
    """Refuse a model whose tensors are not those of the checkpoint.

    Raises:
        UsageError: naming the first difference.
    """
    shapes = tensor_shapes(components)
    saved = {name: tuple(value.shape) for name, value in tensors.items()}
    differing = sorted(
        name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name)
    )
    if differing:
        raise UsageError(
            f"{checkpoint} holds another model than {config.model}, which differs in "
            f"{differing[0]}: use the model code that the run was started with"
        )


def check(run: Path, name: str, is_trusted: bool) -> None:
    """Refuse to import a module that a run names if another user could have written it.

    The run folder and its configuration name the module; the module and its folder hold the code,
    and the current folder what that imports. Folders above these are not checked, nor is this
    Python's installation.

    Args:
        name: of a model or an augmentation, as in the configuration.
        is_trusted: import it in any case.

    Raises:
        UsageError: with the fault and what to do.
    """
    module = name.rpartition(":")[0]
    if name in REGISTRY or ":" not in name:
        return
    files, installed = _files(module), (sys.prefix, sys.base_prefix)
    checked = [file for file in files if not any(map(file.is_relative_to, installed))]
    folders = [Path.cwd(), *(file.parent for file in checked)]
    paths = [run, run / "config.yaml", *checked, *folders]
    paths += [folder / "__pycache__" for folder in folders]
    faults = (ownership_problem(path) for path in paths if path.exists())
    if not is_trusted and (fault := next(filter(None, faults), None)):
        raise UsageError(f"{run} names {name}, whose code would run, and {fault}; or give --trust")
    source = files[-1] if files else module
    print(f"hvdtrain: importing {source}, which {run} names", file=sys.stderr)


def _files(module: str) -> list[Path]:
    """Return the files that an import executes for a module and its packages, without importing.

    The current folder comes first, as in `models.find`.
    """
    if module.endswith(".py"):
        return [Path(module).absolute()]
    names, path, files = module.split("."), [str(Path.cwd()), *sys.path], []
    for count in range(1, len(names) + 1):
        spec = PathFinder.find_spec(".".join(names[:count]), path)
        if spec is None and count == 1 and names[0] not in sys.modules:
            spec = find_spec(names[0])  # as of a package that is installed in place
        if spec is None:
            break
        path = list(spec.submodule_search_locations or ())
        if spec.has_location and spec.origin:
            files.append(Path(spec.origin))
        elif path:
            files.append(Path(path[0]))
    return files


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
    if path.suffix not in (*WEIGHTS, ONNX, PT2, KERAS):
        raise UsageError(
            f"{file}: the suffix decides the form: use .pth or .pt (weights), .onnx, or .pt2 "
            "(torch.export); of TensorFlow runs .keras or .pth"
        )
    if read_config(Path(run), of_keras=True).get("framework") == "tensorflow":
        return _export_keras(Path(run), path, which, trust)
    if path.suffix == KERAS:
        raise UsageError(f"{file}: {run} is a PyTorch run: use .pth, .pt, .onnx or .pt2")
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


def _export_keras(run: Path, path: Path, which: Which, trust: bool) -> Path:
    """Write a TensorFlow run's model for Keras, or a built-in model's weights for PyTorch."""
    model = KerasModel(run, which, trust)
    if path.suffix == KERAS:
        model.write(path)
        return model.checkpoint
    if path.suffix not in WEIGHTS or model.config.model not in REGISTRY:
        raise UsageError(
            f"{path}: a TensorFlow run is exported as .keras, and cnn, resnet18 and "
            "the other built-in models as .pth, too"
        )
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder, "weights.npz")
        model.write(arrays)
        with np.load(arrays) as loaded:
            state = {name: torch.from_numpy(loaded[name]) for name in loaded}
    weights.write(path, model.config.model, state, {})
    return model.checkpoint


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
    images = torch.zeros(EXAMPLE_IMAGES, *input_shape(trained.inputs.size))
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
