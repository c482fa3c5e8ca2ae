"""Sources of data sets: CIFAR from its official binary archives, and a synthetic one.

No pickle is ever loaded. Downloads resume: a `.part` file, HTTP ranges, and an MD5 at the end.

CIFAR: Krizhevsky (2009), "Learning Multiple Layers of Features from Tiny Images". A record is
the label (CIFAR-100: coarse, then fine label), one byte each, and 3072 bytes of pixels: red,
green, blue, each 32 lines of 32.

In the synthetic set each class is a smooth coloured pattern that wraps around the image. A sample
is its class's pattern and a weaker one of another class, each moved to a random place, under
strong noise. A linear model learns some of it, and a small convolutional network improves epoch by
epoch. Samples are computed with integers from a counter-based hash, so a seed gives the same bytes
everywhere.
"""

import gzip
import hashlib
import http.client
import sys
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.augment import sample_hash, splitmix64
from hvdtrain.data.index import Index
from hvdtrain.data.writer import Layout, in_order, write_sources
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import output
from hvdtrain.host.files import sync

Progress = Callable[[int, int | None], None]  # bytes so far, total bytes if known

OFFICIAL_SITE = "https://www.cs.toronto.edu/~kriz"
IMAGE_SHAPE = (32, 32, 3)

_PIXEL_BYTES = 3072
_BLOCK = 2**20
_NAMES_BYTES = 2**16  # a file of class names larger than this is not one
_ARCHIVE_BYTES = 2**29  # limit for an unpacked archive: official ones have a third of it
_MOST_MEMBERS = 1000
_DOWNLOAD_BLOCK = 2**18
_TIMEOUT = 30.0  # seconds without a byte
_ATTEMPTS = 5
# Errors of a connection that breaks, or of an unreachable server.
_NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, OSError)
_ARCHIVE_ERRORS = (tarfile.TarError, EOFError, zlib.error, OSError, ValueError)


@dataclass(frozen=True)
class File:
    """An official file: its name, number of records and MD5."""

    name: str
    records: int
    md5: str


@dataclass(frozen=True)
class Edition:
    """One of the two data sets as it is published; the fine label is the last label byte."""

    name: str
    archive: str
    archive_md5: str
    folder: str
    train: tuple[File, ...]
    test: tuple[File, ...]
    names_file: str
    default_names: tuple[str, ...]
    label_limits: tuple[int, ...]  # classes of each label byte

    @property
    def files(self) -> tuple[File, ...]:
        """All files with records, train first."""
        return self.train + self.test

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return len(self.label_limits) + _PIXEL_BYTES


CIFAR10 = Edition(
    name="cifar10",
    archive="cifar-10-binary.tar.gz",
    archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
    folder="cifar-10-batches-bin",
    train=(
        File("data_batch_1.bin", 10_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
        File("data_batch_2.bin", 10_000, "5ea93a67294ea407fff1d09f752e9692"),
        File("data_batch_3.bin", 10_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
        File("data_batch_4.bin", 10_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
        File("data_batch_5.bin", 10_000, "53f37980c15c3d472c316c40844f3f0d"),
    ),
    test=(File("test_batch.bin", 10_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),),
    names_file="batches.meta.txt",
    default_names=tuple(
        "airplane automobile bird cat deer dog frog horse ship truck".split()  # noqa: SIM905
    ),
    label_limits=(10,),
)
CIFAR100 = Edition(
    name="cifar100",
    archive="cifar-100-binary.tar.gz",
    archive_md5="03b5dce01913d631647c71ecec9e9cb8",
    folder="cifar-100-binary",
    train=(File("train.bin", 50_000, "6172c7755cfe09b2fe270c85cebc1b15"),),
    test=(File("test.bin", 10_000, "4499cfba6c016c1be1438163640a0898"),),
    names_file="fine_label_names.txt",
    default_names=tuple(f"class {number}" for number in range(100)),
    label_limits=(20, 100),
)
EDITIONS = {edition.name: edition for edition in (CIFAR10, CIFAR100)}


def fetch(
    name: str, to: Path | str, progress: Progress | None = None, site: str = OFFICIAL_SITE
) -> Path:
    """Download the archive of `cifar10` or `cifar100` into the folder `to`; return its path.

    An intact archive is not downloaded again, and an interrupted download resumes.
    `progress(bytes, total bytes)` is called meanwhile; without it a terminal shows a bar.
    Raises UsageError for another name, DataError for a failing network or disk or a wrong MD5.
    """
    if name not in EDITIONS:
        raise UsageError(f"no data set {name!r} to fetch: choose {' or '.join(EDITIONS)}")
    edition = EDITIONS[name]
    url = f"{site}/{edition.archive}"
    return download(url, Path(to) / edition.archive, edition.archive_md5, progress)


def pack(source: Path | str, destination: Path | str, shard_mb: int = 64) -> Index:
    """Pack official CIFAR files into HDF5 shards of up to `shard_mb` MiB; return the index.

    `source` is the .tar.gz archive, a folder of the .bin files, or a folder that holds either.
    A file with fewer whole records than the official one is accepted, and the index notes it.
    Raises DataError, naming the file, for a wrong, incomplete or damaged source or a destination
    that cannot be written; UsageError for a source that holds both data sets.
    """
    edition, path = find_source(Path(source))
    wanted = {file.name: file.records * edition.record_bytes for file in edition.files}
    wanted[edition.names_file] = _NAMES_BYTES
    contents = _read_folder(path, wanted) if path.is_dir() else _members(path, wanted)
    parts = {file: _records(edition, file, path, contents) for file in edition.files}
    notes = [
        f"{file.name}: {len(labels):,} of {file.records:,} records"
        for file, (_, labels) in parts.items()
        if len(labels) < file.records
    ]
    sources = {
        "train": in_order(parts[file] for file in edition.train),
        "test": in_order(parts[file] for file in edition.test),
    }
    text = contents.get(edition.names_file, b"").decode("utf-8", "replace")
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    complete = len(set(names)) == len(edition.default_names) == len(names)
    if not (complete and all(map(str.isprintable, names))):
        names = edition.default_names
    layout = Layout(IMAGE_SHAPE, shard_mb=shard_mb)
    return write_sources(destination, sources, layout, names, notes)


def is_official(source: Path) -> bool:
    """Return whether a folder holds official CIFAR files, or a file may be an archive of them."""
    if source.is_file():
        with source.open("rb") as file:
            return file.read(2) == b"\x1f\x8b"
    return bool(_candidates(source))


def find_source(source: Path) -> tuple[Edition, Path]:
    """Return the data set that `source` holds, and the folder or archive with its files."""
    if source.is_file():
        names = set(_members(source, {}))
        for edition in EDITIONS.values():
            if any(file.name in names for file in edition.files):
                return edition, source
        if names & {"data_batch_1", "train"}:
            raise DataError(f"{source}: is the Python (pickle) version; get the binary version")
        raise DataError(
            f"{source}: is not an official CIFAR archive (binary version); "
            "get one with `hvdtrain data fetch`"
        )
    if not source.is_dir():
        raise DataError(f"{source}: no such file or folder; get one with `hvdtrain data fetch`")
    candidates = _candidates(source)
    if not candidates:
        raise DataError(
            f"{source}: holds no official CIFAR files (binary version); "
            "get them with `hvdtrain data fetch`"
        )
    if len({edition.name for edition, _ in candidates}) > 1:
        places = " or ".join(str(path) for _, path in candidates)
        raise UsageError(f"{source}: holds both CIFAR-10 and CIFAR-100; choose one: {places}")
    return candidates[0]


def _candidates(source: Path) -> list[tuple[Edition, Path]]:
    """Return the data sets in a folder, each with the folder or archive of its files."""
    candidates = []
    for edition in EDITIONS.values():
        for folder in (source, source / edition.folder):
            if any((folder / file.name).is_file() for file in edition.files):
                candidates.append((edition, folder))
        if (source / edition.archive).is_file():
            candidates.append((edition, source / edition.archive))
    return candidates


def _members(path: Path, wanted: dict[str, int]) -> dict[str, bytes]:
    """Return the regular files in an archive by plain name, empty but for the wanted ones.

    `wanted` maps each name to the largest size it may have. Nothing is extracted to disk, and
    folders in the archive are ignored. The headers are read here and not by tarfile, which reads
    those of any length whole; what follows a header of another kind is passed over.
    """
    contents = {}
    try:
        with gzip.open(path) as stream:
            for _ in range(_MOST_MEMBERS + 1):
                header = stream.read(tarfile.BLOCKSIZE)
                if not header.strip(b"\0"):
                    break
                member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
                name = PurePosixPath(member.name).name
                is_empty = member.isdir() or member.issym() or member.islnk() or member.isdev()
                blocks = 0 if is_empty else -(-member.size // tarfile.BLOCKSIZE)
                end = stream.tell() + blocks * tarfile.BLOCKSIZE
                if not stream.tell() <= end <= _ARCHIVE_BYTES:
                    raise DataError(f"{path}: is longer than the official archive; fetch it again")
                if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    if name in wanted and member.size > wanted[name]:
                        raise DataError(f"{path}: {name} is larger than the official file")
                    contents[name] = stream.read(member.size) if name in wanted else b""
                    if name in wanted and len(contents[name]) < member.size:
                        raise tarfile.ReadError("unexpected end of data")
                stream.seek(end)
            else:
                raise tarfile.ReadError(f"more than {_MOST_MEMBERS:,} files")
            while stream.read(_BLOCK):  # the checksum of gzip is at the very end
                if stream.tell() > _ARCHIVE_BYTES:
                    raise DataError(f"{path}: is longer than the official archive; fetch it again")
    except _ARCHIVE_ERRORS as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path}: archive is damaged or not a .tar.gz file ({reason}); fetch it again"
        ) from error
    return contents


def _read_folder(folder: Path, wanted: dict[str, int]) -> dict[str, bytes]:
    contents = {}
    for name, largest in wanted.items():
        path = folder / name
        try:
            if not path.is_file():
                continue
            if path.stat().st_size > largest:
                raise DataError(f"{path}: is larger than the official file")
            contents[name] = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return contents


def _records(
    edition: Edition, file: File, path: Path, contents: dict[str, bytes]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Check a file and return views of its images [n, 32, 32, 3] and labels [n]."""
    if file.name not in contents:
        raise DataError(f"{path}: {file.name} is missing; fetch the archive again")
    content = contents[file.name]
    count, rest = divmod(len(content), edition.record_bytes)
    if rest or not count:
        raise DataError(
            f"{path}: {file.name} is truncated or not a CIFAR file ({len(content):,} bytes are "
            f"not a multiple of {edition.record_bytes}); fetch the archive again"
        )
    if (
        count == file.records
        and hashlib.md5(content, usedforsecurity=False).hexdigest() != file.md5
    ):
        raise DataError(
            f"{path}: {file.name} is damaged (official size, another MD5); fetch the archive again"
        )
    table = np.frombuffer(content, np.uint8).reshape(count, edition.record_bytes)
    for column, limit in enumerate(edition.label_limits):
        if table[:, column].max() >= limit:
            raise DataError(f"{path}: {file.name} has a label outside 0..{limit - 1}")
    label_bytes = len(edition.label_limits)
    images = table[:, label_bytes:].reshape(count, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, table[:, label_bytes - 1]


class _Interrupted(Exception):
    """The connection ended early; the received bytes are in the part file."""


def download(url: str, path: Path, md5: str, progress: Progress | None = None) -> Path:
    """Download `url` to `path`, unless the file exists already; return `path`.

    A download that an earlier call left in `path`.part resumes. Without `progress`, a terminal
    shows a bar. Raises DataError (one line) if the network or the disk fails, or if the file has
    another MD5: a finished part file with a wrong MD5 is deleted.
    """
    if path.exists():
        if file_md5(path) == md5:
            return path
        raise DataError(f"{path}: has another MD5 than the official file; remove it")
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _bar(path.name, progress) as show:
            _fetch_all(url, part, show)
        if file_md5(part) != md5:
            part.unlink()
            raise DataError(
                f"{url}: the download had a wrong MD5 and was deleted; try again, "
                f"or put the official file at {path}"
            )
        sync(part)
        part.rename(path)
        sync(path.parent)
    except OSError as error:
        raise DataError(f"{part}: cannot be written ({error.strerror or error})") from error
    return path


def file_md5(path: Path) -> str:
    """Return the MD5 (hex) of a file; raise DataError if it cannot be read."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _fetch_all(url: str, part: Path, show: Progress) -> None:
    """Fill the part file, resuming after an interruption as long as attempts make progress."""
    for attempt in range(1, _ATTEMPTS + 1):
        before = _size(part)
        try:
            _fetch_rest(url, part, show)
            return
        except _Interrupted as error:
            if attempt == _ATTEMPTS or _size(part) == before:
                target = part.with_name(part.name.removesuffix(".part"))
                raise DataError(
                    f"cannot download {url} ({error}): run this again to resume from "
                    f"{_size(part):,} bytes, or copy the file to {target} yourself"
                ) from error


def _fetch_rest(url: str, part: Path, show: Progress) -> None:
    """Append the missing bytes to the part file; raise _Interrupted if that ends early."""
    have = _size(part)
    headers = {"User-Agent": "hvdtrain", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=_TIMEOUT
        )
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is left to fetch; the MD5 decides
        raise _Interrupted(f"the server answers {error.code} {error.reason}") from error
    except _NETWORK_ERRORS as error:
        raise _Interrupted(_reason(error)) from error
    with response:
        resumed = response.status == HTTPStatus.PARTIAL_CONTENT
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise _Interrupted("the server sent another range than the requested one")
        have = have if resumed else 0
        total = None if response.length is None else have + response.length
        with part.open("ab" if have else "wb") as file:
            show(have, total)
            while True:
                try:
                    block = response.read(_DOWNLOAD_BLOCK)
                except _NETWORK_ERRORS as error:
                    raise _Interrupted(_reason(error)) from error
                if not block:
                    break
                have += file.write(block)
                show(have, total)
    if total is not None and have < total:
        raise _Interrupted(f"the connection ended after {have:,} of {total:,} bytes")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return " ".join(str(reason).split()) or type(error).__name__


@contextmanager
def _bar(name: str, progress: Progress | None) -> Iterator[Progress]:
    """Yield the caller's progress function, else a bar on a terminal, else a dummy."""
    if progress is not None:
        yield progress
    elif sys.stderr.isatty():
        from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = output.console(stderr=True)
        columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Bar(*columns, console=console) as bar:
            task = bar.add_task(name, total=None)
            yield lambda have, total: bar.update(task, completed=have, total=total)
    else:
        yield lambda have, total: None


_GRID = 6  # random points across a pattern
_CHANNELS = 3
_LARGEST_SIZE = 1024
_MOST_CLASSES = 10_000
_BLOCK_BYTES = 2**22  # images made at a time


def synth(
    destination: Path | str,
    images: int,
    classes: int,
    size: int = 32,
    seed: int = 0,
    shard_mb: int = 64,
) -> Index:
    """Make a data set of `images` train samples and a fifth as many for test; return its index.

    Images are uint8 [size, size, 3]; classes alternate. Raises UsageError for numbers out of
    range, DataError if the destination cannot be written.
    """
    _check("images", images, 1, 2**40)
    _check("classes", classes, 2, _MOST_CLASSES)
    _check("size", size, _GRID, _LARGEST_SIZE)
    patterns = class_patterns(classes, size, seed)
    test = max(1, images // 5)
    sources = {
        "train": in_order(_samples(patterns, seed, 0, images)),
        "test": in_order(_samples(patterns, seed, images, images + test)),
    }
    layout = Layout((size, size, _CHANNELS), shard_mb=shard_mb)
    return write_sources(
        destination, sources, layout, [f"class {number}" for number in range(classes)]
    )


def _check(name: str, value: int, smallest: int, largest: int) -> None:
    if not smallest <= value <= largest:
        raise UsageError(f"{name} is {value}: choose from {smallest} to {largest}")


def class_patterns(classes: int, size: int, seed: int) -> NDArray[np.int32]:
    """Return a smooth periodic pattern per class, values -128..127: [classes, size, size, 3].

    Random points on a coarse grid are interpolated linearly along both axes.
    """
    points = _random_bytes(seed, 0, np.arange(classes), _GRID * _GRID * _CHANNELS)
    grid = points.astype(np.int32).reshape(classes, _GRID, _GRID, _CHANNELS) - 128
    # Pixel p lies at p * _GRID / size on the grid: between `low` and the next, `part` / size on.
    low, part = np.divmod(np.arange(size) * _GRID, size)
    high = (low + 1) % _GRID
    down = part[:, None, None]
    tall = (grid[:, low] * (size - down) + grid[:, high] * down) // size
    across = part[:, None]
    return np.asarray(
        (tall[:, :, low] * (size - across) + tall[:, :, high] * across) // size, np.int32
    )


def _samples(
    patterns: NDArray[np.int32], seed: int, start: int, stop: int
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Yield samples start .. stop - 1 of this seed's endless sequence, a few at a time."""
    rows = max(1, _BLOCK_BYTES // (4 * patterns[0].size))
    for low in range(start, stop, rows):
        numbers = np.arange(low, min(low + rows, stop), dtype=np.int64)
        labels = (numbers - start) % len(patterns)
        yield _images(patterns, seed, numbers, labels), labels


def _images(
    patterns: NDArray[np.int32], seed: int, numbers: NDArray[np.int64], labels: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Return the images of these samples: uint8 [n, size, size, 3]."""
    count, size = len(numbers), patterns.shape[1]
    bits = _hash(seed, 1, numbers)
    others = (labels + 1 + _field(bits, 0, len(patterns) - 1)) % len(patterns)
    main = _moved(patterns, labels, _field(bits, 1, size), _field(bits, 2, size))
    more = splitmix64(bits)
    other = _moved(patterns, others, _field(more, 0, size), _field(more, 1, size))
    noise = _random_bytes(seed, 2, numbers, 2 * main[0].size).astype(np.int32)
    # -255..255, in a triangular distribution
    noise = (noise[:, ::2] + noise[:, 1::2] - 255).reshape(main.shape)
    strength = 24 + _field(more, 2, 24).reshape(count, 1, 1, 1)  # of 64
    mixed = 128 + (main * strength + other * 20 + noise * 24) // 64
    images: NDArray[np.uint8] = np.clip(mixed, 0, 255).astype(np.uint8)
    return images


def _moved(
    patterns: NDArray[np.int32],
    chosen: NDArray[np.int64],
    down: NDArray[np.int64],
    across: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Return the chosen patterns, each rolled by its own offsets: [n, size, size, 3]."""
    steps = np.arange(patterns.shape[1])
    rows = (down[:, None] + steps) % len(steps)
    columns = (across[:, None] + steps) % len(steps)
    moved = patterns[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
    return np.asarray(moved, np.int32)


def _field(bits: NDArray[np.uint64], field: int, limit: int) -> NDArray[np.int64]:
    """Return a number from 0 to limit - 1 from 16 bits of each hash, field 0 to 3."""
    part = (bits >> np.uint64(16 * field)) & np.uint64(0xFFFF)
    return ((part * np.uint64(limit)) >> np.uint64(16)).astype(np.int64)


def _hash(seed: int, stream: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return random numbers that no epoch of augmentation with the same seed uses."""
    return sample_hash(seed, 2**40 + stream, numbers)


def _random_bytes(
    seed: int, stream: int, numbers: NDArray[np.int64], length: int
) -> NDArray[np.uint8]:
    """Return `length` random bytes for each of these numbers: uint8 [n, length]."""
    words = np.arange(-(-length // 8), dtype=np.uint64)
    state = splitmix64(_hash(seed, stream, numbers)[:, None] ^ words)
    return state.astype("<u8").view(np.uint8)[:, :length]
