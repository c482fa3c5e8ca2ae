"""The part of a scaling report about laws: fits, what they predict, and what would tell more."""

from hvdtrain.study.laws import BEYOND, Fit, cautions, next_run, usl_peak
from hvdtrain.study.series import Series
from hvdtrain.study.tables import markdown_table, number, rate


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
