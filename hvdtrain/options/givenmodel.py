"""Models and losses that are passed in Python: the name in a configuration, with the object.

Nothing here loads torch.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UsageError

# The type of a configuration's model or loss: a name on the command line, or any in Python.
if TYPE_CHECKING:
    Model = Any
else:
    Model = str
PREFIX = "in-python:"  # no module can have this name
# Options besides the model that may be a user's own function, and what that is.
SEAMS = {
    "loss": "a function of (outputs, targets) or an hvdtrain.Loss",
    "optimizer": "a function of (parameters, lr) that returns a torch.optim.Optimizer",
    "lr_schedule": "a function of the share of the run that is done",
    "augment": "a function of (images, seeds, epoch)",
}


class GivenModel(str):
    """The name of a model or a loss that was passed in Python, which carries it.

    Copies and pickles are plain names: a run folder and other ranks receive the name alone.

    Attributes:
        model: a function of (classes, image_size), a list of components, or a torch module; or a
            loss.
    """

    model: Any

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


class ModelInConfig:
    """Base of a configuration with a model and other seams: what is not a name gets one."""

    model: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", named(self.model))
        for name, what in SEAMS.items():
            if not hasattr(self, name):  # of the commands that have fewer of them
                continue
            value = getattr(self, name)
            if not isinstance(value, str) and not callable(value):
                raise UsageError(f"{name} is a {type(value).__name__}: pass a name, or {what}")
            object.__setattr__(self, name, named(value))


def named(model: object) -> str:
    """Return the name of a model for a configuration.

    A name stays as it is. A function that the command line finds becomes
    `package.module:function`, and anything else a GivenModel.

    Raises:
        UsageError: if it is none of the kinds of a model.
    """
    if isinstance(model, str):
        return model
    is_module = is_torch_module(model)
    if not (is_module or callable(model) or isinstance(model, list | tuple)):
        raise UsageError(
            f"model is a {type(model).__name__}: pass a name, a function of (classes, "
            "image_size), a list of components or a torch.nn.Module"
        )
    if not is_module and (reference := _reference(model)) is not None:
        return reference
    if isinstance(model, list | tuple):
        name = "components"
    else:
        name = getattr(model, "__name__", type(model).__name__).strip("<>")
    carrier = GivenModel(f"{PREFIX}{name}")
    carrier.model = model
    return carrier


def is_torch_module(model: object) -> bool:
    """Return whether an object is a torch.nn.Module, without loading torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _reference(model: object) -> str | None:
    """Return the `package.module:function` that names this very function, None if none does."""
    module, name = getattr(model, "__module__", None), getattr(model, "__name__", "")
    if not isinstance(module, str) or module == "__main__" or not name.isidentifier():
        return None
    if not all(part.isidentifier() for part in module.split(".")):
        return None
    is_named = getattr(sys.modules.get(module), name, None) is model
    return f"{module}:{name}" if is_named else None


def beside(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values of a configuration file, with modules that lie in its folder as files.

    So `module:function` in a file is found from any current folder.
    """

    def placed(value: Any) -> Any:
        if isinstance(value, list):
            return [placed(member) for member in value]
        place, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        file = folder / f"{place.removesuffix('.py')}.py"
        return f"{file.resolve()}:{name}" if place and file.is_file() else value

    seams = ("model", "callback", *SEAMS)
    return {name: placed(value) if name in seams else value for name, value in values.items()}


def is_reference(value: str) -> bool:
    """Return whether a value is a user's function: `module:function`, or passed in Python."""
    place, _, function = value.rpartition(":")
    return isinstance(value, GivenModel) or (place != "" and function.isidentifier())


def is_same_code(one: Any, other: Any) -> bool:
    """Return whether two references name the same function of a file, wherever the file lies."""
    names = [str(value).rpartition("/")[2] for value in (one, other)]
    return names[0] == names[1] and ".py:" in names[0]


def refuse_lost(model: str, kind: str = "model") -> None:
    """Refuse the bare name of a model or a loss that was passed in Python.

    Raises:
        UsageError: with what to do.
    """
    if model.startswith(PREFIX) and not isinstance(model, GivenModel):
        raise UsageError(
            f"{kind} {model} was passed in Python, and no file holds it: resume or use the run in "
            f"the script that made it, or write the {kind} as package.module:function"
        )
