"""Starting a job again from its last checkpoint after a rank failed."""

import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain import launch
from hvdtrain.config import TrainConfig
from hvdtrain.errors import RankError
from hvdtrain.parallel.planfile import refit
from hvdtrain.training.metrics import make_folder


def run(config: TrainConfig, arguments: Sequence[str]) -> int:
    """Run `hvdtrain ARGUMENTS`, at most `config.restarts` times again; the last exit code.

    Only a failed rank is a reason to start again: what a user has to mend, or wished, is not.
    """
    folder = Path(config.run) if config.run else make_folder(config)
    ranks = config.ranks or 1
    for left in range(config.restarts, -1, -1):
        code = launch.run(ranks, [*arguments, *_more(config, folder, ranks)])
        if code != RankError.exit_code or left == 0:
            break
        ranks = max(ranks - 1, min(ranks, config.min_ranks or ranks))
        said = f"starting again on {ranks} rank(s) from the last checkpoint of {folder}"
        print(f"hvdtrain: {said}; {left - 1} restart(s) left", file=sys.stderr, flush=True)
    return code


def _more(config: TrainConfig, folder: Path, ranks: int) -> list[str]:
    """The options of one start; those that come last win."""
    options = ["--restarts", "0", "--ranks", str(ranks), "--run", str(folder)]
    if (folder / "config.yaml").exists():
        options += ["--resume"]
    if ranks < (config.ranks or 1) and (plan := refit(config.plan, ranks)) is not None:
        options += ["--plan", plan]
    return options
