"""Folders, CSV files, arrays and iterators of images become data sets, whole or not at all."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from hvdtrain import cli, data
from hvdtrain.data import packing
from hvdtrain.data.arrays import read_arrays
from hvdtrain.data.index import Index, read_index
from hvdtrain.data.shards import open_split
from hvdtrain.data.sources import CIFAR10
from hvdtrain.errors import DataError, HvdtrainError, UsageError
from tests.conftest import ROOT, Program
from tests.pure.data.test_images import a_bomb
from tests.single.data.test_cifar import a_folder, files_of

SIZE = 12


def pixels_of(number: int, size: int = SIZE) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)


def save(path: Path, pixels: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def class_folders(folder: Path, count: int, names: tuple[str, ...] = ("cat", "dog")) -> Path:
    """Save `count` images, numbered through all classes."""
    for number in range(count):
        save(folder / names[number % len(names)] / f"{number}.png", pixels_of(number))
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 41 training and 9 test images of 2 classes."""
    folder = tmp_path_factory.mktemp("images")
    class_folders(folder / "train", 41)
    class_folders(folder / "val", 9)
    return folder


def everything(index: Index, split: str) -> Any:
    with open_split(index, split) as samples:
        return samples.gather(np.arange(len(samples)))


def refusal(source: Path, destination: Path, **options: Any) -> str:
    with pytest.raises(HvdtrainError) as caught:
        data.pack(source, destination, **options)
    assert "\n" not in str(caught.value)
    assert not destination.exists()
    return str(caught.value)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.proves(
    "A folder of images, a CSV file, arrays or a Python iterator becomes a data set, "
    "whole or not at all; what cannot be packed is named in one line."
)
def test_a_folder_is_packed_in_the_order_of_its_file_names(folders: Path, tmp_path: Path) -> None:
    index = data.pack(folders, tmp_path / "packed")
    assert index == read_index(tmp_path / "packed")
    assert index.class_names == ("cat", "dog")
    assert index.notes == ("val/ is the test split", "test: 9 different images are in train, too")
    batch = everything(index, "train")
    assert batch.ids.tolist() == list(range(41))  # 2 comes before 10
    assert batch.labels.tolist() == [number % 2 for number in range(41)]
    np.testing.assert_array_equal(batch.images, [pixels_of(number) for number in range(41)])
    assert everything(index, "test").ids.tolist() == list(range(41, 50))
    np.testing.assert_allclose(index.mean, (batch.images / 255).mean(axis=(0, 1, 2)))
    np.testing.assert_allclose(index.std, (batch.images / 255).std(axis=(0, 1, 2)))


def test_png_files_of_cifar_give_the_index_of_the_archive(tmp_path: Path) -> None:
    """The index has the hash of each shard, and is all that a run depends on."""
    source = a_folder(tmp_path / "cifar", files_of(CIFAR10, 60))
    packed = data.pack(source, tmp_path / "packed")
    as_png(tmp_path / "packed", tmp_path / "png")
    ours = data.pack(tmp_path / "png", tmp_path / "ours")
    assert ours.splits == packed.splits
    assert ours.class_names == packed.class_names
    assert packed.notes  # this archive is smaller than the official one
    ours_file = json.loads((tmp_path / "ours" / "index.json").read_text())
    their_file = json.loads((tmp_path / "packed" / "index.json").read_text())
    assert ours_file | {"notes": []} == their_file | {"notes": []}


def as_png(packed: Path, folder: Path) -> None:
    """Save all images of a data set as files, numbered through the classes."""
    index = read_index(packed)
    for split in index.splits:
        batch = everything(index, split)
        for number, (image, label) in enumerate(zip(batch.images, batch.labels, strict=True)):
            save(folder / split / index.class_names[label] / f"{number}.png", image)


def trained(program: Program, packed: Path, run: Path, *options: str) -> tuple[str, str]:
    """Return the hash of the weights after a short run, and its ledger."""
    command = f"train --model cnn --data {packed} --run {run} --ledger {run}.csv"
    done = program(*command.split(), *options)
    assert done.returncode == 0, done.stderr
    summary = json.loads((run / "summary.json").read_text())
    return summary["weights_sha256"], Path(f"{run}.csv").read_text()


@pytest.mark.proves(
    "CIFAR as PNG files trains to the weights of the archive; any number of workers, and "
    "a pack that was killed, give the same bytes."
)
def test_png_files_train_to_the_weights_of_the_archive(tmp_path: Path, hvdtrain: Program) -> None:
    archive = tmp_path / "archive"
    data.pack(a_folder(tmp_path / "cifar", files_of(CIFAR10, 60)), archive)
    # The notes on missing records have no place in a folder of images, but a part in the hash.
    content = json.loads((archive / "index.json").read_text()) | {"notes": []}
    (archive / "index.json").write_text(json.dumps(content))
    as_png(archive, tmp_path / "png")
    data.pack(tmp_path / "png", tmp_path / "packed")
    options = ("--max-steps", "3", "--eval-every", "0", "--augment", "crop-flip")
    expected = trained(hvdtrain, archive, tmp_path / "a", *options)
    assert trained(hvdtrain, tmp_path / "packed", tmp_path / "b", *options) == expected
    # Another order of the same samples trains to other weights.
    for path in sorted((tmp_path / "png").rglob("*.png")):
        path.rename(path.with_name(f"{999 - int(path.stem)}.png"))
    data.pack(tmp_path / "png", tmp_path / "other")
    assert trained(hvdtrain, tmp_path / "other", tmp_path / "c", *options)[0] != expected[0]


@pytest.mark.weekly
@pytest.mark.skipif("CIFAR_DIR" not in os.environ, reason="CIFAR_DIR is not set")
def test_png_files_of_the_real_cifar_train_to_the_weights_of_the_archive(
    tmp_path: Path, hvdtrain: Program
) -> None:
    data.pack(Path(os.environ["CIFAR_DIR"]) / CIFAR10.folder, tmp_path / "archive")
    as_png(tmp_path / "archive", tmp_path / "png")
    data.pack(tmp_path / "png", tmp_path / "packed")
    assert files_in(tmp_path / "packed") == files_in(tmp_path / "archive")
    options = ("--max-steps", "20", "--eval-every", "0")
    expected = trained(hvdtrain, tmp_path / "archive", tmp_path / "a", *options)
    assert trained(hvdtrain, tmp_path / "packed", tmp_path / "b", *options) == expected


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_any_number_of_workers_gives_the_same_bytes(
    folders: Path, tmp_path: Path, encoding: Any
) -> None:
    for workers in (1, 3):
        data.pack(folders, tmp_path / f"{workers}", encoding=encoding, size=8, workers=workers)
    assert files_in(tmp_path / "1") == files_in(tmp_path / "3")


@pytest.mark.proves(
    "Image files that are kept are read as their pixels would be, in bounded memory; "
    "random parts depend on seed, epoch and sample alone."
)
def test_files_that_are_kept_are_read_as_pixels_would_be(folders: Path, tmp_path: Path) -> None:
    pixels = data.pack(folders, tmp_path / "raw", size=8)
    files = data.pack(folders, tmp_path / "jpeg", size=8, encoding="jpeg")
    assert data.verify(tmp_path / "jpeg") == []
    assert files.format_version == 2
    assert (files.mean, files.std) == (pixels.mean, pixels.std)
    assert data.info(tmp_path / "jpeg")["encoding"] == "jpeg"
    for split in ("train", "test"):
        np.testing.assert_array_equal(
            everything(files, split).images, everything(pixels, split).images
        )
        np.testing.assert_array_equal(
            everything(files, split).labels, everything(pixels, split).labels
        )
    whole = everything(files.at_size(SIZE), "train")
    np.testing.assert_array_equal(whole.images, [pixels_of(number) for number in range(41)])
    centre = everything(files.at_size(4), "train").images
    np.testing.assert_array_equal(centre, everything(pixels.at_size(4), "train").images)
    np.testing.assert_array_equal(centre, everything(pixels, "train").images[:, 2:6, 2:6])
    assert {files.hash, files.at_size(4).hash} == {read_index(tmp_path / "jpeg").hash}
    with pytest.raises(UsageError, match="pack them with --size 12"):
        pixels.at_size(SIZE)


def test_files_are_read_in_bounded_memory(tmp_path: Path) -> None:
    for number in range(300):
        save(
            tmp_path / "source" / "train" / f"{number % 2}" / f"{number}.png",
            pixels_of(number, 40),
        )
    class_folders(tmp_path / "source" / "test", 2, ("0", "1"))
    index = data.pack(tmp_path / "source", tmp_path / "jpeg", encoding="jpeg", size=40, shard_mb=1)
    assert len(index.splits["train"].shards) > 1
    rows = np.random.default_rng(0).permutation(300)[:200]
    with open_split(index, "train", memory_bytes=1000) as samples:
        assert not samples.in_memory
        batch = samples.gather(rows)
        assert len(samples._chunks) == 1
        np.testing.assert_array_equal(samples.labels(rows), rows % 2)
    np.testing.assert_array_equal(batch.images, [pixels_of(row, 40) for row in rows])


def test_a_flipped_byte_of_a_kept_file_is_named(folders: Path, tmp_path: Path) -> None:
    index = data.pack(folders, tmp_path / "set", encoding="jpeg", size=8)
    path = tmp_path / "set" / "train-00000.h5"
    content = bytearray(path.read_bytes())
    place = content.index(b"IDAT", len(content) // 4)
    content[place + 8] ^= 1
    path.write_bytes(content)
    assert "fails its checksum" in " ".join(data.verify(tmp_path / "set"))
    with pytest.raises(DataError, match="fails its checksum"):
        everything(index, "train")


def test_one_folder_is_split_by_the_seed(tmp_path: Path) -> None:
    class_folders(tmp_path / "one", 60, ("a", "b", "c"))
    first = data.pack(tmp_path / "one", tmp_path / "1", split="0.9,0.1", seed=1)
    again = data.pack(tmp_path / "one", tmp_path / "2", split="0.9,0.1", seed=1)
    other = data.pack(tmp_path / "one", tmp_path / "3", split="0.9,0.1", seed=2)
    assert first.hash == again.hash != other.hash
    assert np.bincount(everything(first, "test").labels).tolist() == [2, 2, 2]
    both = np.concatenate([everything(first, "train").images, everything(first, "test").images])
    assert len(np.unique(both.reshape(60, -1), axis=0)) == 60
    assert "give --split 0.9,0.1" in refusal(tmp_path / "one", tmp_path / "4")
    assert "whose sum is 1" in refusal(tmp_path / "one", tmp_path / "4", split="0.9,0.2")


def test_a_csv_file_keeps_its_order_and_names_or_numbers_its_classes(tmp_path: Path) -> None:
    for number in range(6):
        save(tmp_path / "files" / f"{number}.png", pixels_of(number))
    order = [3, 1, 5, 0, 2, 4]
    rows = [(f"files/{number}.png", number % 2) for number in order]
    plain = "".join(f"{file},{label}\n" for file, label in rows)
    (tmp_path / "plain.csv").write_text(plain)
    (tmp_path / "header.csv").write_text("\ufeffFile,Label\n" + plain)
    (tmp_path / "columns.csv").write_text(
        "id,target,path\n" + "".join(f"x,{label},{file}\n" for file, label in rows)
    )
    absolute = plain.replace("files", f"{tmp_path / 'files'}")
    (tmp_path / "absolute.csv").write_text(absolute)
    named = "".join(f'"{file}", {"kitten" if label else "10 dogs"}\r\n' for file, label in rows)
    (tmp_path / "named.csv").write_text(named)
    packed = {
        name: data.pack(tmp_path / f"{name}.csv", tmp_path / name, split="0.5,0.5")
        for name in ("plain", "header", "columns", "absolute", "named")
    }
    assert len({packed[name].hash for name in ("plain", "header", "columns", "absolute")}) == 1
    assert packed["plain"].class_names == ("class 0", "class 1")
    assert packed["named"].class_names == ("10 dogs", "kitten")
    both = tmp_path / "both"
    both.mkdir()
    for name in ("train", "val"):
        (both / f"{name}.csv").write_text(plain.replace("files", "../files"))
    index = data.pack(both, tmp_path / "packed")
    assert index.notes == (
        "val.csv is the test split",
        "test: 6 different images are in train, too",
    )
    batch = everything(index, "train")
    np.testing.assert_array_equal(batch.images, [pixels_of(number) for number in order])
    assert batch.labels.tolist() == [number % 2 for number in order]


def test_arrays_are_packed(tmp_path: Path) -> None:
    images = np.stack([pixels_of(number) for number in range(30)])
    labels = np.arange(30) % 3
    np.savez(tmp_path / "alone.npz", images=images, labels=labels)
    np.savez_compressed(
        tmp_path / "keras.npz",
        x_train=images[..., 0],
        y_train=labels[:, None],
        x_test=images[:6, :, :, :1],
        y_test=labels[:6, None],
    )
    folder = tmp_path / "npy"
    folder.mkdir()
    for split in ("train", "val"):
        np.save(folder / f"{split}_images.npy", images)
        np.save(folder / f"{split}_labels.npy", np.array(["c", "b", "a"])[labels])
    alone = data.pack(tmp_path / "alone.npz", tmp_path / "1", split="0.8,0.2")
    assert np.bincount(everything(alone, "train").labels).tolist() == [8, 8, 8]
    grey = data.pack(tmp_path / "keras.npz", tmp_path / "2")
    expected = np.repeat(images[..., :1], 3, axis=3)
    np.testing.assert_array_equal(everything(grey, "train").images, expected)
    assert everything(grey, "test").labels.tolist() == [0, 1, 2] * 2
    named = data.pack(folder, tmp_path / "3", size=8)
    assert named.class_names == ("a", "b", "c")
    assert everything(named, "train").labels.tolist() == [2, 1, 0] * 10
    resized = [data.resize(image, 8) for image in images]
    np.testing.assert_array_equal(everything(named, "test").images, resized)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, "holds no arrays named `images` and `labels`"),
        ({"images": np.zeros((4, 3, 8, 8), np.uint8)}, "save uint8 [n, height, width, 3]"),
        ({"images": np.zeros((4, 8, 8, 3))}, "images of float64 [4, 8, 8, 3]: save uint8"),
        ({"images": np.zeros((0, 8, 8, 3), np.uint8)}, "holds no images"),
        ({"labels": np.array([0, 1, 0])}, "not the labels of 4 images"),
        ({"labels": np.array([0, 1, 0, -1])}, "label -1 is out of range"),
        ({"labels": np.array([0, 1, 0, 10**9])}, "label 1000000000 is out of range"),
        ({"labels": np.array([1, 2, 1, 2])}, "no image has label 0"),
        ({"labels": np.array([0, 2, 0, 2])}, "has no image of class 1"),
        ({"labels": np.array(["0", "1", "", "1"])}, "the label of 1 image(s) is empty"),
        ({"labels": np.array(["a", "\ud800", "a", "\ud800"])}, "labels.npy: cannot be read"),
        ({"labels": np.array([0, 1, 0, None])}, "labels.npy: object [4] are not the labels of 4"),
    ],
)
def test_arrays_that_fit_nothing_are_refused(
    tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    good = {"images": np.zeros((4, 8, 8, 3), np.uint8), "labels": np.array([0, 1, 0, 1])}
    content = arrays if "a" in arrays else good | arrays
    np.savez(tmp_path / "arrays.npz", **content)
    assert message in refusal(tmp_path / "arrays.npz", tmp_path / "packed", split="0.5,0.5")


def test_large_images_of_an_array_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    np.savez(tmp_path / "large.npz", images=np.zeros((9, 1024, 1024), np.uint8), labels=[0] * 9)
    array, _ = read_arrays(tmp_path / "large.npz")[0]["all"]
    assert [len(images) for images in array.images()] == [4, 4, 1]


@pytest.mark.parametrize("save_arrays", [np.savez, np.savez_compressed])
def test_a_flipped_byte_of_an_archive_of_arrays_is_named(tmp_path: Path, save_arrays: Any) -> None:
    images = np.stack([pixels_of(number) for number in range(8)])
    path = tmp_path / "arrays.npz"
    save_arrays(path, images=images, labels=np.array(["cat", "dog"] * 4))
    whole = path.read_bytes()
    messages = []
    for place in np.random.default_rng(0).integers(0, len(whole), 120):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        )
        try:
            splits, classes, _ = read_arrays(path)
            array, labels = splits["all"]
            np.testing.assert_array_equal(np.concatenate(list(array.images())), images)
            assert (labels.tolist(), classes) == ([0, 1] * 4, ("cat", "dog"))
        except DataError as error:
            messages.append(str(error))
    assert len(messages) > 90
    assert all(message.startswith(f"{path}: ") for message in messages)


@pytest.mark.parametrize("name", ["images", "labels"])
def test_what_is_no_array_of_numpy_is_named(tmp_path: Path, name: str) -> None:
    folder, archive_path = tmp_path / "folder", tmp_path / "text.npz"
    folder.mkdir()
    np.save(folder / "images.npy", np.zeros((4, 8, 8), np.uint8))
    np.save(folder / "labels.npy", np.zeros(4, np.uint8))
    np.savez(tmp_path / "zip.npz", np.zeros(4))
    (tmp_path / "zip.npz").rename(folder / f"{name}.npy")
    with zipfile.ZipFile(archive_path, "w") as archive:
        for file in folder.iterdir():
            archive.write(file, file.name)
    for source, place in (
        (folder, folder / f"{name}.npy"),
        (archive_path, f"{archive_path}: {name}.npy"),
    ):
        message = refusal(source, tmp_path / "set", split="0.5,0.5")
        assert message.startswith(f"{place}: cannot be read (the magic string")


def test_an_iterator_is_packed_by_a_function(tmp_path: Path) -> None:
    def samples(count: int) -> Iterator[tuple[Any, Any]]:
        for number in range(count):
            pixels = pixels_of(number)
            yield (Image.fromarray(pixels) if number % 2 else pixels), np.int64(number % 3)

    index = data.write(tmp_path / "set", {"train": samples(20), "test": samples(5)})
    assert index.class_names == ("class 0", "class 1", "class 2")
    batch = everything(index, "train")
    np.testing.assert_array_equal(batch.images, [pixels_of(number) for number in range(20)])
    assert batch.labels.tolist() == [number % 3 for number in range(20)]
    small = data.write(
        tmp_path / "small", {"test": samples(5), "train": samples(20)}, list("abc"), size=8
    )
    assert small.image_shape == (8, 8, 3)
    assert list(small.splits) == ["train", "test"]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([], "the split `train` has no images"),
        (
            [(np.zeros((4, 4)), 0)],
            "sample 0 of `test` is uint8 [12, 12, 3], others are float64 [4, 4]",
        ),
        ([(np.zeros((3, 5, 5), np.uint8), 0)], "its shape is 3x5x5"),
        ([(pixels_of(0), 0), (pixels_of(0, 5), 0)], "sample 1 of `train`: image of 5x5 pixels"),
        ([(pixels_of(0, 5), 0)], "sample 0 of `test`: image of 12x12 pixels, others have 5x5"),
        ([(pixels_of(0), 2)], "sample 0 of `train` has label 2: labels are 0 to 1"),
        ([(pixels_of(0), 2**32)], "sample 0 of `train` has label 4294967296: give whole numbers"),
        ([(pixels_of(0), -(2**70))], "has label -1180591620717411303424: give whole numbers"),
        ([(pixels_of(0), -1)], "sample 0 of `train` has label -1: labels are 0 to 1"),
        ([(pixels_of(0), 0.5)], "sample 0 of `train` cannot be used: 'float' object"),
        ([pixels_of(0)], "sample 0 of `train` cannot be used"),
    ],
)
def test_samples_that_cannot_be_used_are_named(
    tmp_path: Path, train: list[Any], message: str
) -> None:
    splits = {"train": iter(train), "test": iter([(pixels_of(1), 0)])}
    with pytest.raises(DataError) as caught:
        data.write(tmp_path / "set", splits, ["a", "b"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "set").exists()
    with pytest.raises(DataError, match="the split `test` has no images"):
        data.write(tmp_path / "set", {"train": [(pixels_of(1), 0)], "test": []})
    with pytest.raises(UsageError, match="give `train` and `test`"):
        data.write(tmp_path / "set", {"train": []})


@pytest.mark.parametrize("names", [range(2), ["a", "two\nlines"], ["a", ""], ["a", "\udcff"]])
def test_class_names_that_no_index_may_hold_are_refused(tmp_path: Path, names: Any) -> None:
    unread = iter([(pixels_of(0), 0)])
    with pytest.raises(UsageError, match=r"class name .*: give each class a name") as caught:
        data.write(tmp_path / "set", {"train": unread, "test": []}, names)
    assert "\n" not in str(caught.value)
    assert next(unread)
    assert not (tmp_path / "set").exists()


def make_bad(folder: Path, kind: str) -> str:
    """Spoil a folder of images, and return what the message says."""
    cat, dog = folder / "train" / "cat", folder / "train" / "dog"
    if kind == "nothing":
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        return "holds no folders of images"
    if kind == "a class without images":
        for path in cat.iterdir():
            path.rename(path.with_suffix(".txt"))
        return f"{cat}: holds no images"
    if kind == "a class in one split":
        save(folder / "val" / "bird" / "1.png", pixels_of(0))
        return "no folder of the class(es) bird, which the other split has"
    if kind == "truncated":
        (dog / "1.png").write_bytes((dog / "1.png").read_bytes()[:200])
        return f"{dog / '1.png'}: the image is damaged or truncated"
    if kind == "text":
        (dog / "1.png").write_text("<html>404</html>")
        return f"{dog / '1.png'}: not an image that can be read"
    if kind == "one pixel":
        save(dog / "1.png", pixels_of(0, 1))
        return f"{dog / '1.png'}: image of 1x1 pixels"
    if kind == "a bomb":
        (dog / "1.png").write_bytes(a_bomb(50_000))
        return f"{dog / '1.png'}: image of more than 134 million pixels"
    if kind == "another size":
        save(dog / "1.png", pixels_of(0, 13))
        return f"{dog / '1.png'}: image of 13x13 pixels, others have 12x12: give --size N"
    if kind == "a dangling link":
        (dog / "1.png").unlink()
        (dog / "1.png").symlink_to("nowhere.png")
        return f"{dog / '1.png'}: cannot be read (No such file or directory)"
    name = os.fsdecode(b"new\nline \xff.png")
    (dog / "1.png").rename(dog / name)
    (dog / name).write_bytes(b"x")
    return f"{dog}/new\\nline \\xff.png: not an image"


WHOLE = ("nothing", "a class without images", "a class in one split", "another size")


@pytest.mark.parametrize(
    "kind",
    [
        *("nothing", "a class without images", "a class in one split", "truncated", "text"),
        *("one pixel", "a bomb", "another size", "a dangling link", "a strange name"),
    ],
)
def test_what_cannot_be_packed_is_named_in_one_line(tmp_path: Path, kind: str) -> None:
    class_folders(tmp_path / "source" / "train", 9)
    class_folders(tmp_path / "source" / "val", 4)
    message = make_bad(tmp_path / "source", kind)
    refused = refusal(tmp_path / "source", tmp_path / "packed", workers=2)
    assert message in refused
    assert refused.endswith("--skip-broken") == (kind not in WHOLE)
    if kind not in WHOLE:
        faults: list[str] = []
        index = data.pack(
            *(tmp_path / "source", tmp_path / "packed"), skip_broken=True, report=faults.append
        )
        assert index.notes[1:2] == ("train: 1 broken file left out",)
        assert message in faults[0]
        assert index.splits["train"].count == 8
    else:
        refusal(tmp_path / "source", tmp_path / "packed", skip_broken=True)


def test_a_class_whose_training_images_are_all_broken_is_refused(tmp_path: Path) -> None:
    """Such as the header of a CSV file under other names, which is an image of its own class."""
    for number in range(4):
        save(tmp_path / f"{number}.png", pixels_of(number))
    rows = "0.png,cat\n1.png,dog\n2.png,cat\n3.png,dog\n"
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text("photo,kind\n" + rows)
    for workers in (1, 2):
        message = refusal(tmp_path, tmp_path / "set", skip_broken=True, workers=workers)
        assert message == (
            f"every training image of kind is broken, such as {tmp_path / 'photo'}: restore the "
            "images, or remove the class"
        )
    (tmp_path / "train.csv").write_text("photo,cat\n" + rows)
    (tmp_path / "test.csv").write_text("photo,cat\n" + rows.replace("1.png", "photo"))
    index = data.pack(tmp_path, tmp_path / "set", skip_broken=True)
    assert index.notes[:2] == ("train: 1 broken file left out", "test: 2 broken files left out")


def test_good_files_of_any_name_are_packed(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", 4)
    class_folders(tmp_path / "test", 4)
    name = os.fsdecode(b"new\nline \xff.png")
    save(tmp_path / "train" / "cat" / "inner" / name, pixels_of(4))
    save(tmp_path / "train" / "cat" / "._hidden.png", pixels_of(5))
    assert data.pack(tmp_path, tmp_path / "packed").splits["train"].count == 5


@pytest.mark.parametrize(
    ("packed", "link", "target", "same"),
    [
        ("train", "train/all", "train", "train"),
        ("train", "train/kitten", "train/cat", "train/cat"),
        ("", "train/cat/loop", "train/cat", "train/cat"),
        ("", "train/cat/up", ".", ""),
        ("", "train/cat/more", "test/cat", "test/cat"),
        ("", "train/cat/twice.png", "train/dog/1.png", "train/dog/1.png"),
        ("", "test/dog/9.png", "train/dog/1.png", "train/dog/1.png"),
    ],
)
def test_nothing_is_read_twice_through_a_link(
    tmp_path: Path, packed: str, link: str, target: str, same: str
) -> None:
    """An extra class held every image, under another label; links to other folders are fine."""
    source, pool = tmp_path / "source", tmp_path / "pool"
    for folder in (source / "train", source / "test", pool):
        class_folders(folder, 4)
    (source / "train" / "cat" / "pooled").symlink_to(pool / "cat")
    (source / "train" / "dog" / "8.png").symlink_to(pool / "dog" / "1.png")
    os.link(source / "train" / "dog" / "1.png", source / "train" / "dog" / "7.png")
    assert data.pack(source, tmp_path / "good").splits["train"].count == 4 + 2 + 2
    (source / link).symlink_to(source / target)
    split = "0.5,0.5" if packed else None
    message = refusal(source / packed, tmp_path / "packed", split=split)
    assert "so that its images would count twice: remove the link" in message
    assert f"is the same as {source / same}" in message
    assert not (tmp_path / "packed").exists()


def test_what_is_no_image_by_its_name_and_other_splits_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    for split in ("train", "test", "val"):
        class_folders(source / split, 4)
    for name in ("a.jfif", "b.JFIF", "c.tif", "notes"):
        (source / "train" / "cat" / name).touch()
    os.mkfifo(source / "train" / "cat" / "pipe.png")  # reading it would wait
    for place in (source / "train", source / "train" / "cat"):
        (place / "loop").symlink_to("loop")
    (source / "val" / "again").symlink_to("cat")  # val is not read
    assert cli.run(["data", "pack", str(source), str(tmp_path / "packed")]) == 0
    output = capsys.readouterr()
    assert "by their suffix no images: 2 .jfif, 1 .tif, 2 without suffix" in output.err
    assert "note: val/ is left out" in output.out
    for image in (source / "test" / "dog").iterdir():
        image.rename(image.with_suffix(".gif"))
    assert "but 2 .gif, 2 .jfif, 1 .tif" in refusal(source, tmp_path / "other")


def test_a_file_of_another_kind_is_answered_with_what_it_is(tmp_path: Path) -> None:
    rows = "file,label\na.png,0\n"
    with h5py.File(tmp_path / "set.h5", "w") as file:
        file["images"] = [0]
    save(tmp_path / "one.png", pixels_of(0))
    for name, content, message in (
        ("set.h5", None, "set.h5: name its data sets, as "),
        ("set.csv", (tmp_path / "set.h5").read_bytes(), "is an HDF5 file: give a CSV file"),
        ("one.png", None, "is a single image: give"),
        ("list.txt", rows.encode(), "is text: give"),
        ("wide.csv", rows.encode("utf-16"), "is text in UTF-16: give a CSV file in UTF-8"),
        ("semi.csv", rows.replace(",", ";").encode(), "separated by semicolons: use commas"),
        ("tabs.csv", rows.replace(",", "\t").encode(), "separated by tabs: use commas"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert message in refusal(tmp_path / name, tmp_path / "packed", split="0.5,0.5"), name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no images"),
        ("file,label\n", "holds no images"),
        ("a.png\n", "line 1 has 1 column(s)"),
        ("a.png,0\nb.png,0,1\n", "line 2 has 3 column(s)"),
        ("a.png,0\nb.png,1\nc.png, \n", "line 3 has no label"),
        ("a.png,-3\nb.png,0\n", "label -3 is out of range"),
        ("a.png,0\nnone.png,0\n", "none.png: cannot be read (No such file"),
        ("a.png,0\n\0,0\n", "is a file of another kind"),
    ],
)
def test_a_csv_file_that_is_wrong_is_refused(tmp_path: Path, content: str, message: str) -> None:
    save(tmp_path / "a.png", pixels_of(0))
    (tmp_path / "list.csv").write_text(content)
    assert message in refusal(tmp_path / "list.csv", tmp_path / "packed", split="0.5,0.5")


def test_an_image_that_is_too_long_to_scale_is_named(tmp_path: Path) -> None:
    long = np.zeros((2, 1_000_000, 3), np.uint8)
    save(tmp_path / "long.png", long)
    (tmp_path / "list.csv").write_text("long.png,0\n" * 2)
    np.savez(tmp_path / "long.npz", images=long[None].repeat(2, axis=0), labels=[0, 0])
    expected = "image of 1000000x2 pixels: too long to scale its shorter side to 4096"
    for source, named in (("list.csv", "long.png"), ("long.npz", "long.npz: images.npy")):
        message = refusal(tmp_path / source, tmp_path / "set", split="0.5,0.5", size=4096)
        assert message.startswith(f"{tmp_path / named}: {expected}")
    with pytest.raises(DataError, match=f"sample 0 of `train`: {expected}"):
        data.write(tmp_path / "set", {"train": [(long, 0)], "test": []}, size=4096)


def test_options_that_fit_no_source_are_refused(folders: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    assert "leave --split out" in refusal(folders, packed, split="0.9,0.1")
    assert "--workers 0" in refusal(folders, packed, workers=0)
    assert "choose from 1 to 4096" in refusal(folders, packed, size=0)
    assert "no such file or folder" in refusal(tmp_path / "none", packed)
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 8, 8, 3), np.uint8), labels=[0, 1, 0, 1])
    assert "are for image files" in refusal(tmp_path / "a.npz", packed, encoding="jpeg")


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_pack_that_is_stopped_resumes_to_the_same_bytes(
    folders: Path, tmp_path: Path, stop: signal.Signals
) -> None:
    options: dict[str, Any] = {"size": 160, "shard_mb": 1}
    data.pack(folders, tmp_path / "whole", **options)
    destination = tmp_path / "set"
    command = f"data pack {folders} {destination} --size 160 --shard-mb 1 --workers 2"
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain", *command.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    partial = destination / ".partial"
    while not (partial / "train-00000.json").exists():
        assert process.poll() is None, "the pack ended too early"
        os.sched_yield()
    os.kill(process.pid, stop)
    _, printed = process.communicate()  # returns when no worker holds the pipes any more
    assert process.returncode == (130 if stop == signal.SIGINT else -stop)
    advice = b"hvdtrain: interrupted: run the same command again to resume\n"
    assert printed == (advice if stop == signal.SIGINT else b"")
    assert not (destination / "index.json").exists()
    before = (partial / "train-00000.h5").stat().st_ino
    data.pack(folders, destination, workers=1, **options)
    assert (destination / "train-00000.h5").stat().st_ino == before, "it was packed again"
    assert files_in(destination) == files_in(tmp_path / "whole")


def test_a_pack_whose_worker_is_killed_resumes(folders: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"size": 160, "shard_mb": 1}
    data.pack(folders, tmp_path / "whole", workers=1, **options)

    def kill_workers(done: int) -> None:
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()

    with pytest.MonkeyPatch.context() as patch, pytest.raises(DataError, match="to resume"):
        patch.setattr(packing, "progress_bar", lambda *_: nullcontext(kill_workers))
        data.pack(folders, tmp_path / "set", workers=2, **options)
    before = (tmp_path / "set" / ".partial" / "train-00000.h5").stat().st_ino
    data.pack(folders, tmp_path / "set", workers=1, **options)
    assert (tmp_path / "set" / "train-00000.h5").stat().st_ino == before, "it was packed again"
    assert files_in(tmp_path / "set") == files_in(tmp_path / "whole")


def test_what_a_stopped_pack_left_is_not_used_for_another(folders: Path, tmp_path: Path) -> None:
    class_folders(tmp_path / "source" / "train", 30)
    class_folders(tmp_path / "source" / "test", 4)
    options: dict[str, Any] = {"size": 160, "shard_mb": 1, "workers": 1}

    def stopped() -> None:
        def report(done: int) -> None:
            if done > 15:
                raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(packing, "progress_bar", lambda *_: nullcontext(report))
            data.pack(tmp_path / "source", tmp_path / "set", **options)
        assert (tmp_path / "set" / ".partial" / "train-00000.h5").exists()

    stopped()
    save(tmp_path / "source" / "train" / "cat" / "0.png", pixels_of(99))
    data.pack(tmp_path / "source", tmp_path / "whole", **options)
    data.pack(tmp_path / "source", tmp_path / "set", **options)
    assert files_in(tmp_path / "set") == files_in(tmp_path / "whole")
    for damage in ("shard", "record", "options"):
        shutil.rmtree(tmp_path / "set")
        stopped()
        if damage == "shard":
            (tmp_path / "set" / ".partial" / "train-00000.h5").write_bytes(b"x")
        elif damage == "record":
            (tmp_path / "set" / ".partial" / "train-00000.json").write_text("{")
        else:
            index = data.pack(tmp_path / "source", tmp_path / "set", **options | {"size": 150})
            assert index.image_shape == (150, 150, 3)
            continue
        data.pack(tmp_path / "source", tmp_path / "set", **options)
        assert files_in(tmp_path / "set") == files_in(tmp_path / "whole")


def test_two_packs_into_one_folder_exclude_each_other(folders: Path, tmp_path: Path) -> None:
    messages = []

    def samples() -> Iterator[tuple[Any, int]]:
        yield pixels_of(0), 0
        with pytest.raises(DataError) as caught:
            data.pack(folders, tmp_path / "set")
        messages.append(str(caught.value))

    data.write(tmp_path / "set", {"train": samples(), "test": [(pixels_of(0), 0)]})
    assert "another process is packing into this folder" in messages[0]
    assert read_index(tmp_path / "set").splits["train"].count == 1
