"""Data sets: images are packed into shards, and shards are read in a reproducible order.

Every public name is loaded on first use, so that importing this package stays cheap. The package
needs only NumPy, h5py and Pillow: PyTorch and TensorFlow read through the same loader.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdtrain.data.arrays import write as write
    from hvdtrain.data.augment import crop_flip as crop_flip
    from hvdtrain.data.images import decode as decode
    from hvdtrain.data.images import resize as resize
    from hvdtrain.data.index import Index as Index
    from hvdtrain.data.index import read_index as read_index
    from hvdtrain.data.order import Loader as Loader
    from hvdtrain.data.packing import pack as pack
    from hvdtrain.data.shards import Batch as Batch
    from hvdtrain.data.shards import Samples as Samples
    from hvdtrain.data.shards import info as info
    from hvdtrain.data.shards import open_split as open_split
    from hvdtrain.data.shards import verify as verify
    from hvdtrain.data.sources import fetch as fetch
    from hvdtrain.data.sources import synth as synth

_HOMES = {
    "Batch": "shards",
    "Index": "index",
    "Loader": "order",
    "Samples": "shards",
    "crop_flip": "augment",
    "decode": "images",
    "fetch": "sources",
    "info": "shards",
    "open_split": "shards",
    "pack": "packing",
    "read_index": "index",
    "resize": "images",
    "synth": "sources",
    "verify": "shards",
    "write": "arrays",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
