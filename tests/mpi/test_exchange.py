"""Each operator that communicates, by itself: adjoint to its own backward, and named if it fails.

An operator F and the one that carries its gradients back, F*, satisfy <F x, y> = <x, F* y>
(Hewett and Grady, DistDL, arXiv 2006.03108): a missing scale factor or a lost row breaks it.
"""

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain import world
from hvdtrain.parallel import schedule
from hvdtrain.parallel.batchnorm import synchronise
from hvdtrain.parallel.cut import cut
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.form import Form
from hvdtrain.parallel.handover import Handover
from hvdtrain.parallel.program import Task, program
from hvdtrain.world import World
from tests.mpi.plans import PLANS

CPU = torch.device("cpu")
COMPONENTS = [f"part{i}" for i in range(8)]
FORMS = [Form((3, 4, 5), torch.float64, True), Form((6,), torch.float64, False)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    from mpi4py import MPI

    if "plan" in metafunc.fixturenames:
        metafunc.parametrize("plan", PLANS[MPI.COMM_WORLD.size])


@pytest.fixture(scope="module")
def exchange(here: World) -> Exchange | None:
    return Exchange(here.communicator, CPU) if here.communicator else None


def through(handover: Handover, tasks: list[Task], given: dict[Any, Any], rank: int) -> Any:
    """Run receipts, sends and what consumes them, and return what was collected."""
    found = {}
    for task in tasks:
        kind, (stage, k) = task.action.kind, task.key
        if kind in ("RECV_F", "RECV_B"):
            handover.post(task)
        elif kind in ("SEND_F", "SEND_B"):
            handover.send(task, given[task.key])
        else:
            is_gradient = kind != "F"
            neighbour = (stage + 1, k) if is_gradient else (stage - 1, k)
            own = any(lane.peer == rank for lane in task.lanes)
            local = given[neighbour] if own else None
            found[task.key] = handover.collect(task, is_gradient, local).clone()
            handover.release(task.key)
    if handover.exchange:
        handover.exchange.flush()
    handover.clear()
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_boundary_is_adjoint_to_its_backward(
    here: World, exchange: Exchange | None, plan: str, form: Form
) -> None:
    made = PLANS[here.size][plan](COMPONENTS)
    pieces = cut(made, 13)
    actions = schedule.training_step(made, pieces)[here.rank]
    tasks = program(made, pieces, actions, here.rank).tasks
    handover = Handover(here.rank, [form] * made.last, exchange, CPU)
    random = np.random.default_rng(here.rank)

    def values(stage: int, k: int) -> torch.Tensor:
        buffer = form.empty(pieces.rows(stage, here.rank, k), CPU)
        return buffer.copy_(torch.from_numpy(random.normal(size=tuple(buffer.shape))))

    keys = [(s, k) for s in made.stages_of(here.rank) for k in range(pieces.microbatches)]
    sent_on = {(s, k): values(s, k) for s, k in keys if s < made.last}
    sent_back = {(s, k): values(s, k) for s, k in keys if s > 0}
    forward = [t for t in tasks if t.action.kind in ("RECV_F", "SEND_F")]
    forward += [t for t in tasks if t.action.kind == "F" and t.key[0] > 0 and t.rows]
    backward = [t for t in tasks if t.action.kind in ("RECV_B", "SEND_B")]
    backward += [
        t for t in tasks if t.action.kind in ("B", "I") and t.key[0] < made.last and t.rows
    ]
    arrived = through(handover, forward, sent_on, here.rank)
    returned = through(handover, backward, sent_back, here.rank)
    left = sum(float((arrived[key] * sent_back[key]).sum()) for key in arrived)
    right = sum(float((returned[key] * sent_on[key]).sum()) for key in returned)
    left, right = np.sum(here.gather([left, right]), axis=0)
    assert left == pytest.approx(right, rel=1e-12)
    assert made.last == 0 or left != 0


@pytest.mark.several_ranks
def test_the_sum_of_gradients_is_its_own_adjoint(here: World, horovod: Any) -> None:
    random = np.random.default_rng(here.rank)
    x, y = (torch.from_numpy(random.normal(size=100)) for _ in range(2))
    # Named: the names that Horovod makes up count the operations of a rank, and those differ.
    summed = [
        horovod.allreduce(value, op=horovod.Sum, name=name) for name, value in (("x", x), ("y", y))
    ]
    left, right = np.sum(here.gather([float(summed[0] @ y), float(x @ summed[1])]), axis=0)
    assert left == pytest.approx(right, rel=1e-12)


@pytest.mark.several_ranks
def test_synchronised_batch_norm_is_adjoint_to_its_backward(
    here: World, exchange: Exchange | None
) -> None:
    """Its Jacobian, by central differences in one direction, against its backward."""
    assert exchange is not None
    gather = exchange.gatherer(tuple(range(here.size)))
    layer = nn.BatchNorm2d(3).double()
    assert synchronise(layer, gather) == 1
    random = np.random.default_rng(here.rank)
    rows = here.rank + 1  # as many samples as nobody else has
    x, v, y = (torch.from_numpy(random.normal(size=(rows, 3, 2, 2))) for _ in range(3))
    x.requires_grad_()
    layer(x).backward(y)
    assert x.grad is not None
    epsilon = 1e-5
    with torch.no_grad():
        forward = (layer(x + epsilon * v) - layer(x - epsilon * v)) / (2 * epsilon)
    pair = [float((forward * y).sum()), float((v * x.grad).sum())]
    left, right = np.sum(here.gather(pair), axis=0)
    assert left == pytest.approx(right, rel=1e-7)


@pytest.mark.several_ranks
def test_large_messages_and_brain_floats_arrive(here: World, exchange: Exchange | None) -> None:
    assert exchange is not None
    after, before = (here.rank + 1) % here.size, (here.rank - 1) % here.size
    sent = torch.full((3, 700_000), float(here.rank), dtype=torch.bfloat16)
    found = torch.empty_like(sent)
    receipt = exchange.receive(found, before, 7)
    exchange.send(sent, after, 7)
    waited = exchange.wait([receipt])
    exchange.flush()
    assert torch.equal(found, torch.full_like(sent, float(before)))
    assert waited.bubble >= 0
    assert waited.transfer >= 0


@pytest.mark.several_ranks
def test_waiting_for_work_is_told_from_waiting_for_the_wire(
    here: World, exchange: Exchange | None
) -> None:
    assert exchange is not None
    here.barrier()
    rows = torch.zeros(1000)
    if here.rank == 0:
        time.sleep(1)  # work
        exchange.send(rows, 1, 3)
    elif here.rank == 1:
        waited = exchange.wait([exchange.receive(rows, 0, 3)])
        assert waited.bubble > 0.5
        assert waited.transfer < 0.4
    exchange.flush()
    here.barrier()


@pytest.mark.several_ranks
def test_clocks_of_one_host_are_one(exchange: Exchange | None) -> None:
    assert exchange is not None
    assert exchange.to_first_clock() == 0.0


@pytest.mark.several_ranks
def test_process_sets_are_made_once(here: World, horovod: Any) -> None:
    first = world.process_set((0, 1))
    assert world.process_set((1, 0)) is first
    assert world.process_set(tuple(range(here.size))) is horovod.global_process_set
