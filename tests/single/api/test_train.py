"""Training from Python: models passed as objects, callbacks, results, and resuming."""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hvdtrain
from hvdtrain import Callback, PlanConfig, TrainConfig, TrainResult, cli, cut, train
from hvdtrain.check import show
from hvdtrain.checkpoint import store
from hvdtrain.configfile import load
from hvdtrain.errors import UsageError
from tests.conftest import ROOT
from tests.single.training.models import small

Config = Any


@pytest.fixture
def config(small_set: Path, tmp_path: Path) -> Config:
    """Return a function that makes the configuration of a short run in `tmp_path / "run"`."""
    return partial(
        TrainConfig,
        data=str(small_set),
        epochs=1,
        run=str(tmp_path / "run"),
        log_every=5,
        threads=1,
    )


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16**2, 8), nn.ReLU(), nn.Linear(8, 5))


def initial(result: TrainResult) -> Mapping[str, np.ndarray]:
    saved = store.load(result.run / "checkpoints" / store.name_of(result["steps"]))
    return saved.tensors


def test_each_public_name_is_what_it_is_called_where_it_is_defined() -> None:
    assert sorted(hvdtrain._PLACES) == sorted(hvdtrain.__all__)
    for name in hvdtrain.__all__:
        assert getattr(hvdtrain, name).__module__.startswith("hvdtrain."), name
    assert set(hvdtrain.__all__) <= set(dir(hvdtrain))
    with pytest.raises(AttributeError, match="has no attribute 'fit'"):
        hvdtrain.fit  # type: ignore[attr-defined]  # noqa: B018


def test_a_configuration_is_imported_without_torch() -> None:
    program = "import sys, hvdtrain; hvdtrain.TrainConfig; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_module_is_trained_from_its_weights_and_stays_as_it_is(
    config: Config, is_cut: bool
) -> None:
    module = network()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = cut(module) if is_cut else module
    result = train(config(model=model, lr=1e-12, weight_decay=0.0))
    prefix = "" if is_cut else "model."
    trained = initial(result)
    assert trained.keys() == {f"{prefix}{name}" for name in before}
    for name, value in before.items():
        assert np.allclose(trained[f"{prefix}{name}"], value, rtol=0, atol=1e-9)
        assert torch.equal(module.state_dict()[name], value)
    name = "components" if is_cut else "Sequential"
    assert load(result.run / "config.yaml")["model"] == f"in-python:{name}"
    assert result == json.loads((result.run / "summary.json").read_text())
    assert isinstance(result["final"]["test_accuracy"], float)


def test_a_cut_module_trains_to_the_weights_of_the_whole(config: Config, tmp_path: Path) -> None:
    settings = {"optimizer": "sgd", "lr": 0.05, "precision": "fp64"}
    whole = train(config(model=network(), **settings))
    parts = train(config(model=cut(network()), **settings | {"run": str(tmp_path / "cut")}))
    other = train(config(model=network(1), **settings | {"run": str(tmp_path / "other")}))
    assert parts["final"] == whole["final"] != other["final"]


def test_a_run_resumes_with_the_same_object_and_not_from_the_command_line(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = train(config(model=network(), epochs=2, run=str(tmp_path / "straight")))
    with pytest.raises(UsageError, match="holds no run to resume"):
        train(config(model=network(), resume=True))
    train(config(model=network()))
    resumed = train(config(model=network(1), epochs=2, resume=True))  # the checkpoint decides
    assert resumed["weights_sha256"] == straight["weights_sha256"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.run(["train", "--config", f"{resumed.run}/config.yaml", "--epochs", "3", "--resume"])
    assert ended.value.code == UsageError.exit_code
    line = capsys.readouterr().err
    assert line.startswith("hvdtrain: model in-python:Sequential was passed in Python, and no")
    assert line.count("\n") == 1
    larger = nn.Sequential(nn.Flatten(), nn.Linear(768, 9), nn.ReLU(), nn.Linear(9, 5))
    with pytest.raises(UsageError, match="use the model code that the run was started with"):
        train(config(model=larger, epochs=3, resume=True))


def test_a_function_that_can_be_imported_resumes_from_the_command_line(config: Config) -> None:
    result = train(config(model=small))
    assert result["model"] == "tests.single.training.models:small"
    words = ["train", "--config", f"{result.run}/config.yaml", "--epochs", "2", "--resume"]
    assert cli.run(words) == 0


def test_functions_and_lambdas_build_seeded_models(config: Config, tmp_path: Path) -> None:
    def whole(classes: int, image_size: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, classes))

    results = [
        train(config(model=model, run=str(tmp_path / str(number)), max_steps=2))
        for number, model in enumerate(
            [whole, whole, lambda classes, image_size: cut(whole(classes, image_size))]
        )
    ]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["model"] == "in-python:whole"
    assert results[2]["model"] == "in-python:lambda"
    again = train(
        config(
            model=lambda classes, image_size: cut(whole(classes, image_size)),
            run=str(tmp_path / "again"),
            max_steps=2,
        )
    )
    assert again["weights_sha256"] == results[2]["weights_sha256"]


class JsonLogger(Callback):
    """Writes what it receives as JSON lines, as a logger for a tracker would send it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = []

    def note(self, event: str, **values: Any) -> None:
        self.events.append({"on": event, **values})
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.events))

    def on_start(self, config: Mapping[str, Any], run: Path) -> None:
        self.note("start", model=config["model"], run=str(run))

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        self.note("step", **metrics)

    def on_epoch(self, metrics: Mapping[str, Any]) -> None:
        self.note("epoch", **metrics)

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.note("checkpoint", step=step, is_committed=(path / "manifest.json").is_file())

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.note("end", final=summary["final"])


def test_a_plan_is_shown_for_an_object_on_the_ranks_of_a_cluster() -> None:
    network = cut(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16**2, 8), nn.ReLU(), nn.Linear(8, 5)))
    config = PlanConfig(
        model=network, cluster="8-v100", plan="dp", image_size=16, classes=5, explain=True
    )
    assert config.ranks == 8
    plan = show.show(config).plan
    assert plan is not None
    assert plan.stages[0].ranks == tuple(range(8))
    with pytest.raises(UsageError, match="missing: --ranks"):
        PlanConfig(model=network)


@pytest.mark.proves(
    "Callbacks receive what the run folder keeps, on rank 0, and an exception in one ends "
    "all ranks."
)
def test_callbacks_receive_what_the_run_folder_keeps(config: Config, tmp_path: Path) -> None:
    logger = JsonLogger(tmp_path / "log.jsonl")
    result = train(
        config(model=small, epochs=2, checkpoint_every="4 steps", eval_every=1), callbacks=logger
    )
    lines = [json.loads(line) for line in logger.path.read_text().splitlines()]
    assert lines[0] == {"on": "start", "model": result["model"], "run": str(result.run)}
    assert lines[-1] == {"on": "end", "final": result["final"]}
    saved = [line["step"] for line in lines if line["on"] == "checkpoint"]
    assert saved == [4, 8, 10, 12, 16, 20]
    assert all(line["is_committed"] for line in lines if line["on"] == "checkpoint")
    kept = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    for event in ("step", "epoch"):
        theirs = [line for line in lines if line["on"] == event]
        ours = [line | {"on": event} for line in kept if line["event"] == event]
        assert len(theirs) == len(ours) == {"step": 6, "epoch": 2}[event]
        for line in ours:
            del line["event"], line["time"]
        assert theirs == ours


@pytest.mark.filterwarnings(
    "error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning"
)
def test_an_exception_in_a_callback_ends_the_run_which_resumes(config: Config) -> None:
    class Fails(Callback):
        def on_epoch(self, metrics: Mapping[str, Any]) -> None:
            raise ZeroDivisionError("no tracker")

    with pytest.raises(ZeroDivisionError, match="no tracker") as raised:
        train(config(model=small, epochs=2), callbacks=[Callback(), Fails()])
    assert raised.value.__notes__ == ["in on_epoch of the callback Fails"]
    assert train(config(model=small, epochs=2, resume="auto"))["epochs"] == 2


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model": 3}, "model is a int: pass a name, a function"),
        ({"model": "cnn", "ranks": 2}, "start the script with mpirun -np 2"),
        ({"model": "cnn", "restarts": 1}, "restarts is for the command line"),
        ({"model": {}}, "model is a dict"),
        ({"model": []}, "returned no component"),
        ({"model": network(), "patch_size": 4}, "has no patches: leave out the patch size 4"),
        ({"model": nn.Sequential(nn.LazyLinear(3))}, "has lazy modules without weights"),
        (
            {"model": nn.Linear(3, 5)},
            "component 'model' cannot take input of shape (2, 3",
        ),
    ],
)
def test_mistakes_are_one_line(config: Config, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        train(config(**values))
    assert reason in str(refused.value), refused.value
    assert "\n" not in str(refused.value)


def test_a_class_in_place_of_a_callback_is_refused(config: Config) -> None:
    with pytest.raises(TypeError, match="derive its class from"):
        train(config(model="cnn"), callbacks=[print])  # type: ignore[list-item]
