"""Inputs that are no square colour images: arrays of any channels, sides and type."""

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hvdtrain import data
from hvdtrain.data.index import UNIT
from hvdtrain.data.order import holdout
from hvdtrain.data.shards import stage
from hvdtrain.engine.feed import normalisation
from hvdtrain.errors import DataError, UsageError
from hvdtrain.world import World
from tests.conftest import ROOT

ALONE = World("none", 0, 1, 0, 1, 1)
N, C, H, W = 40, 2, 6, 10
TYPES = ("float32", "float64", "float16", "int16", "uint8")


def arrays(dtype: str, n: int = N) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    inputs = (100 * random.random((n, C, H, W))).astype(dtype)
    targets = random.standard_normal((n, 1, H, W)).astype(np.float32)
    return inputs, targets


def stored(index: data.Index, split: str) -> data.Batch:
    with data.open_split(index, split) as samples:
        return samples.gather(np.arange(index.splits[split].count))


@pytest.mark.proves(
    "`data pack` takes inputs of any channels, sides and numbers, and their targets."
)
@pytest.mark.parametrize("dtype", TYPES)
def test_arrays_come_back_as_they_were(tmp_path: Path, dtype: str) -> None:
    inputs, targets = arrays(dtype)
    np.savez(tmp_path / "fields.npz", inputs=inputs, targets=targets)
    index = data.pack(tmp_path / "fields.npz", tmp_path / "packed", split="0.8,0.2", shard_mb=1)
    assert (index.input_size, index.image_dtype) == ((C, H, W), dtype)
    assert {name: split.count for name, split in index.splits.items()} == {"train": 32, "test": 8}
    both = [stored(data.read_index(tmp_path / "packed"), name) for name in ("train", "test")]
    images = np.concatenate([batch.images for batch in both]).transpose(0, 3, 1, 2)
    labels = np.concatenate([batch.labels for batch in both])
    assert images.dtype == inputs.dtype
    order = [int(np.flatnonzero((targets == label).all((1, 2, 3)))[0]) for label in labels]
    assert sorted(order) == list(range(N))
    assert np.array_equal(images, inputs[order])
    train = both[0].images.astype(np.float64)
    unit = UNIT if dtype == "uint8" else 1
    assert unit * np.array(index.mean) == pytest.approx(train.mean((0, 1, 2)))
    assert unit * np.array(index.std) == pytest.approx(train.std((0, 1, 2)))


def test_moments_of_the_rows_that_are_not_held_out(tmp_path: Path) -> None:
    inputs, targets = arrays("float32")
    np.savez(tmp_path / "fields.npz", inputs=inputs, targets=targets)
    index = data.pack(tmp_path / "fields.npz", tmp_path / "packed", split="0.8,0.2")
    rows, _ = holdout(32, 0.25, index.hash, 0)
    mean, std = normalisation("meanstd", index, rows, ALONE)
    with data.open_split(index, "train") as samples:
        kept = samples.gather(rows).images.astype(np.float64)
    assert UNIT * np.array(mean) == pytest.approx(kept.mean((0, 1, 2)))
    assert UNIT * np.array(std) == pytest.approx(kept.std((0, 1, 2)))
    mean, std = normalisation("unit", index, rows, ALONE)
    assert (mean, std) == ((0.0, 0.0), (1 / UNIT, 1 / UNIT)), "numbers stay as they are"


def test_data_sets_of_an_hdf5_file(tmp_path: Path) -> None:
    inputs, targets = arrays("float32")
    path = tmp_path / "simulation.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("run/inputs", data=inputs, chunks=(7, C, H, W), compression="gzip")
        file["run/targets"] = targets
        file["classes"] = np.arange(N) % 3
    index = data.pack(f"{path}:/run/inputs,/run/targets", tmp_path / "fields", split="0.8,0.2")
    assert (index.input_size, index.classes) == ((C, H, W), H * W)
    index = data.pack(f"{path}:/run/inputs,/classes", tmp_path / "classes", split="0.8,0.2")
    assert (index.targets, index.classes) == (None, 3)
    whole = ",".join(["/run/inputs,/run/targets"] * 2)
    assert data.pack(f"{path}:{whole}", tmp_path / "both").splits["test"].count == N
    for names, fault in (
        (
            "/run/inputs,/run/x",
            r"/run/x: is no data set of the file, which has /classes, /run/inp",
        ),
        ("/run/inputs", "name two data sets"),
    ):
        with pytest.raises(DataError, match=fault):
            data.pack(f"{path}:{names}", tmp_path / "no", split="0.8,0.2")
    with pytest.raises(DataError, match=r"name its data sets, as .*simulation\.h5:/inputs"):
        data.pack(path, tmp_path / "no", split="0.8,0.2")


@pytest.mark.proves("`data pack --reference` copies no inputs, and notices one that changed.")
@pytest.mark.parametrize("dtype", [">f4", "uint8"])
def test_a_reference_reads_what_a_copy_holds(tmp_path: Path, dtype: str) -> None:
    n = 3000  # several chunks
    inputs, targets = arrays(dtype, n)
    path, copy, referring = (tmp_path / name for name in ("user.h5", "copy", "referring"))
    with h5py.File(path, "w") as file:
        file["deep/inputs"], file["targets"] = inputs, targets
    source = f"{path}:/deep/inputs,/targets"
    packed = data.pack(source, copy, split="0.8,0.2", shard_mb=1)
    index = data.pack(source, referring, split="0.8,0.2", shard_mb=1, reference=True)
    assert (index.mean, index.std) == (packed.mean, packed.std)
    held = sum(one.bytes for one in index.splits["train"].shards)
    assert held < sum(one.bytes for one in packed.splits["train"].shards) - inputs.nbytes // 2
    for name in ("train", "test"):
        expected = stored(packed, name)
        assert np.array_equal(stored(data.read_index(referring), name).images, expected.images)
        with data.open_split(index, name, memory_bytes=0) as samples:  # chunk by chunk
            rows = np.random.default_rng(0).permutation(len(samples))
            batch = samples.gather(rows)
        for made, whole in zip(vars(batch).values(), vars(expected).values(), strict=True):
            assert np.array_equal(made, whole[rows])
    assert data.verify(referring) == []
    with h5py.File(path, "a") as file:
        file["deep/inputs"][17, 1, 2, 3] += 1
    (fault,) = data.verify(referring)
    assert "row 17 of /deep/inputs changed" in fault
    with h5py.File(path, "a") as file:
        file["deep/inputs"][:] = 0
    assert all(
        re.search(r"row \d+ of .* and [\d,]+ more", fault) for fault in data.verify(referring)
    )
    with h5py.File(path, "a") as file:
        del file["deep/inputs"]
        file["deep/inputs"] = inputs[: n // 2]
    faults = data.verify(referring)
    assert f"user.h5: /deep/inputs cannot be read (it has {n // 2:,} rows, and row" in faults[-1]
    with h5py.File(path, "a") as file:
        del file["deep"]
    (fault,) = data.verify(referring)
    assert "user.h5: /deep/inputs cannot be read" in fault
    path.rename(tmp_path / "moved.h5")
    (fault,) = data.verify(referring)
    with pytest.raises(DataError, match=re.escape(fault)):
        data.read_index(referring)
    assert "refers to it, and it cannot be opened (No such file or directory)" in fault


def test_few_rows_of_a_reference_are_read_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, targets = arrays("float32", 4000)
    path, read = tmp_path / "user.h5", [0]
    with h5py.File(path, "w") as file:
        file["inputs"], file["targets"] = inputs, targets
    source = f"{path}:/inputs,/targets"
    index = data.pack(source, tmp_path / "set", split="0.998,0.002", reference=True)
    monkeypatch.setattr("hvdtrain.data.shards.CHUNK_BYTES", 8 * inputs[0].nbytes)
    whole = h5py.Dataset.__getitem__

    def counted(data_set: h5py.Dataset, place: Any, **options: Any) -> Any:
        chosen = whole(data_set, place, **options)
        read[0] += len(chosen) if data_set.name == "/inputs" else 0
        return chosen

    monkeypatch.setattr(h5py.Dataset, "__getitem__", counted)
    assert len(stored(index, "test").images) == 8
    assert 8 <= read[0] <= 8 * 8


def test_a_reference_is_of_an_hdf5_file_as_it_is(tmp_path: Path) -> None:
    images = np.zeros((20, 8, 8, 1), np.uint8)
    path = tmp_path / "user.h5"
    with h5py.File(path, "w") as file:
        file["grey"], file["colour"] = images, images.repeat(3, 3)
        file["labels"] = np.arange(20) % 2
    make = partial(data.pack, destination=tmp_path / "set", split="0.5,0.5", reference=True)
    with pytest.raises(UsageError, match="as RGB alone"):
        make(f"{path}:/grey,/labels")
    with pytest.raises(UsageError, match="without --size"):
        make(f"{path}:/colour,/labels", size=4)
    np.savez(tmp_path / "set.npz", images=images, labels=np.arange(20) % 2)
    with pytest.raises(UsageError, match="data sets of an HDF5 file"):
        make(tmp_path / "set.npz")
    index = make(f"{path}:/colour,/labels")
    assert stored(index, "test").images.shape == (10, 8, 8, 3)
    with pytest.raises(UsageError, match="leave --stage out"):
        stage(index, str(tmp_path / "near"))


def test_an_iterator_of_inputs(tmp_path: Path) -> None:
    inputs, targets = arrays("float32")

    def samples(first: int, last: int, target: Any) -> Iterator[tuple[np.ndarray, Any]]:
        yield from ((inputs[row], target[row]) for row in range(first, last))

    splits = {"train": samples(0, 30, targets), "test": samples(30, N, targets)}
    index = data.write(tmp_path / "fields", splits)
    assert index.target_form.shape == (1, H, W)
    assert np.array_equal(stored(index, "test").images.transpose(0, 3, 1, 2), inputs[30:])
    labels = np.arange(N) % 4
    splits = {"train": samples(0, 30, labels), "test": samples(30, N, labels)}
    assert data.write(tmp_path / "labels", splits).classes == 4
    other = iter([(inputs[0], targets[0]), (inputs[0, :1], targets[0])])
    with pytest.raises(DataError, match=r"sample 1 of `train` is float32 \[1, 6, 10\], others"):
        data.write(tmp_path / "no", {"train": other, "test": samples(30, N, targets)})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda inputs: inputs[:, 0, 0], r"float32 \[40, 10\]|\[40, 10\]: save inputs"),
        (lambda inputs: inputs.astype(complex), r"complex128 .*: save inputs"),
        (lambda inputs: np.where(inputs == inputs[7, 1, 2, 3], np.nan, inputs), "sample 7 is not"),
    ],
)
def test_inputs_that_cannot_be_used_are_named(tmp_path: Path, change: Any, fault: str) -> None:
    inputs, targets = arrays("float32")
    np.savez(tmp_path / "fields.npz", inputs=change(inputs), targets=targets)
    with pytest.raises(DataError, match=fault):
        data.pack(tmp_path / "fields.npz", tmp_path / "packed", split="0.8,0.2")
    assert not (tmp_path / "packed").exists()


def test_a_size_is_for_images(tmp_path: Path) -> None:
    inputs, targets = arrays("float32")
    np.savez(tmp_path / "fields.npz", inputs=inputs, targets=targets)
    with pytest.raises(UsageError, match="holds no images: leave --size out"):
        data.pack(tmp_path / "fields.npz", tmp_path / "packed", split="0.8,0.2", size=8)


def test_the_example_keeps_the_first_images_of_each_class(small_set: Path, tmp_path: Path) -> None:
    file = tmp_path / "few.npz"
    program = (sys.executable, ROOT / "examples" / "few_images.py", small_set, file)
    subprocess.run((*program, "--images", "7"), check=True)
    few, whole = data.pack(file, tmp_path / "few"), data.read_index(small_set)
    assert stored(few, "test").labels.tolist() == stored(whole, "test").labels.tolist()
    every, kept = stored(whole, "train"), stored(few, "train")
    for one in range(5):
        first = every.images[every.labels == one][:7]
        assert np.array_equal(kept.images[kept.labels == one], first)
