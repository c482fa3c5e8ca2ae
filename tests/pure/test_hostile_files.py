"""Plan, configuration, manifest: whatever they hold, what they mean or one line comes out."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain import cli
from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError, UsageError
from hvdtrain.parallel import plan as plans
from hvdtrain.parallel import planfile
from hvdtrain.training.checkpoint import manifest
from hvdtrain.training.checkpoint.partfile import Entry
from hvdtrain.training.progress import Progress
from tests import hostile

PARSER = cli._parser()
NAMES = ["stem", "body", "neck", "head"]
PLAN = {
    "stages": [
        {"components": ["stem", "body"], "ranks": [0, 1], "shares": [2, 1]},
        {"components": ["neck", "head"], "ranks": [2], "shares": [1]},
    ],
    "microbatches": 4,
    "schedule": "1f1b",
}
CONFIG = asdict(TrainConfig(model="cnn", data="data", lr=0.1, epochs=3, inject="kill step=3"))
PROGRESS = asdict(Progress("0" * 64)) | {"metrics_bytes": 5, "ledger": "/x", "ledger_bytes": 5}
PART = Entry("part-0000.safetensors", 100, "0" * 64)
MANIFEST: dict[str, Any] = json.loads(
    manifest.Manifest((PART,), PROGRESS, {"model": "cnn"}).to_json()
)


@given(st.sampled_from(hostile.paths_of(PLAN)), hostile.VALUES)
def test_a_plan_file_is_a_plan_of_the_model_or_one_line(path: tuple[Any, ...], to: object) -> None:
    content = json.loads(json.dumps(hostile.changed(PLAN, path, to)))
    try:
        plan = planfile.from_json(content, "plan.json", NAMES)
        plans.check(plan, NAMES, 3, lambda: "")
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert [name for stage in plan.stages for name in stage.components] == NAMES
        assert set(plan.ranks) == {0, 1, 2}


@settings(deadline=None)  # the parser takes its time
@given(st.sampled_from(sorted(CONFIG)), hostile.VALUES)
def test_a_configuration_is_in_range_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, key: str, to: object
) -> None:
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {key: to}))
    try:
        parsed = PARSER.parse_args(["train", "--config", str(path)])
        values = {name: parsed["train"][name] for name in CONFIG}
        config = TrainConfig(**values).check()
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert config.batch_size > 0
        assert config.lr > 0


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00\x01",
        b"[" * 60_000,
        b"x: 1\n" * 20_000,
        b"model: &a [cnn]\ndata: *a\n",
        "".join(f"{' ' * depth}a:\n" for depth in range(100)).encode(),
        b"model: !!python/object/apply:os.system ['touch harmed']\n",
        b"model: cnn\nlr: 0x" + b"1" * 6000 + b"\n",
        b"- model\n- cnn\n",
        b"",
    ],
)
def test_a_configuration_made_to_harm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        cli.run(["train", "--config", "config.yaml"])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert not (tmp_path / "harmed").exists()


@given(st.sampled_from(hostile.paths_of(MANIFEST)), hostile.VALUES, st.booleans())
def test_a_manifest_is_one_or_one_line(path: tuple[Any, ...], to: object, signs: bool) -> None:
    content = hostile.changed(MANIFEST, path, to)
    if signs:  # as one who means harm would
        own = {key: content[key] for key in content if key != "sha256"}
        try:
            content["sha256"] = manifest._digest(own)
        except ValueError:
            return  # no JSON has such a number
    try:
        found = manifest.parse(json.dumps(content))
        Progress.of(found.progress)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert all(0 <= part.bytes < 2**63 for part in found.parts)
        assert all("/" not in part.name for part in found.parts)
