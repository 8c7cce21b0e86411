# Sourced by quickstart.sh and test.sh from the repository's root: a Python environment with what they need.
#
#   use_environment          megalite and its core dependencies
#   use_environment dev      those of an extra too
#
# An active environment (venv or conda) is used as it is; else .venv in the repository is made. conda's base counts only
# where torch is in it. If nothing is missing, nothing is installed. torch is asked for by exact version and first, so
# that nothing else decides which build of it is taken; a torch that is there stays.

TORCH_VERSION=2.13.0

fail() {
    echo "error: $*" >&2
    exit 1
}

find_python() {
    local candidate without_venv=
    for candidate in python3.12 python3.11 python3 python3.13 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
                echo "$candidate"
                return
            fi
            without_venv=${without_venv:-$candidate}
        fi
    done
    if [[ -n $without_venv ]]; then
        fail "$without_venv has no module venv; install it (Debian, Ubuntu: apt install $without_venv-venv), or" \
            "activate an environment"
    fi
    fail "no Python 3.11 or newer found; install one, or activate an environment that has it"
}

# Whether `python` is that of the folder $1.
is_python_of() {
    [[ -n $1 ]] && python -c 'import os, sys; sys.exit(not os.path.samefile(sys.prefix, sys.argv[1]))' "$1" 2>/dev/null
}

is_active() {
    if is_python_of "${VIRTUAL_ENV:-}"; then
        return
    fi
    is_python_of "${CONDA_PREFIX:-}" &&
        { [[ ${CONDA_DEFAULT_ENV:-} != base ]] || python -c 'import torch' 2>/dev/null; }
}

# .venv, made where it is not there, and made again where it does not work (moved, its Python gone, half installed).
use_own_environment() {
    local why= base output
    if [[ -e .venv ]]; then
        # shellcheck disable=SC1091
        source .venv/bin/activate 2>/dev/null || true
        if ! is_python_of .venv || ! python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            why="its Python does not work here"
        elif ! python -c 'import pip' 2>/dev/null; then
            why="it has no pip"
        else
            why=$(python scripts/missing_packages.py --incomplete)
        fi
        if [[ -z $why ]]; then
            return
        fi
        # What a link leads to belongs to somebody else, too: clearing it would take their environment away.
        [[ ! -L .venv ]] || fail "$PWD/.venv is a link to $(readlink .venv), and $why; remove the link, or activate an" \
            "environment"
        echo "making .venv again: $why"
        deactivate 2>/dev/null || true
        hash -r
    fi
    base=$(find_python)
    output=$("$base" -m venv --clear .venv 2>&1) || fail "$PWD/.venv cannot be made (${output##*$'\n'})"
    # shellcheck disable=SC1091
    source .venv/bin/activate
}

pip_install() {
    local output
    if output=$(python -m pip install --quiet --no-input --disable-pip-version-check "$@" 2>&1); then
        return
    fi
    if grep -qE 'NewConnectionError|ConnectTimeoutError|NameResolutionError|ProxyError|from versions: none' <<<"$output"; then
        fail "pip reaches no package index that has $*; connect this machine to one, or activate an environment that" \
            "has the packages"
    fi
    grep -vE '^(\[notice\]|WARNING:)|^$' <<<"$output" >&2 || true
    fail "pip could not install $*: see above"
}

use_environment() {
    local extra=${1:-} missing place
    if ! is_active; then
        use_own_environment
    fi
    missing=$(python scripts/missing_packages.py $extra) || exit 1
    if [[ -z $missing ]]; then
        return
    fi
    place=$(python -c 'import sys; print(sys.prefix)')
    python -c 'import pip' 2>/dev/null || fail "the environment $place lacks $missing and has no pip; run python -m ensurepip"
    echo "installing into $place, once: $missing"
    if ! python -c 'import torch' 2>/dev/null; then
        pip_install "torch==$TORCH_VERSION"
    fi
    pip_install -e ".${extra:+[$extra]}"
}
