"""Data sets: official files are packed into shards, and shards are read in a reproducible order.

Every public name is loaded on first use, so that importing this package stays cheap. The package
needs only NumPy and h5py: PyTorch and TensorFlow read through the same loader.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdtrain.data.augment import crop_flip
    from hvdtrain.data.cifar import fetch, pack
    from hvdtrain.data.index import Index, read_index
    from hvdtrain.data.loader import Loader
    from hvdtrain.data.shardfile import Batch
    from hvdtrain.data.shards import Samples, info, open_split, verify
    from hvdtrain.data.synthetic import synth

__all__ = [
    "Batch",
    "Index",
    "Loader",
    "Samples",
    "crop_flip",
    "fetch",
    "info",
    "open_split",
    "pack",
    "read_index",
    "synth",
    "verify",
]

_HOMES = {
    "Batch": "shardfile",
    "Index": "index",
    "Loader": "loader",
    "Samples": "shards",
    "crop_flip": "augment",
    "fetch": "cifar",
    "info": "shards",
    "open_split": "shards",
    "pack": "cifar",
    "read_index": "index",
    "synth": "synthetic",
    "verify": "shards",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
