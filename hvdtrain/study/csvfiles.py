"""The numbers of a scaling report as CSV."""

from collections.abc import Sequence
from typing import Any

from hvdtrain.host.harmless import as_csv
from hvdtrain.study import agreement
from hvdtrain.study.results import Result
from hvdtrain.study.series import Series

RUN_COLUMNS = (
    "model",
    "plan",
    "ranks",
    "threads",
    "batch_size",
    "seed",
    "samples",
    "seconds",
    "startup_seconds",
    "train_seconds",
    "images_per_second",
    "exposed",
    "bubble",
    "data",
    "imbalance",
    "peak_memory_bytes",
    "accuracy",
    "core_hours",
)


def runs_csv(results: Sequence[Result]) -> str:
    """Return the numbers of each run."""
    keys = agreement.counts_shown(results)
    names = [*RUN_COLUMNS, *(["agreement"] if keys else [])]
    rows = [
        [
            run.name,
            *(getattr(run, name) for name in names),
            *(run.counted.get(key) for key in keys),
        ]
        for run in results
    ]
    return as_csv(["run", *names, *keys], rows)


def sizes_csv(all_series: Sequence[Series], counts: Sequence[str]) -> str:
    """Return the numbers of each size.

    Args:
        counts: keys of what ranks counted about their agreement that are columns.
    """
    names = (
        *("images_per_second", "speedup", "efficiency", "speedup_over_best", "seconds"),
        "serial_fraction",
    )
    heads = ["model", "plan", "precision", "scaling", "ranks", "repeats"]
    heads += [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    heads += ["agreement", *counts] if counts else []
    rows = []
    for series in all_series:
        for size in series.sizes:
            row: list[Any] = [series.model, series.plan, series.precision, series.scaling]
            row += [size.ranks, len(size.runs)]
            for name in names:
                estimate = getattr(size, name)  # a serial fraction may be None
                row += [getattr(estimate, part, None) for part in ("value", "low", "high")]
            if counts:
                row += [series.agreement]
                row += [agreement.median_count(size.runs, key) for key in counts]
            rows.append(row)
    return as_csv(heads, rows)
