#!/usr/bin/env bash
# Everything that must hold: formatting, lint, spelling, types, tests. Sets up what it needs (see environment.sh).
#
#   scripts/test.sh            every room; large matrices are sampled; within five minutes on two idle cores
#   scripts/test.sh --landing  what CI asks of every change (.ci/run): more kills, mutations and cases
#   scripts/test.sh --full     all of the large matrices; run before a large change is called done
#   scripts/test.sh --coverage     which lines of the product the unit tests run
#
# Further arguments go to pytest. All steps run even if one fails. The tests that start ranks or commands, which mostly wait,
# run beside all others and are shown after them; the last line of each part says what it left out. --landing also measures
# coverage of inventory/ and schedule/ (tracing doubles the time of a test, so CI does not measure the others; what forked
# ranks run is not seen).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_environment dev

# The lines of some packages (comma-separated) that pytest with these arguments runs.
measure_coverage() {
    local data
    data=$(mktemp)
    OMP_NUM_THREADS=1 nice -n 19 python -m coverage run --data-file="$data" --source="$1" -m pytest -q "${@:2}" || true
    python -m coverage report --data-file="$data" --skip-covered --sort=cover
    rm -f "$data"
}

if [[ ${1:-} == --coverage ]]; then
    measure_coverage megalite tests/unit "${@:2}"
    exit
fi

status=0
# One thread: the cores belong to the ranks that the tests start.
export OMP_NUM_THREADS=1
logs=()
beside=()
if [[ -z $* || $* == --full || $* == --landing ]]; then
    trap 'kill "${beside[@]}" 2> /dev/null || true; rm -f "${logs[@]}"' EXIT
    others=()
    for part in "tests/distributed tests/equivalence" "tests/cli tests/faults tests/unit/train tests/unit/observe tests/unit/rehearsal"; do
        read -ra folders <<< "$part"
        log=$(mktemp)
        python -m pytest --durations=10 "${folders[@]}" "$@" > "$log" 2>&1 &
        beside+=($!)
        logs+=("$log")
        others+=("${folders[@]/#/--ignore=}")
    done
    set -- "${others[@]}" "$@"
fi
echo "== formatting" && python -m ruff format --check . || status=1
echo "== lint" && python -m ruff check . || status=1
echo "== spelling" && python -m codespell_lib || status=1
echo "== types" && python -m mypy || status=1
echo "== tests"
python -m pytest --durations=10 "$@" || status=1
if [[ " $* " == *" --ignore="*" --landing "* ]]; then
    echo "== coverage"
    measure_coverage megalite.inventory,megalite.schedule tests/unit/{inventory,schedule} || status=1
fi
for part in "${!beside[@]}"; do
    wait "${beside[part]}" || status=1
    cat "${logs[part]}"
done
exit "$status"
