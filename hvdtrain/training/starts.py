"""How often in a row Slurm has started a run that then saved no new checkpoint.

A job that was told to leave goes back into the queue, and the next job of a chain follows one that
failed: without a limit, a run that never saves a checkpoint is started again indefinitely.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain import files
from hvdtrain.errors import DataError, RankError

NAME, SUMMARY = "starts.json", "summary.json"
SUBMISSION = "HVDTRAIN_SUBMISSION"  # the same for all jobs of a chain, unlike those of any other
MOST_FRUITLESS_STARTS = 3  # of our own launcher, too


@dataclass(frozen=True)
class Start:
    """One start of a run by Slurm.

    Attributes:
        submission: what a user asked for once. job: of it. number: how often that was requeued.
        newest: the checkpoint that was there, and when it was made.
        fruitless: starts of the submission in a row before this one that saved none.
    """

    submission: str
    job: str
    number: str
    newest: list[str | int]
    fruitless: int = 0


def count(run: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Count this start of a run, if it is one by Slurm.

    Raises:
        RankError: if the last ones saved nothing, so that this one is not likely to either.
        DataError: if the run folder cannot be written to.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job:
        return
    submission, number = environment.get(SUBMISSION, job), environment.get("SLURM_RESTART_COUNT")
    now = Start(submission, job, number or "0", list(newest(run) or ()))
    if _is_over(run, now):
        return
    fruitless = _fruitless(now, _read(run / NAME))
    content = asdict(now) | {"fruitless": fruitless}
    files.write_text(run / NAME, json.dumps(content) + "\n", "the number of starts", DataError)
    if fruitless >= MOST_FRUITLESS_STARTS:
        raise RankError(
            f"{run} is not started again: {fruitless} starts in a row by Slurm saved no new "
            f"checkpoint (the newest is {now.newest[0] if now.newest else 'none'}); the log of "
            "the job says how each of them ended: change that, then submit the run again"
        )


def newest(run: Path | None) -> tuple[str, int] | None:
    """The newest checkpoint of a run, and when it was made."""
    from hvdtrain.training.checkpoint import store  # loads numpy, which our launcher does without

    found = store.stored(run / "checkpoints") if run else []
    return (found[-1].name, found[-1].stat().st_mtime_ns) if found else None


def _is_over(run: Path, now: Start) -> bool:
    """Whether the run ended after its newest checkpoint, so that there is nothing left to save."""
    with suppress(OSError):
        return bool(now.newest) and (run / SUMMARY).stat().st_mtime_ns >= int(now.newest[1])
    return False


def _fruitless(now: Start, before: Start | None) -> int:
    """Starts in a row before this one that saved nothing; those of one job's start are one."""
    if before is None or (now.submission, now.newest) != (before.submission, before.newest):
        return 0
    return before.fruitless + ((now.job, now.number) != (before.job, before.number))


def _read(path: Path) -> Start | None:
    try:
        return Start(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
