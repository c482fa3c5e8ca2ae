"""A small process beside a rank that no launcher of ours watches: under srun, or another mpirun.

A rank's own watchdog is a thread: it does nothing while the process is stopped, or while another
thread keeps Python's lock. The monitor reads what the rank notes, as our launcher does, and kills
the rank if need be; whoever started the ranks then ends the job. There is one per rank, not one
per node, since that needs no folder that ranks share: it watches from the rank's first moments on,
and ends with it. Nothing here loads torch.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain import alert, failure
from hvdtrain.activity import WATCH_SECONDS, Watch, ended_from_outside
from hvdtrain.config import TrainConfig
from hvdtrain.launchers import Launch, detect
from hvdtrain.stop import STOP_SIGNALS, end_with_parent
from hvdtrain.world import NOTES_OF_ONE, activity_path


def start(config: TrainConfig, launch: Launch, start_limit: float) -> None:
    """Have this process watched to its end, if a launcher started it that is not ours.

    The monitor stays in the process group of its rank, since that is what job control suspends,
    but is deaf to what asks the rank to save and leave.

    Args:
        start_limit: seconds that anything may take before the first step.
    """
    if launch.launcher == "none" or activity_path() is not None:
        return
    try:
        notes = os.memfd_create("hvdtrain-activity")
        _spawn(config, launch, start_limit, notes)
    except OSError as error:  # a limit of processes, or of what may be done: training is not ended
        print(
            f"hvdtrain: rank {launch.rank} is not watched from outside: {error.strerror}",
            file=sys.stderr,
        )
    else:
        os.environ[NOTES_OF_ONE] = f"/proc/{os.getpid()}/fd/{notes}"


def _spawn(config: TrainConfig, launch: Launch, start_limit: float, notes: int) -> None:
    alert_command = {alert.COMMAND: config.on_alert} if config.on_alert is not None else {}
    # Inherited, and not opened by the name that it has in the rank: that needs no permission.
    inherited = max(notes + 1, 3)
    words = [sys.executable, "-P", "-m", "hvdtrain.monitor", f"/proc/self/fd/{inherited}"]
    words += [str(os.getpid()), launch.job, str(launch.rank), str(start_limit), config.run or ""]
    os.posix_spawn(
        sys.executable,
        words,
        {**os.environ, **alert_command},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, notes, inherited),
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, 2, 1),
        ],
        setsigmask=[signal.SIGINT, *STOP_SIGNALS],
    )


def main(words: Sequence[str]) -> None:
    """Watch a rank for as long as it is there."""
    path, parent, job, rank, start_limit, run = words
    end_with_parent(signal.SIGKILL)  # the rank's main thread started this process
    watch = Watch(Path(path), [0], float(start_limit), WATCH_SECONDS)
    while os.getppid() == int(parent):
        time.sleep(WATCH_SECONDS)
        if (stalled := watch.stalled()) is not None:
            listener = failure.Listener(os.environ.get(alert.COMMAND), run or None)
            text = f"hvdtrain: {ended_from_outside(int(rank), stalled[1])}"
            try:
                failure.tell(text, replace(detect(os.environ), job=job), listener)
            finally:
                if os.getppid() == int(parent):
                    os.kill(int(parent), signal.SIGKILL)
            return


if __name__ == "__main__":
    main(sys.argv[1:])
