"""The script of a job, as parameters for submitit."""

from typing import Any

from hvdtrain.jobs.options import MEMORY, SBATCH_OPTIONS, JobOptions
from hvdtrain.jobs.site import Site

# A job that exits with 75 has saved: it is requeued if the site allows that.
REQUEUE = (
    "code=$?",
    "if ((code == 75)); then",
    "    scontrol requeue $SLURM_JOB_ID && sleep 60",
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


def parameters(job: JobOptions, site: Site, ranks_per_node: int, name: str) -> dict[str, Any]:
    """Return the parameters of submitit's SlurmExecutor for a job.

    Args:
        ranks_per_node: tasks per node.
        name: name of the job.

    Raises:
        UsageError: as `SlurmOptions.sbatch_options`.
    """
    options: dict[str, Any] = {"requeue" if site.requeue else "no-requeue": True}
    if job.gpus_per_node:
        kind, _, model = site.gpus.partition(":")
        gpus = f"{model}:{job.gpus_per_node}" if model else str(job.gpus_per_node)
        options |= {"gres": f"gpu:{gpus}"} if kind == "gres" else {"gpus-per-node": gpus}
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
