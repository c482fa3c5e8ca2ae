"""The losses, and the trial of a user's own before a run."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hvdtrain.config import TrainConfig
from hvdtrain.data.index import TargetForm
from hvdtrain.errors import UsageError
from hvdtrain.models.costs import Boundary
from hvdtrain.models.losses import (
    BUILT_IN,
    Loss,
    check_loss,
    cross_entropy,
    example_targets,
    loss_of,
)
from hvdtrain.options.sections import CROSS_ENTROPY, LOSSES

VECTOR = TargetForm((5,), "float32", 5)
EMITTED = Boundary((2, 5), torch.float32)


def config_of(loss: object, **settings: Any) -> TrainConfig:
    return TrainConfig(model="cnn", data="", loss=loss, **settings)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(1)


def test_the_names_are_those_of_the_option() -> None:
    assert {CROSS_ENTROPY, *BUILT_IN} == set(LOSSES)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_torchs_to_the_bit(smoothing: float) -> None:
    logits, labels = torch.randn(9, 4, requires_grad=True), torch.randint(4, (9,))
    loss = cross_entropy(smoothing)
    expected = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    assert torch.equal(loss.sum(logits, labels), expected)
    with torch.no_grad():  # an evaluation has no smoothing
        plain = functional.cross_entropy(logits, labels, reduction="sum")
        assert torch.equal(loss.sum(logits, labels), plain)
        right = loss.measured(logits, labels)["accuracy"]
    assert right == (logits.argmax(1) == labels).sum()


def test_the_others_are_means_over_the_values_of_a_sample() -> None:
    outputs, targets = torch.randn(3, 2, 4), torch.rand(3, 2, 4)
    for name, function in (
        ("mse", functional.mse_loss),
        ("l1", functional.l1_loss),
        ("binary-cross-entropy", functional.binary_cross_entropy_with_logits),
    ):
        expected = torch.stack([function(*pair) for pair in zip(outputs, targets, strict=True)])
        assert torch.allclose(BUILT_IN[name](outputs, targets.double()), expected), name
        assert torch.equal(
            BUILT_IN[name](outputs, targets.view(3, 8)), BUILT_IN[name](outputs, targets)
        )
    logits, classes = torch.randn(3, 5, 2, 2), torch.randint(5, (3, 2, 2))
    loss = BUILT_IN["pixel-cross-entropy"]
    expected = torch.stack(
        [functional.cross_entropy(a[None], b[None]) for a, b in zip(logits, classes, strict=True)]
    )
    assert torch.allclose(loss(logits, classes.byte()), expected)
    share = (logits.argmax(1) == classes).float().mean()
    assert loss.measured(logits, classes)["accuracy"] / 3 == pytest.approx(float(share))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_share_without_samples_has_the_loss_zero(name: str) -> None:
    shape = (0, 5, 4, 4)
    targets = torch.zeros((0, 4, 4) if name == "pixel-cross-entropy" else shape)
    targets = targets.long() if name == "pixel-cross-entropy" else targets
    assert BUILT_IN[name].sum(torch.zeros(shape), targets) == 0


def test_a_function_and_a_loss_can_be_passed_in_python() -> None:
    assert config_of(squares).loss == f"{__name__}:squares"
    assert loss_of(config_of(squares)).per_sample is squares
    passed = Loss(squares, {"worst": lambda outputs, targets: (outputs - targets).abs().amax(1)})
    config = config_of(passed)
    assert loss_of(config) is passed
    check_loss(config, EMITTED, VECTOR)
    lost = pickle.loads(pickle.dumps(config))
    with pytest.raises(UsageError, match="was passed in Python, and no file holds it"):
        loss_of(lost)
    with pytest.raises(UsageError, match="loss is a int: pass a name, or a function"):
        config_of(3)


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets)


def mean_of_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    return squares(outputs, targets).mean().expand(len(outputs))


def each_value(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def without_gradient(outputs: Tensor, targets: Tensor) -> Tensor:
    return squares(outputs.detach(), targets)


def infinite(outputs: Tensor, targets: Tensor) -> Tensor:
    return squares(outputs, targets) / 0


def another_shape(outputs: Tensor, targets: Tensor) -> Tensor:
    return squares(outputs, targets.view(-1, 7))


@pytest.mark.proves(
    "A loss that is not a sum over samples, such as a mean over the batch, is refused before the "
    "run with the cure."
)
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (mean, r"returns \[\] for 2 samples, not one value for each: use reduction='none'"),
        (mean_of_batch, "depends on the other samples of its batch: use reduction='none'"),
        (each_value, r"returns \[2, 5\] for 2 samples, not one value for each"),
        (without_gradient, "has no gradient"),
        (infinite, "is not finite"),
        (another_shape, r"fails with outputs \[2, 5\] and targets \[2, 5\]"),
        (Loss(squares, {"all": mean}), "measure 'all' of loss .* returns"),
        (Loss(squares, {"loss": squares}), "has a measure 'loss': name it"),
        (BUILT_IN["pixel-cross-entropy"], "needs outputs .n, classes, height, width."),
    ],
)
def test_what_is_no_sum_over_samples_is_refused(loss: object, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        check_loss(config_of(loss), EMITTED, VECTOR)
    assert "\n" not in str(raised.value)


def test_outputs_and_targets_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match=r"outputs \[2, 4\] and targets \[2, 5\] do not fit"):
        check_loss(config_of("mse"), Boundary((2, 4), torch.float32), VECTOR)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "mes"}, "--loss mes is not known; did you mean mse"),
        (
            {"loss": "mse", "framework": "tensorflow"},
            "--loss mse is not supported with --framework tensorflow, which trains classifiers",
        ),
    ],
)
def test_options_that_exclude_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(model="cnn", data="", **settings).check()


def test_an_expected_accuracy_needs_a_loss_that_measures_it() -> None:
    with pytest.raises(UsageError, match="--expected is a test accuracy, which the loss 'mse'"):
        loss_of(config_of("mse", expected=0.5))
    assert loss_of(config_of("pixel-cross-entropy", expected=0.5)).measures


def test_examples_are_of_their_form() -> None:
    random = np.random.default_rng(0)
    labels = example_targets(TargetForm((3,), "uint8", 4), 9, random)
    assert labels.shape == (9, 3) and labels.dtype == np.uint8 and labels.max() == 3
    values = example_targets(TargetForm((), "float64", 1), 9, random)
    assert values.shape == (9,) and values.dtype == np.float64
