"""Pairs of plans, models, precisions and options compute the gradients of the serial step.

test_plans has the whole matrix, for `make proof`.
"""

import pytest

from hvdtrain.world import World
from tests.mpi.pairs import Case, pairwise, possible
from tests.mpi.test_plans import parity_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    from mpi4py import MPI

    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", pairwise(possible(MPI.COMM_WORLD.size)), ids=str)


@pytest.mark.proves(
    "Gradients of every plan on 1 to 4 ranks equal those of the serial step to 1e-12 in "
    "fp64 (ResNet-50: 1e-11)."
)
def test_a_plan_computes_the_serial_step(world: World, case: Case) -> None:
    parity = parity_of(
        world,
        case.plan,
        case.model,
        precision=case.precision,
        batch_size=case.batch_size,
        microbatches=case.microbatches,
        batch_norm=case.batch_norm,
        recompute=case.recompute,
        loss=case.loss,
        synchronous=case.synchronous,
    )
    assert parity.is_within, parity
