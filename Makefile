# make demo    decide a sample support ticket with a compiled engine
# make test    lint, type-check and test
# make venv    only the test environment, in .venv
# make bench   the measures that need no GPU and no download
PYTHON ?= python3
# For example the index of CPU-only torch wheels: PIP_FLAGS="--extra-index-url …"
PIP_FLAGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --constraint constraints.txt

.PHONY: demo test venv lint bench clean

demo: .venv/.export
	$(BIN)/clef-trt demo

test: lint
	$(BIN)/python -m pytest

venv: .venv/.test

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy clef_trt export

bench: .venv/.test
	$(BIN)/python bench/host.py
	$(BIN)/python bench/media.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/cpu_operators.py
	$(BIN)/python bench/cpu.py
	$(BIN)/python bench/growth.py
	$(BIN)/python bench/full_size_export.py
	$(BIN)/python bench/embed.py
	$(BIN)/python bench/serve_load.py

# Stamps, so that an environment is made once and again when what it is made from changes.
.venv/.export: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --editable '.[export]'
	touch $@

# The RTX wheels are taken alone: they parse and build without the CUDA packages that they name.
# clef-finetune carries the published reference; what it asks for besides (torchvision, peft, …) is not needed.
.venv/.test: .venv/.export
	$(PIP) --editable '.[export,test]'
	$(PIP) --no-deps clef-finetune==0.1.0 tensorrt-rtx-cu13-libs==1.7.1.116 tensorrt-rtx-cu13-bindings==1.7.1.116
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
