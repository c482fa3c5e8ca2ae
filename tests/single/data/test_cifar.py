"""Official CIFAR files, intact or damaged, and the real ones in the folder of CIFAR_DIR."""

import gzip
import io
import os
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hvdtrain.data.index import read_index
from hvdtrain.data.shards import open_split, verify
from hvdtrain.data.sources import CIFAR10, CIFAR100, EDITIONS, Edition, fetch, pack
from hvdtrain.errors import DataError, UsageError

Contents = dict[str, bytes]

both = pytest.mark.parametrize("edition", list(EDITIONS.values()), ids=list(EDITIONS))


def records(edition: Edition, count: int, seed: int) -> NDArray[np.uint8]:
    """Return random records: uint8 [count, record bytes]."""
    generator = np.random.default_rng(seed)
    table = generator.integers(0, 256, (count, edition.record_bytes), dtype=np.uint8)
    for column, limit in enumerate(edition.label_limits):
        table[:, column] %= limit
    return table


def files_of(edition: Edition, count: int = 20) -> Contents:
    """Return the files of an edition with `count` random records each."""
    return {
        file.name: records(edition, count, seed).tobytes()
        for seed, file in enumerate(edition.files)
    }


def a_folder(folder: Path, contents: Contents) -> Path:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def an_archive(path: Path, contents: Contents, folder: str = "cifar") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def refusal(source: Path, destination: Path) -> str:
    with pytest.raises(DataError) as caught:
        pack(source, destination)
    assert "\n" not in str(caught.value)
    assert not destination.exists()
    return str(caught.value)


@both
def test_packed_images_labels_and_order_are_those_of_the_files(
    tmp_path: Path, edition: Edition
) -> None:
    contents = files_of(edition)
    index = pack(a_folder(tmp_path / "source", contents), tmp_path / "packed")
    assert index.hash == read_index(tmp_path / "packed").hash
    for name, files in (("train", edition.train), ("test", edition.test)):
        record = [
            raw
            for file in files
            for raw in np.frombuffer(contents[file.name], np.uint8).reshape(20, -1)
        ]
        with open_split(index, name) as samples:
            batch = samples.gather(np.arange(len(samples)))
        assert len(batch) == len(record)
        label_bytes = len(edition.label_limits)
        for raw, image, label in zip(record, batch.images, batch.labels, strict=True):
            assert label == raw[label_bytes - 1]
            planes = raw[label_bytes:].reshape(3, 32, 32)
            for channel in range(3):
                np.testing.assert_array_equal(image[:, :, channel], planes[channel])


@both
def test_an_archive_a_folder_and_a_folder_above_give_the_same(
    tmp_path: Path, edition: Edition
) -> None:
    contents = files_of(edition)
    a_folder(tmp_path / "above" / edition.folder, contents)
    # The order of members, their folder and unknown files do not matter.
    strange = {"../../evil.bin": b"x", **dict(reversed(contents.items())), "readme.html": b"x"}
    an_archive(tmp_path / "any-name.tar.gz", strange, folder="/some/where")
    (tmp_path / "fetched").mkdir()
    an_archive(tmp_path / "fetched" / edition.archive, contents)
    sources = ["above", f"above/{edition.folder}", "any-name.tar.gz", "fetched"]
    hashes = {
        pack(tmp_path / source, tmp_path / f"packed{number}").hash
        for number, source in enumerate(sources)
    }
    assert len(hashes) == 1
    assert not list(tmp_path.rglob("evil.bin"))


@both
def test_fewer_records_than_the_official_files_are_noted(tmp_path: Path, edition: Edition) -> None:
    index = pack(a_folder(tmp_path / "source", files_of(edition)), tmp_path / "packed")
    assert index.notes == tuple(
        f"{file.name}: 20 of {file.records:,} records" for file in edition.files
    )


def test_class_names_come_from_their_file_or_are_known(tmp_path: Path) -> None:
    contents = files_of(CIFAR10, 1)
    plain = pack(a_folder(tmp_path / "a", contents), tmp_path / "packed-a")
    assert plain.class_names[:3] == ("airplane", "automobile", "bird")
    names = "\n".join(f"name {number}" for number in range(10)) + "\n\n"
    contents["batches.meta.txt"] = names.encode()
    named = pack(a_folder(tmp_path / "b", contents), tmp_path / "packed-b")
    assert named.class_names == tuple(f"name {number}" for number in range(10))
    contents["batches.meta.txt"] = b"\xff\x00 nonsense"
    odd = pack(a_folder(tmp_path / "c", contents), tmp_path / "packed-c")
    assert odd.class_names == plain.class_names
    hundred = pack(a_folder(tmp_path / "d", files_of(CIFAR100, 1)), tmp_path / "packed-d")
    assert hundred.class_names == tuple(f"class {number}" for number in range(100))


@both
@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_a_file_that_is_damaged_is_named(tmp_path: Path, edition: Edition, kind: str) -> None:
    name = edition.train[-1].name
    good = files_of(edition, 3)
    label_out_of_range = bytearray(good[name])
    label_out_of_range[edition.record_bytes + len(edition.label_limits) - 1] = 200
    cases = {
        f"{name} is truncated": good[name][:-1],
        f"{name} is truncated or": b"",
        f"{name} has a label outside": bytes(label_out_of_range),
        f"{name} is missing": None,
    }
    for number, (reason, content) in enumerate(cases.items()):
        contents = {key: value for key, value in good.items() if key != name}
        if content is not None:
            contents[name] = content
        path = tmp_path / f"source{number}"
        if kind == "folder":
            a_folder(path, contents)
        else:
            an_archive(path, contents)
        if edition is CIFAR100 and content is None and kind == "archive":
            contents = {"test.bin": good["test.bin"]}
        assert reason in refusal(path, tmp_path / "packed")


def test_a_file_larger_than_the_official_one_is_refused_unread(tmp_path: Path) -> None:
    contents = files_of(CIFAR10, 2)
    folder = a_folder(tmp_path / "source", contents)
    with (folder / "data_batch_2.bin").open("r+b") as file:
        file.truncate(2**40)  # sparse: reading it would not end
    assert "data_batch_2.bin: is larger than the official file" in refusal(
        folder, tmp_path / "packed"
    )


def test_sources_that_are_not_cifar_are_refused_with_advice(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    assert "no such file or folder" in refusal(tmp_path / "nowhere", packed)
    assert "`hvdtrain data fetch`" in refusal(a_folder(tmp_path / "empty", {}), packed)
    (tmp_path / "text.tar.gz").write_text("no archive")
    assert "damaged or not a .tar.gz file" in refusal(tmp_path / "text.tar.gz", packed)
    (tmp_path / "nothing.tar.gz").write_bytes(b"")
    assert "nothing.tar.gz" in refusal(tmp_path / "nothing.tar.gz", packed)
    an_archive(tmp_path / "other.tar.gz", {"x.bin": b"x"})
    assert "is not an official CIFAR archive" in refusal(tmp_path / "other.tar.gz", packed)
    an_archive(tmp_path / "python.tar.gz", {"data_batch_1": b"pickle", "test_batch": b"pickle"})
    assert "is the Python (pickle) version; get the binary" in refusal(
        tmp_path / "python.tar.gz", packed
    )


def test_a_truncated_or_flipped_archive_is_refused(tmp_path: Path) -> None:
    whole = an_archive(tmp_path / "whole.tar.gz", files_of(CIFAR10, 2)).read_bytes()
    broken = tmp_path / "broken.tar.gz"
    for place in (100, len(whole) // 2, len(whole) - 3):
        broken.write_bytes(whole[:place])
        assert "broken.tar.gz" in refusal(broken, tmp_path / "packed")
        flipped = bytearray(whole)
        flipped[place] ^= 8
        broken.write_bytes(flipped)
        assert "broken.tar.gz" in refusal(broken, tmp_path / "packed")


def a_header(kind: bytes, size: int) -> tuple[bytes, bytes]:
    """Return the first block of a file in an archive, and a block that may follow it endlessly."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if kind != tarfile.GNUTYPE_SPARSE:
        return bytes(block), bytes(512)
    block[482] = 1  # the list of holes continues
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block), b"00000000001\0" * 42 + b"\1" + bytes(7)


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE]
)
def test_a_small_archive_takes_no_more_memory_than_it_should(tmp_path: Path, kind: bytes) -> None:
    """tarfile reads a header whole, however long it is: 1.8 MB of archive would take 451 MiB."""
    source, length = tmp_path / "archive.tar.gz", 32 * 2**20
    first, block = a_header(kind, length)
    with gzip.open(source, "wb", compresslevel=1) as stream:
        stream.write(first)
        for _ in range(length // (512 * 256)):
            stream.write(block * 256)
    tracemalloc.start()
    try:
        message = refusal(source, tmp_path / "packed")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "is not an official CIFAR archive" in message
    assert peak < 4 * 2**20


def test_an_archive_of_many_files_or_headers_is_refused(tmp_path: Path) -> None:
    many = an_archive(tmp_path / "many.tar.gz", dict.fromkeys(map(str, range(1001)), b""))
    assert "more than 1,000 files" in refusal(many, tmp_path / "packed")
    chain = tmp_path / "chain.tar.gz"
    with gzip.open(chain, "wb") as stream:  # tarfile recurses for each
        stream.write(a_header(tarfile.XHDTYPE, 0)[0] * 5000)
    assert "archive is damaged or not a .tar.gz file" in refusal(chain, tmp_path / "packed")


def test_an_archive_that_unpacks_to_more_than_the_official_one_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "long.tar.gz"
    with gzip.open(source, "wb") as stream:
        stream.write(a_header(tarfile.REGTYPE, 2**40)[0])
        stream.write(bytes(2**20))
    assert "is longer than the official archive" in refusal(source, tmp_path / "packed")


def test_a_folder_with_both_data_sets_asks_for_one(tmp_path: Path) -> None:
    for edition in EDITIONS.values():
        a_folder(tmp_path / "both" / edition.folder, files_of(edition, 1))
    with pytest.raises(UsageError) as caught:
        pack(tmp_path / "both", tmp_path / "packed")
    for edition in EDITIONS.values():
        assert str(tmp_path / "both" / edition.folder) in str(caught.value)
        pack(tmp_path / "both" / edition.folder, tmp_path / edition.name)


def test_an_unknown_data_set_is_not_fetched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose cifar10 or cifar100"):
        fetch("mnist", tmp_path)


@pytest.fixture
def real() -> Path:
    if "CIFAR_DIR" not in os.environ:
        pytest.skip("CIFAR_DIR is not set: it names the folder that holds cifar-10-batches-bin/")
    return Path(os.environ["CIFAR_DIR"])


def test_the_real_cifar10_is_packed_whole(tmp_path: Path, real: Path) -> None:
    index = pack(real / CIFAR10.folder, tmp_path / "packed")
    assert index.notes == ()
    assert {name: split.count for name, split in index.splits.items()} == {
        "train": 50_000,
        "test": 10_000,
    }
    assert len(index.splits["train"].shards) == 3
    assert [round(value, 4) for value in index.mean] == [0.4914, 0.4822, 0.4465]
    assert [round(value, 4) for value in index.std] == [0.2470, 0.2435, 0.2616]
    assert index.class_names[9] == "truck"
    assert verify(tmp_path / "packed") == []
    with open_split(index, "train") as samples:
        batch = samples.gather(np.arange(50_000))
    assert np.bincount(batch.labels).tolist() == [5_000] * 10
    raw = np.concatenate(
        [np.fromfile(real / CIFAR10.folder / file.name, np.uint8) for file in CIFAR10.train]
    ).reshape(-1, 3073)
    np.testing.assert_array_equal(batch.labels, raw[:, 0])
    planes = batch.images.transpose(0, 3, 1, 2).reshape(50_000, 3072)
    assert np.array_equal(planes, raw[:, 1:])


def test_one_flipped_bit_in_the_real_files_is_noticed(tmp_path: Path, real: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in (real / CIFAR10.folder).iterdir():
        (source / path.name).symlink_to(path.resolve())
    content = bytearray((source / "data_batch_4.bin").read_bytes())
    content[12_345_678] ^= 2
    (source / "data_batch_4.bin").unlink()
    (source / "data_batch_4.bin").write_bytes(content)
    assert "data_batch_4.bin is damaged (official size, another MD5)" in refusal(
        source, tmp_path / "packed"
    )


def test_the_real_cifar100_is_packed_with_a_note_on_what_is_missing(
    tmp_path: Path, real: Path
) -> None:
    if not (real / CIFAR100.folder).is_dir():
        pytest.skip("CIFAR_DIR holds no cifar-100-binary/")
    index = pack(real / CIFAR100.folder, tmp_path / "packed")
    count = (real / CIFAR100.folder / "train.bin").stat().st_size // 3074
    assert index.splits["train"].count == count
    assert index.splits["test"].count == 10_000
    assert index.classes == 100
    if count == 50_000:  # both splits of the published data set hold copies
        assert index.notes == (
            "train: 14 images are copies of others",
            "test: 2 images are copies of others",
            "test: 10 different images are in train, too",
        )
    else:
        assert index.notes[0] == f"train.bin: {count:,} of 50,000 records"
    with open_split(index, "test") as samples:
        labels = samples.gather(np.arange(10_000)).labels
    assert np.bincount(labels).tolist() == [100] * 100
