"""The commands of plans."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain import launch, launchers, models
from hvdtrain.commands import common
from hvdtrain.errors import CheckFailed
from hvdtrain.planner.options import PlanConfig


def plan_show(arguments: Sequence[str], **values: Any) -> int:
    """What a plan means for a model."""
    common.in_one_process("plan show")
    from hvdtrain.training import plancommands

    config = PlanConfig(**values)
    found = plancommands.show(config)
    if config.picture is not None:
        from hvdtrain.study.plan_pictures import draw_strategies

        draw_strategies(found.plan, Path(config.picture))
    print(common.as_json(found.as_json()) if values["json"] else found.as_text())
    return 0


def plan_simulate(arguments: Sequence[str], **values: Any) -> int:
    """What a plan means for a model, with times measured here."""
    common.in_one_process("plan simulate")
    from hvdtrain.training import plancommands

    found = plancommands.simulate(PlanConfig(**values))
    print(common.as_json(found.as_json()) if values["json"] else found.as_text())
    return 0


def plan_check(arguments: Sequence[str], **values: Any) -> int:
    """Does a plan compute the gradients of the serial step?"""
    config = PlanConfig(**values)
    started = launchers.detect(os.environ)
    launchers.check_pmix(started, os.environ)
    if started.size == 1 and config.ranks > 1:
        models.check_name(config.model)
        return launch.run(config.ranks, arguments)
    from hvdtrain.training import plancommands

    parity = plancommands.check(config)
    if started.rank == 0:
        names = plancommands.component_names(config)
        as_json = config.json
        print(
            common.as_json(plancommands.parity_as_json(parity, names))
            if as_json
            else plancommands.parity_as_text(parity, names),
            flush=True,
        )
    return 0 if parity.is_within else CheckFailed.exit_code
