"""Tests of one GPU: `make test-gpu`. Without one, each is reported as not run, by name.

HVDTRAIN_TEST_DEVICE=cpu rehearses them on the CPU.
"""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Return the device of the tests."""
    name = os.environ.get("HVDTRAIN_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("not run: there is no GPU")
    return name
