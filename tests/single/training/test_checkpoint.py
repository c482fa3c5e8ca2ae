import json
import os
from pathlib import Path

import pytest
import torch

from hvdtrain.errors import DataError
from hvdtrain.training import checkpoint
from hvdtrain.training.checkpoint import Checkpoint


def make(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "stem.conv.weight": torch.randn(4, 3, 3, 3, generator=generator),
        "stem.bn.running_mean": torch.randn(4, generator=generator, dtype=torch.float64),
        "stem.bn.num_batches_tracked": torch.tensor(step),
        "head.half": torch.randn(5, generator=generator).to(torch.bfloat16),
    }
    tensors["stem.conv.weight"] = tensors["stem.conv.weight"].to(memory_format=torch.channels_last)
    optimizer = {
        "stem.conv.weight": {"exp_avg": torch.ones(4, 3, 3, 3), "step": torch.tensor(3.0)}
    }
    return Checkpoint(tensors, optimizer, {"step": step, "position": 64 * step})


def test_everything_reads_back_to_the_bit(tmp_path: Path) -> None:
    saved = make(7)
    read = checkpoint.load(checkpoint.save(tmp_path, saved))
    assert read.progress == saved.progress
    assert read.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert read.tensors[name].dtype == tensor.dtype
        assert torch.equal(read.tensors[name], tensor), name
    assert torch.equal(read.optimizer["stem.conv.weight"]["step"], torch.tensor(3.0))


def test_the_newest_that_verifies_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, make(step))
    damaged = tmp_path / "step-00000004" / "state.h5"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    found, path, skipped = checkpoint.load_newest(tmp_path)
    assert found is not None
    assert path is not None
    assert found.progress["step"] == 2
    assert path.name == "step-00000002"
    assert len(skipped) == 2
    assert "step-00000004" in skipped[0]
    assert "SHA-256" in skipped[0]
    assert "step-00000003" in skipped[1]


def test_a_folder_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path) == (None, None, [])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format_version": 99, "sha256": "x"}'])
def test_a_manifest_that_is_none_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = checkpoint.save(tmp_path, make(1))
    (path / "manifest.json").write_text(content)
    with pytest.raises(DataError) as caught:
        checkpoint.load(path)
    assert "\n" not in str(caught.value)


def test_old_checkpoints_go_and_the_best_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        checkpoint.save(tmp_path, make(step))
        if step == 2:
            checkpoint.mark_best(tmp_path, "step-00000002", "val_accuracy", 0.5)
    checkpoint.prune(tmp_path, keep_last=2)
    kept = [path.name for path in checkpoint.stored(tmp_path)]
    assert kept == ["step-00000002", "step-00000004", "step-00000005"]
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "step-00000002"


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """A real limit on the size of files, in a child process: the write fails in the middle."""
    checkpoint.save(tmp_path, make(1))
    child = os.fork()
    if child == 0:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            checkpoint.save(tmp_path, make(2))
        except DataError as error:
            os._exit(0 if str(error).endswith("cannot be written: File too large") else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    found, path, skipped = checkpoint.load_newest(tmp_path)
    assert found is not None
    assert (path, skipped) == (tmp_path / "step-00000001", [])
