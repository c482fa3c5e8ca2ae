"""The emulated part of the report: validation, table I again, and devices that change."""

from collections.abc import Sequence
from statistics import mean

from hvdtrain.study.paper_b.arms import ADAPTIVE, DP, HYBRID, MP
from hvdtrain.study.paper_b.emulations import (
    DILATION,
    EVENTS_ON,
    Emulated,
    Emulations,
    Scenario,
)
from hvdtrain.study.paper_b.settings import CLUSTER
from hvdtrain.study.report import markdown_table

ASKED_SPEEDUP = 1.18  # of adaptive over static, as the paper's text has it
HERE = (
    "The ranks of this machine again, emulated from one profile of each model (`--emulate "
    "FILE.json`), against the measured steps of the tables above: what the emulation and the "
    "profile leave out."
)
V100 = (
    f"The plans of table I on emulated ranks of {CLUSTER}, against the simulator that predicts "
    "them. Emulated ranks share this machine's cores, so that seconds are dilated, and what the "
    "program itself needs is a part of each step; it is in the last column, in real time."
)
SIZES = "The program's own time per step by number of ranks, DP, in real time on these cores:"
OWN_TIME = (
    "It does not shrink with the dilation. Of it, the agreement of all ranks on each step, the "
    "sums of the all-reduces' start times and the record of each rank in `metrics.jsonl` grow "
    "with the number of ranks; the actions of a step depend on the plan."
)
CHANGES = (
    f"{EVENTS_ON} on {CLUSTER} whose devices or links change, {DILATION:g} real seconds per "
    "emulated one. Seconds are means over all steps, with adaptive's migrations. The bound is the "
    "prediction for the planner's best plan in each phase, from its first step on."
)


def section(emulations: Emulations) -> str:
    """Return the emulated part of the report as Markdown."""
    parts = ["## Emulated"]
    if emulations.measured:
        parts += [HERE, comparison(emulations.measured, "measured")]
    if not emulations.v100:
        return "\n\n".join([*parts, "The V100 were left out by `--emulated-steps 0`."])
    parts += [
        f"### {CLUSTER}",
        V100,
        comparison(emulations.v100, "predicted"),
        SIZES,
        own_time(emulations),
        OWN_TIME,
        "### Devices and links that change",
        CHANGES,
        scenarios(emulations.scenarios),
        "\n".join(f"- {verdict(scenario)}" for scenario in emulations.scenarios),
    ]
    return "\n\n".join(parts)


def comparison(runs: Sequence[Emulated], expected: str) -> str:
    """Return a table of emulated steps beside the expected ones.

    Args:
        expected: what they are compared with, as the head of a column.
    """
    rows = [
        {
            "model": run.comparison.model,
            "strategy": run.comparison.strategy,
            "ranks": str(run.comparison.arm.ranks),
            f"{expected}, ms": f"{1e3 * run.comparison.expected:.1f}",
            "emulated, ms": f"{1e3 * run.seconds:.1f}",
            "difference": f"{run.difference:+.1%}",
            "dilation": f"{run.dilation:g}",
            "own time of the program, ms": f"{1e3 * run.overhead:.0f}",
        }
        for run in runs
    ]
    farthest = max(runs, key=lambda run: abs(run.difference))
    which = f"{farthest.comparison.model}, {farthest.comparison.strategy}"
    average = mean(abs(run.difference) for run in runs)
    return (
        f"{markdown_table(rows)}\n\nThe mean difference is {average:.1%}, the largest "
        f"{farthest.difference:+.1%} ({which})."
    )


def own_time(emulations: Emulations) -> str:
    """Return a table of the program's own time by number of ranks."""
    of_model = [
        run
        for run in (*emulations.sizes, *emulations.v100)
        if (run.comparison.model, run.comparison.strategy) == (EVENTS_ON, "DP")
    ]
    runs = sorted(of_model, key=lambda run: run.comparison.arm.ranks)
    rows = [
        {"ranks": str(run.comparison.arm.ranks), "ms per step": f"{1e3 * run.overhead:.0f}"}
        for run in runs
    ]
    return markdown_table(rows)


def scenarios(changed: Sequence[Scenario]) -> str:
    """Return a table of the seconds per step of each strategy by what happens."""
    rows = []
    for scenario in changed:
        row = {"what happens": scenario.change.title}
        for strategy in (DP, MP, HYBRID, ADAPTIVE):
            run = scenario.runs.get(strategy)
            row[f"{strategy}, ms"] = "-" if run is None else f"{1e3 * run.mean_seconds:.1f}"
        row["bound, ms"] = f"{1e3 * _bound(scenario):.1f}"
        row["changes of the plan"] = str(scenario.runs[ADAPTIVE].changes)
        rows.append(row)
    return markdown_table(rows)


def verdict(scenario: Scenario) -> str:
    """Return how adaptive compares with the best static plan and with the bound."""
    adaptive, title = scenario.runs[ADAPTIVE], scenario.change.title
    if scenario.change.event is None:
        kept = "keeps its plan" if not adaptive.changes else "changes its plan without a reason"
        return f"{title}: adaptive {kept}."
    best = scenario.runs[scenario.best_static]
    speedup = best.mean_seconds / adaptive.mean_seconds
    possible = best.mean_seconds / _bound(scenario)
    return (
        f"{title}: adaptive is {speedup:.2f}x as fast as the best static plan, "
        f"{scenario.best_static}; that is {speedup / possible:.0%} of the bound, "
        f"{possible:.2f}x. The paper's text has {ASKED_SPEEDUP}x."
    )


def _bound(scenario: Scenario) -> float:
    return scenario.runs[ADAPTIVE].comparison.expected
