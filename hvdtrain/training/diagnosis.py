"""Where a bad step went wrong: it is run again, and what every component emits is looked at.

No update was made from a bad step, and what it drew at random is seeded, so that it can be run
again as long as its images are at hand. The ranks learn of it when the step after it is done (on a
GPU the one after that), whose update, if it was a good one, the weights have taken by then.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hvdtrain.parallel.part import Part
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.program import Program
from hvdtrain.parallel.reduce import all_finite
from hvdtrain.parallel.runtime import Runtime
from hvdtrain.parallel.stage import StageModel
from hvdtrain.parallel.step import Step
from hvdtrain.parallel.update import copied_buffers, restore_buffers
from hvdtrain.training.badstep import Sighting, in_words
from hvdtrain.training.session import Taken
from hvdtrain.world import World


def diagnose(runtime: Runtime, plan: Plan, here: World, program: Program, taken: Taken) -> str:
    """Run a step again without updating anything; what is wrong with it, in words. Collective.

    The generators are as they were when the step began.
    """
    sightings, places = list[Sighting](), _places(plan)
    kept = copied_buffers(runtime.parts)
    events, runtime.events = runtime.events, None
    assert runtime.activity is not None
    newest, _ = runtime.activity.now()
    runtime.activity.step(taken.step)
    with _watched(runtime.parts, places, here.rank, sightings):
        gradients = runtime.gradients(program, Step(taken.feed.images, taken.feed.labels))
    runtime.events = events
    runtime.activity.step(newest)
    restore_buffers(runtime.parts, kept)
    with runtime.activity.doing("gathering what each rank found in a bad step"):
        told = here.gather((sightings, _norms(runtime.parts, gradients)))
    seen = [sighting for theirs, _ in told for sighting in theirs]
    norms = {name: norm for _, theirs in told for name, norm in theirs.items()}
    return in_words(seen, norms, places)


def _norms(parts: Mapping[int, Part], gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """The norm of the gradients of each component that this rank holds."""
    found = {}
    for part in parts.values():
        for component in part.model.components:
            own = [value for name, value in gradients.items() if name.startswith(f"{component}.")]
            if own:
                found[component] = float(torch.nn.utils.get_total_norm(own))
    return found


def _places(plan: Plan) -> dict[str, int]:
    names = [name for stage in plan.stages for name in stage.components]
    return {name: place for place, name in enumerate(names)}


@contextmanager
def _watched(
    parts: Mapping[int, Part], places: Mapping[str, int], rank: int, sightings: list[Sighting]
) -> Iterator[None]:
    """Look at what each component emits from what is finite."""
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
    def look(given: Tensor) -> Tensor:
        output = call(given)
        if not all_finite([output.detach()]) and all_finite([given.detach()]):
            weights = list(model.components[name].parameters())
            has_bad_weights = not all_finite([value.detach() for value in weights])
            sightings.append(Sighting(place, name, rank, has_bad_weights))
        return output

    return look
