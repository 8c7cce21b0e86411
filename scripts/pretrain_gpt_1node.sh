#!/usr/bin/env bash
# A 345 million parameter GPT-2 on the GPUs of one node. DRY_RUN=1 prints the command instead of running it.
#
#   scripts/pretrain_gpt_1node.sh DATA_PREFIX SAVE_DIR [--flag value ...]
#
# DATA_PREFIX: a .bin/.idx pair written by tools/preprocess_data.py with GPT-2's vocabulary. VOCAB_FILE, MERGE_FILE and
# GPUS_PER_NODE may be set in the environment. Relative paths are those of the folder where this is called.
set -euo pipefail
PROGRAM=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/pretrain_gpt.py # paths of the command are those of the caller's folder

if [[ $# -lt 2 || $1 == -* || $2 == -* ]]; then
    echo "usage: $0 DATA_PREFIX SAVE_DIR [--flag value ...]" >&2
    exit 2
fi
for word in "$@"; do
    if [[ $word == --config || $word == --config=* ]]; then
        echo "error: $word: the flags here are those of a GPT-2 of 345 million parameters, which would count before the file's; run" >&2
        echo "       torchrun --standalone --nproc-per-node ${GPUS_PER_NODE:-8} $PROGRAM --config FILE.yaml" >&2
        exit 2
    fi
done
DATA_PATH=$1
SAVE_DIR=$2
shift 2
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
VOCAB_FILE=${VOCAB_FILE:-gpt2/vocab.json}
MERGE_FILE=${MERGE_FILE:-gpt2/merges.txt}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

LAUNCHER=(torchrun --standalone --nproc-per-node "$GPUS_PER_NODE")
MODEL_ARGS=(
    --model-type gpt
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    --activation gelu-tanh
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --use-distributed-optimizer
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 64
    --train-iters 500000
    --bf16
    --compile
    --lr 1.5e-4
    --min-lr 1e-5
    --lr-decay-style cosine
    --lr-warmup fraction=0.01
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
)
DATA_ARGS=(
    --data-path "$DATA_PATH"
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --split 949,50,1
)
OUTPUT_ARGS=(
    --save "$SAVE_DIR"
    --auto-resume
    --save-interval 10000
    --log-interval 100
    --eval-interval 1000
    --eval-iters 10
)

COMMAND=(
    "${LAUNCHER[@]}" "$PROGRAM"
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
)
if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "${COMMAND[@]}"
    echo
else
    exec "${COMMAND[@]}"
fi
