"""Parts of a scaling report: methods and references for a paper, energy, laws in words."""

from collections.abc import Iterable, Sequence

from hvdtrain import __version__
from hvdtrain.study.laws import BEYOND, Fit, cautions, next_run, usl_peak
from hvdtrain.study.results import Result, machines
from hvdtrain.study.series import Series
from hvdtrain.study.statistics import median
from hvdtrain.study.tables import markdown_table, number, rate
from hvdtrain.study.target import seconds_to

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


ENERGY = (
    "Energy, evaluation included. RAPL counts whole processors and NVML all GPUs that the host "
    "shows, so on a shared host those of other jobs, too; neither counts memory, power supplies, "
    "fans or the network. Slurm counts what its plugin on the cluster reads, which may be whole "
    "hosts, and stands only where no other counter was readable. Nothing is estimated but what "
    "says so: runs without counters, or that restarted, are left out."
)


def energy_section(series: Series, accuracy: float | None) -> str:
    """Return a table of the energy of runs by size; empty if no run's was counted.

    Args:
        accuracy: up to which the energy is also given, as a share of the run's.
    """
    rows = []
    for size in series.sizes:
        runs = [run for run in size.runs if run.energy]
        row = {"ranks": str(size.ranks), "runs": str(len(runs))}
        row |= _columns(runs, accuracy) if runs else {}
        row["counted by"] = " and ".join(sorted({name for run in runs for name in run.energy}))
        rows.append(row)
    if not any(row["counted by"] for row in rows):
        return ""
    names = max(rows, key=len).keys()
    table = markdown_table([{name: row.get(name, "-") for name in names} for row in rows])
    return f"{ENERGY}\n\n{table}"


def joules(run: Result) -> float:
    """Return the joules of a run, of all sources."""
    return sum(run.energy.values())


def _columns(runs: list[Result], accuracy: float | None) -> dict[str, str]:
    per_images = [1e3 * joules(run) / run.samples for run in runs]
    epochs = [joules(run) / len(run.epochs) for run in runs if run.epochs]
    columns = {
        "joules per 1,000 images": number(median(per_images), ",.1f"),
        "joules per epoch": number(median(epochs), ",.0f") if epochs else "-",
        "watts": number(median([joules(run) / run.seconds for run in runs]), ",.1f"),
    }
    if accuracy is not None:
        pairs = ((run, seconds_to(run, accuracy)) for run in runs)
        until = [joules(run) * end / run.seconds for run, end in pairs if end is not None]
        name = f"joules until {accuracy:.2%} (estimated: the share of the run's time)"
        columns[name] = number(median(until), ",.0f") if until else "-"
    return columns


def laws_text(series: Series) -> str:
    """Return the fitted laws, the simplest one that describes the runs, and its predictions."""
    laws, most = series.laws, series.sizes[-1].ranks
    if not laws.fits:
        return f"No scaling law is fitted: {len(series.sizes)} sizes are too few."
    lines = [_line(fit, most) for fit in laws.fits if fit.values]
    if not laws.fits[0].has_repeats:
        reason = "repeat each size to see which law describes these runs"
        return "\n".join([*lines, f"- Without repeats nothing is known of the noise: {reason}."])
    if laws.law is None:
        reason = "so no throughput beyond the sizes measured is predicted"
        return "\n".join([*lines, f"- No law describes these runs, {reason}."])
    lines.append(f"- {_choice(laws.law)}")
    richest = laws.fits[-1]
    if richest is not laws.law and richest.has_repeats:
        target = BEYOND[-1] * most
        speedup = number(richest.predicted(target, over=1), ",.1f")
        lines.append(
            f"- If {richest.name} holds nevertheless, the speed-up on {target} ranks is {speedup}."
        )
    if (narrowing := next_run(laws.law, BEYOND[-1] * most)) is not None:
        ranks, before, after = narrowing
        lines.append(
            f"- One more run on {ranks} rank(s) would tell most: it narrows the interval for "
            f"{BEYOND[-1] * most} ranks from ±{before:.1%} to about ±{after:.1%}."
        )
    return "\n".join(lines) + "\n\n" + _predictions(laws.law, most)


def _line(fit: Fit, most: int) -> str:
    parameters = [
        f"{name.replace('_', ' ')} {number(item, '.3g') if name in fit.values else rate(item)}"
        for name, item in fit.parameters.items()
    ]
    text = f"- {fit.name}: {', '.join(parameters)}"
    if fit.name == "USL" and (peak := usl_peak(fit)) is not None:
        beyond = ", beyond the sizes measured" if peak > most else ""
        text += f"; throughput peaks at {peak:.1f} ranks{beyond}"
    caution = cautions(fit)
    return f"{text}. Caution: {caution}." if caution else f"{text}."


def _choice(law: Fit) -> str:
    if law.name == "linear" and law.is_misfit:
        worst = max(map(abs, law.misfits.values()))
        return f"These runs are within {worst:.1%} of linear scaling."
    if law.name == "linear":
        return "These runs do not differ from linear scaling by more than noise."
    return f"The simplest law that describes these runs is {law.name}."


def _predictions(law: Fit, most: int) -> str:
    rows = [
        {
            "ranks": str(times * most),
            "images/s": rate(law.predicted(times * most)),
            "speed-up": number(law.predicted(times * most, over=1), ",.2f"),
        }
        for times in BEYOND
    ]
    return f"Beyond the sizes measured, by {law.name}, if nothing else changes:\n\n" + (
        markdown_table(rows)
    )
