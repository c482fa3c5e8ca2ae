"""What a job does."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """Pickled by submitit where the job is made, called by it in every task of the job."""

    arguments: tuple[str, ...]

    def __call__(self) -> None:
        """Become `hvdtrain train`, so that a rank is the same program however it was started."""
        # A warning before the program can obey it must not end it; ignored outlives exec.
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, _command(self.arguments))


@dataclass(frozen=True)
class Trainings:
    """The runs of a job on this machine, one after the other."""

    arguments: tuple[tuple[str, ...], ...]
    visible_gpus: str | None  # submitit hides all

    def __call__(self) -> None:
        """Run each of them, in processes that hear of the end of the job's time."""
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if self.visible_gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible_gpus
        running: list[subprocess.Popen[bytes]] = []

        def pass_on(number: int, frame: object) -> None:
            for process in running:
                process.send_signal(number)

        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        codes = []
        for words in self.arguments:
            running[:] = [subprocess.Popen(_command(words))]
            codes.append(running[0].wait())
            if codes[-1] in (75, 130):
                break
        sys.exit(max(codes, key=abs))


def _command(arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-P", "-m", "hvdtrain", *arguments]
