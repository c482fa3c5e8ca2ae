"""The ways in which the replicas of a study's runs agreed, and what they counted."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from statistics import median
from typing import Any

from hvdtrain.options.syncoptions import SyncOptions
from hvdtrain.study.results import EXACT, Result

# What ranks count, by its key in summary.json: its head in a table, and its format.
COUNTS: Mapping[str, tuple[str, str]] = {
    "sent_bytes_per_step": ("bytes sent per step and rank", ",.0f"),
    "meetings": ("meetings", ",.0f"),
    "residual_norm": ("residual norm", ".3g"),
    "mean_staleness": ("staleness, mean", ".2f"),
    "max_staleness": ("staleness, maximum", ",.0f"),
}
OPTIONS = frozenset(item.name for item in fields(SyncOptions))


def counts_shown(results: Sequence[Result]) -> list[str]:
    """Return the counts that a report shows: none if all runs sum exactly in every step."""
    if all(result.agreement == EXACT for result in results):
        return []
    return [key for key in COUNTS if any(key in result.counted for result in results)]


def median_count(runs: Sequence[Result], key: str) -> float | None:
    """Return the median of a count over repeats; None if no run has it."""
    known = [run.counted[key] for run in runs if key in run.counted]
    return median(known) if known else None


def rows(results: Sequence[Result]) -> list[dict[str, str]]:
    """Return a row per configuration on several ranks; none if all of them sum exactly."""
    keys = counts_shown(results)
    if not keys:
        return []
    groups: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    for run in results:
        if run.ranks > 1:
            groups[run.model, run.plan, run.ranks, run.batch_size, run.agreement].append(run)
    return [_row(groups[group], keys) for group in sorted(groups)]


def _row(runs: Sequence[Result], keys: Sequence[str]) -> dict[str, str]:
    first = runs[0]
    accuracies = [run.accuracy for run in runs if run.accuracy is not None]
    row = {
        "model": first.model,
        "plan": first.plan,
        "ranks": str(first.ranks),
        "batch": str(first.batch_size),
        "agreement": first.agreement,
        "repeats": str(len(runs)),
        "images/s": f"{median(run.images_per_second for run in runs):,.0f}",
        "accuracy": f"{median(accuracies):.4f}" if accuracies else "-",
    }
    for key in keys:
        head, form = COUNTS[key]
        value = median_count(runs, key)
        row[head] = "-" if value is None else format(value, form)
    return row
