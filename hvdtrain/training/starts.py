"""Starts of a run: checks before its ranks start, restarts from its last checkpoint, their count.

Slurm requeues a preempted job, and the next job of a chain follows a failed one: starts in a row
that saved no new checkpoint are counted, since such a run would be restarted indefinitely. This
module loads neither torch nor NumPy, except for a run that will wait in a queue.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path

from hvdtrain import data, launch, models
from hvdtrain.config import TrainConfig
from hvdtrain.engine.folders import as_modelled, index_for
from hvdtrain.errors import DataError, Interrupted, Preempted, RankError, UsageError, shortened
from hvdtrain.health.failure import start_patience
from hvdtrain.host import alert, files, records
from hvdtrain.host.ownership import LAUNCH, LAUNCHED, process_start, since_boot
from hvdtrain.launch import RanksStop
from hvdtrain.models.find import find_function
from hvdtrain.options import requests
from hvdtrain.options.givenmodel import SEAMS, is_reference
from hvdtrain.options.requests import Chosen, check_one_rank
from hvdtrain.options.sections import RATE_SCHEDULES
from hvdtrain.plan.plan import refit
from hvdtrain.training.metrics import AFTER_FAULTS, holds_run, make_folder, no_run

NO_TENSORFLOW = "TensorFlow is not installed: pip install tensorflow-cpu, or leave --framework out"


def check_before_launch(config: TrainConfig) -> None:
    """Find mistakes of the user in one process, as far as it needs no torch.

    Raises:
        UsageError, DataError: as the ranks would.
    """
    models.check_name(config.model)
    if config.framework == "tensorflow" and find_spec("tensorflow") is None:
        raise UsageError(NO_TENSORFLOW)
    index_for(config)
    check_one_rank(config.plan, config.ranks or 1)
    # With --replicate the ranks search for copies of a run whose folder is lost.
    may_resume = config.resume and (config.replicate or holds_run(Path(config.run or "")))
    if config.weights is not None and not may_resume and not Path(config.weights).exists():
        raise UsageError(f"--weights {config.weights}: there is no such file")
    if config.resume is True and not may_resume:
        raise no_run(Path(config.run or ""))


def check_seams(config: TrainConfig) -> None:
    """Find the user's functions and classes that options name, and try the rate.

    Raises:
        UsageError: if one is missing, or is not what the option takes.
    """
    for name in SEAMS:
        if is_reference(getattr(config, name)):
            find_function(getattr(config, name), name)
    if config.callback:
        from hvdtrain.training.console import callback_class

        for reference in config.callback:
            callback_class(reference)
    if config.lr_schedule not in RATE_SCHEDULES:
        from hvdtrain.engine.progress import rate_factor

        for done in (0.0, 0.5, 1.0):
            rate_factor(config.lr_schedule, done)


def check_before_submission(runs: Iterable[TrainConfig]) -> None:
    """Refuse mistakes that the ranks of these runs would otherwise report hours later.

    Raises:
        UsageError: if model, plan and ranks do not fit each other.
        DataError: if the data set is damaged.
    """
    good: set[str] = set()  # data sets that were read completely, once
    for config in runs:
        check_before_launch(config)
        check_seams(config)
        if config.data not in good:
            _verify(config.data)
            good.add(config.data)
        if config.framework == "torch":
            _check_plan(config)


def _verify(folder: str) -> None:
    if faults := data.verify(folder):
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise DataError(f"{folder} is damaged: {faults[0]}{more}")


def _check_plan(config: TrainConfig) -> None:
    from hvdtrain.backends.pytorch.build import check_batches
    from hvdtrain.backends.pytorch.setup import (
        check_choice,
        check_components,
        make_plan,
        model_components,
    )
    from hvdtrain.data import order

    index = as_modelled(index_for(config), config)
    components = model_components(config, index)
    boundaries = check_components(components, config, index)
    if isinstance(config.plan_request, Chosen):
        check_choice(config, components)
        return
    plan = make_plan(config, components, index.input_size, config.ranks or 1)
    rows, _ = order.holdout(index.splits["train"].count, config.holdout, index.hash, config.seed)
    check_batches(config, plan, components, boundaries, len(rows))


NO_FAULT = (0, Interrupted.exit_code, Preempted.exit_code)
# After starts that saved no new checkpoint the launcher waits: the fault may be temporary.
FIRST_WAIT_SECONDS, WAIT_GROWTH = 5.0, 6.0
MOST_MESSAGES = 20  # passed to the next start
MOST_CHARACTERS_OF_REASON = 200


def run(config: TrainConfig, arguments: Sequence[str], stop: RanksStop) -> int:
    """Run `hvdtrain ARGUMENTS`, restart it as often as `--restarts` says, return the exit code.

    Only a failed rank causes a restart: errors that a user has to fix and requested stops do not.
    After some time on fewer ranks the job saves, and starts again on all of them. If a rank fails
    again then, it takes twice the time until the next such start.

    Raises:
        Interrupted, Preempted: if this process was requested to stop before it started the ranks.
    """
    restarts = config.restart_request
    everybody = ranks = config.ranks or 1
    messages: list[str] = []
    arguments = alert.without_command(arguments)
    folder = Path(config.run) if config.run else None
    if folder is None and restarts.most:
        folder = make_folder(config)
    launch_id, launched = secrets.token_hex(8), process_start()
    fruitless, left, grow = 0, restarts.most, restarts.grow_seconds
    for number in count():
        environment = _environment(config, f"{launch_id}:{number}", messages)
        environment[LAUNCHED] = str(launched)
        options = _more(config, folder, ranks, number > 0)
        limit, before = start_patience(config), newest_checkpoint(folder)
        ended = launch.supervise(
            ranks,
            [*arguments, *options],
            environment,
            stop,
            limit,
            stop_after=grow if ranks < everybody else None,
        )
        if ended.was_due and ended.code == Preempted.exit_code and not stop.requested:
            ranks, fruitless, grow = everybody, 0, 2 * grow
            _say(f"starting again on {ranks} rank(s), after {grow / 2:g} s on fewer")
            launched = since_boot()
            continue
        messages.append(ended.message)
        fruitless = 0 if newest_checkpoint(folder) != before else fruitless + 1
        may_restart = ended.code == RankError.exit_code and left > 0 and not stop.requested
        again = may_restart and fruitless < MOST_FRUITLESS_STARTS
        if ended.code not in NO_FAULT:
            cause = "rank failed" if ended.code == RankError.exit_code else "job failed"
            message = f"{ended.message}; restarting" if again else ended.message
            alert.send_and_wait(config.on_alert, cause, message, str(folder or ""))
        if not again:
            if may_restart:
                _say(_why_not_again(fruitless, ended.message))
            break
        ranks, left = max(ranks - 1, min(ranks, restarts.fewest_ranks or ranks)), left - 1
        wait = FIRST_WAIT_SECONDS * WAIT_GROWTH ** (fruitless - 1) if fruitless else 0.0
        when = f" in {wait:.0f} s, as no new checkpoint was saved" if wait else ""
        restart = f"restarting on {ranks} rank(s) from the last checkpoint of {folder}{when}"
        _say(f"{restart}; {left} restart(s) left")
        _wait(wait, stop)
        launched = since_boot()
    return ended.code


def _environment(config: TrainConfig, launch: str, messages: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of one start of the ranks."""
    environment = {LAUNCH: launch}
    if messages:
        environment[AFTER_FAULTS] = "\n".join(messages[-MOST_MESSAGES:])
    if config.on_alert is not None:
        environment[alert.COMMAND] = config.on_alert
    return environment


def _why_not_again(fruitless: int, message: str) -> str:
    reason = shortened(message, MOST_CHARACTERS_OF_REASON)
    return (
        f"not restarted: {fruitless} starts in a row saved no new checkpoint; "
        f"the last one: {reason}"
    )


def _say(line: str) -> None:
    print(f"hvdtrain: {line}", file=sys.stderr, flush=True)


def _wait(seconds: float, stop: RanksStop) -> None:
    """Wait, at most until a stop is requested."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not stop.requested:
        time.sleep(0.05)


def _more(config: TrainConfig, folder: Path | None, ranks: int, is_again: bool) -> list[str]:
    """Return the options that one start adds: of repeated options the last one counts."""
    options = []
    if config.inject:  # random faults are drawn once, and none for ranks that were removed
        faults = requests.parse_faults(config.inject, config.ranks or 1)
        options += [
            "--inject",
            "; ".join(str(fault) for fault in faults if (fault.rank or 0) < ranks),
        ]
    if not config.restart_request.most or folder is None:
        return options
    options += ["--restarts", "0", "--ranks", str(ranks), "--run", str(folder)]
    if is_again:  # auto: a rank may have failed before there was a run to resume
        options += ["--resume", "auto"]
    if ranks < (config.ranks or 1) and (plan := refit(config.plan, ranks)) is not None:
        options += ["--plan", plan]
    return options


STARTS = "starts.json"
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


def count_start(run: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Count this start of a run, if Slurm started it.

    Raises:
        RankError: if the last starts saved nothing, so that this one probably would not either.
        DataError: if the run folder cannot be written to.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job:
        return
    submission, number = environment.get(SUBMISSION, job), environment.get("SLURM_RESTART_COUNT")
    now = Start(submission, job, number or "0", list(newest_checkpoint(run) or ()))
    fruitless = _fruitless(now, _read(run / STARTS))
    content = asdict(now) | {"fruitless": fruitless}
    files.write_text(run / STARTS, json.dumps(content) + "\n", "the number of starts", DataError)
    if fruitless >= MOST_FRUITLESS_STARTS:
        raise RankError(
            f"{run} is not restarted: {fruitless} starts in a row by Slurm saved no new "
            f"checkpoint (the newest is {now.newest[0] if now.newest else 'none'}): fix the cause "
            "that the log of the job shows for each start, then submit the run again"
        )


def newest_checkpoint(run: Path | None) -> tuple[str, int] | None:
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
