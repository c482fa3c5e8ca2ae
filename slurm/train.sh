# The common end of all .sbatch files in this folder: trains with one rank per task. Before the time
# limit, or when the job is preempted, all ranks save, and the job is requeued to resume from there.
# The arguments are those of `hvdtrain train`. RUN=DIR names the run folder (in an array each run
# adds its number); MPI=KIND is the value for srun --mpi (default: pmix).
set -uo pipefail

run=${RUN:-runs/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}
for argument; do
    if [[ $argument == --run || $argument == --run=* ]]; then
        echo "${0##*/}: --run is not possible in this script: use RUN=DIR sbatch ..." >&2
        exit 2
    fi
done
set -- "$@" --run "$run" --resume auto

# Since Slurm 22.05 srun does not inherit the number of CPUs per task from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# Signals are blocked until the program can handle them. `env` can do that since coreutils 8.31; with
# an older one a signal that comes this early is ignored: the warning is lost, but the job continues.
if env --block-signal=USR1 true 2>/dev/null; then
    block=(env --block-signal=HUP,TERM,USR1,USR2)
else
    block=(bash -c 'trap "" USR1 USR2; exec "$@"' hvdtrain)
fi
srun --mpi="${MPI:-pmix}" --kill-on-bad-exit=1 "${block[@]}" hvdtrain train "$@"
code=$?

if ((code == 75)); then
    # Saved. In an array, one element has the array's SLURM_JOB_ID: a requeue of it restarts all.
    # A successful requeue ends this script during the sleep.
    scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}" && sleep 60
    echo "$run is saved but not done: submit again with RUN=$run to resume" >&2
fi
exit "$code"
