"""A job that our own launcher starts, and starts again from its last checkpoint."""

import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain import alert, launch
from hvdtrain.config import TrainConfig
from hvdtrain.errors import Interrupted, Preempted, RankError
from hvdtrain.parallel.planfile import refit
from hvdtrain.training.metrics import AFTER_FAULT, make_folder

NO_FAULT = (0, Interrupted.exit_code, Preempted.exit_code)


def run(config: TrainConfig, arguments: Sequence[str]) -> int:
    """Run `hvdtrain ARGUMENTS`, at most `config.restarts` times again; the last exit code.

    Only a failed rank is a reason to start again: what a user has to mend, or wished, is not.
    """
    folder = Path(config.run) if config.run else make_folder(config)
    ranks, fault = config.ranks or 1, ""
    for left in range(config.restarts, -1, -1):
        environment = {AFTER_FAULT: fault} if fault else {}
        ended = launch.supervise(ranks, [*arguments, *_more(config, folder, ranks)], environment)
        fault = ended.message
        again = ended.code == RankError.exit_code and left > 0
        if ended.code not in NO_FAULT:
            cause = "rank failed" if ended.code == RankError.exit_code else "job failed"
            told = f"{fault}; starting again" if again else fault
            alert.send_and_wait(config.on_alert, cause, told, str(folder))
        if not again:
            break
        ranks = max(ranks - 1, min(ranks, config.min_ranks or ranks))
        said = f"starting again on {ranks} rank(s) from the last checkpoint of {folder}"
        print(f"hvdtrain: {said}; {left - 1} restart(s) left", file=sys.stderr, flush=True)
    return ended.code


def _more(config: TrainConfig, folder: Path, ranks: int) -> list[str]:
    """The options of one start; those that come last win."""
    if not config.restarts:
        return []
    options = ["--restarts", "0", "--ranks", str(ranks), "--run", str(folder)]
    if (folder / "config.yaml").exists():
        options += ["--resume"]
    if ranks < (config.ranks or 1) and (plan := refit(config.plan, ranks)) is not None:
        options += ["--plan", plan]
    return options
