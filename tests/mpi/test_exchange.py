"""Tests of each communicating operator: its backward is its adjoint.

An operator F and the operator F* of its backward satisfy <F x, y> = <x, F* y> (Hewett and Grady,
DistDL, arXiv 2006.03108): a missing scale factor or a lost row violates this.
"""

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.parallel.batchnorm import synchronise
from hvdtrain.parallel.exchange import Boundaries, Exchange, Form
from hvdtrain.plan import schedule
from hvdtrain.plan.cut import cut
from hvdtrain.plan.schedule import Task, program
from hvdtrain.plan.trace import StepMarks
from hvdtrain.world import World, process_set
from tests.mpi.plans import PLANS

CPU = torch.device("cpu")
COMPONENTS = [f"part{i}" for i in range(8)]
FORMS = [Form((3, 4, 5), torch.float64, True), Form((6,), torch.float64, False)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    from mpi4py import MPI

    if "plan" in metafunc.fixturenames:
        metafunc.parametrize("plan", PLANS[MPI.COMM_WORLD.size])


@pytest.fixture(scope="module")
def exchange(world: World) -> Exchange | None:
    return Exchange(world.communicator, CPU) if world.communicator else None


def through(boundaries: Boundaries, tasks: list[Task], tensors: dict[Any, Any], rank: int) -> Any:
    """Run receipts, sends and the actions that use them; return the collected tensors."""
    collected = {}
    for task in tasks:
        kind, (stage, k) = task.action.kind, task.key
        if kind in ("RECV_F", "RECV_B"):
            boundaries.post(task)
        elif kind in ("SEND_F", "SEND_B"):
            boundaries.send(task, tensors[task.key])
        else:
            is_gradient = kind != "F"
            neighbour = (stage + 1, k) if is_gradient else (stage - 1, k)
            has_local = any(lane.peer == rank for lane in task.lanes)
            local = tensors[neighbour] if has_local else None
            collected[task.key] = boundaries.collect(task, is_gradient, local).clone()
            boundaries.release(task.key)
    if boundaries.exchange:
        boundaries.exchange.flush()
    assert not boundaries._posted
    assert not boundaries._in_use, "a step left buffers in use"
    return collected


@pytest.mark.parametrize("form", FORMS)
def test_a_boundary_is_adjoint_to_its_backward(
    world: World, exchange: Exchange | None, plan: str, form: Form
) -> None:
    made = PLANS[world.size][plan](COMPONENTS)
    pieces = cut(made, 13)
    actions = schedule.training_step(made, pieces)[world.rank]
    tasks = program(made, pieces, actions, world.rank).tasks
    boundaries = Boundaries(world.rank, [form] * made.last, exchange, CPU)
    random = np.random.default_rng(world.rank)

    def values(stage: int, k: int) -> torch.Tensor:
        buffer = form.empty(pieces.rows(stage, world.rank, k), CPU)
        return buffer.copy_(torch.from_numpy(random.normal(size=tuple(buffer.shape))))

    keys = [(s, k) for s in made.stages_of(world.rank) for k in range(pieces.microbatches)]
    sent_on = {(s, k): values(s, k) for s, k in keys if s < made.last}
    sent_back = {(s, k): values(s, k) for s, k in keys if s > 0}
    forward = [t for t in tasks if t.action.kind in ("RECV_F", "SEND_F")]
    forward += [t for t in tasks if t.action.kind == "F" and t.key[0] > 0 and t.rows]
    backward = [t for t in tasks if t.action.kind in ("RECV_B", "SEND_B")]
    backward += [
        t for t in tasks if t.action.kind in ("B", "I") and t.key[0] < made.last and t.rows
    ]
    arrived = through(boundaries, forward, sent_on, world.rank)
    returned = through(boundaries, backward, sent_back, world.rank)
    left = sum(float((arrived[key] * sent_back[key]).sum()) for key in arrived)
    right = sum(float((returned[key] * sent_on[key]).sum()) for key in returned)
    left, right = np.sum(world.gather([left, right]), axis=0)
    assert left == pytest.approx(right, rel=1e-12)
    assert made.last == 0 or left != 0


@pytest.mark.several_ranks
def test_the_sum_of_gradients_is_its_own_adjoint(world: World, horovod: Any) -> None:
    random = np.random.default_rng(world.rank)
    x, y = (torch.from_numpy(random.normal(size=100)) for _ in range(2))
    # Explicit names: Horovod's default names count the operations of a rank, which differ.
    summed = [
        horovod.allreduce(value, op=horovod.Sum, name=name) for name, value in (("x", x), ("y", y))
    ]
    left, right = np.sum(world.gather([float(summed[0] @ y), float(x @ summed[1])]), axis=0)
    assert left == pytest.approx(right, rel=1e-12)


@pytest.mark.several_ranks
def test_synchronised_batch_norm_is_adjoint_to_its_backward(
    world: World, exchange: Exchange | None
) -> None:
    """Compare the backward to the Jacobian in one direction, by central differences."""
    assert exchange is not None
    gather = exchange.all_gather_among(tuple(range(world.size)))
    layer = nn.BatchNorm2d(3).double()
    assert synchronise(layer, gather) == 1
    random = np.random.default_rng(world.rank)
    rows = world.rank + 1  # a different number on each rank
    x, v, y = (torch.from_numpy(random.normal(size=(rows, 3, 2, 2))) for _ in range(3))
    x.requires_grad_()
    layer(x).backward(y)
    assert x.grad is not None
    epsilon = 1e-5
    with torch.no_grad():
        forward = (layer(x + epsilon * v) - layer(x - epsilon * v)) / (2 * epsilon)
    pair = [float((forward * y).sum()), float((v * x.grad).sum())]
    left, right = np.sum(world.gather(pair), axis=0)
    assert left == pytest.approx(right, rel=1e-7)


@pytest.mark.several_ranks
def test_large_messages_and_brain_floats_arrive(world: World, exchange: Exchange | None) -> None:
    assert exchange is not None
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent = torch.full((3, 700_000), float(world.rank), dtype=torch.bfloat16)
    received = torch.empty_like(sent)
    receipt = exchange.receive(received, before, 7)
    exchange.send(sent, after, 7)
    exchange.waits = []
    exchange.wait([receipt])
    exchange.flush()
    assert torch.equal(received, torch.full_like(sent, float(before)))
    waited = StepMarks(waits=exchange.waits).seconds()
    assert exchange.waits  # the second one is left out if all is sent already
    assert waited.bubble >= 0
    assert waited.transfer >= 0


@pytest.mark.several_ranks
def test_waiting_for_work_is_told_from_waiting_for_the_wire(
    world: World, exchange: Exchange | None
) -> None:
    assert exchange is not None
    world.barrier()
    rows = torch.zeros(1000)
    if world.rank == 0:
        time.sleep(1)  # work
        exchange.send(rows, 1, 3)
    elif world.rank == 1:
        exchange.waits = []
        exchange.wait([exchange.receive(rows, 0, 3)])
        waited = StepMarks(waits=exchange.waits).seconds()
        assert waited.bubble > 0.5
        assert waited.transfer < 0.4
    exchange.flush()
    world.barrier()


@pytest.mark.several_ranks
def test_clocks_of_one_host_are_one(exchange: Exchange | None) -> None:
    assert exchange is not None
    assert exchange.offset_to_first_clock() == 0.0


@pytest.mark.several_ranks
def test_process_sets_are_made_once(world: World, horovod: Any) -> None:
    first = process_set((0, 1))
    assert process_set((1, 0)) is first
    assert process_set(tuple(range(world.size))) is horovod.global_process_set
