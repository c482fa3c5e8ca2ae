"""hvdtrain trains image models on many processes and explains what it got for them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdtrain.api import plan_check as plan_check
    from hvdtrain.api import train as train
    from hvdtrain.config import TrainConfig as TrainConfig
    from hvdtrain.data import pack as pack
    from hvdtrain.models.component import Component as Component
    from hvdtrain.models.losses import Loss as Loss
    from hvdtrain.models.ready import cut as cut
    from hvdtrain.notebook import notebook_launch as notebook_launch
    from hvdtrain.plan.plan import Plan as Plan
    from hvdtrain.planner.options import PlanConfig as PlanConfig
    from hvdtrain.study.report import write as report
    from hvdtrain.training.console import Callback as Callback
    from hvdtrain.training.summary import TrainResult as TrainResult
    from hvdtrain.use.evaluate import evaluate as evaluate
    from hvdtrain.use.evaluate import predict as predict
    from hvdtrain.use.trained import export as export
    from hvdtrain.use.trained import load_classifier as load

__version__ = "0.3.0"

# Where each public name is defined: nothing is loaded before a name is used.
_PLACES = {
    "Callback": "hvdtrain.training.console:Callback",
    "Component": "hvdtrain.models.component:Component",
    "Loss": "hvdtrain.models.losses:Loss",
    "Plan": "hvdtrain.plan.plan:Plan",
    "PlanConfig": "hvdtrain.planner.options:PlanConfig",
    "TrainConfig": "hvdtrain.config:TrainConfig",
    "TrainResult": "hvdtrain.training.summary:TrainResult",
    "cut": "hvdtrain.models.ready:cut",
    "evaluate": "hvdtrain.use.evaluate:evaluate",
    "export": "hvdtrain.use.trained:export",
    "load": "hvdtrain.use.trained:load_classifier",
    "notebook_launch": "hvdtrain.notebook:notebook_launch",
    "pack": "hvdtrain.data:pack",
    "plan_check": "hvdtrain.api:plan_check",
    "predict": "hvdtrain.use.evaluate:predict",
    "report": "hvdtrain.study.report:write",
    "train": "hvdtrain.api:train",
}

__all__ = [
    "Callback",
    "Component",
    "Loss",
    "Plan",
    "PlanConfig",
    "TrainConfig",
    "TrainResult",
    "cut",
    "evaluate",
    "export",
    "load",
    "notebook_launch",
    "pack",
    "plan_check",
    "predict",
    "report",
    "train",
]


if not TYPE_CHECKING:  # mypy would accept any name

    def __getattr__(name: str) -> Any:
        """Load a public name at its first use."""
        if name not in _PLACES:
            raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
        module, _, attribute = _PLACES[name].partition(":")
        value = getattr(import_module(module), attribute)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
