"""The commands that train, and that use what was trained."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hvdtrain.commands import as_json, in_one_process, started_ranks
from hvdtrain.config import TrainConfig
from hvdtrain.errors import Interrupted, Preempted, UsageError
from hvdtrain.health import failure, monitor
from hvdtrain.health.failure import start_patience
from hvdtrain.host import alert
from hvdtrain.host.process import StopRequest
from hvdtrain.launch import RanksStop
from hvdtrain.options.parser import select_fields

if TYPE_CHECKING:
    from hvdtrain.data.index import Resize
    from hvdtrain.use.trained import Which


def train(arguments: Sequence[str], **values: Any) -> int:
    """Train on the ranks that a launcher started, or start --ranks of them on this machine."""
    settings = select_fields(TrainConfig, values).check()
    settings = replace(settings, on_alert=os.environ.get(alert.COMMAND, settings.on_alert))
    started = started_ranks()
    if settings.restart_request.most and started.launcher != "none":
        raise UsageError(
            f"--restarts needs hvdtrain's own launcher (--ranks N), not {started.launcher}: "
            "leave it out, and let the scheduler requeue the job"
        )
    if started.size == 1 and ((settings.ranks or 1) > 1 or settings.restart_request.most):
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


def evaluate(
    arguments: Sequence[str],
    run: str,
    data: str | None,
    split: str,
    which: "Which",
    to: str | None,
    json: bool,
    trust: bool,
) -> int:
    """Print how well a run's model does on a data set."""
    in_one_process("evaluate")
    from hvdtrain.use import evaluate as evaluating

    result = evaluating.evaluate(run, data, split, which, to, trust=trust)
    print(as_json(result.as_json()) if json else result.as_text())
    if to is not None and not json:
        print(f"{to}: {', '.join(evaluating.FILES)}")
    return 0


def predict(
    arguments: Sequence[str],
    run: str,
    images: list[str],
    format: str,
    top: int,
    resize: "Resize | None",
    which: "Which",
    trust: bool,
) -> int:
    """Print the classes of images, in their order, once all of them are read."""
    in_one_process("predict")
    from hvdtrain.use import predict as predicting

    predictions = predicting.predict(run, images, top, which, resize, trust=trust)
    sys.stdout.write(predicting.as_table(predictions, format))
    return 0


def export(arguments: Sequence[str], run: str, file: str, which: "Which", trust: bool) -> int:
    """Write the model of a run, or its weights, for other programs."""
    in_one_process("export")
    from hvdtrain.use import export as exporting

    checkpoint = exporting.export(run, file, which, trust=trust)
    what = "weights" if file.endswith(exporting.WEIGHTS) else "model"
    print(f"{file}: the {what} of {checkpoint}")
    return 0
