"""The commands for plans."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain import launch, models
from hvdtrain.commands import as_json, in_one_process, started_ranks
from hvdtrain.errors import CheckFailed
from hvdtrain.planner.options import PlanConfig


def plan_show(arguments: Sequence[str], **values: Any) -> int:
    """Print the stages, memory and timeline of a plan for a model."""
    in_one_process("plan show")
    from hvdtrain.check import show

    config = PlanConfig(**values)
    description = show.show(config)
    if config.picture is not None:
        assert description.plan is not None
        from hvdtrain.study.planplots import draw_strategies

        draw_strategies(description.plan, Path(config.picture))
    print(as_json(description.content) if config.json else description.text)
    return 0


def plan_simulate(arguments: Sequence[str], **values: Any) -> int:
    """Simulate a plan for a model with times measured on this machine."""
    in_one_process("plan simulate")
    from hvdtrain.check import show

    config = PlanConfig(**values)
    description = show.simulate(config)
    print(as_json(description.content) if config.json else description.text)
    return 0


def plan_check(arguments: Sequence[str], **values: Any) -> int:
    """Check that a plan computes the gradients of the serial step."""
    config = PlanConfig(**values)
    started = started_ranks()
    if started.size == 1 and config.ranks > 1:
        models.check_name(config.model)
        return launch.run(config.ranks, arguments)
    from hvdtrain.check import show

    parity = show.check(config)
    if started.rank == 0:
        names = show.component_names(config)
        text = as_json(parity.as_json(names)) if config.json else parity.as_text(names)
        print(text, flush=True)
    return 0 if parity.is_within else CheckFailed.exit_code
