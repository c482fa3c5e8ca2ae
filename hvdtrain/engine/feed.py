"""Data that a rank reads for a step: images for the first stage, labels for the last stage."""

import hashlib
import math
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from PIL.Image import Image

from hvdtrain.config import TrainConfig
from hvdtrain.data.augment import Places, crop_flip, moves, resized_crop_flip, sample_hash
from hvdtrain.data.index import UNIT, Index, parse_index
from hvdtrain.data.order import Range, Rows, split
from hvdtrain.data.shards import (
    Batch,
    Picture,
    Samples,
    Verifier,
    open_split,
    stage,
    staged_folder,
)
from hvdtrain.data.writer import counted, joined, mean_and_std
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host.activity import Activity
from hvdtrain.models.find import call_users, find_function
from hvdtrain.options.sections import AUGMENTATIONS, smoothing_of
from hvdtrain.world import World

# Per split: shared by the ranks of a node, but at least twice the window of the shuffle.
CACHE_BYTES_PER_NODE = 4 * 2**30
SMALLEST_CACHE_BYTES = 512 * 2**20
READING = "reading its samples"


@dataclass(frozen=True)
class Feed:
    """Images uint8 [n, H, W, C] with their sample ids, and labels [m] of other samples.

    n is 0 on ranks without the first stage, m is 0 on ranks without the last stage. Images on the
    device are given by the places of their pixels.
    """

    images: np.ndarray | Places
    ids: Rows
    labels: np.ndarray

    @property
    def pixels(self) -> np.ndarray:
        """Return the images of a feed that the host has made."""
        assert isinstance(self.images, np.ndarray)
        return self.images


Request = tuple[Rows, Rows]  # the rows whose images, and whose labels, a rank needs


@dataclass(frozen=True)
class Augmentation:
    """The augmentation of one epoch.

    Attributes:
        picture: applies to one image in its stored size.
        batch: applies to a batch of images in their final size.
    """

    picture: Picture | None = None
    batch: Callable[[Batch], Batch] | None = None

    def gather(self, samples: Samples, rows: Rows) -> Batch:
        """Return augmented samples."""
        batch = samples.gather(rows, self.picture)
        return batch if self.batch is None else self.batch(batch)


@dataclass
class Feeder:
    """Reads feeds from a split; takes the place of the split in a `Loader`."""

    samples: Samples
    augmentation: Augmentation = field(default_factory=Augmentation)

    def gather(self, request: Request) -> Feed:
        """Read one step's feed; rows whose images and labels are needed are read once."""
        for_images, for_labels = request
        if not len(for_images):
            index = self.samples.index
            empty = np.empty((0, *index.image_shape), index.image_dtype)
            return Feed(empty, for_images, self.samples.labels(for_labels))
        batch = self.augmentation.gather(self.samples, for_images)
        is_same = np.array_equal(for_images, for_labels)
        labels = batch.labels if is_same else self.samples.labels(for_labels)
        return Feed(batch.images, batch.ids, labels)


@dataclass
class PlacedFeeder:
    """Names the samples of a split that is on the device; takes the place of a `Feeder`."""

    samples: Samples
    config: TrainConfig
    epoch: int

    def gather(self, request: Request) -> Feed:
        """Return one step's feed."""
        rows, for_labels = request
        config, ids = self.config, self.samples.ids(rows)
        drawn = None
        if config.augment == "crop-flip":
            drawn = moves(ids, config.seed, self.epoch)
        return Feed(Places(rows, drawn), ids, self.samples.labels(for_labels))


def training_feeder(
    config: TrainConfig,
    samples: Samples,
    epoch: int,
    is_resident: bool = False,
) -> "Feeder | PlacedFeeder":
    """Return what makes the feeds of an epoch.

    Args:
        is_resident: whether the samples are on the device.
    """
    if is_resident:
        return PlacedFeeder(samples, config, epoch)
    return Feeder(samples, augmentation(config, epoch))


def augmentation(config: TrainConfig, epoch: int) -> Augmentation:
    """Return the augmentation of an epoch's images."""
    if config.augment == "none":
        return Augmentation()

    def picture(image: Image, sample: int, size: int) -> np.ndarray:
        return resized_crop_flip(image, sample, config.seed, epoch, size)

    def batch(batch: Batch) -> Batch:
        if config.augment == "crop-flip":
            images = crop_flip(batch.images, batch.ids, config.seed, epoch)
        else:
            images = own_augmentation(config, batch, epoch)
        return Batch(images, batch.labels, batch.ids)

    if config.augment == "resized-crop-flip":
        return Augmentation(picture)
    return Augmentation(None, batch)


View = tuple[float, Callable[[np.ndarray], np.ndarray]]  # a weight, and what changes images
WHOLE: list[View] = [(1.0, lambda images: images)]


def views(config: TrainConfig) -> Sequence[View]:
    """Return what an evaluation sees of each image; the logits of all count by their weights.

    It is the image itself, unless a user's augmentation has an attribute `views`.

    Raises:
        UsageError: if these are no weights and functions.
    """
    seen: Any = ()
    if config.augment not in AUGMENTATIONS:
        seen = getattr(find_function(config.augment, "augment"), "views", ())
    try:
        pairs = [(float(weight), view) for weight, view in seen]
        if not all(callable(view) for _, view in pairs):
            raise TypeError("what follows a weight is no function")
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the views of --augment {config.augment} are not of the form [(weight, function of "
            f"images), ...] ({error}): correct them"
        ) from None
    if not pairs:
        return WHOLE
    return [(weight, partial(_seen, config.augment, view)) for weight, view in pairs]


def _seen(name: str, view: Callable[[np.ndarray], np.ndarray], images: np.ndarray) -> np.ndarray:
    where = f"a view of --augment {name}"
    return _checked(where, call_users(where, view, images), images)


def own_augmentation(config: TrainConfig, batch: Batch, epoch: int) -> np.ndarray:
    """Return the images that a user's function makes of a batch.

    It gets one seed per sample, of (seed, sample id), and the epoch: what it draws from both is
    then the same on any rank, in any batch and after a resume.

    Raises:
        UsageError: if it fails, or returns something else than images of the same form.
    """
    where, images = f"--augment {config.augment}", batch.images
    function = find_function(config.augment, "augment")
    seeds = sample_hash(config.seed, 0, batch.ids)
    return _checked(where, call_users(where, function, images, seeds, epoch), images)


def _checked(where: str, made: Any, images: np.ndarray) -> np.ndarray:
    """Return what a user's function made of images, if it has their form."""
    same_form = images.shape, images.dtype
    if not isinstance(made, np.ndarray) or (made.shape, made.dtype) != same_form:
        form = (
            f"{made.dtype} {list(made.shape)}"
            if isinstance(made, np.ndarray)
            else type(made).__name__
        )
        raise UsageError(
            f"{where} returned {form}: return images {images.dtype} {list(images.shape)}, as it "
            "gets them"
        )
    return np.ascontiguousarray(made)


def requests(
    rows: Rows, slices: Iterable[Range], local_rows: Callable[[Rows], Request]
) -> Iterator[Request]:
    """Yield this rank's request for each global batch.

    Args:
        slices: the global batches, as ranges of `rows`.
        local_rows: returns this rank's request for the rows of a batch: `Session.local_rows`.
    """
    for start, stop in slices:
        yield local_rows(rows[start:stop])


def watched(feeds: Iterable[Feed], activity: Activity) -> Iterator[Feed]:
    """Yield the feeds of a loader; note each wait, since the loader may hang on a disk."""
    rest = iter(feeds)
    while True:
        with activity.doing(READING):
            feed = next(rest, None)
        if feed is None:
            return
        yield feed


def take_rows(batch: np.ndarray, ranges: Iterable[Range]) -> np.ndarray:
    """Return the samples of a batch that lie in `ranges`; there may be none."""
    return np.concatenate([batch[:0], *(batch[first:last] for first, last in ranges)])


def open_splits(index: Index, world: World, reads: bool) -> dict[str, Samples]:
    """Return all splits, loaded into memory where they fit, so that no step waits for it.

    Args:
        reads: whether this rank reads samples; one that holds neither the first nor the last
            stage does not.
    """
    memory, verifier = cache_bytes(world.local_size), _verifier(world, reads)
    splits = {name: open_split(index, name, memory, verifier) for name in index.splits}
    if reads:
        for samples in splits.values():
            samples.load()
    return splits


def _verifier(world: World, reads: bool) -> Verifier:
    """Return which of the ranks that read on this host this one is, and their number.

    They share the check of large shards: hashing them on each rank would read a set many times.
    """
    host = socket.gethostname()
    readers = [
        rank for rank, other in enumerate(world.gather((host, reads))) if other == (host, True)
    ]
    return (readers.index(world.rank), len(readers)) if reads else (0, 1)


def cache_bytes(local_size: int) -> int:
    """Return the memory that each of the `local_size` ranks of a node may keep of a split."""
    return max(SMALLEST_CACHE_BYTES, CACHE_BYTES_PER_NODE // local_size)


Normalisation = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation per channel
_BLOCK_ROWS = 4096  # images measured at a time, at most
_BLOCK_BYTES = 64 * 2**20  # of these images, as pixels
_MEASURING_BYTES = 2**30  # of the split in memory meanwhile, at most


def normalisation(how: str, index: Index, rows: Rows, world: World) -> Normalisation:
    """Return mean and deviation per channel, for stored numbers / UNIT. Collective.

    If a part of the train split is held out, the ranks measure the other part together: each
    counts the values of a share of it. The sum of counts is the same on any number of ranks. That
    of other numbers than pixels would not be: rank 0 measures them.

    Args:
        how: the value of --normalise.
        rows: the rows of the train split to train on.

    Raises:
        DataError: if a shard is damaged.
    """
    is_pixels = index.image_dtype == "uint8"
    if how == "unit":
        measured = index.normalisation("unit")
    elif how == "split" or len(rows) == index.splits["train"].count:
        measured = index.normalisation("meanstd")
    else:
        shares = [1] * world.size if is_pixels else [1] + [0] * (world.size - 1)
        first, last = split(len(rows), shares)[world.rank]
        memory = min(_MEASURING_BYTES, cache_bytes(world.local_size))
        parts = world.gather(_counts(index, rows[first:last], memory))
        measured = mean_and_std([part for theirs in parts for part in theirs])
    if is_pixels:
        return measured
    mean, std = (tuple(value / UNIT for value in values) for values in measured)
    return mean, std


def _counts(index: Index, rows: Rows, memory_bytes: int) -> list[np.ndarray]:
    """Return what `counted` returns of some training images, in as few parts as can be."""
    parts: list[np.ndarray] = []
    block = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // math.prod(index.image_shape)))
    with open_split(index, "train", memory_bytes) as samples:
        for start in range(0, len(rows), block):
            parts.append(counted(samples.gather(rows[start : start + block]).images))
            parts = [joined(parts)]
    return parts


def check_started(config: TrainConfig, world: World) -> None:
    """Raise UsageError unless the launcher started the requested number of ranks."""
    if config.ranks is not None and config.ranks != world.size:
        raise UsageError(
            f"--ranks {config.ranks}, but the launcher started {world.size}: leave --ranks out"
        )


def check_images(config: TrainConfig, index: Index) -> None:
    """Raise UsageError unless the images fit their targets, the framework and augmentation.

    Targets of two dimensions or more are taken for fields over the image.
    """
    is_pixels = isinstance(index.input_size, int) and index.image_dtype == "uint8"
    if not is_pixels and config.framework == "tensorflow":
        raise UsageError(
            f"{config.data} holds {index.image_dtype} inputs {list(index.image_shape)}, and "
            "--framework tensorflow trains on square colour images: leave it out"
        )
    if not is_pixels and config.augment in AUGMENTATIONS[1:]:
        raise UsageError(
            f"--augment {config.augment} is for square colour images, and {config.data} holds "
            "other inputs: give a function of your own"
        )
    if smoothing_of(config.loss) is not None and index.targets is not None:
        others = "use --loss mse, l1, pixel-cross-entropy or one of your own"
        if config.framework == "tensorflow":
            others = "leave --framework tensorflow out, and give another --loss"
        raise UsageError(
            f"--loss {config.loss} needs class labels, and the data set has targets "
            f"{index.targets}: {others}"
        )
    if views(config) != WHOLE and config.framework == "tensorflow":
        raise UsageError(
            f"--augment {config.augment} has views of test images, which --framework tensorflow "
            "does not evaluate: leave one of them out"
        )
    if len(index.target_form.shape) > 1 and config.augment != "none":
        raise UsageError(
            f"--augment {config.augment} moves images but not their targets {index.targets}: "
            "leave it out"
        )


def step_seed(seed: int, position: int, rank: int | None) -> int:
    """Return the seed of this rank's generators in the step that starts at `position`.

    To resume, or to run a step again, no other state of the generators has to be saved.

    Args:
        rank: None for numbers that all ranks share: the masks of dropout.

    Returns:
        0 to 2**63 - 1.
    """
    digest = hashlib.blake2b(repr((seed, position, rank)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def staged(index: Index, directory: str | None, world: World) -> Index:
    """Return the index of this host's copy; of the data set itself without a copy. Collective.

    Args:
        directory: for the copy; None for no copy.

    Raises:
        DataError, UsageError: on all ranks, the error of the first host that has one.
    """
    if directory is None:
        return index
    own_error: DataError | UsageError | None = None
    if world.local_rank == 0:
        try:
            stage(index, directory)
        except (DataError, UsageError) as error:
            own_error = error
    for rank_error in world.gather(own_error):
        if rank_error is not None:
            raise rank_error
    folder = staged_folder(index, directory)
    parse_index(folder)  # this host's rank of the copy has checked its files
    return replace(index, folder=folder)  # with the data set's hashes, to check the copy
