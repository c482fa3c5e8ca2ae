"""The agreement of replicas, as far as predictions need it: bytes, and seconds of coding.

This module does not import torch.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.options.requests import (
    NO_SYNC,
    CompressRequest,
    DiLoCo,
    Elastic,
    Local,
    PowerSGD,
    Rounded,
    SyncRequest,
    TopK,
    parse_compress_request,
)
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.schedule import BUCKET_BYTES, FIRST_BUCKET_BYTES, group_by_bytes
from hvdtrain.plan.traffic import Operation, Sizes, Traffic, bucket_traffic, meeting_operations

if TYPE_CHECKING:
    from hvdtrain.config import TrainConfig
    from hvdtrain.models.costs import ComponentCost

NONE = "none"


class Coding(NamedTuple):
    """Seconds of compressing the gradients of a component, and of decompressing their sums."""

    encode: float
    decode: float

    def times(self, factor: float) -> "Coding":
        """Return the seconds on a rank that is `factor` times slower."""
        return Coding(factor * self.encode, factor * self.decode)


FREE = Coding(0.0, 0.0)


@dataclass(frozen=True)
class Agreement:
    """The way in which the replicas of a stage agree.

    Predictions are for steps after the exact ones of `--compress-after` and `local:H@EPOCH`.

    Attributes:
        sync: when.
        compress: what travels, as a value of `--compress`.
        averaged: elements of the optimizer's state that are averaged, too: as a multiple of the
            parameters' elements, and per parameter.
    """

    sync: SyncRequest = NO_SYNC
    compress: str = NONE
    averaged: tuple[int, int] = (0, 0)

    @cached_property
    def request(self) -> CompressRequest:
        """The compression of what travels."""
        return parse_compress_request(self.compress)

    @property
    def period(self) -> int | None:
        """Steps between two meetings; None if gradients are summed in every step."""
        return self.sync.period if isinstance(self.sync, Local | DiLoCo | Elastic) else None

    def meeting(self, sizes: Sizes, replicas: int) -> tuple[Operation, ...]:
        """Return the operations of one period of replicas with local steps."""
        copies, numbers = self.averaged
        state = copies * sizes.elements + numbers * len(sizes.gradients)
        return meeting_operations(sizes, replicas, state)

    def coding(self, measured: Mapping[str, Coding]) -> Coding:
        """Return the seconds of a component's compression.

        Args:
            measured: by method.

        Raises:
            KeyError: if the method was not measured.
        """
        return FREE if self.compress == NONE else measured[self.compress]


EXACT = Agreement()
# Bytes that compressing and decompressing read and write, per byte of gradients: counted in
# `hvdtrain/sync`, for hardware on which it cannot be measured. Rounding is that to 16 bits.
PASSES: Mapping[type[CompressRequest], tuple[float, float]] = {
    Rounded: (7.0, 4.5),
    TopK: (9.0, 2.0),
    PowerSGD: (4.0, 4.0),
}


def typical_coding(
    methods: Sequence[str], costs: "Sequence[ComponentCost]", bytes_per_second: float
) -> dict[str, dict[str, Coding]]:
    """Return predicted seconds of compression, by component and method.

    Args:
        bytes_per_second: rate of a rank's memory.
    """
    passes = {method: PASSES[type(parse_compress_request(method))] for method in methods}
    return {
        cost.name: {
            method: Coding(
                encode * cost.parameter_bytes / bytes_per_second,
                decode * cost.parameter_bytes / bytes_per_second,
            )
            for method, (encode, decode) in passes.items()
        }
        for cost in costs
    }


def agreement_of(config: "TrainConfig") -> Agreement:
    """Return how the replicas of a run agree."""
    request = config.sync_request
    if not isinstance(request, Local) or not request.averages_optimizer:
        averaged = (0, 0)
    elif config.optimizer == "sgd":
        averaged = (int(config.momentum > 0), 0)
    else:
        averaged = (2, 1)  # two moments, and a count of steps
    return Agreement(request, config.compress, averaged)


class Reduction(NamedTuple):
    """The sum of one bucket of a stage.

    Attributes:
        last: the component whose backward completes the bucket, counted from the end of the stage.
        bytes_of: bytes of gradients by component, counted in the same way.
        traffic: the operations.
    """

    last: int
    bytes_of: Mapping[int, float]
    traffic: Traffic


def reductions(
    agreement: Agreement, costs: "Sequence[ComponentCost]", replicas: int
) -> list[Reduction]:
    """Return the sums of a stage in every step, in the order in which backward completes them.

    Args:
        costs: of the stage's components.
    """
    backwards = [cost.sizes for cost in costs][::-1]
    whole = Sizes.total(backwards)
    gradients = [
        (place, gradient)
        for place, sizes in enumerate(backwards)
        for gradient in sizes.gradients[::-1]
    ]
    sizes = [whole.itemsize * gradient.elements for _, gradient in gradients]
    groups = group_by_bytes(sizes, BUCKET_BYTES, FIRST_BUCKET_BYTES)
    made = []
    for number, group in enumerate(groups):
        statistics = whole.statistics if number == len(groups) - 1 else 0
        traffic = bucket_traffic(
            agreement.request,
            [gradients[k][1] for k in group],
            statistics,
            replicas,
            whole.itemsize,
        )
        bytes_of: dict[int, float] = defaultdict(float)
        for k in group:
            bytes_of[gradients[k][0]] += sizes[k]
        last = gradients[group[-1]][0] if group else len(costs) - 1
        made.append(Reduction(last, bytes_of, traffic))
    return [one for one in made if any(o.size for o in one.traffic.operations)]


def step_bytes(agreement: Agreement, costs: "Sequence[ComponentCost]", replicas: int) -> float:
    """Return the bytes that each replica of a stage sends per step, as its rank counts them.

    Replicas with local steps send them at their meetings: this is the mean over a period.
    """
    if replicas == 1:
        return 0.0
    operations = _operations(agreement, costs, replicas)
    return sum(one.sent_bytes(replicas) for one in operations) / (agreement.period or 1)


def load_bytes(agreement: Agreement, costs: "Sequence[ComponentCost]", replicas: int) -> float:
    """Return the bytes whose all-reduce takes as long as one period of some components."""
    operations = _operations(agreement, costs, replicas)
    return sum(one.as_all_reduce(replicas) for one in operations)


def _operations(
    agreement: Agreement, costs: "Sequence[ComponentCost]", replicas: int
) -> list[Operation]:
    if agreement.period is not None:
        return list(agreement.meeting(Sizes.total(cost.sizes for cost in costs), replicas))
    sums = reductions(agreement, costs, replicas)
    return [operation for one in sums for operation in one.traffic.operations]


def rank_bytes(
    agreement: Agreement, plan: Plan, costs: "Mapping[str, ComponentCost]"
) -> tuple[float, ...]:
    """Return the bytes that each rank of a plan sends per step to agree with other replicas.

    Args:
        costs: of the components by name.
    """
    of_stage = [
        step_bytes(agreement, [costs[name] for name in stage.components], len(stage.ranks))
        for stage in plan.stages
    ]
    return tuple(sum(of_stage[stage] for stage in plan.stages_of(rank)) for rank in plan.ranks)


def size(count: float) -> str:
    """Return a number of bytes in words."""
    return f"{count / 1e6:.3g} MB" if count >= 1e5 else f"{count / 1e3:.3g} kB"
