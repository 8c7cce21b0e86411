#!/usr/bin/env bash
# A training on several nodes: run this on every node. DRY_RUN=1 prints the command.
#
#   MASTER_ADDR=node0 NNODES=4 NODE_RANK=0 scripts/pretrain_gpt_multinode.sh SAVE_DIR --config FILE.yaml [--flag ...]
#   MASTER_ADDR=node0 NNODES=4 NODE_RANK=0 scripts/pretrain_gpt_multinode.sh DATA_PREFIX TOKENIZER SAVE_DIR [--flag ...]
#
# NNODES is the number of nodes (4 if unset), NODE_RANK the number of this one, MASTER_ADDR the host of node 0. GPUS_PER_NODE (8) and
# MASTER_PORT (6000) may be set, too.
#
# The first trains what the file says. The second trains a Llama of 7 billion parameters, for 32 GPUs and more: model, layout and training
# are the flags below. With --config, there too, none of them is given.
#
# NNODES=2:4 MAX_RESTARTS=10 ...: after a failure the ranks start again, on as many of the nodes as there are (add --elastic N); a node may
# join at any time. MASTER_ADDR then serves the rendezvous alone: best a host that does not train, because that one must not fail.
#
# DATA_PREFIX: a .bin/.idx pair. TOKENIZER: a tokenizer.json or its directory. Under SLURM use slurm.sbatch, which
# starts the ranks by srun. Relative paths are those of the folder where this is called. The rendezvous is not encrypted: use a private network.
set -euo pipefail
PROGRAM=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/pretrain_gpt.py # paths of the command are those of the caller's folder

usage() {
    echo "usage: $0 SAVE_DIR --config FILE.yaml [--flag value ...]" >&2
    echo "       $0 DATA_PREFIX TOKENIZER SAVE_DIR [--flag value ...] (a Llama of 7 billion parameters)" >&2
    echo "on every node, with NNODES (nodes: 4), NODE_RANK (0 to NNODES - 1) and MASTER_ADDR (host of node 0) in the environment" >&2
    exit 2
}
names=()
while [[ $# -gt 0 && $1 != -* ]]; do
    names+=("$1")
    shift
done
own=0
for word in "$@"; do
    if [[ $word == --config || $word == --config=* ]]; then own=1; fi
done
case ${#names[@]}:$own in
    1:1) SAVE_DIR=${names[0]} ;;
    3:*) DATA_PATH=${names[0]} TOKENIZER=${names[1]} SAVE_DIR=${names[2]} ;;
    *) usage ;;
esac
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-4}
if [[ $NNODES == 1 ]]; then NODE_RANK=${NODE_RANK:-0} MASTER_ADDR=${MASTER_ADDR:-localhost}; fi
if [[ ${DRY_RUN:-0} == 1 ]]; then NODE_RANK=${NODE_RANK:-NODE_RANK} MASTER_ADDR=${MASTER_ADDR:-MASTER_ADDR}; fi
if [[ -z ${MASTER_ADDR:-} || ( -z ${NODE_RANK:-} && $NNODES != *:* ) ]]; then
    # or every node would wait for the others at itself
    echo "error: NNODES=$NNODES: needs MASTER_ADDR=HOST (where all nodes meet)$([[ $NNODES == *:* ]] || echo " and NODE_RANK=N (0 on that host, another on each)")" >&2
    exit 2
fi
if [[ ! $NNODES =~ ^[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})?$ ]]; then
    echo "error: NNODES=$NNODES: give a number of nodes, or FEWEST:MOST" >&2
    exit 2
fi
if [[ $NNODES != *:* && ${DRY_RUN:-0}$NODE_RANK != 1NODE_RANK ]] && { [[ ! $NODE_RANK =~ ^[0-9]{1,6}$ ]] || ((10#$NODE_RANK >= NNODES)); }; then
    # or the others would wait for a node that never comes
    echo "error: NODE_RANK=$NODE_RANK: with NNODES=$NNODES nodes are numbered 0 to $((NNODES - 1)), 0 on the host of MASTER_ADDR" >&2
    exit 2
fi
MASTER_PORT=${MASTER_PORT:-6000}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

LAUNCHER=(
    torchrun
    --nproc-per-node "$GPUS_PER_NODE"
    --nnodes "$NNODES"
)
if [[ $NNODES == *:* ]]; then
    # Or ranks would look for each other at a node that is lost: rank 0 serves the store of each round, not torchrun.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    LAUNCHER+=(
        --max-restarts "${MAX_RESTARTS:-10}"
        --rdzv-backend c10d
        --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"
        --rdzv-id "${RUN_ID:-$(basename "$SAVE_DIR")}"
    )
else
    LAUNCHER+=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
fi
MODEL_ARGS=(
    --model-type llama
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --seq-length 4096
    --norm-epsilon 1e-5
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 2
    --sequence-parallel
    --use-distributed-optimizer
    --recompute-activations
    --distributed-timeout-minutes 30
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1024
    --train-tokens 1000000000000
    --bf16
    --compile
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup fraction=0.005
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
)
OUTPUT_ARGS=(
    --save-interval 1000
    --log-interval 10
    --eval-interval 1000
    --eval-iters 10
)
DATA_ARGS=()
if [[ -n ${DATA_PATH:-} ]]; then
    DATA_ARGS=(
        --data-path "$DATA_PATH"
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "$TOKENIZER"
    )
fi
RUN_ARGS=("${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" --split 990,10,0 "${OUTPUT_ARGS[@]}")
if ((own)); then RUN_ARGS=(); fi

COMMAND=(
    "${LAUNCHER[@]}" "$PROGRAM"
    ${RUN_ARGS[@]+"${RUN_ARGS[@]}"} ${DATA_ARGS[@]+"${DATA_ARGS[@]}"} --save "$SAVE_DIR" --auto-resume "$@"
)
if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "${COMMAND[@]}"
    echo
else
    exec "${COMMAND[@]}"
fi
