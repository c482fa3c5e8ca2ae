# The common end of the scripts in this folder: trains, and sets `code` to the exit code.
#
# The script sets `ranks`, `nodes` and `run`, and its arguments are those of `hvdtrain train`. A signal
# to this shell, such as a warning before the time limit, lets all ranks save; `code` is then 75, and
# the script asks its scheduler for another start, which resumes.
#   MPIRUN="mpirun --hostfile $hosts"   the command that starts ranks on several nodes
set -uo pipefail

for argument; do
    if [[ $argument == --run || $argument == --run=* ]]; then
        echo "${0##*/}: --run is not possible in this script: use RUN=DIR" >&2
        exit 2
    fi
done
set -- "$@" --run "$run" --resume auto

child= ended=
# Open MPI's mpirun passes SIGUSR1 on to its ranks, and so does hvdtrain's own launcher.
trap '[[ -z $child ]] || kill -USR1 "$child"' USR1 USR2
trap 'ended=1; [[ -z $child ]] || kill -USR1 "$child"' TERM # the job is deleted: no other start
if ((nodes == 1)); then
    hvdtrain train --ranks "$ranks" "$@" &
else
    read -ra mpirun <<<"${MPIRUN:-mpirun}"
    "${mpirun[@]}" -n "$ranks" hvdtrain train "$@" &
fi
child=$!
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do # a signal has ended the wait, and ranks are saving
    wait "$child"
    code=$?
done
((code != 75)) || echo "$run is saved but not done" >&2
