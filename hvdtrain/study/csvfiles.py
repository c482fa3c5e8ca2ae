"""The numbers of a scaling report as CSV, and for Extra-P."""

import json
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

EXTRA_P_METRICS = {
    "seconds": "seconds",
    "seconds of steps": "train_seconds",
    "seconds of waiting for communication": "exposed",
    "seconds of waiting in the pipeline": "bubble",
    "seconds of waiting for data": "data",
}


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


def extra_p(all_series: Sequence[Series]) -> str:
    """Return the seconds of all repeats as JSON Lines for Extra-P, which fits scaling models.

    A series is a call path; the whole run, its steps, and parts of them are metrics.
    Source: https://github.com/extra-p/extrap/blob/master/docs/file-formats.md.
    """
    lines = [
        {
            "params": {"ranks": size.ranks},
            "callpath": f"series {place}: {series.title}",
            "metric": metric,
            "value": [float(getattr(run, attribute)) for run in size.runs],
        }
        for place, series in enumerate(all_series, 1)
        for metric, attribute in EXTRA_P_METRICS.items()
        for size in series.sizes
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)
