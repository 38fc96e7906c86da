#!/usr/bin/env bash
# All checks that need a GPU, in at most 10 minutes: kernels against the reference, their speed, decoding end to end,
# waits of the host, what a long context costs.
#
#   scripts/gpu_checks.sh [OUT_DIR]       PYTHON=python3 picks another interpreter
#
# Needs torch with CUDA or ROCm, triton, pytest and this package's dependencies; reads nothing from the network
# unless the embedded target still has to be fetched.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-results/gpu}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1

"$python" -c 'from eagle_mars.cli import main; main()' info | tee "$out/info.txt"
timeout 150 "$python" -m pytest -q -x -p no:cacheprovider tests/verify/kernel_suite.py | tee "$out/kernel_suite.txt"
timeout 90 "$python" scripts/bench_verify.py --device cuda --dtype bfloat16 --no-compiled \
    --nodes 26 --nodes 64 --vocab 49152 --vocab 151936 --out "$out/bench_verify.jsonl" | tee "$out/bench_verify.txt"
timeout 120 "$python" -c 'from eagle_mars.cli import main; main()' compare --device cuda --dtype bfloat16 --json \
    --prompts evaluation/data/heldout_chat.jsonl --limit 10 --max-new-tokens 128 | tee "$out/compare.txt"
timeout 180 "$python" -m evaluation.bench_gpu "$out" | tee "$out/end_to_end.txt"
timeout 60 "$python" -m evaluation.bench_context 256 2048 8000 --device cuda --no-cpu-pack --out "$out" \
    | tee "$out/context.txt"
