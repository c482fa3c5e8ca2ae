"""The option of what is done to images."""

from dataclasses import dataclass

from hvdtrain.options.fields import Group, Rule, option
from hvdtrain.options.optimisationoptions import Seam

AUGMENTATIONS = ("none", "crop-flip", "resized-crop-flip")


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The augmentation of training images."""

    augment: Seam = option(  # noqa: RUF009
        "none",
        "none; crop-flip: shifts, flips; resized-crop-flip: random parts, flips; or "
        "module:function of (images, seeds of the samples, epoch) that returns the images",
        Group.DATA,
        Rule.FIRST,
        "NAME",
    )
