#!/usr/bin/env bash
# Ranks started by Open MPI instead of torchrun. DRY_RUN=1 prints the command.
#
#   NP=16 MASTER_ADDR=node0 scripts/mpirun.sh --config configs/gpt2_345m.yaml [--flag value ...]
#
# HOSTS="node0:8,node1:8" places the ranks; MASTER_ADDR is the host of rank 0 (not needed on one host).
# Relative paths are those of the folder where this is called; all hosts must see it.
set -euo pipefail
PROGRAM=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/pretrain_gpt.py # paths of the command are those of the caller's folder

LAUNCHER=(mpirun -np "${NP:-2}" --bind-to none)
if [[ -n ${HOSTS:-} ]]; then
    LAUNCHER+=(--host "$HOSTS")
fi
for name in MASTER_ADDR MASTER_PORT OMP_NUM_THREADS CUDA_DEVICE_MAX_CONNECTIONS; do
    if [[ -n ${!name:-} ]]; then
        LAUNCHER+=(-x "$name")
    fi
done

COMMAND=("${LAUNCHER[@]}" python "$PROGRAM" "$@")
if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "${COMMAND[@]}"
    echo
else
    exec "${COMMAND[@]}"
fi
