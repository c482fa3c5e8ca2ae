"""The start of a run, up to its first step, and what its seconds went to."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

from hvdtrain.config import TrainConfig
from hvdtrain.configfile import public
from hvdtrain.engine.session import Session
from hvdtrain.errors import UsageError
from hvdtrain.host import output
from hvdtrain.host.ownership import LAUNCHED, process_start, since_boot
from hvdtrain.training.precheck import NO_TENSORFLOW
from hvdtrain.training.run import Run
from hvdtrain.training.summary import announce
from hvdtrain.world import World


@dataclass
class StartClock:
    """Seconds from the command to the first step of this process, by phase.

    Another launcher does not tell when it was started: then they count from the start of this
    process.

    Attributes:
        last: when the last phase ended, in seconds since boot.
        seconds: by phase, in their order.
    """

    last: float = field(default_factory=process_start)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (launched := os.environ.pop(LAUNCHED, None)) is not None:
            self.seconds["launch"] = max(0.0, self.last - float(launched))

    def mark(self, phase: str) -> None:
        """Count the seconds since the last mark for a phase."""
        now = since_boot()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


def open_session(config: TrainConfig, world: World, mark: Callable[[str], None]) -> Session:
    """Return the session of a run; loads only the framework of the run. Collective.

    Args:
        mark: called with the name of each phase at its end.

    Raises:
        UsageError, DataError: if the options or the data are invalid.
    """
    if config.framework == "tensorflow":
        # Hides TensorFlow's remarks on processors and plug-ins; errors come as exceptions.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if find_spec("tensorflow") is None:
            raise UsageError(NO_TENSORFLOW)
        with output.without(output.TENSORFLOW_REMARKS):
            from hvdtrain.backends.tensorflow import opening
        mark("framework")
        session: Session = opening.open_session(config, world)
        mark("model")
        return session
    from hvdtrain.backends.pytorch import setup
    from hvdtrain.check.plan import CHECKS

    mark("framework")
    return setup.open_session(config, world, CHECKS, mark)


def begin(run: Run, clock: StartClock) -> None:
    """Print the settings of the run, and start its clock when all ranks are ready. Collective."""
    run.journal.followers.call("on_start", public(run.session.config), run.journal.folder.path)
    if run.progress.step:
        run.journal.followers.call("on_resume", run.progress.step)
    announce(run)
    # Other ranks wait while rank 0 opens the records: that must not count for their first step.
    run.activity.step(run.progress.step)  # tells the launcher that training has started
    clock.mark("run_folder")
    if run.heartbeat.meter is not None:
        run.heartbeat.meter.ask()
    with run.activity.doing("waiting for all ranks to start"):
        run.session.world.barrier()
    clock.mark("waiting")
    run.restart_clock()
