"""A run says if bf16 is slow on its processor, and takes the faster precision if it may choose."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hvdtrain import TrainConfig, data, train
from hvdtrain.backends.pytorch import setup
from hvdtrain.backends.pytorch.setup import chosen_precision, precision_remark
from hvdtrain.errors import UsageError
from hvdtrain.world import World

CPU = torch.device("cpu")


@pytest.mark.parametrize(("speedup", "is_said"), [(1 / 60, True), (0.5, False), (2.0, False)])
def test_a_slow_bf16_is_said_with_its_ratio(
    monkeypatch: pytest.MonkeyPatch, speedup: float, is_said: bool
) -> None:
    monkeypatch.setattr(setup, "speedup", lambda action, clock: speedup)
    for precision in ("bf16", "fp16"):
        line = precision_remark(precision, CPU)
        assert bool(line) == is_said
        assert not is_said or line.startswith(f"{precision} takes 60x the time of fp32")


def test_each_precision_multiplies_its_own_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []

    def once(action: Any, clock: Any) -> float:
        assert clock is time.thread_time
        kinds.extend([action(False).dtype, action(True).dtype])
        return 1.0

    monkeypatch.setattr(setup, "speedup", once)
    precision_remark("fp16", CPU)
    assert kinds == [torch.float32, torch.float16]


def test_nothing_is_measured_in_fp32_and_random_numbers_stay() -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    assert precision_remark("fp32", CPU) == ""
    precision_remark("bf16", CPU)
    config = TrainConfig(model="cnn", data="", precision="auto", device="cpu")
    world = World("none", 0, 1, 0, 1, threads)
    chosen, line = chosen_precision(config, world)
    assert chosen.precision in ("bf16", "fp32")
    assert line.startswith(f"--precision auto: {chosen.precision}, since ")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_auto_takes_what_is_faster_and_a_resume_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data.synth(tmp_path / "set", 24, 5, size=8, seed=3)
    settings: dict[str, Any] = {"model": "cnn", "data": str(tmp_path / "set"), "batch_size": 8}
    settings |= {"threads": 1, "eval_every": 0, "precision": "auto"}

    def run(name: str, ratio: float, steps: int, **options: Any) -> str:
        facts = {"is_gpu": False, "threads": 1, "speedups": {"matrices": ratio}}
        monkeypatch.setattr(setup, "bf16_speedups", lambda *_: facts)
        config = TrainConfig(run=str(tmp_path / name), max_steps=steps, **settings | options)
        train(config)
        saved = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        *_, checkpoint = sorted((tmp_path / name / "checkpoints").glob("step-*"))
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        assert manifest["configuration"]["precision"] == saved["precision"]
        return str(saved["precision"])

    assert run("fast", 2.0, 1) == "bf16"
    assert "--precision auto: bf16, since fp32 takes 2.0x the proc" in capsys.readouterr().out
    assert run("slow", 0.5, 1) == run("equal", 1.05, 1) == "fp32"
    capsys.readouterr()
    assert run("fast", 0.5, 2, resume=True) == "bf16"
    assert "--precision auto: bf16, with which this run started" in capsys.readouterr().out
    assert run("fast", 0.5, 3, resume=True, precision="bf16") == "bf16"
    with pytest.raises(UsageError, match="precision was 'bf16', is 'fp32'"):
        run("fast", 0.5, 4, resume=True, precision="fp32")
