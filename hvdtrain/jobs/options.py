"""Options of `hvdtrain jobs`, in addition to the options of `train`."""

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.options import requests
from hvdtrain.options.fields import about

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
