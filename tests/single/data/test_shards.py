"""Reading packed shards gives the same samples with any memory, and detects all damage."""

import os
import random
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from hvdtrain.data import shards
from hvdtrain.data.index import Index, Shard, read_index
from hvdtrain.data.shards import Batch, Samples, open_split
from hvdtrain.data.sources import synth
from hvdtrain.errors import DataError, UsageError

LITTLE = 3 * 64 * (64 * 64 * 3 + 16)  # bytes of three chunks


def read_plainly(folder: Path, split: str) -> Batch:
    """Read all files, in the order of their names, with h5py alone."""
    parts: dict[str, list[NDArray[np.generic]]] = {"images": [], "labels": [], "ids": []}
    for path in sorted(folder.glob(f"{split}-*.h5")):
        with h5py.File(path, "r") as file:
            for name, arrays in parts.items():
                arrays.append(file[name][:])
    images, labels, ids = (np.concatenate(arrays) for arrays in parts.values())
    return Batch(images, labels.astype(np.int64), ids.astype(np.int64))


def flip_bit(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def place_of_chunk(path: Path, name: str, chunk: int) -> int:
    """Return the offset of a chunk's bytes in the file."""
    with h5py.File(path, "r") as file:
        return int(file[name].id.get_chunk_info(chunk).byte_offset)


@pytest.mark.parametrize("memory", [0, 2**30])
def test_labels_come_alone_in_any_order_and_memory(packed: Path, memory: int) -> None:
    plain = read_plainly(packed, "train")
    with open_split(read_index(packed), "train", memory) as samples:
        rows = np.random.default_rng(0).permutation(len(samples))
        assert np.array_equal(samples.labels(rows), plain.labels[rows])
        assert len(samples.labels(rows[:0])) == 0
        with pytest.raises(IndexError, match="a row outside"):
            samples.labels(np.array([len(samples)]))


@pytest.mark.proves(
    "Ranks of a host share the check of large shards; ranks of large jobs beat less "
    "often, and the figures say what grows with ranks or samples."
)
def test_ranks_of_a_host_share_the_check_of_shards(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = read_index(packed)
    hashed: list[str] = []

    def sha256(index: Index, shard: Shard) -> str:
        hashed.append(shard.file)
        return shard.sha256

    monkeypatch.setattr(shards, "shard_sha256", sha256)
    for verifier in [(0, 2), (1, 2)]:
        with open_split(index, "train", 1, verifier) as samples:
            samples.gather(np.arange(len(samples)))
    assert hashed == [f"train-0000{number}.h5" for number in (0, 2, 1)]


@pytest.mark.parametrize("memory", [2**30, LITTLE, 1])
def test_rows_are_gathered_in_any_order_and_memory(packed: Path, memory: int) -> None:
    index = read_index(packed)
    assert [shard.count for shard in index.splits["train"].shards] == [128, 128, 44]
    plain = read_plainly(packed, "train")
    generator = np.random.default_rng(0)
    with open_split(index, "train", memory) as samples:
        assert len(samples) == 300
        assert samples.in_memory == (memory == 2**30)
        for size in (0, 1, 7, 300, 400):
            rows = generator.integers(0, 300, size)
            batch = samples.gather(rows)
            assert batch.images.dtype == np.uint8
            assert batch.images.flags.c_contiguous
            assert batch.labels.dtype == batch.ids.dtype == np.int64
            np.testing.assert_array_equal(batch.images, plain.images[rows])
            np.testing.assert_array_equal(batch.labels, plain.labels[rows])
            np.testing.assert_array_equal(batch.ids, plain.ids[rows])


@pytest.mark.parametrize("memory", [2**30, LITTLE])
def test_a_batch_belongs_to_the_caller(packed: Path, memory: int) -> None:
    with open_split(read_index(packed), "test", memory) as samples:
        rows = np.arange(5)
        first = samples.gather(rows)
        kept = first.images.copy()
        first.images[:] = 0
        np.testing.assert_array_equal(samples.gather(rows).images, kept)


@pytest.mark.proves(
    "The loader is faster than torch's DataLoader over h5py, and its memory stays bounded."
)
def test_memory_stays_bounded_and_used_chunks_are_kept(packed: Path) -> None:
    index = read_index(packed)
    with open_split(index, "train", LITTLE) as samples:
        samples.gather(np.arange(300))
        assert list(samples._chunks) == [2, 3, 4]
        samples.gather(np.array([2 * 64, 0]))
        assert list(samples._chunks) == [4, 0, 2] or list(samples._chunks) == [4, 2, 0]


@pytest.mark.parametrize("rows", [[-1], [300], [0, 5, 300]])
@pytest.mark.parametrize("memory", [2**30, LITTLE])
def test_a_row_outside_is_an_error(packed: Path, rows: list[int], memory: int) -> None:
    with (
        open_split(read_index(packed), "train", memory) as samples,
        pytest.raises(IndexError, match=r"outside 0\.\.299"),
    ):
        samples.gather(np.array(rows))


def test_an_unknown_split_is_refused(packed: Path) -> None:
    with pytest.raises(UsageError, match="`train` and `test`"):
        open_split(read_index(packed), "valid")


def test_ids_are_unique_over_the_whole_data_set(packed: Path) -> None:
    ids = [read_plainly(packed, split).ids.tolist() for split in ("train", "test")]
    assert ids == [list(range(300)), list(range(300, 360))]


@pytest.mark.parametrize("name", ["images", "labels", "ids"])
@pytest.mark.parametrize("memory", [2**30, LITTLE])
def test_a_flipped_bit_is_named_with_file_and_chunk(packed: Path, name: str, memory: int) -> None:
    index = read_index(packed)
    shard = packed / "train-00001.h5"
    flip_bit(shard, place_of_chunk(shard, name, 1) + 3, bit=6)
    samples = open_split(index, "train", memory)
    with pytest.raises(
        DataError, match=r"chunk 1 \(rows 64\.\.127\) fails its checksum"
    ) as caught:
        samples.gather(np.array([128 + 64]))
    assert str(shard) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damage_after_the_first_look_is_found_where_it_is(packed: Path) -> None:
    """Little memory makes chunks be read again, and their checksums are verified each time."""
    index = read_index(packed)
    plain = read_plainly(packed, "train")
    shard = packed / "train-00001.h5"
    place = place_of_chunk(shard, "images", 1)
    with open_split(index, "train", LITTLE) as samples:
        samples.gather(np.array([128]))
        flip_bit(shard, place)
        images = samples.gather(np.array([128])).images
        with pytest.raises(DataError, match=r"chunk 1 \(rows 64\.\.127\) fails its checksum"):
            samples.gather(np.array([128 + 64]))
    np.testing.assert_array_equal(images, plain.images[[128]])


def test_no_flipped_bit_anywhere_in_a_shard_gives_other_samples(tmp_path: Path) -> None:
    """One bit of each byte of a small shard is flipped in turn: structure, padding, contents."""
    index = synth(tmp_path / "small", images=6, classes=2, size=6)
    shard = tmp_path / "small" / "train-00000.h5"
    intact = shard.read_bytes()
    rows = np.arange(6)
    for place in range(len(intact)):
        flip_bit(shard, place, bit=place % 8)
        # There is too little memory for the whole split, so its chunks are read one by one.
        with pytest.raises(DataError) as caught, open_split(index, "train", 1) as samples:
            samples.gather(rows)
        assert "\n" not in str(caught.value)
        shard.write_bytes(intact)
    with open_split(index, "train", 1) as samples:
        assert samples.gather(rows).ids.tolist() == list(range(6))


@pytest.mark.parametrize("memory", [2**30, LITTLE])
def test_a_shard_of_another_set_is_noticed(packed: Path, tmp_path: Path, memory: int) -> None:
    """The sizes are equal and the checksums good, as after an interrupted copy of a newer set."""
    synth(tmp_path / "other", images=300, classes=3, size=64, seed=6, shard_mb=2)
    shard = packed / "train-00001.h5"
    shard.write_bytes((tmp_path / "other" / shard.name).read_bytes())
    with pytest.raises(DataError, match=r"train-00001.h5: shard differs from the index"):
        open_split(read_index(packed), "train", memory).gather(np.array([128]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("labels", "label outside 0..2"),
        ("shape", "holds `images` (10, 64, 64, 3) uint8, the index says (44, 64, 64, 3)"),
        ("type", "holds `images` (44, 64, 64, 3) float32"),
        ("missing", "is damaged outside its chunks"),
        ("unchecked", "holds `images` without checksums"),
        ("packed", "holds `images` with filters besides checksums"),
        ("text", "shard cannot be opened"),
    ],
)
def test_a_file_that_the_index_does_not_describe_is_refused(
    packed: Path, change: str, reason: str
) -> None:
    index = read_index(packed)
    path = packed / "train-00002.h5"
    rows = 10 if change == "shape" else 44
    kind = np.float32 if change == "type" else np.uint8
    with h5py.File(path, "w") as file:
        if change != "missing":
            images = np.zeros((rows, 64, 64, 3), kind)
            packing = "gzip" if change == "packed" else None
            checked = change != "unchecked"
            file.create_dataset("images", data=images, fletcher32=checked, compression=packing)
        labels = np.full(44, 3 if change == "labels" else 0, np.int32)
        file.create_dataset("labels", data=labels, fletcher32=True)
        file.create_dataset("ids", data=np.arange(44), fletcher32=True)
    if change == "text":
        path.write_text("this is no HDF5 file")
    with pytest.raises(DataError) as caught, open_split(index, "train", LITTLE) as samples:
        samples.gather(np.array([299]))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_forked_process_opens_files_of_its_own(packed: Path) -> None:
    samples = open_split(read_index(packed), "train", LITTLE)
    before = samples.gather(np.arange(300)).images.sum()
    child = os.fork()
    if child == 0:
        same = samples.gather(np.arange(300)).images.sum() == before
        opened = any(process == os.getpid() for process, _ in samples._files)
        os._exit(0 if same and opened else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert samples.gather(np.arange(300)).images.sum() == before
    samples.close()


def test_two_threads_read_the_same_samples(packed: Path) -> None:
    plain = read_plainly(packed, "train")
    errors: list[BaseException] = []

    def read(samples: Samples, seed: int) -> None:
        generator = np.random.default_rng(seed)
        try:
            for _ in range(30):
                rows = generator.integers(0, 300, 16)
                np.testing.assert_array_equal(samples.gather(rows).images, plain.images[rows])
        except BaseException as error:
            errors.append(error)

    with open_split(read_index(packed), "train", LITTLE) as samples:
        threads = [threading.Thread(target=read, args=(samples, seed)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


def test_closing_lets_files_and_memory_go(packed: Path) -> None:
    samples = open_split(read_index(packed), "train", LITTLE)
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    samples.gather(np.arange(300))
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before + 3
    samples.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
    assert samples.gather(np.array([7])).ids.tolist() == [7]
    samples.close()


@pytest.mark.parametrize("seed", range(100))
def test_no_random_damage_gives_other_samples(packed: Path, seed: int) -> None:
    """Damages are a bit, a cut, bytes after the end, zeros in the middle, and another shard."""
    dice, memory = random.Random(seed), [2**30, LITTLE][seed % 2]
    index = read_index(packed)
    shard = dice.choice(index.splits["train"].shards)
    path = packed / shard.file
    before = path.read_bytes()
    content, place = bytearray(before), dice.randrange(len(before))
    match dice.randrange(5):
        case 0:
            content[place] ^= 1 << dice.randrange(8)
        case 1:
            del content[place:]
        case 2:
            content += dice.randbytes(dice.randint(1, 100))
        case 3:
            length = min(4096, len(content) - place)
            content[place : place + length] = bytes(length)
        case 4:
            other = dice.choice([one for one in index.splits["train"].shards if one != shard])
            content[:] = (packed / other.file).read_bytes()
    if content == before:
        content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:  # as a run does at its start, and in its epochs
        open_split(read_index(packed), "train", memory).gather(np.arange(300))
    assert "\n" not in str(caught.value)
    assert shard.file in str(caught.value)
