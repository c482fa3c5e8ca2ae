import hashlib
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from hvdtrain.backends.pytorch.state import Copies, to_array, to_tensor
from hvdtrain.checkpoint import store
from hvdtrain.checkpoint.tensorfile import (
    BLOCK,
    BLOCKS,
    DTYPES,
    parse_manifest,
    read_manifest,
    read_verified,
    verify,
    write_tensors,
)
from hvdtrain.errors import DataError
from tests.children import end_of, in_child
from tests.single.training.checkpoints import make, save

PART = "part-0001.safetensors"


def test_everything_reads_back_to_the_bit(tmp_path: Path) -> None:
    saved = make(7)
    read = store.load(save(tmp_path, saved, ranks=3))
    assert read.progress == saved.progress
    assert read.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert read.tensors[name].dtype == tensor.dtype
        assert read.tensors[name].shape == tensor.shape
        assert read.tensors[name].tobytes() == tensor.tobytes(), name
    state = read.optimizer["stem.conv.weight"]
    assert state["step"] == 3
    assert np.array_equal(state["exp_avg"], np.ones((4, 3, 3, 3)))


def test_other_programs_read_a_part(tmp_path: Path) -> None:
    from safetensors.torch import load_file as load_torch_file

    path = save(tmp_path, make(7), ranks=1)
    loaded = load_torch_file(path / "part-0000.safetensors")
    weight = make(7).tensors["stem.conv.weight"]
    assert np.array_equal(loaded["model/stem.conv.weight"].numpy(), weight)
    half = to_tensor(make(7).tensors["head.half"])
    assert half.dtype == torch.bfloat16
    assert torch.equal(loaded["model/head.half"], half)
    assert sorted(item.name for item in path.iterdir()) == [
        "manifest.json",
        "part-0000.safetensors",
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_become_arrays_and_come_back(tmp_path: Path, dtype: str) -> None:
    tensor = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(getattr(torch, dtype))
    array = to_array(tensor)
    assert (array.dtype.name, array.shape) == (dtype, (2, 3))
    arrays = {"odd": np.zeros(3, np.uint8), "x": array, "scalar": to_array(tensor[1, 1])}
    entry = write_tensors(tmp_path / "part", arrays)
    # By the library that defines the format, if it has the dtype, and by our own reader.
    others = [] if dtype == "complex128" else [load_file(tmp_path / "part")]
    for held in (*others, read_verified(tmp_path, entry)):
        read = {name: to_tensor(value) for name, value in held.items()}
        assert read["x"].dtype == tensor.dtype
        assert torch.equal(read["x"], tensor)
        assert torch.equal(read["scalar"], tensor[1, 1])


@pytest.mark.proves(
    "Files of any size are hashed while they are written and read, and are those of the "
    "library that defines their format."
)
@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK * BLOCKS - 100, BLOCK * (BLOCKS + 2) + 5])
def test_files_of_all_sizes_are_hashed_while_they_are_written_and_read(
    tmp_path: Path, size: int
) -> None:
    tensor = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    entry = write_tensors(tmp_path / PART, {"first": tensor[: size // 3], "x": tensor})
    content = bytearray((tmp_path / PART).read_bytes())
    assert (entry.bytes, entry.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    verify(tmp_path, entry)
    assert np.array_equal(read_verified(tmp_path, entry)["x"], tensor)
    content[-1] ^= 1
    (tmp_path / PART).write_bytes(content)
    for read in (verify, read_verified):
        with pytest.raises(DataError, match="SHA-256 differs"):
            read(tmp_path, entry)


def test_copies_are_used_again_and_are_no_view() -> None:
    copies, tensor = Copies(), torch.zeros(3, 2).t()
    first = copies.of({"x": tensor})["x"]
    tensor += 1
    assert not first.any()
    assert first.flags.c_contiguous
    second = copies.of({"x": tensor})["x"]
    assert np.shares_memory(first, second)
    assert second.all()


def test_the_newest_that_verifies_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, make(step))
    damaged = tmp_path / "step-00000005" / PART
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    (tmp_path / "step-00000003" / PART).unlink()
    loaded, path, skipped = store.load_newest(tmp_path)
    assert loaded is not None
    assert path is not None
    assert loaded.progress["step"] == 2
    assert path.name == "step-00000002"
    assert len(skipped) == 3
    assert "step-00000005" in skipped[0]
    assert "SHA-256" in skipped[0]
    assert "step-00000004" in skipped[1]
    assert "is missing" in skipped[2]


def test_a_folder_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert store.load_newest(tmp_path) == (None, None, [])


@pytest.mark.proves(
    "A damaged checkpoint is found, set aside and reported, and the one before it is used."
)
@pytest.mark.parametrize("seed", range(100))
def test_no_damage_goes_unnoticed(tmp_path: Path, seed: int) -> None:
    """One change to one file: a flipped bit, a cut, extra bytes, or the file of another step."""
    dice = random.Random(seed)
    path, other = save(tmp_path, make(1)), save(tmp_path, make(2))
    chosen = dice.choice([PART, "part-0000.safetensors"])
    before = (path / chosen).read_bytes()
    content = bytearray(before)
    match dice.randrange(4):
        case 0:
            content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        case 1:
            del content[dice.randrange(len(content)) :]
        case 2:
            content += dice.randbytes(dice.randint(1, 100))
        case 3:
            content[:] = (other / chosen).read_bytes()
    assert content != before
    (path / chosen).write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        store.load(path)


@pytest.mark.parametrize("seed", range(100))
def test_a_damaged_manifest_loads_nothing_else(tmp_path: Path, seed: int) -> None:
    """A changed character is detected, or changes nothing of the content."""
    dice = random.Random(seed)
    path = save(tmp_path, make(1)) / "manifest.json"
    text = path.read_text()
    place = dice.randrange(len(text))
    path.write_text(text[:place] + dice.choice('0a"{}[],:x\\\0') + text[place + 1 :])
    try:
        loaded = read_manifest(path.parent)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert loaded == parse_manifest(text)


def sign(path: Path, **changes: object) -> None:
    """Change a manifest and its hash, as an attacker would."""
    content = json.loads((path / "manifest.json").read_text()) | changes
    del content["sha256"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(content))


def entry(**changes: object) -> dict[str, object]:
    return {"name": PART, "bytes": 8, "sha256": "0" * 64} | changes


@pytest.mark.proves("Nothing in checkpoints, weights and configurations is executed.")
@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        {"format_version": 99},
        {"format_version": "2"},
        {"format_version": True},
        {"parts": []},
        {"parts": [entry(name="../../../etc/passwd")]},
        {"parts": [entry(name="/etc/passwd")]},
        {"parts": [entry(name="part-0001.safetensors/../x")]},
        {"parts": [entry(bytes=2**80)]},
        {"parts": [entry(bytes=-1)]},
        {"parts": [entry(sha256="x")]},
        {"parts": [entry(), entry()]},
        {"parts": [entry(bytes=10**15)]},
        {"parts": ["part-0001.safetensors"]},
        {"progress": []},
        {"configuration": None},
    ],
)
def test_a_manifest_made_to_harm_is_refused_in_one_line(tmp_path: Path, content: object) -> None:
    path = save(tmp_path, make(1))
    if isinstance(content, dict):
        sign(path, **content)
    else:
        (path / "manifest.json").write_text(str(content))
    with pytest.raises(DataError) as caught:
        store.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_part_that_is_a_link_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, make(1))
    (path / PART).rename(tmp_path / "elsewhere")
    (path / PART).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="is not a file"):
        store.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (2**60).to_bytes(8, "little") + b"{}",
        b"\x80\x04\x95",  # the first bytes of a pickle
        (40).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[9999999999,9],',
        *(
            len(header).to_bytes(8, "little") + header
            for header in (
                b'{"a":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}}',
                b'{"a":{"dtype":"F4","shape":[0],"data_offsets":[0,0]}}',
                b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}}',
                b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
                b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}',
                b'{"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,0]}}',
                b'{"a":{"dtype":["F32"],"shape":[0],"data_offsets":[0,0]}}',
                b'{"a":[]}',
                b"[]",
                b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0.0,0]}}',
            )
        ),
    ],
)
def test_a_part_made_to_harm_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    """The hash is right: who can write the file can write the manifest."""
    path = save(tmp_path, make(1))
    (path / PART).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    sign(path, parts=[entry(bytes=len(content), sha256=digest)])
    with pytest.raises(DataError) as caught:
        store.load(path)
    assert "\n" not in str(caught.value)


def test_old_checkpoints_go_and_the_best_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, make(step))
        if step == 2:
            store.mark_best(tmp_path, "step-00000002", "val_accuracy", 0.5)
    store.prune(tmp_path, keep_last=2)
    kept = [path.name for path in store.stored(tmp_path)]
    assert kept == ["step-00000002", "step-00000004", "step-00000005"]
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "step-00000002"


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, make(1), ranks=3)
    save(tmp_path, make(1), ranks=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert not (tmp_path / "step-00000001" / PART).exists()
    assert store.load(tmp_path / "step-00000001").progress["step"] == 1


CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


def killed_at(count: int, work: Callable[[], object]) -> Callable[[], None]:
    """Return `work` with a kill before its change number `count` to the file system."""

    def run() -> None:
        left = count

        def hook(event: str, _: object) -> None:
            nonlocal left
            left -= event in CHANGES
            if left < 0:
                os._exit(9)

        sys.addaudithook(hook)
        work()

    return run


@pytest.mark.proves("A kill at any moment of a save loses no checkpoint.")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_at_any_moment_of_a_save_loses_nothing(
    tmp_path: Path, again: bool, keep: int
) -> None:
    """Kill before every change to the file system in turn, also when the step is saved again."""
    new = 2 if again else 3
    died = 0
    for moment in count():
        folder = tmp_path / str(moment)
        folder.mkdir()
        save(folder, make(1))
        save(folder, make(2))
        store.mark_best(folder, "step-00000002", "val_accuracy", 0.5)

        def work(folder: Path = folder) -> None:
            save(folder, make(new), ranks=1)
            store.prune(folder, keep)

        code = end_of(in_child(killed_at(moment, work)))
        store.restore_replaced(folder)
        loaded, _, skipped = store.load_newest(folder)
        assert skipped == []
        assert loaded is not None
        assert loaded.progress["step"] in (2, new)
        assert store.best(folder) == folder / "step-00000002"
        if code == 0:
            break
        assert code == 9
        died += 1
        store.clean(folder)
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert died > 15
    assert loaded is not None
    assert loaded.progress["step"] == new


def test_numbers_that_are_none_do_not_spoil_a_checkpoint(tmp_path: Path) -> None:
    made = make(1)
    made.progress["final"] = {"test_loss": float("inf"), "losses": [float("nan"), 1.5]}
    read = store.load(save(tmp_path, made))
    assert read.progress["final"] == {"test_loss": None, "losses": [None, 1.5]}


def test_what_cannot_be_written_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    """A limit on the size of files, in a child process, makes a write fail in the middle."""
    save(tmp_path, make(1))

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        with pytest.raises(DataError, match=r"cannot be written: File too large$"):
            save(tmp_path, make(2))

    assert end_of(in_child(fill)) == 0
    store.clean(tmp_path)
    loaded, path, skipped = store.load_newest(tmp_path)
    assert loaded is not None
    assert (path, skipped) == (tmp_path / "step-00000001", [])
    assert [item.name for item in tmp_path.iterdir()] == ["step-00000001"]
