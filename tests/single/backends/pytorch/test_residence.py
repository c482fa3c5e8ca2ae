"""The training images of a session are on the device where --resident and the data set say so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain import data
from hvdtrain.backends.pytorch import setup
from hvdtrain.backends.pytorch.setup import open_session, resident_images
from hvdtrain.check.plan import CHECKS
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import read_index
from hvdtrain.data.shards import open_split
from hvdtrain.engine.feed import training_feeder
from hvdtrain.errors import UsageError
from hvdtrain.parallel.stage import Images
from hvdtrain.world import World

CPU, MEAN = torch.device("cpu"), (0.3, 0.5, 0.7)
ALONE = World("none", 0, 1, 0, 1, 1)


def config_of(**settings: Any) -> TrainConfig:
    return TrainConfig(model="cnn", data="", seed=4, **settings).check()


@pytest.mark.parametrize("size", [16, 12])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"augment": "crop-flip"},
    ],
    ids=str,
)
def test_feeds_of_the_device_are_those_of_the_host(
    tmp_path: Path, settings: dict[str, Any], size: int
) -> None:
    data.synth(tmp_path / "set", 60, 3, size=16)
    index = read_index(tmp_path / "set").at_size(size)
    config = config_of(resident="always", **settings)
    rows = np.array([59, 0, 7, 7, 31])  # as where others are held out
    with open_split(index, "train") as samples:
        images = Images(MEAN, (0.2, 0.2, 0.2), CPU, "fp32")
        images.resident = resident_images(config, samples, CPU, 1)
        assert images.resident is not None
        feeds = [
            training_feeder(config, samples, 3, is_resident).gather((rows, rows[:2]))
            for is_resident in (True, False)
        ]
        assert not isinstance(feeds[0].images, np.ndarray)
        assert np.array_equal(feeds[0].ids, feeds[1].ids)
        assert np.array_equal(feeds[0].labels, feeds[1].labels)
        assert torch.equal(*(images(feed.images) for feed in feeds))


@pytest.mark.parametrize(("resident", "expected"), [("always", True), ("auto", False)])
def test_a_session_knows_whether_they_are(small_set: Path, resident: Any, expected: bool) -> None:
    config = TrainConfig(model="cnn", data=str(small_set), resident=resident).check()
    session = open_session(config, ALONE, CHECKS)
    assert session.is_resident is expected
    session.close()


def test_a_device_that_another_process_has_filled_is_told(
    small_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "to", is_full)
    with open_split(read_index(small_set), "train") as samples:
        with pytest.raises(UsageError, match=r"--resident always: the images need [\d,]+ bytes"):
            resident_images(config_of(resident="always"), samples, CPU, 1)
        monkeypatch.setattr(setup, "_fits", lambda *_: True)
        assert resident_images(config_of(resident="auto"), samples, CPU, 1) is None
