"""`train --verify`: before a run begins, its first steps under its plan against serial ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.order import Range, Rows
from hvdtrain.data.shards import Index, Samples
from hvdtrain.errors import CheckFailed
from hvdtrain.models.component import Component
from hvdtrain.parallel.cut import cut
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.stage import Images
from hvdtrain.training.feed import Feeder, augmentation, taken
from hvdtrain.training.normalise import Normalisation
from hvdtrain.training.parity import Parity
from hvdtrain.training.plancheck import compare
from hvdtrain.training.rate import learning_rate
from hvdtrain.training.serialrun import Batch
from hvdtrain.world import World


@dataclass(frozen=True)
class Trial:
    """What a run would train: model, data, and settings."""

    config: TrainConfig
    components: Sequence[Component]
    index: Index
    splits: Mapping[str, Samples]
    rows: Rows
    normalisation: Normalisation
    images: Images
    here: World

    def parity(self, plan: Plan) -> Parity:
        """The first two steps of the run, the last one of its first epoch between. Collective.

        Where replicas normalise together, sums are cut elsewhere than in one process, and batch
        norm makes much of the difference: there the steps are made in fp64.
        """
        config, images = self.config, self.images
        if config.batch_norm == "sync" and config.precision != "fp64":
            config = replace(config, precision="fp64")
            images = Images(*self.normalisation, images.device, config.precision)
        batches = [self._batch(plan, each) for each in self._slices()]
        return compare(config, self.components, plan, batches, images, self.here)

    def _slices(self) -> list[Range]:
        """Of the first epoch."""
        length, size = len(self.rows), self.config.batch_size
        total = self.config.total_samples(length)
        found = [each for each in order.step_slices(length, size) if each[0] < total]
        return list(dict.fromkeys([found[0], found[-1], *found[1:2]]))

    def _batch(self, plan: Plan, place: Range) -> Batch:
        config, (start, stop) = self.config, place
        rows = order.training_order(self.index, self.rows, config.seed, 0)[start:stop]
        feeder = Feeder(self.splits["train"], augmentation(config, self.normalisation[0], 0))
        parts = cut(plan, len(rows)).parts
        first, last = (parts[k].get(self.here.rank, ()) for k in (0, plan.last))
        own = feeder.gather((taken(rows, first), taken(rows, last)))
        whole = feeder.gather((rows, rows)) if self.here.rank == 0 else None
        return Batch(
            *(len(rows), start, (own.images, own.labels)),
            (whole.images, whole.labels) if whole else None,
            learning_rate(config, len(self.rows), start),
        )


def verify(trial: Trial, plan: Plan) -> str:
    """Refuse a plan under which the run would not compute what one rank computes. Collective.

    Returns what was found, in words.

    Raises:
        CheckFailed: on rank 0, naming the tensor that is furthest off.
    """
    parity = trial.parity(plan)
    if trial.here.rank == 0 and parity.fault:
        raise CheckFailed(
            f"--verify: {parity.fault}, between the plan and one rank: the run would not compute "
            "what the serial run does (nor can a model be verified that draws random numbers, but "
            "for nn.Dropout): use another --plan or --schedule, or leave --verify out"
        )
    trial.here.barrier()
    return (
        f"verified: {parity.steps} step(s) under the plan are those of one rank; the largest "
        f"error is {parity.largest:.1e}"
    )
