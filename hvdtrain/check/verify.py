"""`train --verify`: compares the first steps under the plan with serial ones, before a run."""

from dataclasses import replace

from hvdtrain.backends.pytorch.remarks import Trial
from hvdtrain.backends.pytorch.setup import Checks
from hvdtrain.check.parity import Batch, Parity
from hvdtrain.check.plan import compare
from hvdtrain.data import order
from hvdtrain.data.order import Range
from hvdtrain.engine.feed import Feeder, augmentation, take_rows
from hvdtrain.engine.progress import learning_rate
from hvdtrain.errors import CheckFailed
from hvdtrain.parallel.stage import Images
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan


def parity(trial: Trial, plan: Plan) -> Parity:
    """Compare the first step, the last one of the first epoch, and the second. Collective.

    With batch norm over all replicas the steps run in fp64: sums over replicas round differently
    from sums in one process, and batch norm amplifies the difference.
    """
    config, images = trial.config, trial.images
    if config.batch_norm == "sync" and config.precision != "fp64":
        config = replace(config, precision="fp64")
        images = Images(*trial.normalisation, images.device, config.precision)
    length, size = len(trial.rows), config.batch_size
    total = config.total_samples(length)
    slices = [bounds for bounds in order.step_slices(length, size) if bounds[0] < total]
    compared = dict.fromkeys([slices[0], slices[-1], *slices[1:2]])
    batches = [_batch(trial, plan, bounds) for bounds in compared]
    return compare(config, trial.components, plan, batches, images, trial.world)


def _batch(trial: Trial, plan: Plan, bounds: Range) -> Batch:
    config, (start, stop) = trial.config, bounds
    rows = order.training_order(trial.index, trial.rows, config.seed, 0)[start:stop]
    feeder = Feeder(trial.splits["train"], augmentation(config, trial.normalisation[0], 0))
    parts = cut(plan, len(rows)).parts
    first, last = (parts[k].get(trial.world.rank, ()) for k in (0, plan.last))
    local = feeder.gather((take_rows(rows, first), take_rows(rows, last)))
    whole = feeder.gather((rows, rows)) if trial.world.rank == 0 else None
    return Batch(
        size=len(rows),
        position=start,
        local=(local.pixels, local.labels),
        whole=(whole.pixels, whole.labels) if whole else None,
        rate=learning_rate(config, len(trial.rows), start),
    )


def fault(trial: Trial, plan: Plan) -> str:
    """Return how the results of a plan differ from those of one rank, or "". Collective."""
    return parity(trial, plan).fault


def verify(trial: Trial, plan: Plan) -> str:
    """Refuse a plan whose results differ from those of one rank. Collective.

    Returns:
        The result, in words.

    Raises:
        CheckFailed: on rank 0, naming the tensor with the largest error.
    """
    compared = parity(trial, plan)
    if trial.world.rank == 0 and compared.mixing:
        raise CheckFailed(f"--verify: {compared.fault}")
    if trial.world.rank == 0 and compared.fault:
        raise CheckFailed(
            f"--verify: {compared.fault}, between the plan and one rank: use another --plan or "
            "--schedule, or drop --verify if the model draws random numbers other than those of "
            "nn.Dropout, because it cannot check such a model"
        )
    trial.world.barrier()
    verified = (
        f"verified: {compared.steps} step(s) under the plan match those of one rank; the largest "
        f"error is {compared.largest:.1e}"
    )
    return "; ".join(filter(None, (verified, compared.not_proved)))


CHECKS = Checks(verify, fault)
