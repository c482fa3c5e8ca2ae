"""Evaluation, prediction and export of a trained model: the results of the training itself."""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import nn

from hvdtrain import (
    TrainConfig,
    TrainResult,
    cli,
    data,
    evaluate,
    export,
    load,
    predict,
    train,
)
from hvdtrain.errors import DataError, HvdtrainError, UsageError
from hvdtrain.models import find
from hvdtrain.use import trained as exporting
from tests.conftest import program_environment

CLASSES, STORED, SIZE = 7, 12, 8


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set of 280 training and 56 test images."""
    folder = tmp_path_factory.mktemp("use") / "packed"
    data.synth(folder, 280, CLASSES, size=STORED, seed=3)
    return folder


@pytest.fixture(scope="module", params=["fp32", pytest.param("bf16", marks=pytest.mark.weekly)])
def run(request: pytest.FixtureRequest, packed: Path) -> TrainResult:
    """Train with a hold-out, whose images the normalisation leaves out, on smaller images."""
    return train(
        TrainConfig(
            model="cnn",
            data=str(packed),
            epochs=3,
            holdout=0.25,
            image_size=SIZE,
            precision=request.param,
            batch_size=10,
            threads=1,
            run=str(packed.with_name(f"run-{request.param}")),
        )
    )


@pytest.fixture(scope="module")
def pictures(packed: Path) -> tuple[list[Path], np.ndarray]:
    """Return the test images as PNG files of their stored size, and their labels."""
    index = data.read_index(packed)
    with data.open_split(index, "test") as samples:
        batch = samples.gather(np.arange(index.splits["test"].count))
    paths = [packed.with_name(f"{number}.png") for number in range(len(batch.images))]
    for path, image in zip(paths, batch.images, strict=True):
        Image.fromarray(image).save(path)
    return paths, batch.labels


def pixels(paths: list[Path]) -> torch.Tensor:
    """Return the centres of images: [n, 3, SIZE, SIZE]."""
    edge = (STORED - SIZE) // 2
    images = np.stack([np.asarray(Image.open(path)) for path in paths])
    return torch.from_numpy(images[:, edge:-edge, edge:-edge].transpose(0, 3, 1, 2).copy())


@pytest.mark.proves(
    "`evaluate` finds the accuracy of the summary, `predict` the answers of `evaluate`, "
    "and exported models the logits of torch."
)
def test_an_evaluation_finds_the_accuracy_of_the_run(
    run: TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(run.run), "--which", "last", "--to", str(tmp_path / "a" / "b")]
    assert cli.run([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["accuracy"] == run["final"]["test_accuracy"]
    assert shown["loss"] == pytest.approx(run["final"]["test_loss"], rel=1e-9)
    assert shown["accuracy"] > 1 / CLASSES
    assert cli.run(words) == 0
    printed = capsys.readouterr().out
    assert f"accuracy {shown['accuracy']:.4f}, top-5 accuracy " in printed
    assert "confusion.png" in printed.splitlines()[-1]
    for split in ("test", "train"):  # the negative control: other images give another result
        other = evaluate(run.run, split=split, which="last")
        assert (other.accuracy == shown["accuracy"]) is (split == "test")


def test_classes_and_confusions_are_those_of_the_answers(
    run: TrainResult, tmp_path: Path, pictures: tuple[list[Path], np.ndarray]
) -> None:
    result = evaluate(run.run, which="last", to=tmp_path)
    paths, labels = pictures
    module = load(run.run, "last")
    autocast = torch.autocast("cpu", torch.bfloat16, enabled="bf16" in run.run.name)
    with torch.inference_mode(), autocast:
        logits = module(pixels(paths)).float()
    answers = logits.argmax(1).numpy()
    expected = np.zeros((CLASSES, CLASSES), np.int64)
    np.add.at(expected, (labels, answers), 1)
    assert np.array_equal(result.confusion, expected)
    five = logits.topk(5, 1).indices.numpy()
    assert result.top5_accuracy == np.mean([label in row for label, row in zip(labels, five)])  # noqa: B905
    for row in result.by_class():
        mine = labels == row["class"]
        assert row["images"] == mine.sum()
        assert row["recall"] == np.mean(answers[mine] == row["class"])
    with (tmp_path / "confusion.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head[1:] == [row[0] for row in rows] == list(result.class_names)
    assert np.array_equal(np.array([row[1:] for row in rows], int), expected)
    with (tmp_path / "classes.csv").open() as file:
        assert [int(row["right"]) for row in csv.DictReader(file)] == np.diag(expected).tolist()
    with Image.open(tmp_path / "confusion.png") as picture:
        assert picture.format == "PNG"


def test_predictions_are_those_of_the_evaluation_without_the_data_set(
    run: TrainResult,
    packed: Path,
    pictures: tuple[list[Path], np.ndarray],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths, labels = pictures
    accuracy = evaluate(run.run, which="last").accuracy
    moved = packed.rename(tmp_path / "moved")
    try:
        predictions = predict(run.run, paths, top=3, which="last")
        assert evaluate(run.run, moved, which="last").accuracy == accuracy
    finally:
        moved.rename(packed)
    right = sum(one.classes[0] == label for one, label in zip(predictions, labels, strict=True))
    assert right / len(paths) == accuracy
    for one in predictions:
        assert one.names == tuple(f"class {number}" for number in one.classes)
        assert 1 >= one.probabilities[0] >= one.probabilities[1] >= one.probabilities[2] >= 0
    odd = tmp_path / os.fsdecode(b"\xff\n,.png")
    shutil.copy(paths[0], odd)
    words = ["predict", str(run.run), str(odd), str(paths[1]), "--which", "last"]
    assert cli.run([*words, "--top", "2"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["class"] for row in rows[:2]] == [str(n) for n in predictions[0].classes[:2]]
    assert rows[0]["image"].endswith(r"\xff\n,.png")
    assert cli.run([*words, "--format", "jsonl"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[1]["classes"][0]["name"] == predictions[1].names[0]


def refusal(call: Callable[[], object], kind: type[HvdtrainError]) -> str:
    """Return the message of an error of this kind."""
    with pytest.raises(kind) as refused:
        call()
    assert type(refused.value) is kind
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_images_that_cannot_be_read_are_one_line_and_no_output(
    run: TrainResult,
    pictures: tuple[list[Path], np.ndarray],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = str(pictures[0][0])
    short, text = tmp_path / "short.png", tmp_path / "a\nb.png"
    short.write_bytes(pictures[0][0].read_bytes()[:80])
    text.write_text("no image")
    for image, reason in (
        ("absent.png", "absent.png: there is no such file"),
        (str(tmp_path), f"{tmp_path} is a folder: name the files, such as"),
        (str(short), f"{short}: the image is damaged or truncated"),
        (str(text), r"a\nb.png: not an image that can be read"),
    ):
        assert reason in refusal(
            partial(cli.run, ["predict", str(run.run), good, image]), DataError
        )
    for top in (0, CLASSES + 1):
        assert f"--top {top}, but" in refusal(partial(predict, run.run, [good], top), UsageError)
    assert capsys.readouterr().out == ""


def test_another_data_set_is_refused_unless_its_classes_are_the_same(
    run: TrainResult, packed: Path, tmp_path: Path
) -> None:
    data.synth(tmp_path / "five", 50, 5, size=STORED)
    shutil.copytree(packed, tmp_path / "renamed")
    index = json.loads((packed / "index.json").read_text())
    index["class_names"][2] = "dog"
    (tmp_path / "renamed" / "index.json").write_text(json.dumps(index))
    message = refusal(partial(evaluate, run.run, tmp_path / "five"), UsageError)
    assert "has 5 classes, and the model was trained on 7" in message
    message = refusal(partial(evaluate, run.run, tmp_path / "renamed"), UsageError)
    assert "class 2 is 'dog' in " in message
    assert "no such folder" in refusal(partial(evaluate, run.run, "absent"), DataError)
    message = refusal(partial(evaluate, run.run, split="val"), UsageError)
    assert message.startswith("--split val is not a split of")
    (tmp_path / "file").touch()
    message = refusal(partial(evaluate, run.run, to=tmp_path / "file"), UsageError)
    assert "cannot be created: File exists" in message


def test_a_run_of_an_older_version_takes_its_inputs_from_its_data_set(
    run: TrainResult, tmp_path: Path
) -> None:
    older = shutil.copytree(run.run, tmp_path / "older")
    (older / "inputs.json").unlink()
    assert evaluate(older, which="last").accuracy == run["final"]["test_accuracy"]
    (older / "inputs.json").write_text('{"mean": 3}')
    message = refusal(partial(evaluate, older), DataError)
    assert "inputs.json is not valid (class_names is missing)" in message
    (older / "config.yaml").write_text("model: cnn\ndata: data\nframework: tensorflow\n")
    assert "is a TensorFlow run" in refusal(partial(load, older), UsageError)
    assert "is not the folder of a run" in refusal(partial(evaluate, tmp_path), UsageError)


def test_a_best_checkpoint_that_is_not_known_is_not_replaced_by_the_newest(
    run: TrainResult, tmp_path: Path
) -> None:
    copy = shutil.copytree(run.run, tmp_path / "copy")
    for text, fault in (
        ('{"checkpoint": "step-', "is not valid"),
        ('{"checkpoint": "step-00000000"}', "names step-00000000, which is no checkpoint here"),
        ('{"checkpoint": "../../run"}', "names ../../run, which is no checkpoint here"),
    ):
        (copy / "checkpoints" / "best.json").write_text(text)
        for call in (evaluate, load, partial(export, file=tmp_path / "weights.pth")):
            message = refusal(partial(call, copy), DataError)
            assert fault in message
            assert message.endswith("choose the newest checkpoint with --which last")
        assert evaluate(copy, which="last").accuracy == run["final"]["test_accuracy"]


@pytest.mark.proves("Code that another user could have written is not imported.")
def test_code_that_another_user_could_have_written_is_not_imported(
    run: TrainResult,
    pictures: tuple[list[Path], np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A module in the current folder; each file and folder that decides what it holds is open."""

    def forget() -> None:
        for name in ("strange_models.net", "strange_models"):
            del sys.modules[name]
        find._import_module.cache_clear()

    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(run.run, tmp_path / "strange" / "run")
    config, module = folder / "config.yaml", tmp_path / "strange_models" / "net.py"
    config.write_text(config.read_text().replace("model: cnn", "model: strange_models.net:net"))
    module.parent.mkdir()
    package = module.with_name("__init__.py")
    package.write_text("from pathlib import Path\nPath('ran').touch()\n")
    module.write_text("from hvdtrain.models.resnet import cnn as net\n")
    paths = [str(path) for path in pictures[0][:2]]
    uses = [["evaluate", folder], ["predict", folder, *paths], ["export", folder, "net.onnx"]]
    commands = [[*map(str, words), "--which", "last"] for words in uses]
    cache = module.with_name("__pycache__")
    cache.mkdir()
    for path in (folder, config, package, module, module.parent, cache, tmp_path):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        for command in commands:
            message = refusal(partial(cli.run, command), UsageError)
            assert f"{path} can be changed by other users" in message
            assert message.endswith("or give --trust")
        assert not Path("ran").exists(), path
        path.chmod(mode)
    config.chmod(0o666)
    capsys.readouterr()
    for command in commands:
        assert cli.run([*command, "--trust"]) == 0
        assert f"importing {module}, which {folder} names" in capsys.readouterr().err
        Path("ran").unlink()
        forget()
    config.chmod(0o644)
    assert evaluate(folder, which="last").accuracy == run["final"]["test_accuracy"]
    forget()


def test_a_module_that_is_loaded_is_no_way_around_the_check(
    run: TrainResult, tmp_path: Path
) -> None:
    folder = shutil.copytree(run.run, tmp_path / "run")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("model: cnn", "model: os:getpid"))
    config.chmod(0o666)
    with pytest.raises(UsageError, match="can be changed by other users"):
        evaluate(folder, which="last")


def test_a_model_of_ours_imports_nothing_from_the_current_folder(
    run: TrainResult, tmp_path: Path
) -> None:
    """An evaluation draws a picture, and matplotlib could come from the folder of a stranger."""
    (tmp_path / "matplotlib.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    command = [sys.executable, "-P", "-m", "hvdtrain", "evaluate", str(run.run), "--to", "out"]
    subprocess.run(command, cwd=tmp_path, env=program_environment(), check=True)
    assert not (tmp_path / "ran").exists()


def test_exported_models_return_the_logits_of_torch(
    run: TrainResult, pictures: tuple[list[Path], np.ndarray], tmp_path: Path
) -> None:
    module = load(run.run)
    for suffix in (".onnx", ".pt2"):
        assert cli.run(["export", str(run.run), str(tmp_path / f"model{suffix}")]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for count in (1, 3, 56):  # any number of images
        images = pixels(pictures[0][:count]).float()
        with torch.inference_mode():
            expected = module(images).numpy()
            again = program(images).numpy()
        (logits,) = session.run(["logits"], {"pixels": images.numpy()})
        assert logits.shape == expected.shape == again.shape == (count, CLASSES)
        assert np.allclose(logits, expected, rtol=1e-4, atol=1e-4)
        assert np.allclose(again, expected, rtol=1e-5, atol=1e-5)
        assert not np.allclose(logits, module(images / 255).detach().numpy(), atol=1e-3)


def test_exports_that_cannot_be_are_one_line_and_leave_no_file(
    run: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal(partial(export, run.run, tmp_path / "model.h5"), UsageError)
    assert "the suffix decides the form: use .pth or .pt (weights), .onnx, or .pt2" in message
    monkeypatch.setattr(exporting, "ONNX_PACKAGES", ("onnx", "no_such_package"))
    message = refusal(partial(export, run.run, tmp_path / "model.onnx"), UsageError)
    assert message == "a file of ONNX needs no_such_package: pip install no_such_package"
    assert not list(tmp_path.iterdir())


class Decides(nn.Module):
    """A model whose forward depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * STORED**2, CLASSES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(images)
        if not logits.is_meta and float(logits.detach().sum()) > 0:
            return -logits
        return logits


class Counts(Decides):
    """A model whose code fixes the number of images."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images).view(len(images), CLASSES)  # type: ignore[no-any-return]


def test_a_model_that_fixes_the_number_of_images_is_not_exported(
    packed: Path, tmp_path: Path
) -> None:
    # ONNX would be written for two images, the number of the example.
    config = TrainConfig(
        model=Counts(), data=str(packed), max_steps=1, threads=1, run=str(tmp_path / "run")
    )
    result = train(config)
    for file in (tmp_path / "model.onnx", tmp_path / "model.pt2"):
        message = refusal(partial(export, result.run, file, model=Counts()), UsageError)
        assert "fixes the number of images, as len(x) does: use x.shape[0]" in message
        assert not file.exists()


def test_a_model_that_was_passed_in_python_is_used_with_the_object(
    packed: Path, tmp_path: Path
) -> None:
    module = Decides()
    options: dict[str, Any] = {"data": str(packed), "max_steps": 2, "threads": 1}
    result = train(TrainConfig(model=module, run=str(tmp_path / "run"), **options))
    message = refusal(partial(evaluate, result.run), UsageError)
    assert "model in-python:Decides was passed in Python, and no file holds it" in message
    assert evaluate(result.run, model=Decides()).accuracy == result["final"]["test_accuracy"]
    message = refusal(partial(evaluate, result.run, model=module.layers), UsageError)
    assert "holds another model than in-python:Sequential" in message
    export(result.run, tmp_path / "weights.pth")  # the module's own names
    before = module.state_dict()["layers.1.weight"].clone()
    module.load_state_dict(torch.load(tmp_path / "weights.pth", weights_only=True))
    assert not torch.equal(module.state_dict()["layers.1.weight"], before)
    message = refusal(
        partial(export, result.run, tmp_path / "model.pt2", model=module), UsageError
    )
    assert message.startswith("torch cannot export model in-python:Decides (")
    assert not (tmp_path / "model.pt2").exists()
    again = train(
        TrainConfig(
            model=Decides(),
            run=str(tmp_path / "again"),
            weights=str(tmp_path / "weights.pth"),
            **options | {"lr": 1e-12, "max_steps": 1},
        )
    )
    assert again["final"]["test_loss"] == pytest.approx(result["final"]["test_loss"], rel=1e-5)
