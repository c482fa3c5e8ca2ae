"""Jobs that our own launcher starts, and restarts from their last checkpoint."""

import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hvdtrain import launch
from hvdtrain.config import TrainConfig
from hvdtrain.errors import Interrupted, Preempted, RankError, shortened
from hvdtrain.health.failure import start_patience
from hvdtrain.health.starts import MOST_FRUITLESS_STARTS, newest
from hvdtrain.host import alert
from hvdtrain.host.ownership import LAUNCH, LAUNCHED, process_start, since_boot
from hvdtrain.launch import RanksStop
from hvdtrain.options import injection
from hvdtrain.plan.planfile import refit
from hvdtrain.training.metrics import AFTER_FAULTS, make_folder

NO_FAULT = (0, Interrupted.exit_code, Preempted.exit_code)
# After starts that saved no new checkpoint the launcher waits: the fault may be temporary.
FIRST_WAIT_SECONDS, WAIT_GROWTH = 5.0, 6.0
MOST_MESSAGES = 20  # passed to the next start
MOST_CHARACTERS_OF_REASON = 200


def run(config: TrainConfig, arguments: Sequence[str], stop: RanksStop) -> int:
    """Run `hvdtrain ARGUMENTS`, restart it as often as `--restarts` says, return the exit code.

    Only a failed rank causes a restart: errors that a user has to fix and requested stops do not.

    Raises:
        Interrupted, Preempted: if this process was requested to stop before it started the ranks.
    """
    restarts = config.restart_request
    ranks, messages = config.ranks or 1, list[str]()
    arguments = alert.without_command(arguments)
    folder = Path(config.run) if config.run else None
    if folder is None and restarts.most:
        folder = make_folder(config)
    launch_id, launched = secrets.token_hex(8), process_start()
    fruitless = 0
    for left in range(restarts.most, -1, -1):
        environment = _environment(config, f"{launch_id}:{restarts.most - left}", messages)
        environment[LAUNCHED] = str(launched)
        options = _more(config, folder, ranks, bool(messages))
        limit, before = start_patience(config), newest(folder)
        ended = launch.supervise(ranks, [*arguments, *options], environment, stop, limit)
        messages.append(ended.message)
        fruitless = 0 if newest(folder) != before else fruitless + 1
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
        ranks = max(ranks - 1, min(ranks, restarts.fewest_ranks or ranks))
        wait = FIRST_WAIT_SECONDS * WAIT_GROWTH ** (fruitless - 1) if fruitless else 0.0
        when = f" in {wait:.0f} s, as no new checkpoint was saved" if wait else ""
        restart = f"restarting on {ranks} rank(s) from the last checkpoint of {folder}{when}"
        _say(f"{restart}; {left - 1} restart(s) left")
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
        faults = injection.parse(config.inject, config.ranks or 1)
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
