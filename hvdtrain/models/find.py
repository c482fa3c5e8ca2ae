"""Find a model's function by `package.module:function` and call it, without importing torch."""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdtrain.data.index import InputSize
from hvdtrain.errors import HvdtrainError, UsageError, one_line, users_line
from hvdtrain.options.givenmodel import GivenModel, refuse_lost

IMAGE_CHANNELS = 3
ModelFunction = Callable[..., object]


def find_function(reference: str, kind: str = "model") -> ModelFunction:
    """Return the function that `package.module:function` names, or that was passed in Python.

    The module may also be a file, `folder/file.py:function`.

    Args:
        kind: of the function, for messages.

    Raises:
        UsageError: if there is none, or its module cannot be imported.
    """
    if isinstance(reference, GivenModel):
        if not callable(reference.model):
            raise UsageError(f"{kind} {reference} is not a function: pass one")
        passed: ModelFunction = reference.model
        return passed
    refuse_lost(reference, kind)
    place, _, function_name = reference.rpartition(":")
    file = Path(place) if place.endswith(".py") else None
    module_name = file.stem if file is not None else place
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise UsageError(
            f"{kind} {reference!r} is not of the form package.module:function or "
            "folder/file.py:function: correct it"
        )
    module = _import_module(f"{kind} {reference!r}", module_name, file)
    function: ModelFunction | None = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(function_name, names)
        hint = f"did you mean {' or '.join(near)}?" if near else "define it, or name another"
        raise UsageError(f"module {module_name!r} has no function {function_name!r}: {hint}")
    return function


def call_users(what: str, function: ModelFunction, *arguments: Any) -> Any:
    """Call a user's function.

    Args:
        what: the function, for the message.

    Raises:
        UsageError: if it fails, with its line.
    """
    try:
        return function(*arguments)
    except HvdtrainError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what} failed with {one_line(error)}{users_line(error)}") from error


def input_shape(size: InputSize) -> tuple[int, int, int]:
    """Return (channels, height, width) of inputs."""
    return size if isinstance(size, tuple) else (IMAGE_CHANNELS, size, size)


def refuse_patches(model: str, patch_size: int | None) -> None:
    """Raise UsageError if a patch size is set, for a model that has none."""
    if patch_size is not None:
        raise UsageError(f"model {model!r} has no patches: leave out the patch size {patch_size}")


def call(
    model: str,
    function: ModelFunction,
    classes: int,
    image_size: InputSize,
    patch_size: int | None,
) -> object:
    """Call the function of a model.

    Raises:
        UsageError: if its parameters cannot take the values, or if it raises; then the message
            contains a command that shows the traceback.
    """
    arguments = _arguments(model, function, classes, image_size, patch_size)
    try:
        return function(**arguments)
    except HvdtrainError:
        raise
    except (Exception, SystemExit) as error:
        place, _, function_name = model.rpartition(":")
        values = ", ".join(f"{name}={value}" for name, value in arguments.items())
        where = f'run python -c "{_import_line(place)} as m; m.{function_name}({values})"'
        if isinstance(model, GivenModel):
            where = f"call it with ({values})"
        raise UsageError(
            f"model {model!r} failed with {one_line(error)}: to see where, {where}"
        ) from error


def _arguments(
    model: str,
    function: ModelFunction,
    classes: int,
    image_size: InputSize,
    patch_size: int | None,
) -> dict[str, Any]:
    """Return the arguments of a model's function by the names of its parameters.

    `input_shape` is (channels, height, width). Without a parameter classes or num_classes,
    `**kwargs`, as of torchvision's functions, get num_classes.

    Raises:
        UsageError: if it requires something else, or cannot take a patch size that is set.
    """
    known: dict[str, Any] = {"classes": classes, "num_classes": classes}
    known |= {"image_size": image_size, "input_shape": input_shape(image_size)}
    try:
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        values = {one.name: known[one.name] for one in parameters if one.name in known}
        if isinstance(values.get("image_size"), tuple):
            raise TypeError(f"inputs {image_size} have no image_size")
        kinds = [one.kind for one in parameters]
        is_open = inspect.Parameter.VAR_KEYWORD in kinds
        if not values and inspect.Parameter.VAR_POSITIONAL in kinds:
            raise TypeError("*args hides its parameters")
        if is_open and not values.keys() - {"image_size", "input_shape"}:
            values["num_classes"] = classes
        if "patch_size" not in signature.parameters:
            refuse_patches(model, patch_size)
        elif patch_size is not None:
            values["patch_size"] = patch_size
        signature.bind(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"model {model!r} cannot take classes and image_size by name ({error}): call its "
            "parameters classes (or num_classes) and image_size, or input_shape for inputs of any "
            "shape, and give others a default"
        ) from error
    return values


def _import_line(place: str) -> str:
    """Return the Python that imports a module or a file."""
    if not place.endswith(".py"):
        return f"import {place}"
    return f"import sys; sys.path.insert(0, '{Path(place).parent}'); import {Path(place).stem}"


@cache  # a run asks in each step
def _import_module(what: str, module_name: str, file: Path | None) -> ModuleType:
    """Import a module as `python -m` would, with the folder of its file first on the path.

    Without a file that is the current folder, but not for our own models: what they import must
    not come from there.
    """
    if file is not None and not file.is_file():
        raise UsageError(f"{what}: there is no file {file}: correct the path")
    folder = str(Path.cwd() if file is None else file.parent.resolve())
    is_ours, is_known = module_name.startswith("hvdtrain."), file is None and "" in sys.path
    if not is_ours and folder not in sys.path and not is_known:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise UsageError(
                f"{what}: there is no module {missing!r} in this folder or on "
                f"PYTHONPATH: run from the folder that holds {missing.partition('.')[0]}, or "
                "correct the name"
            ) from error
        raise UsageError(
            f"{what}: importing it failed with {one_line(error)}: to see where, run "
            f'python -c "{_import_line(str(file or module_name))}"'
        ) from error
    if file is not None and not (module.__file__ and file.samefile(module.__file__)):
        raise UsageError(f"{what}: another module has the name {file.stem}: rename the file")
    return module
