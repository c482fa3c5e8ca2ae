from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import configfile
from hvdtrain.bench.options import StepConfig
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.planner.options import PlanConfig


def make(**values: Any) -> TrainConfig:
    return TrainConfig(**{"model": "cnn", "data": "somewhere", **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "--epochs must be above 0, not 0"),
        ({"batch_size": -1}, "--batch-size must be above 0"),
        ({"ranks": 0}, "--ranks must be above 0"),
        ({"max_steps": 0}, "--max-steps must be above 0"),
        ({"lr": float("nan")}, "--lr must be above 0, not nan"),
        ({"lr": float("inf")}, "--lr must be above 0, not inf"),
        ({"holdout": 1.0}, "--holdout must be between 0 and 0.9"),
        ({"warmup_epochs": 11.0, "epochs": 10}, "--warmup-epochs 11.0 is more than --epochs 10"),
        ({"warmup_epochs": 50.0}, "--warmup-epochs 50.0 is more than --epochs 10"),
        ({"run": "a\nb"}, "--run must be one line of text"),
        ({"seed": -1}, "--seed must be 0 or more"),
        ({"eval_every": -1}, "--eval-every must be 0 or more, not -1"),
        ({"eval_every": 4, "epochs": 3}, "--eval-every 4 is more than --epochs 3: give 3"),
        ({"eval_every": 11}, "--eval-every 11 is more than --epochs 10: give 10"),
        (
            {"checkpoint_every": "4 epochs", "epochs": 3},
            "--checkpoint-every 4 epochs is more than --epochs 3: give 3",
        ),
        ({"resume": True}, "--resume needs --run"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**values).check()


@pytest.mark.proves(
    "The learning rate is used as given; optimizers, schedules, label smoothing and "
    "augmentation are those that the options name."
)
def test_the_learning_rate_is_used_as_given_and_scaled_only_if_asked() -> None:
    assert make(lr=0.1, batch_size=512).learning_rate() == 0.1
    assert make(lr=0.1, batch_size=512, lr_base_batch=256).learning_rate() == 0.2


def test_a_saved_configuration_reads_back_and_differs_from_none_of_itself(tmp_path: Path) -> None:
    written = make(lr=0.25, ledger="x.csv")
    (tmp_path / "config.yaml").write_text(configfile.to_yaml(written))
    read = configfile.load(tmp_path / "config.yaml")
    assert read == asdict(written)
    assert configfile.differences(read, written) == []


def test_a_change_of_what_is_computed_is_named_with_both_values() -> None:
    old = asdict(make(lr=0.1, epochs=3, ranks=1))
    assert configfile.differences(old, make(lr=0.2, epochs=5, ranks=4)) == ["lr was 0.1, is 0.2"]


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", ""])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"config\.yaml"):
        configfile.load(path)


def test_epochs_and_steps_end_a_run_whichever_comes_first() -> None:
    """100 samples in batches of 30: three steps of 30 and one of 10."""
    assert make(batch_size=30).total_samples(100) == 1000
    assert make(batch_size=30, epochs=3).total_samples(100) == 300
    assert make(batch_size=30, max_steps=6).total_samples(100) == 160
    assert make(batch_size=30, max_steps=8).total_samples(100) == 200
    assert make(batch_size=30, max_steps=6, epochs=1).total_samples(100) == 100
    assert make(batch_size=30, max_steps=100_000).total_samples(100) == 2_500_000


@pytest.mark.parametrize(
    ("kind", "exceptions"),
    [
        # Its data may be synthetic images, with their own size.
        (StepConfig, {"data", "image_size"}),
        # It needs shapes alone; check runs in fp64 on CPUs; the trace is of the simulated step.
        (PlanConfig, {"ranks", "plan", "precision", "device", "image_size", "seed", "trace"}),
    ],
)
def test_other_commands_have_the_defaults_and_the_help_of_train(
    kind: type, exceptions: set[str]
) -> None:
    """`bench step` must not time SGD while `train` uses Adam."""
    train = {item.name: item for item in fields(TrainConfig)}
    shared = [item for item in fields(kind) if item.name in train and item.name not in exceptions]
    assert len(shared) >= 8
    for item in shared:
        of_train = train[item.name]
        assert (item.default, item.metadata) == (of_train.default, of_train.metadata), item.name


def test_a_longer_run_is_another_one_where_the_schedule_follows_its_length() -> None:
    old = asdict(make(epochs=3, lr_schedule="cosine"))
    assert configfile.differences(old, make(epochs=5, lr_schedule="cosine")) == [
        "epochs was 3, is 5"
    ]


def test_a_run_whose_intervals_an_older_version_took_goes_on() -> None:
    TrainConfig(
        model="cnn", data="d", epochs=3, eval_every=4, run="runs/old", resume="auto"
    ).check()
