"""The script of a job: what submitit is told."""

from typing import Any

from hvdtrain.jobs.options import MEMORY, OF_SBATCH, JobOptions
from hvdtrain.jobs.site import Site

# A job that ends with 75 has saved: it goes back into the queue where the site allows it.
REQUEUE = (
    "code=$?",
    "if ((code == 75)); then",
    "    scontrol requeue $SLURM_JOB_ID && sleep 60",
    "fi",
    "exit $code",
)
KEEP_CODE = ("exit $?",)
# A signal waits until the program can obey it, where coreutils (8.31) can arrange that.
BLOCK = (
    "block='env --block-signal=HUP,TERM,USR1,USR2'",
    "$block true 2>/dev/null || block=",
)
BLOCKED = "$block"  # before a command, in the script


def parameters(job: JobOptions, site: Site, ranks_per_node: int, name: str) -> dict[str, Any]:
    """The parameters of submitit's SlurmExecutor for a job.

    Args:
        ranks_per_node: tasks of each node.
        name: of the job.

    Raises:
        UsageError: as `SlurmOptions.sbatch_options`.
    """
    options: dict[str, Any] = {"requeue" if site.requeue else "no-requeue": True}
    if job.gpus_per_node:
        kind, _, model = site.gpus.partition(":")
        wanted = f"{model}:{job.gpus_per_node}" if model else str(job.gpus_per_node)
        options |= {"gres": f"gpu:{wanted}"} if kind == "gres" else {"gpus-per-node": wanted}
    named = {key: getattr(job, key) for key in OF_SBATCH if getattr(job, key) is not None}
    own = job.sbatch_options()
    of_site = {key: value for key, value in site.options.items() if key not in named}
    if "mem" in named or not own.keys().isdisjoint(MEMORY):
        # sbatch takes one of the three: the site's gives way.
        of_site = {key: value for key, value in of_site.items() if key not in ("mem", *MEMORY)}
    options |= of_site | own
    values = {key: named.get(key, getattr(site, key)) for key in OF_SBATCH}
    if not options.keys().isdisjoint(MEMORY):
        values["mem"] = None
    found = {
        "job_name": name,
        **values,
        "time": job.minutes(),
        "nodes": job.nodes,
        "ntasks_per_node": ranks_per_node,
        "cpus_per_task": job.cpus_per_rank,
        "signal_delay_s": site.warning_seconds,
        # Since Slurm 22.05 srun has to be told again how many CPUs a task has.
        "setup": [*site.setup, "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK", *BLOCK],
        "teardown": list(REQUEUE if site.requeue else KEEP_CODE),
        "srun_args": [f"--mpi={site.mpi}", "--kill-on-bad-exit=1"],
        "additional_parameters": options,
    }
    return {key: value for key, value in found.items() if value is not None}
