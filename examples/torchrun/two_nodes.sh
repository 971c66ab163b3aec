#!/usr/bin/env bash
# Runs one benchmark on two machines. Start it on both at about the same time, with the name of the first machine:
#
#   examples/torchrun/two_nodes.sh node1 train-bench --model resnet50
#
# RANKS is the number of processes on each machine, for example the number of its GPUs. INTERFACE is the network
# interface to use if a machine has several. The machine of rank 0 writes the run directory.
set -euo pipefail

first=${1:?name of the first machine}
shift

if [ -n "${INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi

exec torchrun --nnodes 2 --nproc-per-node "${RANKS:-1}" \
    --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29400}" --rdzv-id "${RUN:-gpubench}" \
    -m gpubench "$@"
