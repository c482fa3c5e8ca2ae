"""A packed data set of 300 + 60 images of 64 x 64 in chunks of 64.

The train split has shards of 128, 128 and 44 images.
"""

from pathlib import Path

import pytest

from hvdtrain.data.sources import synth


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Make the data set in a separate folder per test, which may damage it."""
    synth(tmp_path / "packed", images=300, classes=3, size=64, seed=5, shard_mb=2)
    return tmp_path / "packed"
