"""The commands that train, and that export trained weights."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from hvdtrain.commands import started_ranks
from hvdtrain.config import TrainConfig
from hvdtrain.errors import Interrupted, Preempted, UsageError
from hvdtrain.health import failure, monitor
from hvdtrain.health.failure import start_patience
from hvdtrain.host import alert
from hvdtrain.host.stop import StopRequest
from hvdtrain.launch import RanksStop
from hvdtrain.options.parser import select_fields


def train(arguments: Sequence[str], **values: Any) -> int:
    """Train on the ranks that a launcher started, or start --ranks of them on this machine."""
    settings = select_fields(TrainConfig, values).check()
    settings = replace(settings, on_alert=os.environ.get(alert.COMMAND, settings.on_alert))
    started = started_ranks()
    if settings.restarts and started.launcher != "none":
        raise UsageError(
            f"--restarts needs hvdtrain's own launcher (--ranks N), not {started.launcher}: "
            "leave it out, and let the scheduler requeue the job"
        )
    if started.size == 1 and ((settings.ranks or 1) > 1 or settings.restarts):
        with RanksStop() as ranks_stop:
            from hvdtrain.training import restarts
            from hvdtrain.training.precheck import check_before_launch

            check_before_launch(settings)
            return restarts.run(settings, arguments, ranks_stop)
    monitor.start(settings, started, start_patience(settings))
    # A signal is recorded from here on, also during the seconds in which torch and MPI start.
    with StopRequest() as stop:
        from hvdtrain.training.loop import train as run_training

        try:
            run_training(settings, stop)
        except (Interrupted, Preempted):
            raise
        except (Exception, KeyboardInterrupt) as error:
            failure.fail(error, failure.Listener(settings.on_alert, settings.run))
    return 0


def export(arguments: Sequence[str], run: str, file: str, which: Literal["best", "last"]) -> int:
    """Write the weights of a run as a file that torchvision reads."""
    from hvdtrain.checkpoint import export as exporting

    print(f"{file}: the weights of {exporting.export(run, file, which)}")
    return 0
