"""The check of who could have written the model code that a run folder names."""

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.host.files import ownership_problem
from hvdtrain.models import REGISTRY


def check(run: Path, model: str, is_trusted: bool) -> None:
    """Refuse to import the module of a run's model if another user could have written it.

    The run folder and its configuration name the module; the module and its folder hold the code,
    and the current folder what that imports. Folders above these are not checked, nor is this
    Python's installation.

    Args:
        model: its name in the configuration.
        is_trusted: import it in any case.

    Raises:
        UsageError: with the fault and what to do.
    """
    module = model.partition(":")[0]
    if model in REGISTRY or ":" not in model:
        return
    files, installed = _files(module), (sys.prefix, sys.base_prefix)
    checked = [file for file in files if not any(map(file.is_relative_to, installed))]
    folders = [Path.cwd(), *(file.parent for file in checked)]
    paths = [run, run / "config.yaml", *checked, *folders]
    paths += [folder / "__pycache__" for folder in folders]
    faults = (ownership_problem(path) for path in paths if path.exists())
    if not is_trusted and (fault := next(filter(None, faults), None)):
        raise UsageError(
            f"{run} names the model {model}, whose code would run, and {fault}; or give --trust"
        )
    source = files[-1] if files else module
    print(f"hvdtrain: importing {source}, which {run} names", file=sys.stderr)


def _files(module: str) -> list[Path]:
    """Return the files that an import executes for a module and its packages, without importing.

    The current folder comes first, as in `models.find`.
    """
    names, path, files = module.split("."), [str(Path.cwd()), *sys.path], []
    for count in range(1, len(names) + 1):
        spec = PathFinder.find_spec(".".join(names[:count]), path)
        if spec is None and count == 1 and names[0] not in sys.modules:
            spec = find_spec(names[0])  # as of a package that is installed in place
        if spec is None:
            break
        path = list(spec.submodule_search_locations or ())
        if spec.has_location and spec.origin:
            files.append(Path(spec.origin))
        elif path:
            files.append(Path(path[0]))
    return files
