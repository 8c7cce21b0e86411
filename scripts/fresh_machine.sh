#!/usr/bin/env bash
# A new user's first hour in a minute: quickstart.sh in a new clone, then every command of README, all of them shortened,
# and every --help, with nothing installed but the core. What needs more must say in one line which extra it is.
#
#   git clone . /tmp/trial && /tmp/trial/scripts/fresh_machine.sh
#
# Active environments are left out of account. .ci/run continues with test.sh in the same .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
CLONE=$PWD
source scripts/environment.sh
unset VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV PYTHONPATH
[[ ! -e .venv ]] || fail "$CLONE/.venv: this is for a new clone; git clone it, and run the new clone's script"

# A folder with a blank in its name, where README's paths mean something and what is written harms nothing.
PLACE=$(mktemp -d)
trap 'rm -rf "$PLACE"' EXIT
mkdir "$PLACE/new user"
cd "$PLACE/new user"
for name in README.md configs pretrain_gpt.py scripts tools benchmarks; do
    ln -s "$CLONE/$name" "$name"
done

# try EXTRA COMMAND: it must succeed; or, with an extra's name, be one line that asks for it.
try() {
    local extra=$1 command=$2 begin=$SECONDS output status=0
    output=$(bash -c "$command" 2>&1) || status=$?
    if [[ $extra == - && $status == 0 ]] ||
        [[ $status == 2 && $output != *$'\n'* && $output == *"; pip install "*"[$extra]\"" ]]; then
        printf '%4d s  %s%s\n' $((SECONDS - begin)) "$command" "$([[ $extra == - ]] || echo "   asks for megalite[$extra]")"
        return
    fi
    printf '%s\n' "$output" >&2
    fail "exit status $status: $command"
}

echo "== quickstart"
SAVE="$PWD/quickstart" "$CLONE/scripts/quickstart.sh" --train-iters 20
source "$CLONE/.venv/bin/activate"
missing=$(python "$CLONE/scripts/missing_packages.py" dev)
[[ -n $missing ]] || fail "the packages of the tests were installed with the core: this trial proves nothing"

echo "== README's other commands"
python -c 'import json, sys
for line in open(0, encoding="utf-8"):
    print(json.dumps({"text": line}))' <<<"$(cat "$CLONE"/docs/*.md)" >corpus.jsonl
python "$CLONE/scripts/readme_commands.py" >commands
while IFS=$'\t' read -r extra command; do
    try "$extra" "$command" </dev/null
done <commands

echo "== tools that start ranks as tests do"
MODEL="--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --train-iters 2 --lr 1e-3"
try - "python tools/prove_layout.py $MODEL --nprocs 2"
try - "python tools/rehearse.py --config configs/gpt2_124m.yaml --num-devices 2 --ranks 0 --values"

echo "== every tool's and benchmark's --help"
for tool in pretrain_gpt.py tools/*.py benchmarks/*.py; do
    if grep -q '^if __name__' "$tool"; then
        try - "python $tool --help"
    fi
done
echo "== a fresh machine works ($SECONDS s)"
