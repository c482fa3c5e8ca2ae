"""The Slurm of slurm/local, with the operations that tests need."""

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
        """Return a user's environment, without variables of a job that the tests may run in."""
        outside = {k: v for k, v in program_environment().items() if not k.startswith("SLURM_")}
        return outside | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the project's folder."""
        words = [str(word) for word in command]
        return subprocess.run(
            program(*words[1:]) if words[0] == "hvdtrain" else words,
            cwd=ROOT,
            env=self.environment() | environment,
            capture_output=True,
            text=True,
            timeout=600,
        )

    def run(self, *command: object, **environment: str) -> str:
        """Run a command, which must succeed; return its output."""
        done = self.start(*command, **environment)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: object, **environment: str) -> str:
        """Submit a job with sbatch; return its number."""
        return self.run("sbatch", "--parsable", *arguments, **environment).split(";")[0].strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def wait(self, number: str, *states: str, seconds: float = 240) -> Mapping[str, str]:
        """Wait until the job is in one of these states; return its fields."""
        job: dict[str, str] = {}

        def has_state() -> bool:
            nonlocal job
            shown = self.start("scontrol", "--oneliner", "show", "job", number)
            # A controller that is busy may not answer once.
            job = dict(re.findall(r"(\S+?)=(\S*)", shown.stdout)) or {"no answer": shown.stderr}
            return job.get("JobState") in states

        wait_for(has_state, seconds, lambda: f"job {number} is {job}")
        return job

    def wait_until_it_trains(self, number: str, run: Path) -> None:
        """Return once the run of this job has made a few steps."""

        def is_training() -> bool:
            return (run / "metrics.jsonl").exists() and len(events_of(run, "step")) > 2

        wait_for(is_training, 240, lambda: str(self.job(number)))

    def end_its_time(self, number: str, warning_seconds: int) -> None:
        """Shorten the time limit of a running job, so that Slurm warns it of its end soon."""
        fields = reversed(self.job(number)["RunTime"].split(":"))
        elapsed = sum(int(part) * 60**place for place, part in enumerate(fields))
        minutes = (elapsed + warning_seconds // 2) // 60 + 1
        self.run("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")

    def was_never_requeued(self, number: str) -> bool:
        """Return whether a job stays cancelled; call it when its processes are gone."""
        job = self.job(number)
        queue = self.run("squeue", "--noheader", f"--name={job['JobName']}")
        return (job["JobState"], job["Restarts"], queue) == ("CANCELLED", "0", "")

    def preempt(self) -> None:
        """Run a job that takes all nodes from the jobs of the partition low."""
        number = self.submit(
            *("--partition=high", "--nodes=4", "--ntasks-per-node=4", "--output=/dev/null"),
            *("--wrap", "srun sleep 1"),
        )
        self.wait(number, "COMPLETED")

    def release(self, number: str) -> None:
        """Start a requeued job now, instead of after Slurm's two minutes.

        Wait until the nodes are free of its first start, as they would be after two minutes.
        """

        def left() -> list[str]:
            return [str(path) for path in (self.folder / "spool").glob(f"*/*[._]{number}.*")]

        def completing() -> str:
            return self.run("sinfo", "--noheader", "--states=completing", "--format=%n")

        wait_for(lambda: not left(), 30, lambda: str(left()))
        wait_for(lambda: not completing().strip(), 30, completing)
        self.run("scontrol", "update", f"JobId={number}", "StartTime=now", "TimeLimit=20")

    def processes(self, words: str) -> list[psutil.Process]:
        """Return the processes of this cluster whose command line contains `words`."""
        matching = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_ours = process.environ().get("SLURM_CONF", "").startswith(f"{self.folder}/")
                if is_ours and words in " ".join(process.cmdline()):
                    matching.append(process)
        return matching

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon and all of its processes, as in a power failure."""
        (daemon,) = self.processes(f"slurmd -D -N {name}")
        for process in [daemon, *daemon.children(recursive=True)]:
            process.kill()


def wait_for(
    condition: Callable[[], bool], seconds: float, description: Callable[[], str]
) -> None:
    """Wait until the condition is true; fail with the description after this many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, description()
        time.sleep(0.5)
