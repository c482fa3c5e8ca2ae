"""The strategies that are compared, as plans and runs, and the optimum of the paper's objective.

The paper names strategies by component: DP on all devices, MP partitioned over devices, HP on
some. A plan puts whole components on ranks, so MP means one rank here.

Its objective: minimise over the strategy s of each component c the sum of t_comp(c) +
t_comm(c, s), s being DP, MP or HP. In print t_comp does not depend on the strategy. The other
reading is that DP and HP divide the work: the time of a component is then that of its busiest
rank. Both add up components that our simulation overlaps. The memory of a device limits nothing
at these sizes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

from torch import cuda

from hvdtrain import models
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Index
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files
from hvdtrain.models.costs import ComponentCost, component_costs
from hvdtrain.plan.plan import Plan, Stage, pipeline
from hvdtrain.planner import profilefile
from hvdtrain.planner.cost import Known
from hvdtrain.study.options import ModelAtSize, PaperBOptions, devices
from hvdtrain.study.runs import Arm, make_folder

TABLE_I = ("single", "DP", "MP", "hybrid", "adaptive")
SINGLE, DP, MP, HYBRID, ADAPTIVE = TABLE_I
FIGURE_6, OBJECTIVE = "figure 6", "objective"
HEAVY = 0.5  # part of all parameters that the tail on one rank holds at least
AS_PRINTED, DIVIDED = "as printed", "with divided work"
READINGS = (AS_PRINTED, DIVIDED)
Group = tuple[int, ...]


@dataclass(frozen=True)
class Optimum:
    """The strategies that minimise the objective.

    Attributes:
        groups: the ranks of each component, by its name in model order.
        seconds: value of the objective.
    """

    groups: Mapping[str, Group]
    seconds: float

    def same_as(self, ranks: int) -> str | None:
        """Return the strategy that the optimum is the same as; OBJECTIVE for a plan of its own.

        None if it leaves ranks idle, which a plan may not.
        """
        groups = set(self.groups.values())
        if groups == {tuple(range(ranks))}:
            return DP
        if len(groups) == 1 and len(*groups) == 1:
            return SINGLE
        used = {rank for group in groups for rank in group}
        return OBJECTIVE if len(used) == ranks else None


def minimise(known: Known, ranks: int, batch_size: int, reading: str) -> Optimum:
    """Return the exact optimum, by dynamic programming over the components.

    DP is all ranks, MP any one rank, HP one half of four or more ranks. Among equal optima the
    one on the lowest ranks is returned.
    """

    def spent_on(cost: ComponentCost, group: Group) -> float:
        """Return t_comp + t_comm of a component, without the transfer of its input."""
        rows = batch_size / len(group) if reading == DIVIDED else batch_size
        times = [rank.components[cost.name] for rank in known.profile.ranks]
        computing = [one.forward(rows) + one.backward(rows) + one.update for one in times]
        # As printed the time is the same under each strategy: that of the fastest rank.
        divided = max(computing[rank] for rank in group)
        seconds = divided if reading == DIVIDED else min(computing)
        return seconds + known.network.reduce_seconds(group, cost.parameter_bytes)

    choices = groups_of(ranks)
    first = known.costs[0]
    best: dict[Group, tuple[float, tuple[Group, ...]]] = {
        group: (spent_on(first, group), (group,)) for group in choices
    }
    for previous, cost in pairwise(known.costs):
        size = previous.output_bytes * batch_size
        best = {
            group: min(
                (
                    spent + hand_over(known, before, group, size) + spent_on(cost, group),
                    (*path, group),
                )
                for before, (spent, path) in best.items()
            )
            for group in choices
        }
    least, path = min(best.values())
    return Optimum(dict(zip([cost.name for cost in known.costs], path, strict=True)), least)


def groups_of(ranks: int) -> list[Group]:
    """Return the ranks that a component may have: single ones, halves of at least two, all."""
    everybody = tuple(range(ranks))
    halves = [everybody[: ranks // 2], everybody[ranks // 2 :]] if ranks >= 4 else []
    return [*((rank,) for rank in everybody), *halves, everybody]


def hand_over(known: Known, before: Group, after: Group, size: float) -> float:
    """Return the seconds of a tensor in the forward, and of its gradient in the backward.

    Args:
        before, after: ranks that hold equal numbers of its rows, in order.
        size: bytes of the whole tensor.
    """

    def seconds_of(senders: Group, receivers: Group) -> float:
        """Return the seconds until each receiver has its rows."""
        return max(
            sum(
                known.network.send_seconds(sender, receiver, shared * size)
                for place, sender in enumerate(senders)
                if sender != receiver
                and (shared := _overlap(number, len(receivers), place, len(senders))) > 0
            )
            for number, receiver in enumerate(receivers)
        )

    return seconds_of(before, after) + seconds_of(after, before)


def _overlap(one: int, ones: int, other: int, others: int) -> float:
    """Return the share of the rows that is in part `one` of `ones` and in part `other`."""
    return min((one + 1) / ones, (other + 1) / others) - max(one / ones, other / others)


def hybrid(costs: Sequence[ComponentCost], ranks: int) -> Plan:
    """Return the hybrid plan: two stages of several ranks each, or on few ranks a heavy tail.

    With four ranks or more and an even number, each of two stages has half of the ranks. On fewer,
    the paper's text is followed, which gives "parameter-heavy layers" to MP: the shortest tail
    with half of the parameters is on the last rank, and all else on all ranks.
    """
    names = [cost.name for cost in costs]
    if ranks >= 4 and ranks % 2 == 0:
        work = [cost.forward_flops for cost in costs]
        return pipeline(names, work, ranks, 2, ranks // 2, None, "1f1b", f"hp:2x{ranks // 2}")
    heavy, held = len(costs), 0
    total = sum(cost.parameters for cost in costs)
    while heavy > 1 and held < HEAVY * total:
        heavy -= 1
        held += costs[heavy].parameters
    everybody, last = tuple(range(ranks)), (ranks - 1,)
    return staged({name: everybody if names.index(name) < heavy else last for name in names})


def figure_6(names: Sequence[str], ranks: int) -> Plan | None:
    """Return the plan with figure 6's labels: attention MP, MLP DP, embedding HP.

    The ranks take turns with the attentions. HP is half of the ranks, or both of two. The head,
    which figure 6 does not show, is DP. None if the model has no attention components.
    """
    attentions = [name for name in names if name.endswith(".attention")]
    if not attentions:
        return None
    everybody = tuple(range(ranks))
    held = dict.fromkeys(names, everybody)
    held[names[0]] = everybody if ranks < 4 else everybody[: ranks // 2]
    return staged(held | {name: (place % ranks,) for place, name in enumerate(attentions)})


def staged(groups: Mapping[str, Group], microbatches: int = 2) -> Plan:
    """Return the plan whose neighbouring components on the same ranks form a stage."""
    stages = [
        Stage(tuple(name for name, _ in held), ranks, (1,) * len(ranks))
        for ranks, held in groupby(groups.items(), key=itemgetter(1))
    ]
    return Plan(tuple(stages), microbatches=microbatches)


def write(folder: Path, name: str, plan: Plan) -> str:
    """Write a plan into the folder of the study and return its path.

    Raises:
        DataError: if it cannot be written.
    """
    path = folder / "plans" / f"{name}.json"
    make_folder(path.parent)
    files.write_text(path, json.dumps(plan.to_json(), indent=1) + "\n", "the plan", DataError)
    return str(path)


# Large models are trained by those of table I only; so is accuracy.
STRATEGIES = {
    SINGLE: "all components on one rank",
    DP: "all components on all ranks",
    MP: "a pipeline of one stage per rank",
    HYBRID: "two stages of half of the ranks each, or on fewer than four ranks the tail with half "
    "of the parameters on one rank and the rest on all",
    FIGURE_6: "the labels of that figure, except that HP is all ranks if they are fewer than four",
    OBJECTIVE: "the optimum of the paper's objective with divided work, if no other row is the "
    "same",
    ADAPTIVE: "what the planner chooses, again during training",
}


def plan_of(
    strategy: str, costs: Sequence[ComponentCost], ranks: int, optimum: Optimum
) -> str | Plan | None:
    """Return a value of `--plan`, or a plan, for a strategy; None if it has none there.

    Args:
        costs: of the components of the model.
        optimum: of the paper's objective with divided work.
    """
    if strategy == HYBRID:
        return hybrid(costs, ranks) if len(costs) > 1 else None
    if strategy == FIGURE_6:
        return figure_6([cost.name for cost in costs], ranks)
    if strategy == OBJECTIVE:
        return staged(optimum.groups, 1) if optimum.same_as(ranks) == OBJECTIVE else None
    return None if strategy == MP and len(costs) == 1 else strategy.lower()


SYNTHETIC = 1024  # images of a size that the packed ones do not have
# Operations of a forward of all images of a step, at most, unless it has fewer than LEAST_IMAGES.
MOST_WORK, LEAST_IMAGES = 8e10, 8


@dataclass(frozen=True)
class Case:
    """A model on a number of ranks: strategies are compared within it."""

    options: PaperBOptions
    index: Index
    model: ModelAtSize
    ranks: int

    @cached_property
    def costs(self) -> list[ComponentCost]:
        """The components of the model, with their counted operations and bytes."""
        classes = self.index.classes
        parts = models.components(self.model.name, classes, self.pixels)
        return list(component_costs(parts, self.pixels, classes=classes))

    @property
    def pixels(self) -> int:
        """The height and width of the images."""
        return self.model.pixels or self.index.image_shape[0]

    @property
    def data(self) -> str:
        """The data set of the runs: synthetic if the packed images are too small."""
        try:
            self.index.at_size(self.model.pixels)
        except UsageError:
            return str(Path(self.options.to) / f"images-{self.model.pixels}")
        return self.options.data

    @property
    def images_per_step(self) -> int:
        """The images per step of timed runs: --batch-size, halved until the work fits."""
        work = sum(cost.forward_flops for cost in self.costs)
        images, least = self.options.batch_size, max(LEAST_IMAGES, *self.options.numbers_of_ranks)
        while not cuda.is_available() and images * work > MOST_WORK and images >= 2 * least:
            images //= 2
        return images

    @property
    def profiled(self) -> Arm:
        """The run that measures the model once, with all ranks at work."""
        config = replace(self._timed("auto", self.ranks), profile=str(self._profile))
        key = f"profile-{self.model.key}-{self.ranks}"
        return Arm(key, f"{self.model.key}, {self.ranks} ranks, profile", self.ranks, config)

    def optima(self) -> dict[str, Optimum]:
        """Return the optima of the paper's objective on measured times, by how it is read.

        Raises:
            UsageError: if there is no profile, or it is of other settings.
        """
        config, names = self._timed("auto", self.ranks), [cost.name for cost in self.costs]
        subjects = profilefile.subjects_of(config, self.costs, self.pixels)
        profile = profilefile.load(self._profile, subjects, names, self.ranks)
        if isinstance(profile, str):
            raise UsageError(
                f"{self._profile} is a profile of other settings ({profile}): choose another --to"
            )
        known, images = Known(self.costs, *profile), self.images_per_step
        return {reading: minimise(known, self.ranks, images, reading) for reading in READINGS}

    def timed(self, optimum: Optimum) -> dict[str, Arm]:
        """Return the timed runs by strategy, and write the plans that have no short form.

        Args:
            optimum: of the paper's objective with divided work.

        Raises:
            DataError: if a plan cannot be written.
        """
        arms = {}
        for name in STRATEGIES:
            if name not in TABLE_I and self.model not in self.options.with_accuracy:
                continue
            plan = plan_of(name, self.costs, self.ranks, optimum)
            if plan is None:
                continue
            key = f"{self.model.key}-{name.replace(' ', '-')}"
            if not isinstance(plan, str):
                plan = write(Path(self.options.to), f"{key}-{self.ranks}", plan)
            ranks = 1 if name == SINGLE else self.ranks
            title = f"{self.model.key}, {name}, timed"
            arms[name] = Arm(f"timed-{key}-{ranks}", title, ranks, self._timed(plan, ranks))
        return arms

    def accuracy(self, timed: Mapping[str, Arm]) -> dict[str, Arm]:
        """Return the runs for accuracy by strategy: on real images, and on the most ranks."""
        options = self.options
        is_real = self.data == options.data and self.model in options.with_accuracy
        if not (is_real and options.epochs and self.ranks == options.numbers_of_ranks[-1]):
            return {}
        return {
            name: Arm(
                arm.key.replace("timed", "accuracy", 1),
                f"{self.model.key}, {name}, accuracy",
                arm.ranks,
                replace(self._config(arm.config.plan or ""), epochs=options.epochs),
            )
            for name, arm in timed.items()
            if name in TABLE_I
        }

    @property
    def _profile(self) -> Path:
        return Path(self.options.to) / "profiles" / f"{self.model.key}-{self.ranks}.json"

    def _config(self, plan: str) -> TrainConfig:
        return TrainConfig(
            model=self.model.name,
            data=self.data,
            plan=plan,
            batch_size=self.options.batch_size,
            image_size=self.model.pixels,
        )

    def _timed(self, plan: str, ranks: int) -> TrainConfig:
        """Return the configuration of a timed run.

        Without GPUs a device of the paper is one core, to which a rank is bound if there are
        enough.
        """
        has_gpus = cuda.is_available()
        return replace(
            self._config(plan),
            batch_size=self.images_per_step,
            threads=None if has_gpus else 1,
            bind=not has_gpus and ranks <= devices(),
            max_steps=self.options.steps_of(self.model),
            eval_every=0,
            log_every=1,
        )
