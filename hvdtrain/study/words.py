"""What a report says beside its numbers."""

from collections.abc import Sequence

from hvdtrain import __version__
from hvdtrain.study.results import Result, machines
from hvdtrain.study.series import Series

INTERVALS = (
    "Numbers are medians of repeats. Intervals are 95 % percentile bootstrap intervals of the "
    "median, or of the ratio of two medians; with few repeats they cannot be wider than the "
    "repeats' range, so read them as that. Communication, bubble and data are seconds in which "
    "ranks waited, as parts of their own time, means over the ranks. Imbalance is the part of "
    "waiting that a slower rank explains. Slower computing is what is left: caches, memory and "
    "cores that ranks share, smaller pieces of a batch; it is negative where pieces fit better. "
    "Core-hours are ranks times threads times the time from the last start, start-up included: "
    "what a run that was killed had to do again is not in them."
)

BIBTEX = f"""@software{{hvdtrain,
  title   = {{hvdtrain: training image classifiers on many processes}},
  version = {{{__version__}}},
  year    = {{2026}},
}}
@article{{horovod,
  title   = {{Horovod: fast and easy distributed deep learning in TensorFlow}},
  author  = {{Sergeev, Alexander and Del Balso, Mike}},
  journal = {{arXiv preprint arXiv:1802.05799}},
  year    = {{2018}},
}}
@inproceedings{{hoefler2015,
  title     = {{Scientific benchmarking of parallel computing systems}},
  author    = {{Hoefler, Torsten and Belli, Roberto}},
  booktitle = {{Proceedings of SC15}},
  doi       = {{10.1145/2807591.2807644}},
  year      = {{2015}},
}}"""


def methods(series: Sequence[Series], results: Sequence[Result]) -> str:
    """A paragraph for the methods section of a paper; the settings come from the runs."""
    first = results[0]
    repeats = sorted({len(size.runs) for one in series for size in one.sizes})
    counts = str(repeats[0]) if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
    sizes = sorted({size.ranks for one in series for size in one.sizes})
    models = ", ".join(sorted({one.model for one in series}))
    scaling = " and ".join(sorted({one.scaling for one in series}))
    epochs = max((len(run.epochs) for run in results), default=0)
    return (
        f"We measured {scaling} scaling of {models} on {', '.join(map(str, sizes))} ranks "
        f"({machines(list(results))[0]}) with hvdtrain {first.versions.get('hvdtrain', '')}, "
        f"PyTorch {first.versions.get('torch', '')} and Horovod "
        f"{first.versions.get('horovod', '')}. Each rank used {first.threads} thread(s), in the "
        f"base case of one rank too. Each size was run {counts} time(s) for {epochs} epoch(s). "
        "Throughput is the number of images divided by the wall time of the training steps, "
        "without start-up and evaluation. We report medians with 95 % bootstrap intervals, "
        "following Hoefler and Belli (2015)."
    )
