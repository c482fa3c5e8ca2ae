"""Predicts a model on 1, 2, 4, ... ranks of a cluster: speed-up, cost, and which plan wins where.

The batch stays the same: speed-ups are those of strong scaling. The replicas of a plan with
equal stages are pipelines of their own that meet in all-reduces only, so that one of them is
simulated: that keeps a thousand ranks within seconds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.plan.cut import cut
from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.planner.candidate import Candidate, play, played
from hvdtrain.planner.clusters import load
from hvdtrain.planner.cost import Question, plan_costs
from hvdtrain.planner.options import PlanConfig
from hvdtrain.planner.solve import solve
from hvdtrain.planner.strategies import EPOCHS, IMAGES, PREDICTED, pipelines, shape

STRATEGIES = ("dp", "mp", "hybrid")
CHOSEN = "chosen"
LITTLE = 0.01  # a speed-up that grows by less does not grow


@dataclass(frozen=True)
class Entry:
    """One strategy on one number of ranks: its plan as stages x replicas, seconds per step."""

    shape: str
    seconds: float


@dataclass(frozen=True)
class Sweep:
    """The predictions of all numbers of ranks.

    Attributes:
        points: by number of ranks, ascending: the strategies that are possible and fit.
        price: of one rank for one hour, None to count rank-hours.
    """

    model: str
    batch_size: int
    points: dict[int, dict[str, Entry]]
    price: float | None = None

    def speedups(self, strategy: str) -> dict[int, float]:
        """Return the speed-up over the fewest ranks' chosen plan, by number of ranks."""
        base = next(iter(self.points.values()))[CHOSEN].seconds
        return {
            ranks: base / entries[strategy].seconds
            for ranks, entries in self.points.items()
            if strategy in entries
        }

    def costs(self, strategy: str) -> dict[int, float]:
        """Return the rank-hours, or their price, of the epochs of paper B by number of ranks."""
        steps = EPOCHS * -(-IMAGES // self.batch_size)
        return {
            ranks: steps * ranks * entries[strategy].seconds / 3600 * (self.price or 1.0)
            for ranks, entries in self.points.items()
            if strategy in entries
        }

    @property
    def unit(self) -> str:
        """The unit of `costs`."""
        return "rank-hours" if self.price is None else "price"

    def winners(self) -> dict[int, str]:
        """Return the fastest of the named strategies by number of ranks, from two ranks on."""
        fastest = {}
        for ranks, entries in self.points.items():
            named = [name for name in STRATEGIES if name in entries]
            if ranks > 1 and named:
                fastest[ranks] = min(named, key=lambda name: entries[name].seconds)
        return fastest

    def remarks(self) -> Iterator[str]:
        """Yield where another plan wins, and where more ranks do not help."""
        winners = self.winners()
        for (_, before), (ranks, name) in pairwise(winners.items()):
            if name != before:
                entries = self.points[ranks]
                other = "cannot run" if before not in entries else f"takes {_ms(entries[before])}"
                yield (
                    f"from {ranks} ranks on, {name} ({entries[name].shape}) wins with "
                    f"{_ms(entries[name])} per step, where {before} {other}"
                )
        if winners and len(set(winners.values())) == 1:
            yield f"{next(iter(winners.values()))} is the fastest of the three on all of them"
        speedups = self.speedups(CHOSEN)
        enough = next(r for r, s in speedups.items() if s * (1 + LITTLE) >= max(speedups.values()))
        if enough < max(self.points):
            yield f"more than {enough} ranks do not make the chosen plan faster"

    def as_json(self) -> dict[str, Any]:
        """Return the content as one JSON object."""
        names = (*STRATEGIES, CHOSEN)
        speedups = {name: self.speedups(name) for name in names}
        costs = {name: self.costs(name) for name in names}
        return {
            "model": self.model,
            "batch_size": self.batch_size,
            "images": IMAGES,
            "epochs": EPOCHS,
            "cost_unit": self.unit,
            "remark": PREDICTED,
            "remarks": list(self.remarks()),
            "points": [
                {
                    "ranks": ranks,
                    "strategies": {
                        name: {
                            "plan": entry.shape,
                            "step_seconds": entry.seconds,
                            "speedup": speedups[name][ranks],
                            "cost": costs[name][ranks],
                        }
                        for name, entry in entries.items()
                    },
                }
                for ranks, entries in self.points.items()
            ],
        }

    def as_text(self) -> str:
        """Return the content as a table and sentences."""
        names = (*STRATEGIES, CHOSEN)
        lines = [
            f"{self.model}, {self.batch_size} images per step on any number of ranks; cost of "
            f"{EPOCHS} epochs of {IMAGES:,} images in {self.unit}",
            f"{'':>7}{'speed-up':^36}{'':>3}{'cost':^36}".rstrip(),
            f"{'ranks':>7}" + ("".join(f"{name:>9}" for name in names) + "   ") * 2 + "plan",
        ]
        speedups = [self.speedups(name) for name in names]
        costs = [self.costs(name) for name in names]
        for ranks, entries in self.points.items():
            cells = ["".join(_cell(one.get(ranks)) for one in half) for half in (speedups, costs)]
            lines.append(f"{ranks:>7}{'   '.join(cells)}   {entries[CHOSEN].shape}")
        return "\n".join([*lines, *self.remarks(), PREDICTED])


def _cell(value: float | None) -> str:
    if value is None:
        return f"{'-':>9}"
    return f"{value:>9.0f}" if value >= 1000 else f"{value:>9.3g}"


def _ms(entry: Entry) -> str:
    return f"{1e3 * entry.seconds:.2f} ms"


def check(config: PlanConfig) -> None:
    """Refuse options that do not fit --sweep.

    Raises:
        UsageError: naming the option.
    """
    if not config.sweep:
        if config.price is not None:
            raise UsageError(f"--price {config.price:g} needs --sweep: add it, or leave it out")
        return
    if config.cluster is None:
        raise UsageError("--sweep predicts for a cluster: add --cluster, such as 16-cpu-10g")
    if config.plan is not None:
        raise UsageError(f"--sweep compares all plans: leave --plan {config.plan} out")
    if config.save or config.actions or config.trace:
        raise UsageError("--save, --actions and --trace need one plan: leave --sweep out")
    if config.price is not None and not 0 < config.price < float("inf"):
        raise UsageError(f"--price must be above 0, not {config.price:g}")


def check_alike(cluster: str, ranks: int) -> None:
    """Refuse a cluster whose ranks are not alike: one replica stands for all.

    Raises:
        UsageError: naming the cluster.
    """
    if load(cluster, ranks).events:
        raise UsageError(
            f"--sweep needs ranks that are alike, and {cluster} has events: leave these out"
        )


def numbers_of_ranks(most: int) -> list[int]:
    """Return 1, 2, 4, ... and `most` itself."""
    return sorted({most, *(2**power for power in range(most.bit_length()))})


def sweep(
    model: str, question_of: Callable[[int], Question], most: int, price: float | None = None
) -> Sweep:
    """Predict all strategies on 1, 2, 4, ... ranks.

    Args:
        question_of: returns the question for a number of ranks.
        most: ranks.
        price: of one rank for one hour.

    Raises:
        UsageError: if no plan fits on any number of ranks, or a cluster has too few ranks.
    """
    points, why, batch_size = {}, None, 0
    for ranks in numbers_of_ranks(most):
        question = question_of(ranks)
        batch_size = question.batch_size
        try:
            chosen = solve(question).chosen
        except UsageError as error:  # more ranks may have the memory
            why = error
            continue
        points[ranks] = _named(question) | {CHOSEN: Entry(shape(chosen.plan), chosen.seconds)}
    if not points:
        assert why is not None
        raise why
    return Sweep(model, batch_size, points, price)


def _named(question: Question) -> dict[str, Entry]:
    """Return the named strategies that are possible on the ranks of a question and fit."""
    names, ranks, number = question.known.profile.names, question.ranks, question.microbatches
    plans: dict[str, list[Plan]] = {"dp": [replicated(names, ranks, number, None)]}
    for plan in pipelines(question):
        plans.setdefault("mp" if len(plan.stages) == ranks else "hybrid", []).append(plan)
    entries = {}
    for kind, tried in plans.items():
        fitting = [
            Entry(shape(plan), candidate.seconds)
            for plan in tried
            if _fits(question, candidate := one_replica(question, plan))
        ]
        if fitting:
            entries[kind] = min(fitting, key=lambda entry: entry.seconds)
    return entries


def _fits(question: Question, candidate: Candidate) -> bool:
    return question.limits is None or max(candidate.rank_bytes) <= min(question.limits)


def one_replica(question: Question, plan: Plan) -> Candidate:
    """Simulate the replica with the most samples of a plan whose stages have equal replicas.

    The result has the seconds of the whole plan, in which only all-reduces connect replicas. If
    batch norm is synchronised, the whole plan is simulated.
    """
    known, pieces = question.known, cut(plan, question.batch_size)
    if known.is_synchronised:
        return play(question, plan, "")
    first = plan.stages[0].ranks
    samples = [pieces.samples(0, rank) for rank in first]
    place = samples.index(max(samples))
    one = replace(
        plan,
        stages=tuple(
            replace(stage, ranks=(stage.ranks[place],), shares=(1,)) for stage in plan.stages
        ),
        microbatches=pieces.microbatches,
    )
    part = cut(one, samples[place])
    costs = replace(plan_costs(one, part, known), reduce=plan_costs(plan, pieces, known).reduce)
    return played(question, one, part, costs, "", [len(stage.ranks) for stage in plan.stages])
