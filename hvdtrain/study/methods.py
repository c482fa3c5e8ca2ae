"""The parts of a scaling report for a paper: a methods paragraph and references."""

from collections.abc import Iterable, Sequence

from hvdtrain import __version__
from hvdtrain.study.results import Result, machines
from hvdtrain.study.series import Series

# By the names of the distributions in a run's versions.
NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "tensorflow-cpu": "TensorFlow"}

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


def methods(all_series: Sequence[Series], results: Sequence[Result]) -> str:
    """Return a paragraph for the methods section of a paper, with the settings of the runs."""
    all_sizes = [size for series in all_series for size in series.sizes]
    runs = [run for size in all_sizes for run in size.runs] or list(results)
    repeats = sorted({len(size.runs) for size in all_sizes})
    counts = str(repeats[0]) if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
    sizes = sorted({size.ranks for size in all_sizes})
    models = ", ".join(sorted({series.model for series in all_series}))
    scaling = " and ".join(sorted({series.scaling for series in all_series}))
    epochs = _all(len(run.epochs) for run in runs)
    threads = _all(run.threads for run in runs)
    hvdtrain, horovod = (
        _all(run.versions.get(name) or "of unknown version" for run in runs)
        for name in ("hvdtrain", "horovod")
    )
    known = {name: {run.versions[name] for run in runs if name in run.versions} for name in NAMES}
    frameworks = " and ".join(
        f"{NAMES[name]} {_all(known[name])}" for name in NAMES if known[name]
    )
    return (
        f"We measured {scaling} scaling of {models} on {', '.join(map(str, sizes))} ranks "
        f"({' and '.join(machines(runs))}) with hvdtrain {hvdtrain}, {frameworks or 'PyTorch'} "
        f"and Horovod {horovod}. Each rank used {threads} thread(s), also in the baseline of one "
        f"rank. Each size was run {counts} time(s) for {epochs} epoch(s). "
        "Throughput is the number of images divided by the wall time of the training steps, "
        "without start-up and evaluation. We report medians of the repeats with 95 % intervals by "
        "Student's t distribution on the logarithms (ratios: Welch), following Hoefler and Belli "
        "(2015) in what is reported."
    )


def _all(values: Iterable[object]) -> str:
    """Return the distinct values, joined by "or"."""
    return " or ".join(sorted(set(map(str, values))))
