"""Models and machines that tests of the planner make up."""

from collections.abc import Sequence

from hvdtrain.models.costs import ComponentCost
from hvdtrain.planner.components import ComponentTimes, Profile, RankTimes
from hvdtrain.planner.cost import Known
from hvdtrain.planner.curve import Curve, Line
from hvdtrain.planner.network import Contention, MeasuredNetwork
from hvdtrain.planner.tables import Question


def component(
    number: int, parameter_bytes: int = 1000, output_bytes: int = 100, saved_bytes: int = 200
) -> ComponentCost:
    """One of a chain."""
    return ComponentCost(
        name=f"part{number}",
        parameters=parameter_bytes // 4,
        parameter_bytes=parameter_bytes,
        buffer_bytes=0,
        forward_flops=1.0,
        output_shape=(output_bytes // 4,),
        output_bytes=output_bytes,
        saved_bytes=saved_bytes,
    )


def rank_times(names: Sequence[str], each: Sequence[float], fixed: float = 0.0) -> RankTimes:
    """Forward of `each` seconds a sample, backward twice as long."""
    return RankTimes(
        {
            name: ComponentTimes(
                Curve.straight(Line(fixed, seconds), 64),
                Curve.straight(Line(2 * fixed, 2 * seconds), 64),
                Curve.straight(Line(fixed, seconds), 64),
                Curve.straight(Line(fixed, seconds), 64),
            )
            for name, seconds in zip(names, each, strict=True)
        }
    )


def network(
    ranks: int,
    latency: float = 0.0,
    each: float = 0.0,
    reduce_each: float = 0.0,
    contention: Contention | None = None,
) -> MeasuredNetwork:
    """Straight lines; sums of any number of ranks take the same."""
    summed = Curve.straight(Line(latency, reduce_each), 1e9)
    return MeasuredNetwork(
        ("here",) * ranks,
        {False: {2: summed, max(3, ranks): summed}},
        {False: Curve.straight(Line(latency, each), 1e9)},
        contention or Contention(),
    )


def known(
    costs: Sequence[ComponentCost],
    each: Sequence[float],
    slowness: Sequence[float],
    between: MeasuredNetwork,
) -> Known:
    """Ranks that are so many times as slow as one that takes `each`."""
    one = rank_times([cost.name for cost in costs], each)
    return Known(costs, Profile(tuple(one.times(factor) for factor in slowness)), between)


def question(ranks: int = 2, **options: object) -> Question:
    """Six components alike, on ranks that are alike."""
    costs = [component(number) for number in range(6)]
    values: dict[str, object] = {"slowness": [1] * ranks, "reduce_each": 0.0, "each": 0.0}
    values |= {name: options.pop(name) for name in list(options) if name in values}
    between = network(ranks, 0.0, float(str(values["each"])), float(str(values["reduce_each"])))
    given = known(costs, [1] * 6, values["slowness"], between)  # type: ignore[arg-type]
    return Question(given, 32, "sgd", **options)  # type: ignore[arg-type]
