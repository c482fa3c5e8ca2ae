"""Installed libraries, recognised without loading them."""

from importlib.util import find_spec
from pathlib import Path


def has_horovod() -> bool:
    """Return whether Horovod is installed with its plugin for PyTorch."""
    spec = find_spec("horovod")
    folders = (spec.submodule_search_locations or []) if spec else []
    return any(True for folder in folders for _ in Path(folder, "torch").glob("mpi_lib*"))
