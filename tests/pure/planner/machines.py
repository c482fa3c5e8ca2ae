"""Builds models and machines for tests of the planner."""

from collections.abc import Sequence

from hvdtrain.models.costs import ComponentCost
from hvdtrain.planner.cost import Known, Question
from hvdtrain.planner.network import Contention, Curve, Line, MeasuredNetwork
from hvdtrain.planner.profile import ComponentTimes, Profile, RankTimes


def component(
    number: int, parameter_bytes: int = 1000, output_bytes: int = 100, saved_bytes: int = 200
) -> ComponentCost:
    """Return the costs of one component of a chain."""
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


def rank_times(names: Sequence[str], seconds: Sequence[float], fixed: float = 0.0) -> RankTimes:
    """Return times of a forward of `seconds` per sample, and of a backward twice as long."""
    return RankTimes(
        {
            name: ComponentTimes(
                Curve.straight(Line(fixed, per_sample), 64),
                Curve.straight(Line(2 * fixed, 2 * per_sample), 64),
                Curve.straight(Line(fixed, per_sample), 64),
                Curve.straight(Line(fixed, per_sample), 64),
            )
            for name, per_sample in zip(names, seconds, strict=True)
        }
    )


def network(
    ranks: int,
    latency: float = 0.0,
    per_byte: float = 0.0,
    reduce_per_byte: float = 0.0,
    contention: Contention | None = None,
) -> MeasuredNetwork:
    """Return a network with linear times; all-reduces do not depend on the number of ranks."""
    summed = Curve.straight(Line(latency, reduce_per_byte), 1e9)
    return MeasuredNetwork(
        ("here",) * ranks,
        {False: {2: summed, max(3, ranks): summed}},
        {False: Curve.straight(Line(latency, per_byte), 1e9)},
        contention or Contention(),
    )


def known(
    costs: Sequence[ComponentCost],
    seconds: Sequence[float],
    slowness: Sequence[float],
    between: MeasuredNetwork,
) -> Known:
    """Return ranks of different slowness; `seconds` are those per component and sample at 1."""
    one = rank_times([cost.name for cost in costs], seconds)
    return Known(costs, Profile(tuple(one.times(factor) for factor in slowness)), between)


def question(ranks: int = 2, **options: object) -> Question:
    """Return a question with six equal components on equal ranks."""
    costs = [component(number) for number in range(6)]
    values: dict[str, object] = {"slowness": [1] * ranks, "reduce_per_byte": 0.0, "per_byte": 0.0}
    values |= {name: options.pop(name) for name in list(options) if name in values}
    transfer, reduce = (float(str(values[name])) for name in ("per_byte", "reduce_per_byte"))
    machine = known(
        costs,
        [1] * 6,
        values["slowness"],  # type: ignore[arg-type]
        network(ranks, 0.0, transfer, reduce),
    )
    return Question(machine, 32, "sgd", **options)  # type: ignore[arg-type]
