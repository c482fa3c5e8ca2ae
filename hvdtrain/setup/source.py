"""Horovod's source: the sdist on PyPI, its checksum, and the edits that today's frameworks need.

Horovod 0.28.1 (June 2023) is its last release. Each edit below is required by its later commits,
conda-forge's recipe or the headers of PyTorch and TensorFlow. An edit fails with its name if the
text that it replaces is missing, so that an unknown source is never built.
"""

from __future__ import annotations

import hashlib
import tarfile
from dataclasses import astuple, dataclass
from pathlib import Path

from hvdtrain.errors import HvdtrainError

VERSION = "0.28.1"
SDIST_NAME = f"horovod-{VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# A line of a requirements file: pip compares before it executes anything of the sdist.
REQUIREMENT = f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}"


class SourceError(HvdtrainError):
    """An unknown sdist, or an edit that does not match; the message is one line."""


@dataclass(frozen=True)
class Edit:
    """A replacement of `old`, which must occur exactly once in `file`, by `new`.

    `why` explains it to readers.
    """

    file: str
    old: str
    new: str
    why: str


EDITS = (
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
        'set(CMAKE_INSTALL_RPATH "$ENV{HOROVOD_RUNPATH}")',
        "TensorFlow's and absl's headers need C++17; a relative RUNPATH makes the wheel movable",
    ),
    Edit(
        "CMakeLists.txt",
        "# RelWithDebInfo uses -O2,",
        'string(REPLACE "-g " "" CMAKE_CXX_FLAGS_RELWITHDEBINFO '
        '"${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")\n# RelWithDebInfo uses -O2,',
        "no debug information: a faster build and a wheel of a tenth of the size",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)",
        "PyTorch's headers: C++17 up to 2.13, C++20 from 2.14",
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
        "it includes XLA headers that TensorFlow no longer ships; its code is for GPUs only",
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        "PATHS ${FLATBUFFERS_INCLUDE_PATH} REQUIRED)",
        "PATHS ${FLATBUFFERS_INCLUDE_PATH} NO_DEFAULT_PATH REQUIRED)",
        "a newer flatbuffers of the system does not fit Horovod's generated headers",
    ),
    Edit(
        "horovod/common/common.h",
        "#include <memory>\n",
        "#include <memory>\n#include <stdexcept>\n",
        "g++ 13 no longer includes it by chance (Horovod #3957)",
    ),
    Edit(
        "horovod/common/group_table.h",
        "#include <queue>\n",
        "#include <queue>\n#include <string>\n",
        "g++ 13 no longer includes it by chance (Horovod #3957)",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_paths()['include'])",
        "Python 3.12 has no distutils",
    ),
    Edit(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)",
        "set(CMAKE_CUDA_STANDARD 17)",
        "CUDA 13's headers need C++17",
    ),
    Edit(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable\n",
        "from shutil import which as find_executable\n",
        "Python 3.12 has no distutils",
    ),
    Edit(
        "horovod/runner/mpi_run.py",
        "return list(_OMPI_FLAGS), list(_NO_BINDING_ARGS), _OMPI_IMPL",
        "return list(_OMPI_FLAGS), ['--bind-to none', '--map-by slot'], _OMPI_IMPL",
        "Open MPI 5 takes the argument of an option with one dash for the program",
    ),
)


def fingerprint(edits: tuple[Edit, ...] = EDITS) -> str:
    """Return twelve hexadecimal digits that change with the version, the sdist or any edit."""
    text = repr((VERSION, SDIST_SHA256, [astuple(edit) for edit in edits]))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def apply_edits(root: Path, edits: tuple[Edit, ...] = EDITS) -> None:
    """Make every edit in the source tree at `root`.

    Raises:
        SourceError: a file is missing, or the text to replace is not there exactly once.
    """
    for edit in edits:
        path = root / edit.file
        if not path.is_file():
            raise SourceError(f"Horovod's source has no {edit.file}; this is not {SDIST_NAME}")
        text = path.read_text(encoding="utf-8")
        count = text.count(edit.old)
        if count != 1:
            first_line = edit.old.strip().splitlines()[0]
            raise SourceError(
                f"cannot edit Horovod's {edit.file}: expected once, found {count} times: "
                f"{first_line!r}; this is not the source of {SDIST_NAME}"
            )
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def unpack(sdist: Path, folder: Path) -> Path:
    """Check the sdist's SHA-256, unpack it into `folder` and return the source tree's root.

    Raises:
        SourceError: the archive is not the known one.
    """
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise SourceError(
            f"{sdist.name} has SHA-256 {digest}, expected {SDIST_SHA256}: the download is damaged "
            "or not the one on PyPI; empty pip's cache (pip cache purge) and try again"
        )
    # The checksum makes the archive trusted; `filter=` needs Python 3.11.4 (Debian 12 has 3.11.2).
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    return folder / f"horovod-{VERSION}"
