#!/usr/bin/env bash
# The tests under every version of Python and torch that megalite says it works with. Run by hand before a release; each
# cell is an environment of its own in a temporary folder, which is removed again (a CUDA build of torch is gigabytes).
#
#   scripts/test_matrix.sh                                    all six cells, the whole suite: an hour or so
#   scripts/test_matrix.sh 3.12/2.11 3.12/2.12                these cells
#   scripts/test_matrix.sh 3.12/2.11 -- tests/unit/nn -x      pytest arguments after --
#
# The interpreters python3.11 and python3.12 must be on PATH. The last lines are rows for docs/versions.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset VIRTUAL_ENV CONDA_PREFIX PYTHONPATH

cells=()
while (($#)) && [[ $1 != -- ]]; do
    [[ $1 =~ ^3\.[0-9]+/[0-9]+\.[0-9]+(\.[0-9]+)?$ ]] || {
        echo "error: $1: not PYTHON/TORCH, like 3.12/2.11; pytest's arguments come after --" >&2
        exit 2
    }
    cells+=("$1")
    shift
done
(($#)) && shift
((${#cells[@]})) || cells=(3.11/2.11 3.11/2.12 3.11/2.13 3.12/2.11 3.12/2.12 3.12/2.13)

for cell in "${cells[@]}"; do
    command -v "python${cell%/*}" >/dev/null || {
        echo "error: $cell: python${cell%/*} is not on PATH" >&2
        exit 2
    }
done

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
rows=() status=0
for cell in "${cells[@]}"; do
    echo "== Python ${cell%/*}, torch ${cell#*/}"
    torch=${cell#*/}
    [[ $torch == *.*.* ]] || torch+=".*"
    "python${cell%/*}" -m venv --clear "$place/venv"
    python=$place/venv/bin/python
    # torch first and by version, so that nothing else decides which one is taken.
    if "$python" -m pip install --quiet --no-input "torch==$torch" &&
        "$python" -m pip install --quiet --no-input -e ".[dev]"; then
        OMP_NUM_THREADS=1 "$python" -m pytest -q "$@" 2>&1 | tee "$place/log" || status=1
        result=$(tail -n 1 "$place/log")
    else
        status=1 result="could not be installed"
    fi
    versions=$("$python" -c 'import platform, torch; print(platform.python_version(), "|", torch.__version__)' || echo "$cell")
    rows+=("| $versions | $(date -u +%Y-%m-%d) | $result |")
done
printf '%s\n' "${rows[@]}"
exit "$status"
