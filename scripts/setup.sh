#!/usr/bin/env bash
# Makes .venv: rlgen, its dependencies at tried versions, and the vLLM that fits this machine. Called by make.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "rlgen needs Python 3.11 or newer; set PYTHON=… (found: $("$python" --version))" >&2
    exit 3
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }

if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    echo "setting up for an NVIDIA GPU"
    pip install --no-deps -r scripts/requirements-cuda.txt
else
    echo "setting up for the CPU (no NVIDIA GPU found)"
    # The CPU build of torch: from the configured indexes, else from its own.
    pip install --no-deps -r scripts/requirements-cpu.txt 2>/dev/null ||
        pip install --no-deps -r scripts/requirements-cpu.txt --extra-index-url https://download.pytorch.org/whl/cpu
fi
# Everything is pinned, so nothing is resolved.
pip install --no-deps --no-build-isolation --editable .
touch .venv/.ready
