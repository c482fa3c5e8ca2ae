"""The Python calls that `import hvdtrain` offers, each loaded when it is first used."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdtrain import world
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.host import launchers

if TYPE_CHECKING:
    from hvdtrain.check.parity import Parity
    from hvdtrain.planner.options import PlanConfig
    from hvdtrain.training.console import Callback
    from hvdtrain.training.summary import TrainResult


def train(config: TrainConfig, callbacks: "Callback | Sequence[Callback]" = ()) -> "TrainResult":
    """Train in this process, on the ranks of the launcher that started it; return the summary.

    `TrainConfig(model=...)` takes a name, a function of (classes, image_size), a list of
    components, or a torch module. Training starts from the weights that a module has on rank 0, or
    that the components from `cut` have there; on other ranks these modules receive the weights of
    rank 0. Training changes none of them.

    Args:
        config: the options of `train`, under the same names.
        callbacks: called on rank 0.

    Returns:
        The content of summary.json, with the run folder as its attribute `run`.

    Raises:
        UsageError, DataError: for any mistake of the user. On several ranks the other ranks wait
            for the one that raised: do not catch it, and the job ends.
        CheckFailed: at a bad step that is not skipped, or if ranks end with different weights.
        Interrupted, Preempted: if the run received a stop signal; its state is saved.
    """
    size = launchers.detect(os.environ).size
    if config.ranks is not None and config.ranks > 1 and size == 1:
        raise UsageError(
            f"train runs in this process, which has one rank: start the script with mpirun -np "
            f"{config.ranks}, or call hvdtrain.notebook_launch(function, ranks={config.ranks})"
        )
    if config.restart_request.most:
        raise UsageError(
            "restarts is for the command line, whose launcher starts the ranks again: leave it "
            'out, and continue a run with resume="auto"'
        )
    from hvdtrain.training.loop import train as run_training

    world.keep_horovod()
    return run_training(config, callbacks=callbacks)


def plan_check(config: "PlanConfig") -> "Parity":
    """Compare steps under a plan with serial steps, on the ranks of the launcher. Collective.

    `PlanConfig(model=...)` takes the same models as `TrainConfig`.

    Returns:
        The largest errors; `is_within` is whether they are within the tolerance.

    Raises:
        UsageError: for any mistake of the user.
    """
    from hvdtrain.check import show

    world.keep_horovod()
    return show.check(config)
