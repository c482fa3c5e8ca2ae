"""The diagnosis of a bad step: it is repeated without an update, and each component is watched."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hvdtrain.engine.session import StepInput
from hvdtrain.health.failure import Sighting, bad_step_words
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.parallel.stage import Part, StageModel
from hvdtrain.parallel.step import Step, copied_buffers, restore_buffers
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.program import Program
from hvdtrain.sync.gradients import all_finite
from hvdtrain.world import World


def diagnose(runtime: Runtime, plan: Plan, world: World, program: Program, step: StepInput) -> str:
    """Repeat a step without updating anything, and return what is wrong with it. Collective.

    The caller has reset the random generators to their state before the step.
    """
    sightings, places = list[Sighting](), _places(plan)
    kept = copied_buffers(runtime.parts)
    observer, activity = runtime.observer, runtime.observer.activity
    events, observer.events = observer.events, None
    assert activity is not None
    newest, _ = activity.now()
    activity.step(step.step)
    with _watched(runtime.parts, places, world.rank, sightings):
        gradients = runtime.gradients(Step(program, step.feed.images, step.feed.labels))
    observer.events = events
    activity.step(newest)
    restore_buffers(runtime.parts, kept)
    with activity.doing("gathering what all ranks saw in a bad step"):
        reports = world.gather((sightings, _norms(runtime.parts, gradients)))
    seen = [sighting for theirs, _ in reports for sighting in theirs]
    norms = _largest([theirs for _, theirs in reports])
    return bad_step_words(seen, norms, places)


def _largest(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest norm of each component over all ranks, or NaN if one of them is NaN.

    Ranks that do not share their gradients have different norms, and a server has none but zeros.
    """
    largest: dict[str, float] = {}
    for name, norm in (item for report in reports for item in report.items()):
        if name not in largest or norm > largest[name] or math.isnan(norm):
            largest[name] = norm
    return largest


def _norms(parts: Mapping[int, Part], gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norm of the gradients of each component that this rank holds."""
    norms = {}
    for part in parts.values():
        for component in part.model.components:
            values = [
                value for name, value in gradients.items() if name.startswith(f"{component}.")
            ]
            if values:
                norms[component] = float(torch.nn.utils.get_total_norm(values))
    return norms


def _places(plan: Plan) -> dict[str, int]:
    names = [name for stage in plan.stages for name in stage.components]
    return {name: place for place, name in enumerate(names)}


@contextmanager
def _watched(
    parts: Mapping[int, Part], places: Mapping[str, int], rank: int, sightings: list[Sighting]
) -> Iterator[None]:
    """Note the components whose output is not finite although their input is."""
    models = [part.model for part in parts.values()]
    before = [dict(model.calls) for model in models]
    for model in models:
        for name, call in model.calls.items():
            model.calls[name] = _looking(model, name, call, places[name], rank, sightings)
    try:
        yield
    finally:
        for model, calls in zip(models, before, strict=True):
            model.calls = calls


def _looking(
    model: StageModel,
    name: str,
    call: Callable[[Tensor], Tensor],
    place: int,
    rank: int,
    sightings: list[Sighting],
) -> Callable[[Tensor], Tensor]:
    def look(inputs: Tensor) -> Tensor:
        output = call(inputs)
        if not all_finite([output.detach()]) and all_finite([inputs.detach()]):
            weights = list(model.components[name].parameters())
            has_bad_weights = not all_finite([value.detach() for value in weights])
            sightings.append(Sighting(place, name, rank, has_bad_weights))
        return output

    return look
