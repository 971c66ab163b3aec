#!/usr/bin/env bash
# One benchmark over two machines. Start it on both, at about the same time, with the name of the first one:
#
#   examples/torchrun/two_nodes.sh node1 train-bench --model resnet50
#
# RANKS is the number of processes on each machine (its GPUs, say), INTERFACE the network card between them, where a
# machine has several. Rank 0's machine writes the run directory.
set -euo pipefail

first=${1:?name of the first machine}
shift

if [ -n "${INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi

exec torchrun --nnodes 2 --nproc-per-node "${RANKS:-1}" \
    --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29400}" --rdzv-id "${RUN:-gpubench}" \
    -m gpubench "$@"
