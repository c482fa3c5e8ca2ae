"""The NCCL that PyTorch has installed, for the build of Horovod."""

import importlib.util
from pathlib import Path

LIBRARY = Path("lib", "libnccl.so.2")  # in the folder of its PyPI package


def of_pytorch() -> list[Path]:
    """Return the folder of the PyPI package of NCCL that PyTorch uses; none without that package.

    It has include/nccl.h, but lib/libnccl.so.2 alone, without the name that linkers look for.
    """
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    places = spec.submodule_search_locations if spec else None
    return [place for place in map(Path, places or ()) if (place / LIBRARY).is_file()]


def linked(work: Path) -> Path | None:
    """Return a folder with PyTorch's own NCCL under the names that Horovod's build looks for.

    A process has one NCCL then: two of different versions in it would be loaded under one name.

    Args:
        work: scratch folder, in which the folder is made.

    Returns:
        None if PyTorch has no NCCL package, as in a build of a site: the build then looks for one.
    """
    package = of_pytorch()
    if not package:
        return None
    home = work / "nccl"
    (home / "lib").mkdir(parents=True)
    (home / "include").symlink_to(package[0] / "include")
    (home / "lib" / "libnccl.so").symlink_to(package[0] / LIBRARY)
    return home
