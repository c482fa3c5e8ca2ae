"""Checks of a run's data, model and plan before it waits in a queue."""

from collections.abc import Iterable

from hvdtrain import data
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.index import read_index
from hvdtrain.errors import DataError
from hvdtrain.options.planrequest import Chosen
from hvdtrain.training.precheck import check_before_launch


def check_before_submission(runs: Iterable[TrainConfig]) -> None:
    """Refuse mistakes that the ranks of these runs would otherwise report hours later.

    Raises:
        UsageError: if model, plan and ranks do not fit each other.
        DataError: if the data set is damaged.
    """
    good: set[str] = set()  # data sets that were read completely, once
    for config in runs:
        check_before_launch(config)
        if config.data not in good:
            _verify(config.data)
            good.add(config.data)
        if config.framework == "torch":
            _check_plan(config)


def _verify(folder: str) -> None:
    if faults := data.verify(folder):
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise DataError(f"{folder} is damaged: {faults[0]}{more}")


def _check_plan(config: TrainConfig) -> None:
    from hvdtrain.backends.pytorch.batches import check_batches
    from hvdtrain.backends.pytorch.setup import (
        check_choice,
        check_components,
        make_plan,
        model_components,
    )

    index = read_index(config.data)
    components = model_components(config, index)
    boundaries = check_components(components, config, index)
    if isinstance(config.plan_request, Chosen):
        check_choice(config, components)
        return
    size, classes = index.image_shape[0], index.classes
    plan = make_plan(config, components, size, classes, config.ranks or 1)
    rows, _ = order.holdout(index.splits["train"].count, config.holdout, index.hash, config.seed)
    check_batches(config, plan, components, boundaries, len(rows))
