#!/bin/sh
# Installs hvdtrain into /opt/hvdtrain of a Debian or Ubuntu image; Dockerfile and Apptainer.def run it.
#
#   install_image.sh SOURCE
#
# SOURCE is a copy of this repository. Variables:
#   MPI          wheel: Open MPI comes with the image, for the hybrid model (default)
#                none: no MPI and no Horovod, for the bind model; run hvdtrain setup --mpi system
#                when the MPI of the cluster is bound into the container
#   CPU          oldest processor that must run the image (default: x86-64-v3; armv8-a on ARM)
#   TORCH_INDEX  one more package index for PyTorch, such as that of its small CPU build
set -eu

source=$1
mpi=${MPI:-wheel}
export DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

case $mpi in wheel | none) ;; *) echo "MPI=$mpi is neither wheel nor none" >&2; exit 2 ;; esac
case ${CPU:-default}:$(uname -m) in
    default:aarch64) cpu=armv8-a ;;
    default:*) cpu=x86-64-v3 ;;
    *) cpu=$CPU ;;
esac

apt-get update -qq
apt-get install -y -qq --no-install-recommends \
    ca-certificates g++ cmake make python3-dev python3-venv
rm -rf /var/lib/apt/lists/*

python3 -m venv /opt/hvdtrain
PATH=/opt/hvdtrain/bin:$PATH
export PATH
pip install --quiet ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    --constraint "$source/constraints.txt" "$source"
if [ "$mpi" = wheel ]; then
    hvdtrain setup --mpi wheel --cpu "$cpu" --constraint "$source/constraints.txt" --cache /tmp/hvdtrain-cache
    rm -rf /tmp/hvdtrain-cache
fi
hvdtrain --version
