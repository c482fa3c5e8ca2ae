"""`--sync auto`: what it goes together with, and how its choice is kept."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import configfile
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.options.syncrequest import AUTO_SYNC


def config(**values: Any) -> TrainConfig:
    return TrainConfig(model="cnn", data="d", **values).check()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"allow_approximate": True}, "--allow-approximate needs --sync auto: add it, or leave"),
        (
            {"sync": "auto", "compress": "fp16"},
            "--sync auto chooses what travels, and --compress fp16 has chosen it: leave one out",
        ),
        ({"sync": "auto", "plan": "adaptive"}, "--plan adaptive does not support --sync auto"),
        ({"sync": "auto", "shard_optimizer": True}, "without --sync: leave one out"),
        (
            {"sync": "auto", "allow_approximate": True, "verify": True},
            "from which --allow-approximate differs: leave one out",
        ),
        (
            {"sync": "auto", "allow_approximate": True, "plan": "auto", "memory_limit": 1.0},
            "--memory-limit does not count the memory that --sync auto needs",
        ),
        (
            {"sync": "auto", "allow_approximate": True, "allreduce": "ring"},
            "--allow-approximate may choose 16 bits, .* so that --allreduce ring would not change",
        ),
        ({"sync": "auto", "framework": "tensorflow"}, "--sync is not supported with --framework"),
        ({"sync": "auto", "memory_limit": 1.0}, "--memory-limit needs --plan auto or --plan ada"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(**values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"allow_approximate": True, "compress_after": 0, "plan": "hp:2x2"},
        {"verify": True, "plan": "auto", "memory_limit": 1.0},
        {"clip_norm": 1.0, "batch_norm": "sync", "on_bad_step": "skip", "profile": "file"},
    ],
)
def test_what_goes_together_is_accepted(values: dict[str, Any]) -> None:
    assert config(sync="auto", **values).sync_request == AUTO_SYNC


@pytest.mark.parametrize("compress", ["none", "bf16", "powersgd:2"])
@pytest.mark.parametrize("plan", ["dp", "auto"])
def test_a_choice_is_a_configuration_of_its_own(compress: str, plan: str) -> None:
    options = {"sync": "auto", "allow_approximate": True, "compress_after": 3, "plan": plan}
    chosen = configfile.with_choice(config(**options, profile="file"), compress)
    assert chosen.check() == chosen
    assert (chosen.sync, chosen.compress) == ("exact", compress)
    assert chosen.compress_after == (100 if compress == "none" else 3)
    assert chosen.profile == ("file" if plan == "auto" else None)


@pytest.mark.parametrize("compress", ["none", "bf16"])
def test_a_run_that_resumes_keeps_its_choice(tmp_path: Path, compress: str) -> None:
    requested = config(
        sync="auto", allow_approximate=True, compress_after=3, run=str(tmp_path), resume=True
    )
    assert configfile.as_started(requested) == (requested, [])
    chosen = configfile.with_choice(requested, compress)
    configfile.save(chosen, tmp_path / "config.yaml")
    resumed, lines = configfile.as_started(requested)
    assert resumed == chosen
    words = "exact" if compress == "none" else "--compress bf16"
    assert lines == [f"--sync auto: {words}, with which this run started"]
    assert configfile.differences(configfile.load(tmp_path / "config.yaml"), resumed) == []


def test_the_same_command_is_the_same_run() -> None:
    """Before and after the choice; a run with another way to agree is another one."""
    requested = config(sync="auto", allow_approximate=True, compress_after=3)
    chosen = configfile.with_choice(requested, "bf16")
    assert configfile.differences(asdict(chosen), requested) == []
    assert configfile.differences(asdict(requested), chosen) == []
    local = config(sync="local:4")
    assert configfile.differences(asdict(local), requested)
    assert configfile.differences(asdict(requested), local)
    other = config(compress="fp16", compress_after=3)
    assert configfile.differences(asdict(chosen), other) == ["compress was 'bf16', is 'fp16'"]


def test_a_run_with_another_way_to_agree_is_not_taken_for_a_choice(tmp_path: Path) -> None:
    requested = config(sync="auto", run=str(tmp_path), resume=True)
    configfile.save(config(sync="local:4"), tmp_path / "config.yaml")
    assert configfile.as_started(requested) == (requested, [])
