#!/usr/bin/env bash
# A run over two hosts, where there is one: two network namespaces with a cable between them, torchrun on each, two CPU
# ranks each; then the same run on one host. Their losses and gradient norms must be equal in every digit.
#
#   sudo scripts/two_hosts.sh                                                   tensor x pipeline parallel
#   sudo scripts/two_hosts.sh --tensor-model-parallel-size 2 --zero-stage 1    any flags; four ranks
#
# Needs root, iproute2 and util-linux, and an active environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ $# -gt 0 ]] || set -- --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
RUNS=$(mktemp -d "$PWD/two_hosts.XXXXXX") # both hosts see it, as they would a shared disk; each has a /tmp of its own
TRAIN=(
    pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2
    --global-batch-size 16 --train-iters 6 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 256
    --fp64 --device cpu --log-interval 1 --eval-iters 1 "$@"
)
export OMP_NUM_THREADS=1

clean_up() {
    ip netns del megalite0 2>/dev/null || true
    ip netns del megalite1 2>/dev/null || true
    rm -rf "$RUNS"
}
trap clean_up EXIT

# host N: torchrun's node N, with a network, a name, processes, /tmp and /dev/shm of its own.
host() {
    # shellcheck disable=SC2016  # expanded by the inner shell
    ip netns exec "megalite$1" unshare --uts --ipc --mount --pid --fork --mount-proc bash -c '
        hostname "node$1"
        mount -t tmpfs tmpfs /tmp
        mount -t tmpfs tmpfs /dev/shm
        printf "127.0.0.1 localhost\n10.77.0.10 node0\n10.77.0.11 node1\n" >/tmp/hosts
        mount --bind /tmp/hosts /etc/hosts
        node=$1 runs=$2
        shift 2
        exec torchrun --nnodes 2 --nproc-per-node 2 --node-rank "$node" --master-addr node0 --master-port 6000 "$@" \
            --save "$runs/two"
    ' host "$1" "$RUNS" "${TRAIN[@]}"
}

for node in 0 1; do
    ip netns add "megalite$node"
    ip netns exec "megalite$node" ip link set lo up
done
ip link add eth0 netns megalite0 type veth peer name eth0 netns megalite1
for node in 0 1; do
    ip netns exec "megalite$node" ip addr add "10.77.0.1$node/24" dev eth0
    ip netns exec "megalite$node" ip link set eth0 up
done

host 1 >"$RUNS/node1.log" 2>&1 &
other=$!
host 0
wait "$other" || { cat "$RUNS/node1.log" && exit 1; }
python "${TRAIN[@]}" --nprocs 4 --save "$RUNS/one" >/dev/null
python - "$RUNS" <<'END'
import json
import sys
from pathlib import Path


def numbers(run: str) -> list[tuple[float, float]]:
    lines = map(json.loads, (Path(sys.argv[1]) / run / "metrics.jsonl").read_text().splitlines())
    return [(line["lm_loss"], line["grad_norm"]) for line in lines if line["kind"] == "train"]


two, one = numbers("two"), numbers("one")
if two != one or len(two) != 6:
    sys.exit(f"error: two hosts computed {two}, one host {one}")
print("two hosts and one host: the same losses and gradient norms in every digit")
END
