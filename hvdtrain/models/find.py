"""Find a model's function by `package.module:function` and call it, without importing torch."""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from hvdtrain.errors import HvdtrainError, UsageError, one_line
from hvdtrain.options.givenmodel import GivenModel

ModelFunction = Callable[..., object]


def find_function(reference: str) -> ModelFunction:
    """Return the function that `package.module:function` names, or that was passed in Python.

    Raises:
        UsageError: if there is none, or its module cannot be imported.
    """
    if isinstance(reference, GivenModel):
        if not callable(reference.model):
            raise UsageError(f"model {reference} is not a function: pass one")
        passed: ModelFunction = reference.model
        return passed
    module_name, _, function_name = reference.partition(":")
    parts = [*module_name.split("."), function_name]
    if module_name.endswith(".py") or not all(part.isidentifier() for part in parts):
        raise UsageError(
            f"model {reference!r} is not of the form package.module:function: "
            "write folder.file:function for folder/file.py, without '/' and '.py'"
        )
    module = _import_module(reference, module_name)
    function: ModelFunction | None = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(function_name, names)
        hint = f"did you mean {' or '.join(near)}?" if near else "define it, or name another"
        raise UsageError(f"module {module_name!r} has no function {function_name!r}: {hint}")
    return function


def patch_argument(
    model: str, function: ModelFunction, patch_size: int | None
) -> dict[str, int | None]:
    """Return the keyword argument that passes `patch_size` to `function`, if it is set.

    Raises:
        UsageError: if the function has no such parameter.
    """
    if patch_size is None:
        return {}
    if "patch_size" not in inspect.signature(function).parameters:
        refuse_patches(model, patch_size)
    return {"patch_size": patch_size}


def refuse_patches(model: str, patch_size: int | None) -> None:
    """Raise UsageError if a patch size is set, for a model that has none."""
    if patch_size is not None:
        raise UsageError(f"model {model!r} has no patches: leave out the patch size {patch_size}")


def call(
    model: str,
    function: ModelFunction,
    classes: int,
    image_size: int,
    patch: dict[str, int | None],
) -> object:
    """Call a user's function.

    Raises:
        UsageError: if the function raises; it contains a command that shows the traceback.
    """
    try:
        return function(classes, image_size, **patch)
    except HvdtrainError:
        raise
    except (Exception, SystemExit) as error:
        module_name, _, function_name = model.partition(":")
        arguments = ", ".join(
            [f"{classes}, {image_size}", *(f"{k}={v}" for k, v in patch.items())]
        )
        where = f'run python -c "import {module_name} as m; m.{function_name}({arguments})"'
        if isinstance(model, GivenModel):
            where = f"call it with ({arguments})"
        raise UsageError(
            f"model {model!r} failed with {one_line(error)}: to see where, {where}"
        ) from error


def _import_module(reference: str, module_name: str) -> ModuleType:
    """Import a module as `python -m` would, with the current folder first on the path."""
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise UsageError(
                f"model {reference!r}: there is no module {missing!r} in this folder or on "
                f"PYTHONPATH: run from the folder that holds {missing.partition('.')[0]}, or "
                "correct the name"
            ) from error
        raise UsageError(
            f"model {reference!r}: importing it failed with {one_line(error)}: to see where, run "
            f'python -c "import {module_name}"'
        ) from error
