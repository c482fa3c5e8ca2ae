"""Packing leaves a whole data set or nothing, also on a full disk."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hvdtrain.data.index import Index, read_index
from hvdtrain.data.shards import open_split
from hvdtrain.data.sources import synth
from hvdtrain.data.writer import Block, Layout, Source, in_order, write_sources
from hvdtrain.errors import DataError, UsageError

NAMES = ("cat", "dog")


def a_split(count: int, size: int = 4) -> tuple[NDArray[np.uint8], NDArray[np.integer]]:
    numbers = np.arange(count)
    images = np.empty((count, size, size, 3), np.uint8)
    images[:] = numbers[:, None, None, None] % 200 + np.arange(3)
    return images, numbers % 2


def write(
    destination: Path,
    splits: Mapping[str, tuple[NDArray[np.uint8], NDArray[np.integer]]],
    image_shape: tuple[int, int, int],
    class_names: Sequence[str],
    notes: Sequence[str] = (),
    shard_mb: int = 64,
) -> Index:
    layout = Layout(image_shape, shard_mb=shard_mb)
    sources = {name: in_order([part]) for name, part in splits.items()}
    return write_sources(destination, sources, layout, class_names, notes)


SPLITS = {"train": a_split(50), "test": a_split(9)}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = write(tmp_path / "a" / "b", SPLITS, (4, 4, 3), NAMES, ["a note"])
    index = read_index(tmp_path / "a" / "b")
    assert index == written
    assert index.hash == written.hash
    assert index.notes == ("a note", "test: 9 different images are in train, too")
    assert names_in(tmp_path / "a" / "b") == ["index.json", "test-00000.h5", "train-00000.h5"]
    for name, (images, labels) in SPLITS.items():
        with open_split(index, name) as samples:
            batch = samples.gather(np.arange(len(labels)))
        np.testing.assert_array_equal(batch.images, images)
        np.testing.assert_array_equal(batch.labels, labels)


def test_mean_and_std_are_those_of_the_train_split(tmp_path: Path) -> None:
    index = write(tmp_path / "set", SPLITS, (4, 4, 3), NAMES)
    images = SPLITS["train"][0] / 255
    np.testing.assert_allclose(index.mean, images.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(index.std, images.std(axis=(0, 1, 2)), rtol=1e-12)


def test_a_channel_that_never_varies_has_std_one(tmp_path: Path) -> None:
    sources = {"train": a_split(1), "test": a_split(1)}
    assert write(tmp_path / "set", sources, (4, 4, 3), NAMES).std == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("size", "rows"), [(1, 262144), (32, 256), (64, 64), (224, 4), (600, 1)])
def test_a_chunk_is_at_most_a_mebibyte_unless_one_image_is_more(
    tmp_path: Path, size: int, rows: int
) -> None:
    sources = {"train": a_split(5, size), "test": a_split(1, size)}
    index = write(tmp_path / "set", sources, (size, size, 3), NAMES, shard_mb=1)
    assert index.splits["train"].chunk_rows == rows
    assert [shard.count for shard in index.splits["train"].shards] == [
        min(rows, 5 - start) for start in range(0, 5, rows)
    ]
    with open_split(index, "train") as samples:
        assert samples.gather(np.arange(5)).ids.tolist() == [0, 1, 2, 3, 4]


def test_a_folder_that_holds_a_data_set_is_refused_and_untouched(packed: Path) -> None:
    before = {path: path.read_bytes() for path in packed.iterdir()}
    with pytest.raises(DataError, match="holds a data set already; remove it or choose another"):
        write(packed, SPLITS, (4, 4, 3), NAMES)
    assert {path: path.read_bytes() for path in packed.iterdir()} == before


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    write(tmp_path, SPLITS, (4, 4, 3), NAMES)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_folder_where_another_process_packs_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".partial").mkdir()
    (tmp_path / ".partial" / "train-00000.h5").write_text("of another")
    with pytest.raises(DataError, match="another process is packing into this folder, or was"):
        write(tmp_path, SPLITS, (4, 4, 3), NAMES)
    assert names_in(tmp_path / ".partial") == ["train-00000.h5"]


def test_a_destination_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for destination in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(DataError, match="choose another"):
            write(destination, SPLITS, (4, 4, 3), NAMES)
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize("shard_mb", [0, -1, 4096])
def test_a_shard_size_out_of_range_is_refused(tmp_path: Path, shard_mb: int) -> None:
    with pytest.raises(UsageError, match="choose from 1 to 2048"):
        write(tmp_path / "set", SPLITS, (4, 4, 3), NAMES, shard_mb=shard_mb)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_in_the_middle_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def blocks(start: int) -> list[Block]:
        raise error

    sources = {"train": in_order([SPLITS["train"]]), "test": Source(blocks)}
    with pytest.raises(error):
        write_sources(tmp_path / "new" / "set", sources, Layout((4, 4, 3)), NAMES)
    assert names_in(tmp_path) == []


def test_a_rename_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """A folder has the name of the second shard: the first, renamed already, is removed."""
    (tmp_path / "test-00000.h5" / "inside").mkdir(parents=True)
    with pytest.raises(DataError, match="cannot be written"):
        write(tmp_path, SPLITS, (4, 4, 3), NAMES)
    assert names_in(tmp_path) == ["test-00000.h5"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """Mount a file system of 1 MiB, and yield its path; None if this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    yield folder if mounted else None
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_leaves_nothing(tmp_path: Path, small_disk: Path | None) -> None:
    if small_disk is None:
        folder, reason = tmp_path / "limited", "File too large"
        message = pack_with_a_limit_on_file_sizes(folder / "deep" / "set", 2**20)
    else:
        folder, reason = small_disk, "No space left on device"
        with pytest.raises(DataError) as caught:
            synth(folder / "deep" / "set", images=2000, classes=2, size=32)
        message = str(caught.value)
    assert f"{folder / 'deep' / 'set' / 'train-00000.h5'}: cannot be written ({reason})" in message
    assert ".partial" not in message
    assert "\n" not in message
    assert not (folder / "deep").exists()


def pack_with_a_limit_on_file_sizes(destination: Path, limit: int) -> str:
    """Return the message of `synth` in a process whose files are limited to `limit` bytes."""
    program = (
        "import sys\n"
        "from hvdtrain.data import synth\n"
        "from hvdtrain.errors import DataError\n"
        "try:\n"
        f"    synth({str(destination)!r}, images=2000, classes=2, size=32)\n"
        "except DataError as error:\n"
        "    print(error)\n"
        "else:\n"
        "    print('written')\n"
    )

    def lower_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    done = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=lower_limit,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout.strip()


def test_a_limit_on_file_sizes_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    message = pack_with_a_limit_on_file_sizes(tmp_path / "set", 2**20)
    assert "train-00000.h5: cannot be written (File too large); raise the limit" in message
    assert not (tmp_path / "set").exists()
    # With enough room the same program succeeds: the limit was the cause.
    assert pack_with_a_limit_on_file_sizes(tmp_path / "set", 2**30) == "written"
    assert json.loads((tmp_path / "set" / "index.json").read_text())["format_version"] == 1


def test_copies_within_and_between_splits_are_noted(tmp_path: Path) -> None:
    different = np.random.default_rng(0).integers(0, 256, (12, 4, 4, 3), np.uint8)
    train = different[[0, 1, 2, 3, 0, 0, 4, 1]]  # three copies
    test = different[[5, 6, 0, 1, 1, 7]]  # one copy, and two images of the other split
    labelled = {
        name: (images, np.zeros(len(images), int))
        for name, images in (("train", train), ("test", test))
    }
    index = write(tmp_path / "a", labelled, (4, 4, 3), NAMES)
    assert index.notes == (
        "train: 3 images are copies of others",
        "test: 1 image is a copy of others",
        "test: 2 different images are in train, too",
    )
    apart = {"train": (different[:8], np.zeros(8, int)), "test": (different[8:], np.zeros(4, int))}
    assert write(tmp_path / "b", apart, (4, 4, 3), NAMES).notes == ()
