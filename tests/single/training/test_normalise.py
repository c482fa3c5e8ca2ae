"""Images are normalised by mean and deviation of the training images, without held-out ones."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from hvdtrain.backends.pytorch import setup
from hvdtrain.check.plan import CHECKS
from hvdtrain.config import TrainConfig
from hvdtrain.data.shards import open_split
from hvdtrain.world import World

ALONE = World("none", 0, 1, 0, 1, 1)


@pytest.mark.proves(
    "`--holdout` makes a seeded part the validation set, which normalisation does not "
    "use, and the best checkpoint has the highest accuracy on it."
)
@pytest.mark.parametrize(("how", "is_centred"), [("meanstd", True), ("split", False)])
def test_the_mean_is_that_of_the_images_trained_on(
    small_set: Path, how: Literal["meanstd", "split"], is_centred: bool
) -> None:
    config = TrainConfig(
        model="cnn", data=str(small_set), holdout=0.3, normalise=how, precision="fp64"
    ).check()
    session = setup.open_session(config, ALONE, CHECKS)
    with open_split(session.index, "train") as samples:
        seen = session.runtime.settings.images(samples.gather(session.train_rows).images).numpy()
    session.close()
    centred = np.allclose(seen.mean(axis=(0, 2, 3)), 0, atol=1e-9)
    scaled = np.allclose(seen.std(axis=(0, 2, 3)), 1, atol=1e-9)
    assert (centred, scaled) == (is_centred, is_centred)
