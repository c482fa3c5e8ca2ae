"""The options of what is done to images, in training and in evaluation."""

from dataclasses import dataclass
from typing import Literal

from hvdtrain.options.fields import Group, Rule, option
from hvdtrain.options.optimisationoptions import Seam

AUGMENTATIONS = ("none", "crop-flip", "resized-crop-flip")


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The augmentation of training images, and the views of an evaluation."""

    augment: Seam = option(  # noqa: RUF009
        "none",
        "none; crop-flip: shifts, flips; resized-crop-flip: random parts, flips; or "
        "module:function of (images, seeds of the samples, epoch) that returns the images",
        Group.DATA,
        Rule.FIRST,
        "NAME",
    )
    flip: Literal["random", "alternate"] = option(
        "random",
        "with --augment: mirror images at random, or each image in every second epoch (Jordan, "
        "arXiv 2404.00498)",
        Group.DATA,
    )
    shift: int = option(
        4,
        "most pixels of a shift of --augment crop-flip",
        Group.DATA,
        Rule.NOT_NEGATIVE,
    )
    border: Literal["zeros", "reflect"] = option(
        "zeros", "what a shift moves into the image: zeros, or its own mirrored pixels", Group.DATA
    )
    cutout: int | None = option(
        None,
        "side in pixels of a square that is blanked in each training image",
        Group.DATA,
        Rule.POSITIVE,
    )
    whiten: bool = option(
        False,
        "start the first convolution as a whitening of the training images' patches, and do not "
        "train its weights; filters beyond two for each value of a patch stay as they started",
        Group.DATA,
        Rule.TORCH_ONLY,
    )
    test_augment: Literal["none", "flip", "flip-shift"] = option(
        "none",
        "evaluate each image as the mean over views: flip: and mirrored; flip-shift: and both "
        "shifted by a pixel up and left, or down and right",
        Group.DATA,
        Rule.TORCH_ONLY,
    )
