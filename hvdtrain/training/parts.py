"""From a plan to what one rank holds of it: modules, gradients, optimizers, boundaries."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase

import torch

from hvdtrain import decay, world
from hvdtrain.arguments import nearest
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError, one_line
from hvdtrain.models.component import Component, build_component
from hvdtrain.parallel.batchnorm import synchronise
from hvdtrain.parallel.exchange import Exchange
from hvdtrain.parallel.form import Form
from hvdtrain.parallel.part import Part
from hvdtrain.parallel.plan import Plan
from hvdtrain.parallel.reduce import Gradients, SerialGradients, horovod_gradients
from hvdtrain.parallel.stage import DTYPES, StageModel
from hvdtrain.parallel.states import States
from hvdtrain.training.optimizer import make_optimizer
from hvdtrain.world import World

PROBED_IMAGES = 2  # one alone does not show its memory format
COMPILED_VARIANTS = 1024


def build_parts(
    config: TrainConfig,
    plan: Plan,
    components: Sequence[Component],
    here: World,
    exchange: Exchange | None,
    device: torch.device,
) -> dict[int, Part]:
    """What this rank holds, by stage. Collective."""
    models = _models(config, plan, components, here.rank, device)
    synchronised = _synchronise(config, plan, models, exchange)
    gradients = _gradients(plan, models, here)
    return {
        number: Part(
            model,
            gradients[number],
            own_optimizer(config, model),
            is_first_replica=here.rank == plan.stages[number].ranks[0],
            synchronised=number in synchronised,
        )
        for number, model in models.items()
    }


def build_parts_alone(
    config: TrainConfig,
    plan: Plan,
    components: Sequence[Component],
    rank: int,
    device: torch.device,
) -> dict[int, Part]:
    """What `rank` would hold, by stage, in a process that agrees with no other."""
    return {
        number: Part(model, SerialGradients(model.parameters()), own_optimizer(config, model))
        for number, model in _models(config, plan, components, rank, device).items()
    }


def _models(
    config: TrainConfig,
    plan: Plan,
    components: Sequence[Component],
    rank: int,
    device: torch.device,
) -> dict[int, StageModel]:
    recomputed = recomputed_components(config.recompute, [part.name for part in components])
    by_name = {part.name: part for part in components}
    return {
        number: build_model(
            [by_name[name] for name in plan.stages[number].components], config, device, recomputed
        )
        for number in plan.stages_of(rank)
    }


def own_optimizer(config: TrainConfig, model: StageModel) -> torch.optim.Optimizer | None:
    """The optimizer of some components; None where nothing is trained."""
    parameters = model.parameters()
    free = model.undecayed(decay.parse(config.no_decay))
    return make_optimizer(config, parameters, free) if parameters else None


def build_model(
    components: Sequence[Component],
    config: TrainConfig,
    device: torch.device,
    recomputed: Collection[str] = (),
) -> StageModel:
    """Build the components with their weights in channels_last order, compiled if asked for."""
    dtype = DTYPES[config.precision]
    built = {part.name: build_component(part, config.seed, device, dtype) for part in components}
    for module in built.values():
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        module.train()  # whatever its constructor left: as after each evaluation
    return StageModel(built, recomputed, config.compile)


def check_compiler(device: torch.device) -> None:
    """Compile something small, and allow for as many variants as a model has components.

    Raises:
        UsageError: if torch.compile does not work on this machine.
    """
    # All components run through one function of torch's, of which it would compile only a few.
    torch._dynamo.config.recompile_limit = COMPILED_VARIANTS
    torch._dynamo.config.accumulated_recompile_limit = 4 * COMPILED_VARIANTS
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(4, device=device))
    except Exception as error:
        raise UsageError(
            f"--compile does not work here ({one_line(error)}): it needs a C++ compiler, on a GPU "
            "Triton; leave --compile out"
        ) from None


def what_forbids_halves(config: TrainConfig, names: Sequence[str]) -> str:
    """The option that does not allow a backward in halves; empty if none does."""
    if config.compile:
        return "--compile"
    if recomputed_components(config.recompute, names):
        return "--recompute"
    return "--batch-norm sync" if config.batch_norm == "sync" else ""


def recomputed_components(patterns: str | None, names: Sequence[str]) -> frozenset[str]:
    """The components that `--recompute` means.

    Raises:
        UsageError: for a name or pattern that means none.
    """
    found: set[str] = set()
    for pattern in filter(None, (word.strip() for word in (patterns or "").split(","))):
        meant = [name for name in names if pattern == "all" or fnmatchcase(name, pattern)]
        if not meant:
            raise UsageError(
                f"--recompute {pattern} names no component of the model{nearest(pattern, names)}"
            )
        found.update(meant)
    return frozenset(found)


def probe_forms(
    plan: Plan,
    parts: Mapping[int, Part],
    image_size: int,
    config: TrainConfig,
    here: World,
    device: torch.device,
) -> list[Form]:
    """What each stage is given, found by handing two black images through. Collective.

    Unlike a run on the meta device this shows memory formats, and dtypes under autocast.

    Raises:
        UsageError: if the plan cuts where no gradient can pass.
    """
    forms = [Form((3, image_size, image_size), DTYPES[config.precision], channels_last=True)]
    for number, stage in enumerate(plan.stages[:-1]):
        found = None
        if here.rank == stage.ranks[0]:
            given = forms[-1].empty(PROBED_IMAGES, device).zero_()
            found = _emitted(parts[number].model, given, config.precision)
        form = here.broadcast(found, stage.ranks[0])
        if not form.dtype.is_floating_point:
            raise UsageError(
                f"the plan cuts behind {stage.components[-1]}, which emits {form.dtype}: "
                "no gradient can come back there; cut elsewhere"
            )
        forms.append(form)
    return forms


def _emitted(model: StageModel, given: torch.Tensor, precision: str) -> Form:
    model.train(False)
    autocast = torch.autocast(given.device.type, dtype=torch.bfloat16)
    with torch.no_grad(), autocast if precision == "bf16" else nullcontext():
        form = Form.of(model(given))
    model.train(True)
    return form


def _synchronise(
    config: TrainConfig, plan: Plan, models: Mapping[int, StageModel], exchange: Exchange | None
) -> frozenset[int]:
    """Let batch norms of replicated stages communicate; the stages of this rank that have any."""
    found = set()
    for number, stage in enumerate(plan.stages):
        if config.batch_norm == "local" or len(stage.ranks) == 1:
            continue
        assert exchange is not None
        gather = exchange.gatherer(stage.ranks)
        if number in models:
            layers = [synchronise(each, gather) for each in models[number].components.values()]
            found |= {number} if sum(layers) else set()
    return frozenset(found)


def _gradients(plan: Plan, models: Mapping[int, StageModel], here: World) -> dict[int, Gradients]:
    """How the replicas of each of this rank's stages agree."""
    found: dict[int, Gradients] = {}
    if all(len(stage.ranks) == 1 for stage in plan.stages):
        return {number: SerialGradients(model.parameters()) for number, model in models.items()}
    own = [value for model in models.values() for value in model.parameters().values()]
    largest = max(here.gather(sum(value.numel() * value.element_size() for value in own)))
    groups = [stage.ranks for stage in plan.stages if len(stage.ranks) > 1]
    horovod = world.start_horovod(largest, groups)
    for number, stage in enumerate(plan.stages):
        process_set = world.process_set(stage.ranks) if len(stage.ranks) > 1 else None
        if number not in models:
            continue
        model = models[number]
        if process_set is None or not model.tensors():
            found[number] = SerialGradients(model.parameters())
        else:
            states = States(model.states, model.put)
            found[number] = horovod_gradients(
                *(model.parameters(), model.statistics(), states, horovod, process_set),
                name=f"stage{number}",
            )
    return found
