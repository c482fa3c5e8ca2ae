"""`verify` names every damaged shard and chunk, and `info` describes the data set."""

import hashlib
import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from hvdtrain.data.index import read_index
from hvdtrain.data.shards import info, open_split, verify
from hvdtrain.data.writer import Layout, in_order, write_sources
from hvdtrain.errors import DataError


def flip_chunk(path: Path, name: str, chunk: int) -> None:
    with h5py.File(path, "r") as file:
        place = file[name].id.get_chunk_info(chunk).byte_offset
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_good_set_has_no_faults(packed: Path) -> None:
    assert verify(packed) == []


def test_every_bad_shard_and_chunk_is_named(packed: Path) -> None:
    flip_chunk(packed / "train-00000.h5", "images", 0)
    flip_chunk(packed / "train-00000.h5", "labels", 1)
    flip_chunk(packed / "train-00002.h5", "ids", 0)
    (packed / "test-00000.h5").write_bytes(b"short")
    (packed / "train-00001.h5").unlink()
    faults = verify(packed)
    assert not [fault for fault in faults if "\n" in fault]
    expected = [
        (
            "train-00000.h5",
            "shard differs from the index (another SHA-256); its damaged chunks follow",
        ),
        ("train-00000.h5", "chunk 0 (rows 0..63) fails its checksum"),
        ("train-00000.h5", "chunk 1 (rows 64..127) fails its checksum"),
        ("train-00001.h5", "shard is missing"),
        (
            "train-00002.h5",
            "shard differs from the index (another SHA-256); its damaged chunks follow",
        ),
        ("train-00002.h5", "chunk 0 (rows 0..43) fails its checksum"),
        ("test-00000.h5", "shard is truncated: 5 bytes"),
    ]
    assert len(faults) == len(expected)
    for fault, (file, reason) in zip(faults, expected, strict=True):
        assert fault.startswith(f"{packed / file}: {reason}")


def test_a_shard_swapped_for_another_good_one_is_named(packed: Path) -> None:
    one, two = packed / "train-00000.h5", packed / "train-00001.h5"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    faults = verify(packed)
    assert [fault.split(";")[1].strip() for fault in faults] == [
        "but the checksums of its chunks match"
    ] * 2


def test_a_broken_index_is_an_error(packed: Path) -> None:
    (packed / "index.json").write_text("{}")
    with pytest.raises(DataError, match=r"index\.json"):
        verify(packed)


def test_labels_out_of_range_are_named_though_all_hashes_are_right(tmp_path: Path) -> None:
    samples = np.zeros((4, 2, 2, 3), np.uint8), np.arange(4)
    sources = {name: in_order([samples]) for name in ("train", "test")}
    write_sources(tmp_path / "set", sources, Layout((2, 2, 3)), None)
    index = json.loads((tmp_path / "set" / "index.json").read_text())
    content = json.dumps(index | {"class_names": ["only", "two"]})
    (tmp_path / "set" / "index.json").write_text(content)
    faults = verify(tmp_path / "set")
    assert len(faults) == 2
    assert all("label outside 0..1" in fault for fault in faults)


def make_index_fit(folder: Path, shard: Path) -> None:
    """Write the size and the SHA-256 of a changed shard into the index."""
    content = json.loads((folder / "index.json").read_text())
    for entry in content["splits"]["train"]["shards"]:
        if entry["file"] == shard.name:
            entry["bytes"] = shard.stat().st_size
            entry["sha256"] = hashlib.sha256(shard.read_bytes()).hexdigest()
    (folder / "index.json").write_text(json.dumps(content))


def put_labels_elsewhere(how: str, file: h5py.File, other: Path) -> None:
    """Replace the labels of an open shard with those of another file."""
    labels = file["labels"][:]
    del file["labels"]
    if how == "raw":
        labels.tofile(other)
        file.create_dataset("labels", labels.shape, labels.dtype, external=str(other))
        return
    with h5py.File(other, "w") as target:
        target.create_dataset("labels", data=labels, fletcher32=True)
    if how == "virtual":
        layout = h5py.VirtualLayout(labels.shape, labels.dtype)
        layout[:] = h5py.VirtualSource(other, "labels", labels.shape)
        file.create_virtual_dataset("labels", layout)
    elif how == "external":
        file["labels"] = h5py.ExternalLink(other, "labels")
    else:  # through a link in the file
        file["elsewhere"] = h5py.ExternalLink(other, "labels")
        file["labels"] = h5py.SoftLink("/elsewhere")


@pytest.mark.proves("The hash of a shard covers all that is read of it.")
@pytest.mark.parametrize("how", ["external", "soft", "raw", "virtual"])
def test_labels_of_another_file_are_refused_though_all_hashes_are_right(
    packed: Path, tmp_path: Path, how: str
) -> None:
    """The SHA-256 covers the shard alone: the labels could be changed later without notice."""
    shard, other = packed / "train-00002.h5", tmp_path / "other"
    with h5py.File(shard, "a", libver="v110") as file:
        put_labels_elsewhere(how, file, other)
    make_index_fit(packed, shard)
    (fault,) = verify(packed)
    link = how in ("external", "soft")
    where = "through a link" if link else "in another file"
    assert fault == (
        f"{shard}: shard holds `labels` {where}; restore the file or pack the data set again"
    )
    for memory in (0, 2**30):  # as a run reads it
        with pytest.raises(DataError, match="holds `labels`"):
            open_split(read_index(packed), "train", memory).gather(np.arange(300))


def test_info_is_ready_for_json(packed: Path) -> None:
    content = json.loads(json.dumps(info(packed)))
    index = read_index(packed)
    assert content["hash"] == index.hash
    assert content["classes"] == 3
    assert content["image_shape"] == [64, 64, 3]
    assert content["splits"]["train"] == {
        "count": 300,
        "shards": 3,
        "bytes": sum(path.stat().st_size for path in packed.glob("train-*.h5")),
        "chunk_rows": 64,
    }
