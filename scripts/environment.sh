# Sourced by test.sh and quickstart.sh: a Python environment with what they need.
#
#   use_environment "module module ..." "pip argument" ...
#
# An active environment (venv or conda) is used as it is, else .venv in the repository is made. If every module can be
# imported there, nothing is installed. torch is asked for by exact version and first, so that nothing else decides
# which build of it is taken; a torch that is already there stays.

TORCH_VERSION=2.13.0

find_python() {
    local candidate
    for candidate in python3.12 python3.11 python3 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or newer found; install one, or activate an environment that has it" >&2
    return 1
}

has_modules() {
    python -c '
import importlib.util, sys
sys.exit(any(importlib.util.find_spec(name) is None for name in sys.argv[1:]))' "$@"
}

use_environment() {
    local modules=$1
    shift
    if [[ -z ${VIRTUAL_ENV:-} && -z ${CONDA_PREFIX:-} ]]; then
        if [[ ! -x .venv/bin/python ]]; then
            local base
            base=$(find_python)
            "$base" -m venv .venv
        fi
        # shellcheck disable=SC1091
        source .venv/bin/activate
    fi
    # shellcheck disable=SC2086
    if has_modules $modules; then
        return
    fi
    echo "installing what is missing into $(python -c 'import sys; print(sys.prefix)')"
    if ! has_modules torch; then
        python -m pip install -qq "torch==$TORCH_VERSION"
    fi
    python -m pip install -qq "$@"
}
