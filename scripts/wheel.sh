#!/usr/bin/env bash
# Builds dist/: the wheel, and the pins of what it was tried with, on a CPU and on CUDA. With --try both are installed in an empty
# environment, and a new folder trains there with nothing of this checkout.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
rm -rf "$root/dist"
"$root/.venv/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$root/dist" "$root"
cp "$root"/scripts/requirements-{cpu,cuda}.txt "$root/dist"
ls "$root"/dist/*
[ "${1:-}" = --try ] || exit 0

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
unset PYTHONPATH
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --no-deps -r "$root/dist/requirements-cpu.txt" "$root"/dist/*.whl
PATH="$place/venv/bin:$PATH"
python -c "import rlgen; assert rlgen.__file__.startswith('$place'), rlgen.__file__"
rlgen docs first-run | head -1
rlgen init mine
cd mine
rlgen recipes warm-start recipe.yaml --accuracy 0.1
rlgen train recipe.yaml --max-steps 3
rlgen report first
rlgen recipes copy smoke   # with vLLM
rlgen train smoke.yaml
