"""The emulated part of the report: validation, table I again, and devices that change."""

from collections.abc import Sequence
from statistics import mean

from hvdtrain.study.paper_b.arms import ADAPTIVE, DP, HYBRID, MP
from hvdtrain.study.paper_b.emulations import (
    CHANGING,
    DILATION,
    FORESEEN,
    RANK_BYTES,
    SIZES,
    Emulated,
    Emulations,
    Scenario,
)
from hvdtrain.study.paper_b.settings import CLUSTER
from hvdtrain.study.statistics import Estimate
from hvdtrain.study.tables import markdown_table, number

CLOSE = 0.1  # part of the expected seconds by which an emulation may differ
MEASURED = (
    "The ranks of this machine again, emulated from one profile of each model (`--emulate "
    "FILE`), against the measured steps of the tables above, with their intervals. What differs "
    "is the error of the profile, and work that an emulation does not dilate, such as loading "
    "images."
)
V100 = (
    f"The plans of table I on emulated ranks of {CLUSTER}, and DP on other numbers of such ranks, "
    "against the simulator that predicts them. Emulated steps are medians."
)
OWN_TIME = (
    "The program's own time is real time in which a rank neither slept nor waited for others, per "
    "step, the mean of all steps: the first one and the loading of images count. It does not "
    "shrink with the dilation, and makes emulated steps longer than simulated ones. It grows with "
    "the actions of a plan, and with the number of ranks: all agree on each step, the start times "
    "of all-reduces and the record of each rank in `metrics.jsonl` have an entry per rank, and "
    "ranks that share a core wait for it."
)
CHANGES = (
    f"{CHANGING} on {CLUSTER} while devices or links change, {DILATION:g} real seconds per "
    "emulated one. Milliseconds are means over all steps, adaptive's migrations included; those "
    f"in brackets are predicted. The {FORESEEN} plan is the planner's for the changed cluster, "
    "kept from the first step on. The bound is predicted: the fastest plan of each phase, from "
    "the first step of the phase on."
)


def section(emulations: Emulations) -> str:
    """Return the emulated part of the report as Markdown."""
    parts = ["## Emulated"]
    if emulations.measured:
        parts += [MEASURED, comparison(emulations.measured, "measured")]
    parts.append(f"### {CLUSTER}")
    if emulations.v100:
        runs = [*emulations.v100, *emulations.sizes]
        parts += [V100, comparison(runs, "predicted"), _left_out(emulations), OWN_TIME]
    else:
        parts.append("Left out by `--emulated-steps 0`.")
    parts.append("### Devices and links that change")
    if emulations.scenarios:
        verdicts = "\n".join(f"- {verdict(one)}" for one in emulations.scenarios)
        parts += [CHANGES, scenarios(emulations.scenarios), verdicts]
    else:
        parts.append("Left out by `--event-steps 0`.")
    return "\n\n".join(filter(None, parts))


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
            f"{expected}, ms": number(_in_ms(run.comparison.expected), ".1f"),
            "emulated, ms": f"{1e3 * run.seconds:.1f}",
            "difference": f"{run.difference:+.1%}",
            "dilation": f"{run.dilation:g}",
            "own time, ms": f"{1e3 * run.overhead:.0f}",
        }
        for run in runs
    ]
    average = mean(abs(run.difference) for run in runs)
    far = [
        f"{run.comparison.model}, {run.comparison.strategy}, {run.comparison.arm.ranks} ranks "
        f"({run.difference:+.1%})"
        for run in runs
        if abs(run.difference) > CLOSE
    ]
    which = f"Farther than {CLOSE:.0%} away: {'; '.join(far)}." if far else ""
    return (
        f"{markdown_table(rows)}\n\nThe mean difference is {average:.1%}. "
        f"{which or f'All are within {CLOSE:.0%}.'}"
    )


def _left_out(emulations: Emulations) -> str:
    """Return the numbers of ranks that were not emulated; they do not fit into memory."""
    emulated = {run.comparison.arm.ranks for run in emulations.sizes}
    missing = [ranks for ranks in SIZES if ranks not in emulated]
    if not missing:
        return ""
    return (
        f"Left out for lack of memory: {', '.join(map(str, missing))} ranks of about "
        f"{RANK_BYTES / 2**20:.0f} MiB each."
    )


def _in_ms(seconds: Estimate) -> Estimate:
    low, high = (None if end is None else 1e3 * end for end in (seconds.low, seconds.high))
    return Estimate(1e3 * seconds.value, low, high)


def scenarios(changed: Sequence[Scenario]) -> str:
    """Return a table of the milliseconds per step of each strategy, by what happens."""
    rows = []
    for scenario in changed:
        row = {"what happens": scenario.change.title}
        for strategy, plan in scenario.change.plans.items():
            predicted = f"({1e3 * scenario.change.predicted(plan):.1f})"
            run = scenario.runs.get(strategy)
            row[strategy] = f"{1e3 * run.mean_seconds:.1f} {predicted}" if run else predicted
        row[ADAPTIVE] = f"{1e3 * scenario.runs[ADAPTIVE].mean_seconds:.1f}"
        row["bound"] = f"({1e3 * scenario.change.bound:.1f})"
        row["changes of the plan"] = str(scenario.runs[ADAPTIVE].changes)
        rows.append(row)
    return markdown_table(rows)


def verdict(scenario: Scenario) -> str:
    """Return how adaptive compares with the plans that do not change, and with the bound."""
    change, adaptive = scenario.change, scenario.runs[ADAPTIVE]
    if change.event is None:
        kept = "changes its plan without a reason" if adaptive.changes else "keeps its plan"
        return f"{change.title}: adaptive {kept}."
    predicted = {name: change.predicted(change.plans[name]) for name in (DP, MP, HYBRID)}
    best = min(predicted, key=lambda name: predicted[name])
    run = scenario.runs.get(best)
    seconds = run.mean_seconds if run else predicted[best]
    text = (
        f"{change.title}: adaptive is {seconds / adaptive.mean_seconds:.2f}x as fast as {best}, "
        "the best of DP, MP and hybrid"
    )
    if foreseen := scenario.runs.get(FORESEEN):
        ratio = foreseen.mean_seconds / adaptive.mean_seconds
        text += f", and {ratio:.2f}x as fast as the {FORESEEN} plan"
    own = adaptive.overhead / adaptive.dilation
    return (
        f"{text}. It reaches {change.bound / adaptive.mean_seconds:.0%} of the bound, "
        f"{(change.bound + own) / adaptive.mean_seconds:.0%} if the program's own time, "
        f"{1e3 * own:.1f} ms, is added to it; the bound is "
        f"{seconds / change.bound:.2f}x as fast as {best}."
    )
