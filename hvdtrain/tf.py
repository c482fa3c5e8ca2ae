"""The name of `hvdtrain.keras` in version 0.1.0, for programs that import it."""

from hvdtrain.keras import (
    Datasets,
    ExactMetrics,
    SameWeights,
    SaveOnFirstRank,
    WarmUp,
    callbacks,
    datasets,
    evaluate,
    optimizer,
    start,
)

__all__ = [
    "Datasets",
    "ExactMetrics",
    "SameWeights",
    "SaveOnFirstRank",
    "WarmUp",
    "callbacks",
    "datasets",
    "evaluate",
    "optimizer",
    "start",
]
