"""Counter of the starts in a row by Slurm after which a run saved no new checkpoint.

A preempted job is requeued, and the next job of a chain follows a failed one: without a limit, a
run that never saves a checkpoint is restarted indefinitely.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain.errors import DataError, RankError
from hvdtrain.host import files, records

NAME = "starts.json"
SUBMISSION = "HVDTRAIN_SUBMISSION"  # the same for all jobs of a chain, and unique to it
MOST_FRUITLESS_STARTS = 3  # also the limit of our own launcher


@dataclass(frozen=True)
class Start:
    """One start of a run by Slurm.

    Attributes:
        submission: one command of a user, which may start a chain of jobs.
        job: the Slurm job. number: how often it was requeued.
        newest: the newest checkpoint at the start, and when it was made.
        fruitless: earlier starts in a row of the submission that saved no checkpoint.
    """

    submission: str
    job: str
    number: str
    newest: list[str | int]
    fruitless: int = 0


def count(run: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Count this start of a run, if Slurm started it.

    Raises:
        RankError: if the last starts saved nothing, so that this one probably would not either.
        DataError: if the run folder cannot be written to.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job:
        return
    submission, number = environment.get(SUBMISSION, job), environment.get("SLURM_RESTART_COUNT")
    now = Start(submission, job, number or "0", list(newest(run) or ()))
    fruitless = _fruitless(now, _read(run / NAME))
    content = asdict(now) | {"fruitless": fruitless}
    files.write_text(run / NAME, json.dumps(content) + "\n", "the number of starts", DataError)
    if fruitless >= MOST_FRUITLESS_STARTS:
        raise RankError(
            f"{run} is not restarted: {fruitless} starts in a row by Slurm saved no new "
            f"checkpoint (the newest is {now.newest[0] if now.newest else 'none'}): fix the cause "
            "that the log of the job shows for each start, then submit the run again"
        )


def newest(run: Path | None) -> tuple[str, int] | None:
    """Return the name of the newest checkpoint of a run, and when it was made."""
    from hvdtrain.checkpoint import store  # loads NumPy, which our launcher avoids

    checkpoints = store.stored(run / "checkpoints") if run else []
    return (checkpoints[-1].name, checkpoints[-1].stat().st_mtime_ns) if checkpoints else None


def _fruitless(now: Start, before: Start | None) -> int:
    """Return the number of earlier starts in a row that saved nothing.

    All starts by one start of a job count once.
    """
    if before is None or (now.submission, now.newest) != (before.submission, before.newest):
        return 0
    return before.fruitless + ((now.job, now.number) != (before.job, before.number))


def _read(path: Path) -> Start | None:
    with suppress(DataError):
        return records.read(path, Start)
    return None
