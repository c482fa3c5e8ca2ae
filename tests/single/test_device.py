"""hvdtrain/device.py: staging, and that no other module depends on the type of a device."""

import ast
import re
import subprocess
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hvdtrain import device
from tests import warm
from tests.conftest import ROOT
from tests.late import LateStream

MODULE = ROOT / "hvdtrain" / "device.py"
# The description of a run's device, which TensorFlow has, too.
MAY_COMPARE = {MODULE, ROOT / "hvdtrain" / "engine" / "session.py"}
DEVICE_TYPE = re.compile(r"""\.is_cuda\b|torch\.cuda\.|\b(type|kind) [=!]= ["'](cuda|cpu)["']""")
WAITS = [
    number
    for number, line in enumerate(MODULE.read_text().splitlines())
    if re.fullmatch(r" +[\w\[\].]+(\.event\([\w.]+\))?\.synchronize\(\)", line)
]


@pytest.mark.proves(
    "One module handles the device; where its copies are late, data, pipeline and hybrid "
    "parallelism compute the gradients of the serial step, and no wait can be left out."
)
def test_no_other_module_compares_the_type_of_a_device() -> None:
    places = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "hvdtrain").rglob("*.py")
        if path not in MAY_COMPARE
        for line in _code(path)
        if DEVICE_TYPE.search(line)
    }
    assert not places


def _code(path: Path) -> list[str]:
    """Return the statements of a module without docstrings and comments."""
    return ast.unparse(_Bare().visit(ast.parse(path.read_text()))).splitlines()


class _Bare(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if is_text else node


def test_on_the_cpu_nothing_is_copied() -> None:
    tensor = torch.arange(6.0, requires_grad=True)
    assert device.stage_out(tensor).data_ptr() == tensor.data_ptr()
    assert device.host_like(tensor) is tensor
    host = device.new_host(tensor, (2, 3))
    assert device.new_target(host, tensor) is host


def check_stage_out(module: types.ModuleType, like: torch.Tensor) -> None:
    host = module.stage_out(like)
    assert torch.equal(host, like)
    assert host.stride() == like.stride()


def check_copy_out(module: types.ModuleType, like: torch.Tensor) -> None:
    host = module.new_host(like, like.shape)
    module.copy_out([like], [host])
    assert torch.equal(host, like)


def check_read_later(module: types.ModuleType, like: torch.Tensor) -> None:
    value = like.sum()
    expected = float(value)
    read = module.read_later([value, value + 1], like.device)
    value.zero_()  # the next step, which the device has not reached when the value is read
    assert read() == [expected, expected + 1]


CHECKS = [check_stage_out, check_copy_out, check_read_later]


def module_of(text: str) -> types.ModuleType:
    """Return the device module with this text, and a late device in place of the CPU."""
    module = types.ModuleType("late_device")
    exec(compile(text, str(MODULE), "exec"), module.__dict__)
    module.STREAMS["cpu"] = LateStream()
    return module


def values() -> torch.Tensor:
    return torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("check", CHECKS)
def test_late_copies_are_waited_for(check: Callable[..., None]) -> None:
    check(module_of(MODULE.read_text()), values())


@pytest.mark.parametrize("number", WAITS)
def test_no_wait_can_be_left_out(number: int) -> None:
    lines = MODULE.read_text().splitlines()
    indent = re.match(" *", lines[number])
    assert indent is not None
    lines[number] = f"{indent[0]}pass"
    module = module_of("\n".join(lines))
    failed = 0
    for check in CHECKS:
        try:
            check(module, values())
        except AssertionError:
            failed += 1
    assert failed == 1


def test_each_wait_is_known() -> None:
    assert len(WAITS) == len(CHECKS)


def test_memory_that_changes_while_it_is_copied_is_found() -> None:
    stream = LateStream()
    host = stream.host_memory((3,), torch.float32).zero_()
    stream.copy(torch.empty(3), host)
    host += 1
    with pytest.raises(AssertionError, match="changed while it was copied"):
        stream.event().synchronize()


def test_options_choose_the_algorithms_of_a_process() -> None:
    program = (
        "import os, torch\n"
        "from hvdtrain.device import choose_algorithms\n"
        "backends = torch.backends\n"
        "backends.cudnn.benchmark = True\n"
        "for precision, exact in (('fp32', False), ('tf32', False), ('bf16', False), "
        "('fp32', True), ('tf32', True)):\n"
        "    choose_algorithms(precision, exact)\n"
        "    print(backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32,"
        " backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled(),"
        " 'CUBLAS_WORKSPACE_CONFIG' in os.environ)\n"
    )
    printed = subprocess.check_output([warm.python(), "-c", program], text=True)
    assert printed.splitlines() == [
        "False False True False False",  # a user's module has set it
        "True True True False False",
        "False False True False False",
        "False False False True True",
        "True True False True True",
    ]
