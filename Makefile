# make lab           set everything up and open JupyterLab on the contents
# make test          set everything up and run every check, the notebooks included
# make quick         each test once, but for the slow ones: a minute
# make check         what your change reaches, tests and notebooks; CONTRIBUTING.md says how
# make check NAME=point_to_point   one chapter's style, tests (each once; ALL=1: all) and notebook
# make notebooks     run the notebooks in clean kernels and store what they show
# make handouts      the notebooks as PDF, EPUB, web pages and live slides, in build/
# make slides        only the live slides, in build/slides/: open one in JupyterLab, press Alt+R
# make student       only the copies with open predictions that make lab opens, in student/
# make site          everything for static hosting, in build/site/
# make assignment NAME=point_to_point [VARIANT=2]   its exercises for otter and nbgrader
# make new-chapter NAME=my_topic [AFTER=point_to_point]   one more chapter, the rest renumbered
# make gpu-report    what a machine with NVIDIA GPUs shows, in ten minutes, in benchmarks/gpu/
# make test-versions everything with the lowest and the newest PyTorch that are promised
# make mutants       seed mistakes one by one, see whether the checks notice (NAMES="lab": only these)
#
# The first command sets up the environment: without an NVIDIA GPU with PyTorch's smaller build
# for CPUs. TORCH_BUILD=cuda or TORCH_BUILD=cpu chooses, and is remembered. CONTRIBUTING.md has
# the commands that only a maintainer needs.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
export JUPYTER_PREFER_ENV_PATH := 1
# Containers like to set this; then each of the many processes compiles all that it imports, for
# PyTorch five seconds.
unexport PYTHONDONTWRITEBYTECODE

# The interpreter of before, else the first that is new enough; make PYTHON=python3.12 takes that
# one, and is remembered.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in `cat $(VENV)/python 2>/dev/null` \
	python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)

.PHONY: lab setup test quick check test-processors test-gpu gpu-report test-versions test-browser mutants notebooks handouts student site slides publish assignment new-chapter update bench audit clean
lab: student/README.md
	@$(BIN)/python tools/open_jupyterlab.py $(LAB)

setup: $(VENV)/installed

PYTEST := $(BIN)/python -m pytest -q
TWO := --numprocesses 2 --dist loadfile
NBVAL := --nbval --nbval-cell-timeout 120
# Every step runs, whatever became of the one before it. (pytest says 5 where nothing was chosen.)
BEGIN := failed=; step() { name=$$1; shift; "$$@" </dev/null || test $$? = 5 || failed="$$failed $$name"; }
END := test -z "$$failed" && echo "all checks passed" || { echo "failed:$$failed"; exit 1; }

test: $(VENV)/installed
	@$(BEGIN); \
	step style $(BIN)/ruff check --quiet .; \
	step format $(BIN)/ruff format --check --quiet .; \
	step tests $(PYTEST) $(TWO) --durations 15 tests; \
	step notebooks $(PYTEST) $(TWO) $(NBVAL) notebooks; \
	$(END)

quick: $(VENV)/installed
	@$(BEGIN); \
	step style $(BIN)/ruff check --quiet .; \
	step format $(BIN)/ruff format --check --quiet .; \
	step tests $(PYTEST) $(TWO) --once -m "not slow" tests; \
	$(END)

BOOK = $(wildcard notebooks/[0-9][0-9]_$(NAME).ipynb)
TESTS = $(wildcard tests/$(NAME) tests/test_$(NAME).py)
WRONG = $(wildcard tests/$(NAME)/test_builds.py)
CODE = $(BOOK) $(TESTS) $(wildcard mgpu_tutorial/$(NAME) mgpu_tutorial/$(NAME).py)
ifndef NAME
check: $(VENV)/installed
	@$(BEGIN); reached=`$(BIN)/python -m tools.reached` || exit 1; \
	step style $(BIN)/ruff check --quiet .; \
	step format $(BIN)/ruff format --check --quiet .; \
	step tests $(PYTEST) $(TWO) $(NBVAL) $$reached; \
	$(END)
else
check: $(VENV)/installed
	@test -f "$(BOOK)" || { echo "NAME=$(NAME): no such chapter; there are" notebooks/*.ipynb; exit 2; }
	@$(BEGIN); \
	step style $(BIN)/ruff check --quiet $(CODE); \
	step format $(BIN)/ruff format --check --quiet $(CODE); \
	step tests $(PYTEST) $(TWO) $(NBVAL) $(if $(ALL),,--once -m "not slow") \
		-k "($(NAME) and not $(NAME)_in_practice) or reached" \
		$(BOOK) $(TESTS) tests/test_notebooks.py tests/test_reached.py; \
	$(if $(and $(WRONG),$(if $(ALL),,once)),step builds $(PYTEST) --numprocesses 2 $(WRONG);) \
	$(END)
endif

# The libraries under PyTorch choose their kernels by what the processor can do, and each choice
# rounds in another order. Variables take abilities away: so this machine can play an older one.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
SSE4 := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
test-processors: $(VENV)/installed
	@$(BEGIN); for abilities in "" "$(AVX2)" "$(SSE4)"; do \
		echo "As a processor with: $${abilities:-all that this one has}"; \
		step "($$abilities)" env $$abilities $(PYTEST) $(TWO) $(NBVAL) \
			$(or $(NAMES),tests notebooks); \
	done; $(END)

test-gpu: $(VENV)/installed
	@$(PYTEST) -m gpu tests

gpu-report: $(VENV)/installed
	@$(BIN)/python benchmarks/gpu_report.py $(REPORT)

test-versions: $(VENV)/installed
	@$(BIN)/python tools/versions.py $(NAMES)

test-browser: $(VENV)/browser
	@$(BIN)/python tests/browser/chromium.py
	@$(PYTEST) tests/browser

mutants: $(VENV)/installed
	@$(BIN)/python tools/mutants.py $(NAMES)

notebooks: $(VENV)/installed
	@$(BIN)/python -m tools.store

handouts: $(VENV)/installed
	@$(BIN)/python -m handouts

student student/README.md: $(VENV)/installed README.md $(wildcard notebooks/[0-9]*.ipynb)
	@$(BIN)/python -m handouts --student

site: $(VENV)/installed
	@$(BIN)/python -m handouts --site

slides: $(VENV)/installed
	@$(BIN)/python -m handouts --slides

assignment: $(VENV)/installed
	@$(BIN)/python -m tools.assignment "$(NAME)" "$(or $(VARIANT),1)"

publish: $(VENV)/installed
	@test -f build/site/index.html || { echo "build/site/ is not there: make site"; exit 1; }
	@$(BIN)/python -c "import ghp_import" 2>/dev/null || $(INSTALL) test,maintain
	@$(BIN)/ghp-import --no-jekyll --no-history --push --force --message "The site" build/site

new-chapter: $(VENV)/installed
	@$(BIN)/python -m tools.new_chapter "$(NAME)" "$(AFTER)"

# The versions are written first, for they decide what is installed.
update:
	@test -z "$(TORCH)" || $(PYTHON) tools/update.py "$(TORCH)"
	@$(MAKE) $(VENV)/installed
	@$(INSTALL) test,maintain
	@$(BIN)/python tools/update.py

bench: $(VENV)/installed
	@for script in $(filter-out benchmarks/gpu_report.py,$(wildcard benchmarks/*.py)); do $(BIN)/python $$script || exit 1; done

# A tool of its own, in an environment of its own. Strict: what could not be asked is a failure.
audit: $(VENV)/installed
	@$(BIN)/python -m venv $(VENV)/audit
	@$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	@$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//' > $(VENV)/audited.txt
	@$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip -r $(VENV)/audited.txt

clean:
	rm -rf $(VENV) build *.egg-info

# A virtual environment knows its own folder, its Python, and the build of PyTorch that was
# asked for: one that was moved, or is to have another, is made again.
HERE := $(VENV)/here
TORCH_BUILD ?= $(filter cpu cuda,$(lastword $(shell cat $(HERE) 2>/dev/null)))
ifneq ($(filter-out cpu cuda,$(TORCH_BUILD)),)
$(error TORCH_BUILD is cpu or cuda, and not $(TORCH_BUILD))
endif
MADE := $(strip $(CURDIR) $(TORCH_BUILD))
ifneq ($(shell cat $(HERE) 2>/dev/null),$(MADE))
.PHONY: $(VENV)/installed
else ifneq ($(shell cat $(VENV)/python 2>/dev/null),$(PYTHON))
.PHONY: $(VENV)/installed
endif

INSTALL = $(BIN)/python tools/install.py "$(TORCH_BUILD)"

$(VENV)/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { \
		echo "make: Python 3.11 or newer is needed, and none was found. Install one, or make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
		echo "make: Python 3.11 or newer is needed, and $(PYTHON) is `$(PYTHON) -V 2>&1 | tail -1`"; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON): a few minutes, once."
	@{ test "`cat $(HERE) 2>/dev/null`" = "$(MADE)" && \
		test "`cat $(VENV)/python 2>/dev/null`" = "$(PYTHON)" && $(BIN)/python -c '' 2>/dev/null; } || \
		if test -L $(VENV); then \
			echo "make: $(VENV) is a link, and a new environment would clear the folder at its other end. Remove the link, and make sets one up here."; exit 1; \
		else $(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1; fi || { \
		echo "make: $(PYTHON) -m venv failed. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "$(MADE)" > $(HERE)
	@echo "$(PYTHON)" > $(VENV)/python
	@$(INSTALL) test
	@$(BIN)/python -c "import matplotlib.font_manager" 2>/dev/null
	@touch $@

AXE := axe-core@4.14.1
$(VENV)/browser: $(VENV)/installed
	@$(INSTALL) test,browser
	@{ mkdir -p $(VENV)/axe-core && cd $(VENV)/axe-core && npm pack --silent $(AXE) && \
		tar xzf axe-core-*.tgz; } >/dev/null 2>&1 || \
		echo "No npm here, or it cannot fetch $(AXE): the web pages are not checked with it."
	@touch $@
