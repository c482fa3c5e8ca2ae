"""Private names of libraries: a version without one of them is found here."""

from typing import Any

import jsonargparse
import pytest
import submitit
import torch
from torch._subclasses import fake_tensor
from torch.nn.modules import batchnorm
from torch.utils import _pytree

USED: list[tuple[Any, tuple[str, ...], str]] = [
    (
        submitit.SlurmExecutor,
        ("_submit_command", "_make_submission_file_text", "update_parameters"),
        "hvdtrain/jobs/slurm.py",
    ),
    (submitit.LocalExecutor, ("_submit_command",), "hvdtrain/jobs/slurm.py"),
    (submitit.core.utils, ("FailedJobError",), "hvdtrain/jobs/slurm.py"),
    (
        jsonargparse.ArgumentParser(),
        ("_actions", "_option_string_actions", "_print_message"),
        "hvdtrain/options/parser.py",
    ),
    (torch._C, ("_current_graph_task_id",), "hvdtrain/parallel/dropout.py"),
    (fake_tensor, ("FakeTensor", "FakeTensorMode"), "hvdtrain/models/costs.py"),
    (
        torch.ops.aten,
        ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        "hvdtrain/models/costs.py",
    ),
    (_pytree, ("tree_map", "tree_map_only", "tree_leaves"), "hvdtrain/torch"),
    (batchnorm, ("_NormBase",), "hvdtrain/torch/reduction.py"),
]


@pytest.mark.parametrize(("owner", "names", "user"), USED, ids=lambda value: str(value)[:40])
def test_private_names_exist(owner: Any, names: tuple[str, ...], user: str) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    assert not missing, f"adapt {user}: {getattr(owner, '__name__', owner)} has no {missing}"
