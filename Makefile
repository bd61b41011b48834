# Each target sets up .venv by itself: Python 3.11 and a C++ compiler are all that is needed.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE_SOURCES := CMakeLists.txt $(wildcard csrc/*/*) $(wildcard protos/flashckpt/v1/*.proto)

.PHONY: demo test test-slow simdev check check-native bench fuzz spec clean

$(STAMP): pyproject.toml constraints.txt $(NATIVE_SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	# torch alone and first: later requirements then find it satisfied and pull no CUDA packages.
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 numpy
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/flashckpt demo

test: $(STAMP) simdev
	$(BIN)/python -m pytest -m "not slow"

# Whole launches of many ranks, long simulations: minutes each. CI runs them too.
test-slow: $(STAMP) simdev
	$(BIN)/python -m pytest -m slow

# The simulated accelerator of the tests, unless build/simdev has it. Tests build it too, but within their time limit.
simdev: $(STAMP)
	$(BIN)/python -m tests.simdev

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) check-native

check-native: $(STAMP)
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
