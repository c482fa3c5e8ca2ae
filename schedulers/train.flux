#!/bin/bash
# Flux: flux batch -N 1 -n 4 schedulers/train.flux --model resnet18 --data data/cifar10
#flux: --job-name=hvdtrain
#flux: --time-limit=4h
#flux: --signal=USR2@180s
#flux: --output=hvdtrain-{{id}}.log
# Lines for your site: #flux: --queue=..., #flux: --bank=..., and here: module load python openmpi

# source .venv/bin/activate
ranks=$(flux resource list -n -s up -o '{ncores}' | head -n 1)
nodes=$(flux resource list -n -s up -o '{nnodes}' | head -n 1)
ranks=${RANKS:-$ranks}
run=${RUN:-runs/hvdtrain-$(date +%Y%m%d-%H%M%S)-$$}
arguments=("$@")
MPIRUN=${MPIRUN:-flux run}
if ((nodes > 1)); then MPIRUN="$MPIRUN -N $nodes"; fi
source schedulers/train.sh
if ((code == 75)) && [[ -z $ended ]]; then # the enclosing instance takes the next start
    RUN=$run flux --parent batch -N "$nodes" -n "$ranks" schedulers/train.flux "${arguments[@]}"
fi
exit "$code"
