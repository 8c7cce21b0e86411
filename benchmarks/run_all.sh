#!/usr/bin/env bash
# Everything on docs/performance.md, measured anew on this machine (which should do nothing else), and the page written.
#
#   benchmarks/run_all.sh                   baseline, all benchmarks in full, the plan: some 40 minutes on two cores
#   benchmarks/run_all.sh tensor data       these only, and the page
#
# `baseline`: the ratios of --quick for --check. Estimated minutes: baseline 9, single 8, data 6, pipeline 5, plan 4, others 2.
# One that fails does not end the others; its former record stays.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
NAMES=(single tensor data pipeline checkpoint tokens attention context experts generation tiers waiting)
RESULTS=benchmarks/results
status=0

run() {
    local begin=$SECONDS
    echo "== $*"
    "$@" || { status=1; echo "failed: $*" >&2; }
    echo "== $((SECONDS - begin)) s"
}

(($#)) || set -- baseline "${NAMES[@]}" plan
for name in "$@"; do
    case $name in
        baseline) for each in "${NAMES[@]}"; do run python "benchmarks/$each.py" --write-baseline; done ;;
        single)
            run python benchmarks/single.py --models small --rounds 5 --json $RESULTS/single.json
            run python benchmarks/single.py --models medium --compile no --rounds 5 --json $RESULTS/single_medium.json ;;
        plan)
            facts=$(mktemp -d)/facts.json
            run python tools/check_plan.py --json "$facts"
            run python benchmarks/write_tables.py --plan "$facts" ;;
        *) run python "benchmarks/$name.py" --rounds 5 --json "$RESULTS/$name.json" ;;
    esac
done
python benchmarks/write_tables.py
exit $status
