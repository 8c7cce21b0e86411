#!/usr/bin/env bash
# Everything that must hold: formatting, lint, spelling, types, tests. Sets up what it needs (see environment.sh).
#
#   scripts/test.sh            large matrices are sampled; at most eight minutes on two cores
#   scripts/test.sh --full     all of the large matrices; run before a large change is called done
#   scripts/test.sh --coverage     which lines of the product the unit tests run
#
# Further arguments go to pytest. All steps run even if one fails; the last line of either half is pytest's. While the
# half with several ranks is still running, coverage of inventory/ and schedule/ is measured (tracing doubles the time of a
# test, so CI does not measure the others; what forked ranks run is not seen).
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
echo "== formatting" && python -m ruff format --check . || status=1
echo "== lint" && python -m ruff check . || status=1
echo "== spelling" && python -m codespell_lib || status=1
echo "== types" && python -m mypy || status=1
echo "== tests"
# One thread: the cores belong to the ranks that the tests start.
export OMP_NUM_THREADS=1
if [[ -n $* && $* != --full ]]; then
    python -m pytest --durations=10 "$@" || status=1
    exit "$status"
fi
# Ranks mostly wait for each other: the tests that start them run beside those that do not.
log=$(mktemp)
RANKS=(tests/distributed tests/equivalence)
python -m pytest --durations=10 "${RANKS[@]}" "$@" > "$log" 2>&1 &
ranks=$!
trap 'kill "$ranks" 2> /dev/null || true; rm -f "$log"' EXIT
python -m pytest --durations=10 "${RANKS[@]/#/--ignore=}" "$@" || status=1
echo "== coverage"
measure_coverage megalite.inventory,megalite.schedule tests/unit/{inventory,schedule} || status=1
wait "$ranks" || status=1
cat "$log"
exit "$status"
