from pathlib import Path

import pytest

from hvdtrain.setup import toolchain


def test_the_nccl_of_pytorch_is_linked_under_the_name_for_linkers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "nvidia" / "nccl"
    for file in ("__init__.py", "include/nccl.h", "lib/libnccl.so.2"):
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(file)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    assert package in toolchain.nccl_of_pytorch()
    home = toolchain.linked_nccl(tmp_path)
    assert home is not None
    assert (home / "lib" / "libnccl.so").read_text() == "lib/libnccl.so.2"
    assert (home / "include" / "nccl.h").read_text() == "include/nccl.h"


def test_without_that_package_the_build_looks_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "NCCL_LIBRARY", Path("lib", "none"))
    assert toolchain.linked_nccl(tmp_path) is None
    assert not list(tmp_path.iterdir())
