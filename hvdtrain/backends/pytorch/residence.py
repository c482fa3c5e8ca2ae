"""The training images of a run on its device, if they can be there."""

import numpy as np
import torch

from hvdtrain import device as devices
from hvdtrain.config import TrainConfig
from hvdtrain.data.images import centre
from hvdtrain.data.shards import Samples
from hvdtrain.errors import UsageError
from hvdtrain.options.sections import AUGMENTATIONS
from hvdtrain.parallel.resident import Resident

MOST_MEMORY = 0.1  # of the free memory of a GPU


def resident_images(
    config: TrainConfig, samples: Samples, device: torch.device, ranks: int
) -> Resident | None:
    """Return the images of a split on the device, as --resident says.

    Args:
        ranks: of this host.

    Raises:
        UsageError: if they should always be there, and cannot.
    """
    if config.resident == "never":
        return None
    index, is_auto = samples.index, config.resident == "auto"
    fault = ""
    if config.augment not in AUGMENTATIONS:
        fault = f"--augment {config.augment} makes images on the host"
    elif index.resize is not None or config.augment == "resized-crop-flip":
        fault = "images that are scaled are made on the host"
    elif not samples.in_memory:
        fault = "the training images do not fit into the memory of the host"
    if fault and not is_auto:
        raise UsageError(f"--resident always: {fault}: leave it out")
    if fault or (is_auto and not _fits(config, samples, device, ranks)):
        return None
    whole = samples.whole()
    assert whole is not None
    stored = whole.images
    if index.packed_shape is not None:
        stored = np.ascontiguousarray(centre(stored, index.image_shape[0]))
    try:
        images = torch.from_numpy(stored).to(device)
    except torch.OutOfMemoryError:  # another process has taken what was free
        if is_auto:
            return None
        raise UsageError(
            f"--resident always: the images need {stored.nbytes:,} bytes of {device}, which has "
            "fewer free: leave it out"
        ) from None
    return Resident(images)


def _fits(config: TrainConfig, samples: Samples, device: torch.device, ranks: int) -> bool:
    """Return whether a GPU has enough memory for the images besides all else.

    The limit of --plan does not count them.
    """
    if not devices.is_gpu(device) or config.memory_gib is not None:
        return False
    sharing = -(-ranks // devices.gpu_count())
    free = devices.free_bytes(device, ranks) / sharing
    return samples.split.count * samples.index.image_bytes <= MOST_MEMORY * free
