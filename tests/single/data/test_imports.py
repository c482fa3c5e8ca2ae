"""hvdtrain.data works with PyTorch and with TensorFlow, and loads nothing until it is used."""

import json
import subprocess
import sys

import hvdtrain.data


def modules_after(program: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after this program."""
    program += "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    return {name.split(".")[0] for name in json.loads(done.stdout)}


def test_importing_the_package_loads_neither_numpy_nor_h5py() -> None:
    assert not modules_after("import hvdtrain.data") & {"numpy", "h5py", "torch", "rich"}


def test_using_all_of_it_loads_no_framework() -> None:
    program = "from hvdtrain.data import " + ", ".join(hvdtrain.data.__all__)
    loaded = modules_after(program + "\nimport hvdtrain.data.order")
    assert {"numpy", "h5py"} <= loaded
    assert not loaded & {"torch", "tensorflow", "keras", "horovod", "mpi4py"}


def test_each_public_name_is_what_it_says() -> None:
    for name in hvdtrain.data.__all__:
        assert getattr(hvdtrain.data, name).__name__ == name
    assert not hasattr(hvdtrain.data, "nothing")
