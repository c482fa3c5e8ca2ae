"""The state of modules beside their tensors, `get_extra_state`, is saved and restored."""

import math
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvdtrain import TrainConfig, TrainResult, data, export, load, train
from hvdtrain.backends.pytorch.state import check_savable
from hvdtrain.checkpoint import store
from hvdtrain.errors import DataError, UsageError
from hvdtrain.models import weights
from hvdtrain.parallel.stage import StageModel

STATES = [
    *(
        None,
        True,
        3,
        2**80,
        0.1,
        "text",
        [],
        (),
        {},
        [1, (2.5, "a")],
        {"a": {1: None, (2, 3): ""}},
    ),
    *(torch.arange(6.0).view(2, 3).T, torch.tensor(True), torch.ones(2, dtype=torch.bfloat16)),
    *(np.float64(0.1), np.arange(3), OrderedDict(b=[torch.zeros(0)], a=np.int32(1))),
    {"tensor": torch.ones(1), "list": {"cpu": 0}},
]


@pytest.mark.parametrize("state", STATES, ids=str)
def test_plain_data_and_tensors_come_back_as_they_were(state: Any) -> None:
    again = weights.decoded("x", weights.encoded("x", state))
    assert repr(again) == repr(state)
    assert type(again) is type(state)


def test_numbers_that_are_not_finite_come_back() -> None:
    one, other = weights.decoded("x", weights.encoded("x", [math.nan, -math.inf]))
    assert (math.isnan(one), other) == (True, -math.inf)


class Counting(nn.Module):
    """Counts its forwards in training outside of buffers; each is weaker than the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count, self.mean = nn.Linear(12, 12), 0, torch.zeros(())

    def get_extra_state(self) -> Any:
        return {"count": self.count, "mean": self.mean}

    def set_extra_state(self, state: Any) -> None:
        self.count, self.mean = state["count"], state["mean"]

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + self.count
        return torch.tanh(self.layer(values)) / (1 + 0.1 * self.count) + 0.01 * self.mean


class Unsaved(Counting):
    def get_extra_state(self) -> Any:
        return {"module": self.layer}


class Unread(nn.Module):
    def get_extra_state(self) -> Any:
        return 1

    def forward(self, values: Tensor) -> Tensor:
        return values


def net(kind: type[nn.Module] = Counting) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 12, 4, stride=4),
        nn.Flatten(2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        kind(),
        nn.Linear(12, 5),
    )


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extra") / "packed"
    data.synth(folder, 40, 5, size=8, seed=3)
    return folder


def trained(packed: Path, run: Path, steps: int, **options: Any) -> TrainResult:
    shared: dict[str, Any] = {
        "model": net(),
        "data": str(packed),
        "batch_size": 8,
        "threads": 1,
        "eval_every": 0,
    }
    return train(TrainConfig(run=str(run), max_steps=steps, **shared | options))


@pytest.fixture(scope="module")
def whole(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return trained(packed, tmp_path_factory.mktemp("runs") / "whole", 6)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_resumed_run_ends_with_the_same_bits(
    whole: TrainResult,
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forgets: bool,
) -> None:
    trained(packed, tmp_path / "run", 3)
    if forgets:  # the control
        monkeypatch.setattr(weights, "load", lambda *_: None)
    again = trained(packed, tmp_path / "run", 6, resume=True)
    assert (again["weights_sha256"] == whole["weights_sha256"]) is not forgets


def test_a_trained_model_has_it_and_so_has_its_export(
    whole: TrainResult, packed: Path, tmp_path: Path
) -> None:
    classifier: Any = load(whole.run, which="last", model=net())
    layer = next(part for part in classifier.modules() if isinstance(part, Counting))
    assert layer.count == 6
    export(whole.run, tmp_path / "x.pth", which="last")
    module: Any = net()
    module.load_state_dict(torch.load(tmp_path / "x.pth", weights_only=True))
    assert (module[4].count, module[4].mean) == (6, layer.mean)
    export(whole.run, tmp_path / "x.pt2", which="last", model=net())
    started = trained(packed, tmp_path / "run", 1, weights=str(tmp_path / "x.pth"))
    checkpoint, _, _ = store.load_newest(started.run / "checkpoints")
    assert checkpoint is not None
    extra = {name: torch.from_numpy(value) for name, value in checkpoint.extra.items()}
    assert weights.decoded("model.4._extra_state", extra)["count"] == 7


def test_a_checkpoint_without_it_is_refused(
    whole: TrainResult, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before this wrote such checkpoints."""
    with monkeypatch.context() as older:
        older.setattr(weights, "saved", lambda *_: {})
        trained(packed, tmp_path / "run", 3)
    for use in (
        lambda: trained(packed, tmp_path / "run", 6, resume=True),
        lambda: load(tmp_path / "run", which="last", model=net()),
    ):
        with pytest.raises(DataError, match=r"holds no model\.4\._extra_state, since older vers"):
            use()
    export(tmp_path / "run", tmp_path / "x.pth", which="last")


def test_a_server_does_not_have_it() -> None:
    part: Any = SimpleNamespace(model=StageModel({"one": Counting()}))
    config = TrainConfig(model="cnn", data="", sync="server")
    with pytest.raises(UsageError, match=r"--sync server is not supported .*one\._extra_state"):
        check_savable({0: part}, config)
    check_savable({0: part}, replace(config, sync="exact"))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Unsaved, "get_extra_state returns a Linear, which"),
        (Unread, "Unread has get_extra_state and no"),
    ],
)
def test_a_state_that_could_not_be_restored_is_refused_before_training(
    packed: Path, tmp_path: Path, kind: type[nn.Module], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        trained(packed, tmp_path / "run", 3, model=net(kind))


@pytest.mark.parametrize(
    "text", ["", "{}", '{"set": []}', '{"cpu": 3}', '{"dict": [1]}', "[" * 100000]
)
def test_a_state_of_another_form_is_damaged(text: str) -> None:
    named = {"_extra_state": torch.tensor([*text.encode()], dtype=torch.uint8)}
    with pytest.raises(DataError, match="_extra_state in the checkpoint is damaged: "):
        weights.load(Counting(), "", named)
