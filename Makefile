# Every command of the project. `make help` lists them; each sets up what it needs first.
#
# Needs from the machine: CPython >= 3.10 with venv and pip, and a Rust toolchain (cargo >= 1.89). cargo-nextest is used
# where it is installed. Everything else is installed into .venv.
#
#   make PYTHON=python3.12 setup     another interpreter for .venv (delete .venv first to change it)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Stamps lie inside the environment that they describe: deleting .venv deletes them too.
STAMPS := $(VENV)/stamps
CORE_SOURCES := $(shell find rust -type f \( -name '*.rs' -o -name Cargo.toml \) 2>/dev/null) \
	$(wildcard Cargo.toml Cargo.lock .cargo/config.toml)

# One interpreter for every build of the extension, so that cargo does not rebuild it for each command.
export PYO3_PYTHON := $(abspath $(BIN)/python)
export VIRTUAL_ENV := $(abspath $(VENV))
# Keeps a notice about the tool itself out of the output.
export NO_MKDOCS_2_WARNING := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A person watches a long download; a log does not.
PIP_QUIET := $(shell test -t 2 || echo --quiet)

.PHONY: help
help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---------------------------------------------------------------------------------------------------------------- setup

.PHONY: setup
setup: $(STAMPS)/extension ## create .venv, install the dev extra, build the extension (quick when nothing changed)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "exactknn needs CPython >= 3.10, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
		echo "Name another one: make PYTHON=/path/to/python3.12 setup" >&2; exit 1; }
	@command -v cargo >/dev/null || { \
		echo "exactknn needs a Rust toolchain (cargo >= 1.89), but cargo is not on PATH." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch's wheel is large; pip fetches it here once, and again only for a new environment.
# Cargo.toml holds the version that the installed metadata shows.
$(STAMPS)/dependencies: pyproject.toml Cargo.toml | $(BIN)/python
	@mkdir -p $(STAMPS)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --upgrade 'maturin>=1.9,<2'
	@echo "Installing the development dependencies into $(VENV) (a few minutes the first time) ..."
	$(BIN)/python -m pip install $(PIP_QUIET) --no-build-isolation --editable '.[dev]'
	@touch $@

# An editable install: changes of Python files need nothing, changes of Rust files need this build.
$(STAMPS)/extension: $(STAMPS)/dependencies $(CORE_SOURCES)
	$(BIN)/maturin develop --release --quiet --skip-install
	@touch $@

# ----------------------------------------------------------------------------------------------------------------- uses

.PHONY: demo
demo: setup ## neighbours of 1,797 real handwritten digits, checked against float64; a picture and an evaluation report
	$(BIN)/python -m docs.recipes.digits

# --------------------------------------------------------------------------------------------------------------- checks

.PHONY: test
test: test-rust test-python test-docs ## all tests: Rust, Python, doctests

.PHONY: test-rust
test-rust: setup ## Rust tests (cargo-nextest where it is installed) and Rust doctests
	if cargo nextest --version >/dev/null 2>&1; then \
		cargo nextest run --workspace --no-fail-fast; \
	else \
		cargo test --workspace --lib --bins --tests; \
	fi
	cargo test --workspace --doc

.PHONY: test-python
test-python: setup ## Python tests
	$(BIN)/python -m pytest

.PHONY: test-docs
test-docs: setup ## the examples in Python docstrings, in README.md and in docs/
	$(BIN)/python -m pytest --doctest-modules --doctest-glob='*.md' python/exactknn README.md docs

.PHONY: lint
lint: setup ## rustfmt, clippy, ruff, mypy, and the stubs against the built extension
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy
	MYPYPATH=python $(BIN)/python -m mypy.stubtest exactknn._core

# Targets and seeds: tests/fuzz. A failed case prints the command that repeats it.
MINUTES ?= 10

.PHONY: fuzz
fuzz: setup ## random cases of searches, bounds, selection, indexes and files against their oracles, for MINUTES=10
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

# Tools that are not installed are named, with the command that installs them.
NIGHTLY := +nightly
CORE_TESTS := --package exactknn-core --lib --test core
# A part of the tests that takes a minute or two in an emulator: one case of each fuzz target, order, selection, files.
FEW_TESTS := seeds_ topk order bound::tests every_type_is_restored own_rows

.PHONY: miri
miri: ## selection, order, bounds and a search under Miri; needs a nightly toolchain
	@cargo $(NIGHTLY) miri --version >/dev/null 2>&1 || { \
		echo "Miri is missing: rustup toolchain install nightly --component miri rust-src" >&2; exit 1; }
	MIRIFLAGS=-Zmiri-disable-isolation cargo $(NIGHTLY) miri test --package exactknn-core --lib -- \
		topk:: order:: bound::tests exact:: --skip seeds_

.PHONY: sanitize
sanitize: ## the Rust tests with the address sanitizer, then with the thread sanitizer; needs a nightly toolchain
	@cargo $(NIGHTLY) --version >/dev/null 2>&1 && \
		test -d "$$(rustc $(NIGHTLY) --print sysroot)/lib/rustlib/src/rust/library" || { \
		echo "Sanitizers are missing: rustup toolchain install nightly --component rust-src" >&2; exit 1; }
	for sanitizer in address thread; do \
		RUSTFLAGS="-Zsanitizer=$$sanitizer" CARGO_TARGET_DIR="target/$$sanitizer" \
		cargo $(NIGHTLY) test -Zbuild-std --target "$$(rustc -vV | sed -n 's/host: //p')" $(CORE_TESTS); \
	done

.PHONY: test-baseline
test-baseline: ## a part of the Rust tests on an emulated CPU without AVX; needs qemu-user
	@command -v qemu-x86_64 >/dev/null || { \
		echo "qemu-x86_64 is missing: apt-get install qemu-user" >&2; exit 1; }
	CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="qemu-x86_64 -cpu Nehalem" cargo test $(CORE_TESTS) -- $(FEW_TESTS)

.PHONY: valgrind
valgrind: ## a part of the Rust tests under memcheck, at the levels that it knows
	@command -v valgrind >/dev/null || { echo "valgrind is missing: apt-get install valgrind" >&2; exit 1; }
	CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="valgrind --quiet --error-exitcode=9" \
		cargo test $(CORE_TESTS) -- --test-threads=1 $(FEW_TESTS)

.PHONY: coverage
coverage: setup ## lines and branches that the tests reach, of Rust and of Python
	@cargo llvm-cov --version >/dev/null 2>&1 || { echo "cargo-llvm-cov is missing: cargo install cargo-llvm-cov" \
		"(and rustup component add llvm-tools, or LLVM_COV and LLVM_PROFDATA of an LLVM as new as rustc's)" >&2; exit 1; }
	@$(BIN)/python -c 'import coverage' 2>/dev/null || $(BIN)/python -m pip install --quiet 'coverage>=7.6'
	cargo llvm-cov --package exactknn-core --ignore-filename-regex 'tests/|bound_properties|oracle'
	$(BIN)/python -m coverage run --branch --source python/exactknn -m pytest -q
	$(BIN)/python -m coverage report --skip-covered

.PHONY: mutants
mutants: ## changes of bounds, order, selection and plan that no test notices (hours); needs cargo-mutants
	@cargo mutants --version >/dev/null 2>&1 || { \
		echo "cargo-mutants is missing: cargo install cargo-mutants" >&2; exit 1; }
	cargo mutants --package exactknn-core --timeout 300 --file rust/core/src/filter/bound.rs \
		--file rust/core/src/order.rs --file 'rust/core/src/topk/*.rs' --file rust/core/src/search/plan.rs \
		--cargo-test-arg=--lib $(MUTANTS)

.PHONY: digest
digest: setup ## one digest of results, compared with the recorded one at every level with 1 to 4 threads (two minutes)
	$(BIN)/python -m benches.digest --all

.PHONY: format
format: setup ## let rustfmt and ruff rewrite the sources
	cargo fmt --all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: check
check: lint test ## what .ci/run runs: lint, then test

# ------------------------------------------------------------------------------------------------------------- measures

.PHONY: bench
bench: setup ## criterion and pytest-benchmark, then the peers of search, evaluation, matching, the loss and the index (minutes in all)
	cargo bench --package exactknn-core --bench '*' -- --quick
	$(BIN)/python -m pytest --benchmark-enable --benchmark-only benches
	$(BIN)/python -m benches.peers --quick
	$(BIN)/python -m benches.evaluation --quick --rounds 1
	$(BIN)/python -m benches.matching --rows 20000
	$(BIN)/python -m benches.ranked_list_loss
	$(BIN)/python -m benches.index --rows 200000 --seconds 0.5
	$(BIN)/python -m benches.large --rows 1000000 --part 200000 --memory 200MB

.PHONY: bench-peers
bench-peers: setup ## the full comparison with faiss at its best, torch, scikit-learn and others, recorded
	$(BIN)/python -m benches.peers --record

.PHONY: bench-memory
bench-memory: setup ## peak memory of one search, each in its own process
	$(BIN)/python -m benches.peak_memory

# -------------------------------------------------------------------------------------------------------------- outputs

.PHONY: docs
docs: setup ## the documentation site, in site/
	$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/python -m pip install --quiet 'mkdocs-material>=9.5,<10'
	$(BIN)/python -m mkdocs build --strict

# A wheel for Linux is linked by zig against glibc 2.17: the linker of this machine would require its own glibc, since
# libc took in pthread_create, dlsym and others in 2.34. `make RELEASE= wheel` does that, for this machine alone.
RELEASE := $(if $(filter Linux,$(shell uname -s)),--zig --compatibility manylinux_2_17)
LINKER := $(if $(findstring --zig,$(RELEASE)),$(STAMPS)/zig)

.PHONY: wheel
wheel: setup $(LINKER) ## a release wheel, in dist/; on Linux for glibc 2.17 and later
	$(BIN)/maturin build --release $(RELEASE) --out dist

.PHONY: wheel-check
wheel-check: setup $(LINKER) ## build the wheel and try it, with NumPy only, on every CPython >= 3.10 of this machine
	$(BIN)/python -m tests.wheel.check_wheel $(RELEASE)

$(STAMPS)/zig: $(STAMPS)/dependencies
	@echo "Installing zig into $(VENV) (a large wheel, once) ..."
	@$(BIN)/python -m pip install $(PIP_QUIET) 'ziglang>=0.13,<0.18' || { \
		echo "A wheel for other machines needs zig, which could not be installed. Only for this machine:" >&2; \
		echo "make RELEASE= wheel" >&2; exit 1; }
	@touch $@

.PHONY: clean
clean: ## remove what was built; .venv stays, its extension is built anew by the next command
	rm -rf build dist site target .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	rm -f python/exactknn/_core*.so $(STAMPS)/extension
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
