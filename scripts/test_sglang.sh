#!/usr/bin/env bash
# SGLang's own verification with MARS hooked in, against eagle_mars.verify, on a CPU: a minute of one core.
#
#   SGLANG_SOURCES=DIR    the unpacked wheel of SGLang 0.5.23; else it is fetched to runs/sglang-0.5.23 (38 MB)
#
# The wheel is read, not installed: what it needs beyond PyTorch and Triton is a GPU's. Not part of `make test`.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
sources=${SGLANG_SOURCES:-runs/sglang-0.5.23}
extra=runs/sglang-extra

if [ ! -d "$sources/sglang" ]; then
    download=$(mktemp -d)
    trap 'rm -r "$download"' EXIT
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$download" sglang==0.5.23
    "$python" -m zipfile --extract "$download"/sglang-0.5.23-*.whl "$sources"
fi
[ -d "$extra" ] || "$python" -m pip install --quiet --no-deps --target "$extra" msgspec

export SGLANG_SOURCES=$sources PYTHONPATH=$extra TRITON_INTERPRET=1 OMP_NUM_THREADS=1
"$python" -m pytest -q -p no:cacheprovider tests/engines/e2e/check_sglang.py
cat runs/engines/sglang.md
