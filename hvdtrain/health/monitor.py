"""A small process that watches a rank which hvdtrain's own launcher did not start (srun, mpirun).

A rank's own watchdog is a thread: it does nothing while the process is stopped, or while another
thread holds Python's lock. The monitor reads the rank's recorded actions, as hvdtrain's launcher
does, and kills the rank if it hangs; the launcher of the ranks then ends the job. There is one
monitor per rank, not one per node, because ranks then need no shared folder: it watches from the
start of the rank and ends with it. Nothing here loads torch.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.config import TrainConfig
from hvdtrain.health import failure
from hvdtrain.host import alert
from hvdtrain.host.activity import WATCH_SECONDS, Watch, stuck_message
from hvdtrain.host.launchers import Launch, detect
from hvdtrain.host.process import STOP_SIGNALS, end_with_parent
from hvdtrain.world import SINGLE_RANK_ACTIVITY, activity_path


def start(config: TrainConfig, launch: Launch, start_limit: float) -> None:
    """Start a monitor for this process if another launcher than hvdtrain's own started it.

    The monitor stays in the process group of its rank, since job control suspends whole groups,
    but blocks the signals that request the rank to save and stop.

    Args:
        start_limit: seconds that any action may take before the first step.
    """
    if launch.launcher == "none" or activity_path() is not None:
        return
    if not hasattr(os, "memfd_create"):  # only Linux has it; the rank's own watchdog remains
        return
    try:
        notes = os.memfd_create("hvdtrain-activity")
        _spawn(config, launch, start_limit, notes)
    except OSError as error:  # a limit on processes or permissions: training continues without
        print(
            f"hvdtrain: rank {launch.rank} is not watched from outside: {error.strerror}",
            file=sys.stderr,
        )
    else:
        os.environ[SINGLE_RANK_ACTIVITY] = f"/proc/{os.getpid()}/fd/{notes}"


def _spawn(config: TrainConfig, launch: Launch, start_limit: float, notes: int) -> None:
    alert_command = {alert.COMMAND: config.on_alert} if config.on_alert is not None else {}
    # The monitor inherits the file: opening it by its name in the rank would need permission.
    inherited = max(notes + 1, 3)
    words = [sys.executable, "-P", "-m", "hvdtrain.health.monitor", f"/proc/self/fd/{inherited}"]
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
    """Watch a rank until it ends."""
    path, parent, job, rank, start_limit, run = words
    end_with_parent(signal.SIGKILL)  # the rank's main thread started this process
    watch = Watch(Path(path), [0], float(start_limit), WATCH_SECONDS)
    while os.getppid() == int(parent):
        time.sleep(WATCH_SECONDS)
        if (stalled := watch.stalled()) is not None:
            listener = failure.Listener(os.environ.get(alert.COMMAND), run or None)
            text = f"hvdtrain: {stuck_message(int(rank), stalled[1])}"
            try:
                failure.report(text, replace(detect(os.environ), job=job), listener)
            finally:
                if os.getppid() == int(parent):
                    os.kill(int(parent), signal.SIGKILL)
            return


if __name__ == "__main__":
    main(sys.argv[1:])
