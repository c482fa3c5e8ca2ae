"""Decisions about checkpoints that ranks make without communication."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.checkpoint.store import FILES, owners
from hvdtrain.checkpoint.tensorfile import Entry, Manifest, parse_manifest
from hvdtrain.config import TrainConfig
from hvdtrain.engine.progress import Progress
from hvdtrain.errors import DataError, UsageError
from hvdtrain.options import requests

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
PROGRESS = Progress("hash", best={"metric": "val_accuracy", "value": 0.5, "step": 1})
KEPT = {**vars(PROGRESS), "metrics_bytes": 10, "ledger": "/x", "ledger_bytes": 3}


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(1, 9))
def test_every_tensor_has_one_owner_and_owners_have_about_the_same(
    sizes: list[int], count: int
) -> None:
    result = owners(sizes, count)
    assert len(result) == len(sizes)
    assert result == sorted(result)
    assert set(result) <= set(range(count))
    loads = [0] * count
    for size, owner in zip(sizes, result, strict=True):
        loads[owner] += size
    assert max(loads) <= sum(sizes) / min(count, FILES) + max(sizes)


@pytest.mark.proves(
    "Many ranks write few files of a checkpoint, and a resumed job reads each file once."
)
def test_many_ranks_write_few_files_from_places_far_apart() -> None:
    assert sorted(set(owners([300] * 999, 1024))) == list(range(0, 1024, 128))
    # A model of 3 GiB keeps more disks busy.
    assert len(set(owners([2**20] * 3072, 1024))) == 48


def interval(text: str) -> tuple[float, str]:
    config = TrainConfig(model="cnn", data="x", checkpoint_every=text)
    return requests.interval(config.check().checkpoint_every)


def test_an_interval_is_epochs_steps_or_minutes() -> None:
    assert interval("1 epoch") == (1, "epoch")
    assert interval("500steps") == (500, "step")
    assert interval("0.5 minutes") == (0.5, "minute")


@pytest.mark.parametrize("text", ["", "5", "0 steps", "1.5 epochs", "-1 steps", "2 hours"])
def test_any_other_interval_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--checkpoint-every"):
        interval(text)


def test_progress_reads_back() -> None:
    assert Progress.of(json.loads(json.dumps(KEPT))) == PROGRESS


@given(st.sampled_from(sorted(KEPT)), JSON)
def test_progress_of_another_kind_is_refused(name: str, value: Any) -> None:
    kept = KEPT | {name: value}
    try:
        result = Progress.of(kept)
    except DataError as error:
        assert name in str(error)
    else:
        assert type(value) in (type(KEPT[name]), int, type(None))
        assert getattr(result, name, value) == value


@given(JSON | st.dictionaries(st.sampled_from(["format_version", "parts", "progress"]), JSON))
def test_what_is_no_manifest_is_refused_in_one_line(content: Any) -> None:
    with pytest.raises(DataError) as caught:
        parse_manifest(json.dumps(content))
    assert "\n" not in str(caught.value)


@given(st.text())
def test_a_text_is_no_manifest(text: str) -> None:
    with pytest.raises(DataError):
        parse_manifest(text)


def test_a_manifest_reads_back() -> None:
    entry = Entry("part-0000.safetensors", 5, "a" * 64)
    made = Manifest((entry,), {"step": 1, "position": 2}, {"model": "cnn"})
    assert parse_manifest(made.to_json()) == made
