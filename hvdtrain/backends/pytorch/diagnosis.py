"""Diagnosis of a bad step: the step is repeated, and the output of every component is checked.

A bad step makes no update and its random draws are seeded, so that it can be repeated as long as
its images are in memory. The ranks learn of it after the next step (on a GPU after the one after
that), and by then the weights have the update of that step, if it was a good one.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hvdtrain.health.badstep import Sighting, as_words
from hvdtrain.parallel.reduce import all_finite
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.parallel.stage import Part, StageModel
from hvdtrain.parallel.step import Step, copied_buffers, restore_buffers
from hvdtrain.plan.plan import Plan
from hvdtrain.plan.program import Program
from hvdtrain.training.session import StepRecord
from hvdtrain.world import World


def diagnose(
    runtime: Runtime, plan: Plan, world: World, program: Program, step: StepRecord
) -> str:
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
    norms = {name: norm for _, theirs in reports for name, norm in theirs.items()}
    return as_words(seen, norms, places)


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
