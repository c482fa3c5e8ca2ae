"""The energy of runs: what counters counted, by their names."""

from hvdtrain.study.results import Result
from hvdtrain.study.series import Series
from hvdtrain.study.statistics import median
from hvdtrain.study.tables import markdown_table, number
from hvdtrain.study.target import seconds_to

ENERGY = (
    "Energy, evaluation included. RAPL counts whole processors and NVML all GPUs that the host "
    "shows, so on a shared host those of other jobs, too; neither counts memory, power supplies, "
    "fans or the network. Slurm counts what its plugin on the cluster reads, which may be whole "
    "hosts, and stands only where no other counter was readable. Nothing is estimated but what "
    "says so: runs without counters, or that restarted, are left out."
)


def section(series: Series, accuracy: float | None) -> str:
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
