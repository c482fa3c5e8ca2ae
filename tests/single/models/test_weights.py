"""Files of weights: names and shapes equal those of torchvision 0.26.

`torchvision_0.26.json` holds the names and shapes in the `state_dict()` of that version's
`resnet18()`, `resnet50()` and `vit_b_16()`.
"""

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hvdtrain import models
from hvdtrain.errors import DataError, UsageError
from hvdtrain.models.component import parameter_count, tensor_shapes
from hvdtrain.models.weights import read, torchvision_name, write

RECORDED = json.loads((Path(__file__).parent / "torchvision_0.26.json").read_text())
Shapes = dict[str, tuple[int, ...]]


def shapes_of(model: str, classes: int = 1000, size: int = 224) -> Shapes:
    return tensor_shapes(models.components(model, classes, size))


def small(name: str, classes: int = 10) -> tuple[Shapes, dict[str, Tensor]]:
    """Return the shapes of a model for 16 x 16 pixels, and values of these shapes."""
    shapes = shapes_of(name, classes, 16)
    return shapes, {
        key: torch.full(shape, float(i)) for i, (key, shape) in enumerate(shapes.items())
    }


@pytest.mark.proves(
    "ResNets and ViTs exchange weights with torchvision: `export` writes its names, and "
    "`--weights` reads them."
)
@pytest.mark.parametrize("model", ["resnet18", "resnet50", "vit_b16"])
def test_names_and_shapes_are_torchvisions(model: str) -> None:
    renamed = {
        torchvision_name(model, name): list(shape) for name, shape in shapes_of(model).items()
    }
    assert renamed == RECORDED[model]


def test_parameter_counts_are_torchvisions() -> None:
    assert parameter_count(models.components("resnet50", 1000, 224)) == 25_557_032
    assert parameter_count(models.components("vit_b16", 1000, 224)) == 86_567_656


@pytest.mark.parametrize("model", ["resnet50", "vit_tiny", "cnn"])
def test_what_is_written_reads_back(tmp_path: Path, model: str) -> None:
    shapes, values = small(model)
    write(tmp_path / "weights.pth", model, values)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pth"]
    tensors, other = read(tmp_path / "weights.pth", model, shapes, "head")
    assert other == []
    assert tensors.keys() == values.keys()
    assert all(torch.equal(tensors[name], value) for name, value in values.items())
    stored = torch.load(tmp_path / "weights.pth", weights_only=True)
    assert stored.keys() == {torchvision_name(model, name) for name in shapes}


def test_hvdtrains_own_names_are_read_too(tmp_path: Path) -> None:
    shapes, values = small("resnet18")
    torch.save(values, tmp_path / "own.pth")
    assert read(tmp_path / "own.pth", "resnet18", shapes, "head")[0].keys() == values.keys()


def test_a_head_of_other_classes_is_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path / "weights.pth", "resnet18", small("resnet18", 1000)[1])
    shapes, _ = small("resnet18", 10)
    tensors, other = read(tmp_path / "weights.pth", "resnet18", shapes, "head")
    assert other == ["head.fc.weight", "head.fc.bias"]
    assert tensors.keys() == shapes.keys() - set(other)


def test_of_a_module_that_is_one_component_only_its_classes_may_differ(tmp_path: Path) -> None:
    """A vision transformer of torchvision for another image size is refused."""

    def shapes(classes: int, patches: int) -> Shapes:
        # As in ViT, and the bias table of Swin, which also has a row per position.
        return {
            "model.pos_embed": (patches, 8),
            "model.head.weight": (classes, 8),
            "model.head.bias": (classes,),
        }

    values = {name: torch.ones(shape) for name, shape in shapes(1000, 197).items()}
    write(tmp_path / "weights.pth", "own:model", values)
    kept, others = read(tmp_path / "weights.pth", "own:model", shapes(10, 197), "model")
    assert (list(kept), others) == (["model.pos_embed"], ["model.head.weight", "model.head.bias"])
    with pytest.raises(DataError, match=r"pos_embed has the shape \(197, 8\)"):
        read(tmp_path / "weights.pth", "own:model", shapes(10, 50), "model")
    write(tmp_path / "odd.pth", "own:model", values | {"model.head.bias": torch.tensor(1.0)})
    with pytest.raises(DataError, match=r"head\.bias has the shape"):
        read(tmp_path / "odd.pth", "own:model", shapes(10, 197), "model")


def test_counters_may_be_missing_as_in_old_files(tmp_path: Path) -> None:
    shapes, values = small("resnet18")
    kept = {name: value for name, value in values.items() if "num_batches" not in name}
    write(tmp_path / "weights.pth", "resnet18", kept)
    assert read(tmp_path / "weights.pth", "resnet18", shapes, "head")[0].keys() == kept.keys()


class Harmful:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("open('harmed', 'w').close()",)


def test_files_that_hold_no_weights_are_refused_and_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shapes, values = small("cnn")
    path = tmp_path / "weights.pth"

    def refusal() -> str:
        with pytest.raises(DataError) as caught:
            read(path, "cnn", shapes, "head")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    with path.open("wb") as file:
        pickle.dump({"conv1.weight": Harmful()}, file)
    assert "is not a file of weights" in refusal()
    assert not (tmp_path / "harmed").exists()
    path.write_bytes(b"")
    assert "is not a file of weights" in refusal()
    torch.save([1, 2], path)
    assert "it must hold a dictionary of tensors by name" in refusal()
    torch.save(values | {"extra.weight": torch.zeros(1)}, path)
    assert "holds extra.weight, which cnn does not have: use weights of cnn" in refusal()
    first = next(iter(values))
    torch.save({name: value for name, value in values.items() if name != first}, path)
    assert f"lacks {first}: use weights of cnn" in refusal()
    torch.save(values | {first: torch.zeros(2, 2)}, path)
    assert f"{first} has the shape (2, 2)" in refusal()


def test_a_file_that_cannot_be_read_or_written_is_said(tmp_path: Path) -> None:
    shapes, values = small("cnn")
    with pytest.raises(UsageError, match="there is no such file"):
        read(tmp_path / "absent.pth", "cnn", shapes, "head")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read(tmp_path, "cnn", shapes, "head")
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        write(tmp_path / "absent" / "weights.pth", "cnn", values)
