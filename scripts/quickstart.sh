#!/usr/bin/env bash
# From a fresh clone to a GPT that has learnt real text: sets up an environment, trains, and lets the model write.
#
#   scripts/quickstart.sh                   one process
#   scripts/quickstart.sh --nprocs 2        flags go to pretrain_gpt.py
#   SAVE=runs/mine scripts/quickstart.sh    where the run is kept (checkpoints/quickstart in the checkout)
#
# Interrupted? The same command continues where it stopped.
set -euo pipefail
for name in SAVE TOKENIZER; do # paths of the folder where this is called
    if [[ -n ${!name:-} && ${!name} != /* ]]; then printf -v "$name" %s "$PWD/${!name}"; fi
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_environment

SAVE=${SAVE:-checkpoints/quickstart}
TOKENIZER=${TOKENIZER:-${SAVE%/}-tokenizer}
if [[ ! -f $TOKENIZER/tokenizer.json ]]; then
    python tools/train_tokenizer.py --vocab-size 4096 --output "$TOKENIZER"
fi
python pretrain_gpt.py --config configs/quickstart.yaml --save "$SAVE" --auto-resume \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER/tokenizer.json" "$@"
echo
echo "== the model continues 'def '"
python tools/generate_text.py --load "$SAVE" --prompt "def " --max-new-tokens 200 --temperature 0.7 --top-k 40 --seed 1
echo
echo "saved in $SAVE: config.yaml, metrics.jsonl and the checkpoint"
echo "its curves, as a page: python tools/report.py --load $SAVE --output report.html"
if [[ ${VIRTUAL_ENV:-} == "$PWD/.venv" ]]; then
    echo "to continue in the same environment: source .venv/bin/activate"
fi
