# What every .sbatch file here ends with: trains with one rank a task. Before the time is up, or when
# the job is preempted, all ranks save, and the job goes back into the queue to go on from there.
# The arguments are those of `hvdtrain train`. RUN=DIR names the run folder (in an array each run
# adds its number), MPI=KIND the kind of srun --mpi (pmix).
set -uo pipefail

run=${RUN:-runs/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}
for argument; do
    if [[ $argument == --run || $argument == --run=* ]]; then
        echo "${0##*/}: --run is given by RUN here: sbatch with RUN=DIR in front of it" >&2
        exit 2
    fi
done
set -- "$@" --run "$run" --resume auto

# Since Slurm 22.05 srun has to be told again how many CPUs a task has.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# A signal before the program can obey it waits until it can. Before coreutils 8.31 no program blocks
# signals: there a warning that comes so early is lost, but ends nothing.
if env --block-signal=USR1 true 2>/dev/null; then
    block=(env --block-signal=HUP,TERM,USR1,USR2)
else
    block=(bash -c 'trap "" USR1 USR2; exec "$@"' hvdtrain)
fi
srun --mpi="${MPI:-pmix}" --kill-on-bad-exit=1 "${block[@]}" hvdtrain train "$@"
code=$?

if ((code == 75)); then
    # Saved. What follows does not happen where the site lets the job go back into the queue.
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
    echo "$run is saved and not done; to go on, submit again with RUN=$run" >&2
fi
exit "$code"
