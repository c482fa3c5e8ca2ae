"""The Slurm of slurm/local, and what tests ask of it."""

import re
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import ROOT, program, program_environment
from tests.single.training.jobs import events_of

LOCAL = ROOT / "slurm" / "local"


@dataclass(frozen=True)
class Cluster:
    """A running Slurm of four nodes."""

    folder: Path

    def environment(self) -> dict[str, str]:
        """That of a user who has left the job, if any, that the tests run in."""
        own = {k: v for k, v in program_environment().items() if not k.startswith("SLURM_")}
        return own | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command, started in the project's folder."""
        words = [str(word) for word in command]
        return subprocess.run(
            program(*words[1:]) if words[0] == "hvdtrain" else words,
            cwd=ROOT,
            env=self.environment() | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def run(self, *command: object, **environment: str) -> str:
        """What a command prints, which must succeed."""
        done = self.start(*command, **environment)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: object, **environment: str) -> str:
        """The number of the job that sbatch makes."""
        return self.run("sbatch", "--parsable", *arguments, **environment).split(";")[0].strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def wait(self, number: str, *states: str, seconds: float = 240) -> Mapping[str, str]:
        """The job, once it is in one of these states."""
        found: list[dict[str, str]] = []

        def is_there() -> bool:
            found[:] = [self.job(number)]
            return found[0]["JobState"] in states

        wait_for(is_there, seconds, lambda: f"job {number} is {found[0]}")
        return found[0]

    def wait_until_it_trains(self, number: str, run: Path) -> None:
        """Return once the run of this job has made a few steps."""

        def is_training() -> bool:
            return (run / "metrics.jsonl").exists() and len(events_of(run, "step")) > 2

        wait_for(is_training, 240, lambda: str(self.job(number)))

    def end_its_time(self, number: str, warning_seconds: int) -> None:
        """Give a job that runs so short a time that Slurm warns it of its end, soon or now."""
        fields = reversed(self.job(number)["RunTime"].split(":"))
        elapsed = sum(int(part) * 60**place for place, part in enumerate(fields))
        minutes = (elapsed + warning_seconds // 2) // 60 + 1
        self.run("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")

    def was_never_requeued(self, number: str) -> bool:
        """Whether a cancelled job stays so; once its processes are gone, nothing changes that."""
        job = self.job(number)
        queue = self.run("squeue", "--noheader", f"--name={job['JobName']}")
        return (job["JobState"], job["Restarts"], queue) == ("CANCELLED", "0", "")

    def preempt(self) -> None:
        """Run a job that takes all nodes from those of the partition low."""
        number = self.submit(
            *("--partition=high", "--nodes=4", "--ntasks-per-node=4", "--output=/dev/null"),
            *("--wrap", "srun sleep 1"),
        )
        self.wait(number, "COMPLETED")

    def release(self, number: str) -> None:
        """Let a job that was requeued start, which Slurm does after two minutes.

        By then its first start has left the nodes; here that is waited for.
        """

        def left() -> list[str]:
            found = (self.folder / "spool").glob(f"*/*[._]{number}.*")
            return [str(path) for path in found]

        def completing() -> str:
            return self.run("sinfo", "--noheader", "--states=completing", "--format=%n")

        wait_for(lambda: not left(), 30, lambda: str(left()))
        wait_for(lambda: not completing().strip(), 30, completing)
        self.run("scontrol", "update", f"JobId={number}", "StartTime=now", "TimeLimit=20")

    def processes(self, words: str) -> list[psutil.Process]:
        """The processes of the cluster with this in their command line."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_own = process.environ().get("SLURM_CONF", "").startswith(f"{self.folder}/")
                if is_own and words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon and all that it has started, as if the power went."""
        (daemon,) = self.processes(f"slurmd -D -N {name}")
        for process in [daemon, *daemon.children(recursive=True)]:
            process.kill()


def wait_for(is_so: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    """Return once it is so; fail with `what` after so many seconds."""
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, what()
        time.sleep(0.5)
