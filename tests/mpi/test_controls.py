"""Negative controls: what a wrong runtime would compute is seen by the measure."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hvdtrain.config import TrainConfig
from hvdtrain.parallel.actions import Action
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.program import Program, program
from hvdtrain.parallel.reduce import ReplicatedGradients
from hvdtrain.training import parts, plancheck
from hvdtrain.training.plancheck import Parity, check_plan
from hvdtrain.world import World
from tests.mpi.common import CLASSES, components_of, names
from tests.mpi.plans import PLANS

SIZE = 16
SEEN = 1e-3  # no rounding error is that large in fp64


def check(here: World, plan: str) -> Parity:
    components = components_of("cnn", SIZE)
    config = TrainConfig(model="cnn", data="", precision="fp64", batch_size=13)
    made = PLANS[here.size][plan](names(components))
    return check_plan(config, components, SIZE, CLASSES, here, made)


def replicas_that(change: Callable[[Tensor, str], Any] | None, operation: str) -> Any:
    """Stands in for `horovod_gradients`, with a fault."""

    def make(
        parameters: Any, statistics: Any, states: Any, horovod: Any, process_set: Any, name: str
    ) -> ReplicatedGradients:
        def all_reduce(tensor: Tensor, bucket: str) -> Any:
            return horovod.allreduce_async_(
                change(tensor, bucket) if change else tensor,
                name=f"{name}.{bucket}",
                op=getattr(horovod, operation),
                process_set=process_set,
            )

        return ReplicatedGradients(
            *(parameters, statistics, states, all_reduce, horovod.synchronize),
            bucket_bytes=100_000,
        )

    return make


def left_out(tensor: Tensor, bucket: str) -> Tensor:
    return tensor.clone() if bucket == "gradients.1" else tensor


@pytest.mark.parametrize(
    ("change", "operation"), [(None, "Average"), (left_out, "Sum"), (None, "Sum")]
)
def test_a_wrong_reduction(
    here: World, monkeypatch: pytest.MonkeyPatch, change: Any, operation: str
) -> None:
    monkeypatch.setattr(parts, "horovod_gradients", replicas_that(change, operation))
    parity = check(here, "dp" if here.size > 1 else "single")
    is_faulty = here.size > 1 and (change is not None or operation != "Sum")
    assert (parity.largest > SEEN or parity.largest != parity.largest) == is_faulty, parity


def test_a_microbatch_that_is_left_out(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_first_backward(
        plan: Plan, pieces: Any, actions: Sequence[Action], rank: int
    ) -> Program:
        made = program(plan, pieces, actions, rank)
        if rank != here.size - 1:
            return made
        dropped = next(task for task in made.tasks if task.action.kind == "B")
        return replace(made, tasks=tuple(task for task in made.tasks if task is not dropped))

    monkeypatch.setattr(plancheck, "program", without_first_backward)
    assert check(here, "dp" if here.size > 1 else "single").largest > SEEN


def test_microbatches_of_which_only_the_last_counts(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The story of NeMo Automodel issue 3530: the loss looked fine.
    from hvdtrain.parallel.runtime import Runtime

    whole = Runtime._backward

    def forgetful(self: Runtime, step: Any, task: Any) -> None:
        for parameter in self.parts[task.key[0]].parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        whole(self, step, task)

    monkeypatch.setattr(Runtime, "_backward", forgetful)
    assert check(here, list(PLANS[here.size])[1]).largest > SEEN


@pytest.mark.several_ranks
@pytest.mark.parametrize("direction", ["activations", "gradients"])
def test_a_stage_that_is_given_zeros(
    here: World, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    # The story of piper issue 15: training ran on zeros, and the loss went down.
    send = Exchange.send

    def zeros(self: Exchange, rows: Tensor, receiver: int, tag: int) -> None:
        forward = receiver > here.rank
        wrong = forward == (direction == "activations")
        send(self, torch.zeros_like(rows) if wrong else rows, receiver, tag)

    monkeypatch.setattr(Exchange, "send", zeros)
    assert check(here, "mp").largest > SEEN


@pytest.mark.several_ranks
def test_samples_that_are_swapped_on_their_way(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Exchange.send

    def flipped(self: Exchange, rows: Tensor, receiver: int, tag: int) -> None:
        send(self, rows.flip(0) if receiver > here.rank else rows, receiver, tag)

    monkeypatch.setattr(Exchange, "send", flipped)
    assert check(here, "mp").largest > SEEN
