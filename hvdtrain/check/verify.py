"""`train --verify`: compares the first steps under the plan with serial ones, before a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hvdtrain.check.parity import Batch, Parity
from hvdtrain.check.plan import compare
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.index import Index
from hvdtrain.data.order import Range, Rows
from hvdtrain.data.shards import Samples
from hvdtrain.errors import CheckFailed
from hvdtrain.models.component import Component
from hvdtrain.parallel.stage import Images
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan
from hvdtrain.training.feed import Feeder, Normalisation, augmentation, take_rows
from hvdtrain.training.progress import learning_rate
from hvdtrain.world import World


@dataclass(frozen=True)
class Trial:
    """The model, data and settings that a run will train with."""

    config: TrainConfig
    components: Sequence[Component]
    index: Index
    splits: Mapping[str, Samples]
    rows: Rows
    normalisation: Normalisation
    images: Images
    world: World

    def parity(self, plan: Plan) -> Parity:
        """Compare the first step, the last one of the first epoch, and the second. Collective.

        With batch norm over all replicas the steps run in fp64: sums over replicas round
        differently from sums in one process, and batch norm amplifies the difference.
        """
        config, images = self.config, self.images
        if config.batch_norm == "sync" and config.precision != "fp64":
            config = replace(config, precision="fp64")
            images = Images(*self.normalisation, images.device, config.precision)
        batches = [self._batch(plan, bounds) for bounds in self._slices()]
        return compare(config, self.components, plan, batches, images, self.world)

    def _slices(self) -> list[Range]:
        """Return the slices of the first epoch to compare: first, last and second step."""
        length, size = len(self.rows), self.config.batch_size
        total = self.config.total_samples(length)
        slices = [bounds for bounds in order.step_slices(length, size) if bounds[0] < total]
        return list(dict.fromkeys([slices[0], slices[-1], *slices[1:2]]))

    def _batch(self, plan: Plan, bounds: Range) -> Batch:
        config, (start, stop) = self.config, bounds
        rows = order.training_order(self.index, self.rows, config.seed, 0)[start:stop]
        feeder = Feeder(self.splits["train"], augmentation(config, self.normalisation[0], 0))
        parts = cut(plan, len(rows)).parts
        first, last = (parts[k].get(self.world.rank, ()) for k in (0, plan.last))
        local = feeder.gather((take_rows(rows, first), take_rows(rows, last)))
        whole = feeder.gather((rows, rows)) if self.world.rank == 0 else None
        return Batch(
            size=len(rows),
            position=start,
            local=(local.pixels, local.labels),
            whole=(whole.pixels, whole.labels) if whole else None,
            rate=learning_rate(config, len(self.rows), start),
        )


def verify(trial: Trial, plan: Plan) -> str:
    """Refuse a plan whose results differ from those of one rank. Collective.

    Returns:
        The result, in words.

    Raises:
        CheckFailed: on rank 0, naming the tensor with the largest error.
    """
    parity = trial.parity(plan)
    if trial.world.rank == 0 and parity.mixing:
        raise CheckFailed(f"--verify: {parity.fault}")
    if trial.world.rank == 0 and parity.fault:
        raise CheckFailed(
            f"--verify: {parity.fault}, between the plan and one rank: use another --plan or "
            "--schedule, or drop --verify if the model draws random numbers other than those of "
            "nn.Dropout, because it cannot check such a model"
        )
    trial.world.barrier()
    verified = (
        f"verified: {parity.steps} step(s) under the plan match those of one rank; the largest "
        f"error is {parity.largest:.1e}"
    )
    return "; ".join(filter(None, (verified, parity.not_proved)))
