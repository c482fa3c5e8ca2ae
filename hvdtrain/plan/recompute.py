"""Components that are recomputed in backward, and options that forbid its halves."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.options.nearest import nearest


def reason_against_split_backward(config: TrainConfig, names: Sequence[str]) -> str:
    """Return the option that forbids a backward pass in halves; empty if none does."""
    if config.compile:
        return "--compile"
    if recomputed_components(config.recompute, names):
        return "--recompute"
    return "--batch-norm sync" if config.batch_norm == "sync" else ""


def recomputed_components(patterns: str | None, names: Sequence[str]) -> frozenset[str]:
    """Return the components that `--recompute` names.

    Raises:
        UsageError: for a name or pattern that matches no component.
    """
    recomputed: set[str] = set()
    for pattern in filter(None, (word.strip() for word in (patterns or "").split(","))):
        matching = [name for name in names if pattern == "all" or fnmatchcase(name, pattern)]
        if not matching:
            raise UsageError(
                f"--recompute {pattern} names no component of the model{nearest(pattern, names)}"
            )
        recomputed.update(matching)
    return frozenset(recomputed)
