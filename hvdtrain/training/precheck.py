"""Checks before a run waits in a queue, and before its ranks are started.

This module loads neither torch nor NumPy, except for a run that will wait in a queue.
"""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from hvdtrain import data, models
from hvdtrain.config import TrainConfig
from hvdtrain.engine.folders import as_modelled, index_for
from hvdtrain.errors import DataError, UsageError
from hvdtrain.models.find import find_function
from hvdtrain.options.givenmodel import SEAMS, is_reference
from hvdtrain.options.requests import Chosen, check_one_rank
from hvdtrain.options.sections import RATE_SCHEDULES
from hvdtrain.training.metrics import holds_run, no_run

NO_TENSORFLOW = "TensorFlow is not installed: pip install tensorflow-cpu, or leave --framework out"


def check_before_launch(config: TrainConfig) -> None:
    """Find mistakes of the user in one process, as far as it needs no torch.

    Raises:
        UsageError, DataError: as the ranks would.
    """
    models.check_name(config.model)
    if config.framework == "tensorflow" and find_spec("tensorflow") is None:
        raise UsageError(NO_TENSORFLOW)
    index_for(config)
    check_one_rank(config.plan, config.ranks or 1)
    # With --replicate the ranks search for copies of a run whose folder is lost.
    may_resume = config.resume and (config.replicate or holds_run(Path(config.run or "")))
    if config.weights is not None and not may_resume and not Path(config.weights).exists():
        raise UsageError(f"--weights {config.weights}: there is no such file")
    if config.resume is True and not may_resume:
        raise no_run(Path(config.run or ""))


def check_seams(config: TrainConfig) -> None:
    """Find the user's functions and classes that options name, and try the rate.

    Raises:
        UsageError: if one is missing, or is not what the option takes.
    """
    for name in SEAMS:
        if is_reference(getattr(config, name)):
            find_function(getattr(config, name), name)
    if config.callback:
        from hvdtrain.training.console import callback_class

        for reference in config.callback:
            callback_class(reference)
    if config.lr_schedule not in RATE_SCHEDULES:
        from hvdtrain.engine.progress import rate_factor

        for done in (0.0, 0.5, 1.0):
            rate_factor(config.lr_schedule, done)


def check_before_submission(runs: Iterable[TrainConfig]) -> None:
    """Refuse mistakes that the ranks of these runs would otherwise report hours later.

    Raises:
        UsageError: if model, plan and ranks do not fit each other.
        DataError: if the data set is damaged.
    """
    good: set[str] = set()  # data sets that were read completely, once
    for config in runs:
        check_before_launch(config)
        check_seams(config)
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
    from hvdtrain.backends.pytorch.build import check_batches
    from hvdtrain.backends.pytorch.setup import (
        check_choice,
        check_components,
        make_plan,
        model_components,
    )
    from hvdtrain.data import order

    index = as_modelled(index_for(config), config)
    components = model_components(config, index)
    boundaries = check_components(components, config, index)
    if isinstance(config.plan_request, Chosen):
        check_choice(config, components)
        return
    plan = make_plan(config, components, index.image_shape[0], config.ranks or 1)
    rows, _ = order.holdout(index.splits["train"].count, config.holdout, index.hash, config.seed)
    check_batches(config, plan, components, boundaries, len(rows))
