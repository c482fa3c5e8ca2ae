"""Reading index.json gives an Index or an error of one line, whatever the file holds."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.data.index import parse_index, read_index
from hvdtrain.errors import DataError
from tests import hostile

GOOD: dict[str, Any] = {
    "format_version": 1,
    "image_shape": [2, 2, 3],
    "class_names": ["cat", "dog"],
    "mean": [0.5, 0.4, 0.3],
    "std": [0.2, 0.2, 0.2],
    "notes": [],
    "splits": {
        "train": {
            "count": 6,
            "chunk_rows": 4,
            "shards": [
                {"file": "train-00000.h5", "count": 4, "bytes": 50, "sha256": "0" * 64},
                {"file": "train-00001.h5", "count": 2, "bytes": 40, "sha256": "1" * 64},
            ],
        },
        "test": {
            "count": 1,
            "chunk_rows": 4,
            "shards": [{"file": "test-00000.h5", "count": 1, "bytes": 30, "sha256": "2" * 64}],
        },
    },
}


def a_folder(path: Path, content: object = GOOD) -> Path:
    """Make a folder with this index and shard files of the right sizes, filled with zeros."""
    text = content if isinstance(content, str) else json.dumps(content)
    (path / "index.json").write_text(text)
    for split in GOOD["splits"].values():
        for shard in split["shards"]:
            (path / shard["file"]).write_bytes(bytes(shard["bytes"]))
    return path


def changed(*keys: Any, to: object) -> Any:
    """Return the good index with one value changed."""
    return hostile.changed(GOOD, keys, to)


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_index(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def test_a_good_index_is_read_as_it_is(tmp_path: Path) -> None:
    index = read_index(a_folder(tmp_path))
    assert index.to_json() == GOOD
    assert index.classes == 2
    assert index.image_shape == (2, 2, 3)
    assert index.splits["train"].shards[1].file == "train-00001.h5"


def test_the_hash_is_of_the_content_and_not_of_place_or_layout(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = read_index(a_folder(tmp_path / "one"))
    backwards = dict(reversed(GOOD.items()))
    two = read_index(a_folder(tmp_path / "two", json.dumps(backwards, indent=7)))
    assert one.hash == two.hash
    assert re.fullmatch("[0-9a-f]{64}", one.hash)
    other = read_index(a_folder(tmp_path / "two", changed("class_names", 0, to="cow")))
    assert other.hash != one.hash


def test_what_is_missing_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    assert "`hvdtrain data pack`" in refusal(tmp_path / "nowhere")
    assert "`hvdtrain data pack`" in refusal(tmp_path)


def test_a_shard_that_is_missing_truncated_or_another_is_named(tmp_path: Path) -> None:
    shard = a_folder(tmp_path) / "train-00001.h5"
    shard.write_bytes(bytes(39))
    assert "train-00001.h5: shard is truncated: 39 bytes" in refusal(tmp_path)
    shard.write_bytes(bytes(41))
    assert "train-00001.h5: shard is another file" in refusal(tmp_path)
    shard.unlink()
    assert "train-00001.h5: shard is missing" in refusal(tmp_path)
    shard.mkdir()
    assert "train-00001.h5: shard is not a file" in refusal(tmp_path)


SHARDS = ("splits", "train", "shards")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "the file cannot be a list"),
        ("{}", "format version None, this hvdtrain reads 1 to 3"),
        (changed("format_version", to=4), "format version 4, this hvdtrain reads 1 to 3"),
        (changed("colour", to=1), "the file has unknown keys"),
        (
            changed("splits", to={"train": GOOD["splits"]["train"]}),
            "`splits` are not `train` and `test`",
        ),
        (changed("splits", "valid", to={}), "chunk_rows is missing"),
        (changed("image_shape", to=[2, 2]), "not [height, width, channels]"),
        (changed("image_shape", to=[2, 2, 2**40]), "`image_shape` is not [height"),
        (changed("mean", to=[0.1]), "not one number per channel"),
        (changed("mean", 0, to=float("nan")), "`mean` is out of range"),
        (changed("mean", 0, to="0.5"), "mean cannot be '0.5'"),
        (changed("std", 0, to=0), "`std` is not above 0"),
        (changed("class_names", to=[]), "`class_names` is empty"),
        (changed("class_names", to="cat"), "class_names cannot be 'cat'"),
        (changed("class_names", 0, to="a\nb"), "`notes` is not a line of text"),
        (changed("notes", to=[3]), "notes cannot be 3"),
        (changed("splits", "train", "count", to=7), "counts in split `train` disagree"),
        (changed("splits", "train", "count", to=True), "count cannot be True"),
        (
            changed("splits", "train", "chunk_rows", to=0),
            "`chunk_rows` of split `train` is not above 0",
        ),
        (changed("splits", "train", "chunk_rows", to=3), "ends inside a chunk"),
        (changed("splits", "train", "shards", to=[]), "counts in split `train` disagree"),
        (changed("splits", "train", "shards", to={}), "shards cannot be a dict"),
        (changed(*SHARDS, 0, "count", to=-4), "of train-00000.h5 is not above 0"),
        (changed(*SHARDS, 0, "count", to=2**40), "too small for 1099511627776 images"),
        (changed(*SHARDS, 0, "count", to=4.0), "count cannot be 4.0"),
        (changed(*SHARDS, 0, "bytes", to=47), "train-00000.h5 is too small for 4 images"),
        (changed(*SHARDS, 0, "bytes", to=10**30), "bytes cannot be 1000000000"),
        (changed(*SHARDS, 0, "sha256", to="xyz"), "not 64 hex digits"),
        (changed(*SHARDS, 0, "sha256", to=None), "sha256 cannot be None"),
        (changed(*SHARDS, 0, "file", to="train-00001.h5"), "two shards have the same name"),
        (changed(*SHARDS, 0, "file", to="../train-00000.h5"), "is not a valid name of a shard"),
        (changed(*SHARDS, 0, "file", to="/etc/passwd"), "is not a valid name of a shard"),
        (changed(*SHARDS, 0, "file", to="a/../../x.h5"), "is not a valid name of a shard"),
        (changed(*SHARDS, 0, "file", to="x.h5\n"), "is not a valid name of a shard"),
        (changed(*SHARDS, 0, "file", to="..h5"), "is not a valid name of a shard"),
        (changed(*SHARDS, 0, "file", to=5), "file cannot be 5"),
        (changed(*SHARDS, 0, to="train-00000.h5"), "shards cannot be 'train-00000.h5'"),
    ],
)
def test_a_broken_rule_is_named(tmp_path: Path, content: object, reason: str) -> None:
    assert reason in refusal(a_folder(tmp_path, content))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(b"\xff\xfe\x00{")
    assert "not JSON" in refusal(tmp_path)


@given(st.sampled_from(hostile.paths_of(GOOD)), hostile.VALUES)
def test_any_value_anywhere_gives_an_index_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, path: tuple[Any, ...], value: object
) -> None:
    folder = tmp_path_factory.mktemp("index")
    (folder / "index.json").write_text(json.dumps(changed(*path, to=value)))
    try:
        index = parse_index(folder)
    except DataError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 400
    else:
        assert json.loads(json.dumps(index.to_json())) == changed(*path, to=value)
