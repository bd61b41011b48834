# Each target sets up .venv by itself: Python 3.11 and a C++ compiler are all that is needed.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE_SOURCES := CMakeLists.txt $(wildcard csrc/*/*) $(wildcard protos/flashckpt/v1/*.proto)

# Test processes side by side. A test marked `alone` waits until the others stand still.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: setup demo test test-unit test-slow simulate campaign mutants soak simdev check check-static check-native bench fuzz spec clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(NATIVE_SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	# torch alone and first: later requirements then find it satisfied and pull no CUDA packages.
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 numpy
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/flashckpt demo

test: $(STAMP) simdev
	$(PYTEST) -m "not slow"

# Of `make test` what is pure and quick: one process per test, no sleeps, less than a minute on two idle cores.
# tests/pure.py fails a test that is not. Properties and the simulator's histories are pure too, but take longer.
UNIT := tests/unit tests/compat tests/security/test_threat_model.py
test-unit: $(STAMP)
	$(PYTEST) -m "not slow" $(UNIT)

# Whole launches of many ranks: minutes each. CI runs them too.
test-slow: $(STAMP) simdev
	$(PYTEST) -m slow

# The simulated accelerator of the tests, unless build/simdev has it. Tests build it too, but within their time limit.
simdev: $(STAMP)
	$(BIN)/python -m tests.simdev

# Far more histories and spoilt shards than CI has time for, others every time: for a night, and after a change to the
# agent's core or to the format.
simulate: $(STAMP)
	FLASHCKPT_SIM_SEEDS=$${SEEDS:-20000} FLASHCKPT_SIM_START=$${START:-$$(shuf -i 1-1000000000 -n 1)} \
		$(BIN)/python -m pytest -m slow tests/sim
	$(MAKE) fuzz

# Random faults and operators' actions on real agents and trainers: docs/testing.md. SEED repeats a run.
MINUTES ?= 10
campaign: $(STAMP)
	$(BIN)/python -m tests.campaign --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --json build/campaign.json $(CAMPAIGN)

# Random faults planted in the core, and which of them the fast tests notice: docs/testing.md. SEED repeats a run.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants --json build/mutants.json $(if $(SEED),--seed $(SEED)) $(MUTANTS)

soak: $(STAMP)
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --json build/soak.json

check: check-static check-native

check-static: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Needs a C++ compiler, nothing of .venv.
check-native:
	csrc/tests/run

# BENCH="--quick" and the like; the page, the pictures and every figure land in build/bench.
BENCH ?=
bench: $(STAMP)
	$(BIN)/python -m bench --out build/bench $(BENCH)

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz.shard --count 200000

# Needs spin and gcc (apt-get install spin gcc), nothing of .venv.
spec:
	spec/run

clean:
	rm -rf $(VENV) build flashckpt/v1 flashckpt/native/*.so
