"""`plan check` detects errors in every part of a step: the tests plant such errors.

These errors show on one rank; tests/mpi/test_controls.py has those that need replicas.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hvdtrain import cli
from hvdtrain.backends.pytorch import build, parts
from hvdtrain.models.losses import cross_entropy
from hvdtrain.parallel import runtime as runtimes
from hvdtrain.parallel.runtime import Runtime, Settings
from hvdtrain.sync.gradients import SerialGradients

PLAN = ("--model", "cnn", "--plan", "single", "--ranks", "1", "--image-size", "8")
OPTIONS = (
    *("--optimizer", "sgd", "--momentum", "0.8", "--weight-decay", "0.01", "--lr", "0.1"),
    *("--loss", "cross-entropy:0.1", "--clip-norm", "0.5"),
)
Fault = Callable[[pytest.MonkeyPatch], None]


def check(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Return the exit code of `plan check` and its output."""
    code = cli.run(["plan", "check", *PLAN, "--batch-size", "9", *options])
    return code, capsys.readouterr().out


def no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    update = runtimes.update

    def left_out(rule: Any, stage: int, parts: Any, exchange: Any, step: Any) -> None:
        whole, parts[stage].optimizer = parts[stage].optimizer, None
        update(rule, stage, parts, exchange, step)
        parts[stage].optimizer = whole

    monkeypatch.setattr(runtimes, "update", left_out)


def gradients_that_are_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SerialGradients, "zero", lambda self: None)


def a_tail_that_counts_as_a_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Runtime._finish_forward

    def wrong(self: Runtime, step: Any, task: Any, logits: torch.Tensor) -> None:
        kept = step.program
        step.program = replace(kept, cut=replace(kept.cut, batch_size=9))
        whole(self, step, task, logits)
        step.program = kept

    monkeypatch.setattr(Runtime, "_finish_forward", wrong)


def decay_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = parts.make_optimizer
    monkeypatch.setattr(parts, "make_optimizer", lambda config, named, free: whole(config, named))


def no_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "clip_gradients", lambda *_: None)


def no_label_smoothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Runtime):
        def __init__(self, settings: Settings, *others: Any) -> None:
            super().__init__(replace(settings, loss=cross_entropy()), *others)

    monkeypatch.setattr(build, "Runtime", Plain)


@pytest.mark.parametrize("options", [(), OPTIONS, ("--precision", "bf16", *OPTIONS)])
def test_without_a_fault_it_finds_none(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    code, printed = check(capsys, *options)
    assert code == 0, printed
    assert printed.splitlines()[-1].startswith("within the tolerance of ")
    assert printed.splitlines()[-1].endswith(", in 3 steps")


@pytest.mark.parametrize(
    ("plant", "where"),
    [
        (no_update, "the update of "),
        (gradients_that_are_never_forgotten, "the gradient of "),
        (a_tail_that_counts_as_a_whole_batch, "the gradient of "),
        (decay_of_everything, "the update of "),
        (no_clipping, "the gradient of "),
        (no_label_smoothing, "the gradient of "),
    ],
)
def test_a_fault_fails_it_and_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, plant: Fault, where: str
) -> None:
    plant(monkeypatch)
    # Clipping hides the factor by which the gradients are wrong.
    options = OPTIONS if plant is not a_tail_that_counts_as_a_whole_batch else OPTIONS[:-2]
    code, printed = check(capsys, *options)
    assert code == 1
    assert f"\n{where}" in printed
    assert " differs by " in printed


def test_brain_floats_are_held_to_more_than_their_own_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two halves of a batch differ from the whole by 0.005 in bf16; the planted error is 0.05.
    whole = Runtime._output_gradient

    def larger(self: Runtime, step: Any, task: Any) -> torch.Tensor | None:
        gradient = whole(self, step, task)
        return torch.tensor(1.05) if gradient is None else gradient

    monkeypatch.setattr(Runtime, "_output_gradient", larger)
    code, printed = check(capsys, "--precision", "bf16", "--json")
    assert code == 1
    assert 0.04 < json.loads(printed)["largest"] < 0.08
