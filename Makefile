# Entry points. `make run` runs the whole pipeline, `make test` the quick tests, `make help` lists all targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
ifndef PYTHON
PYTHON := $(shell command -v python3.11 || command -v python3 || echo python3.11)
endif
export PYTHON
BIN := .venv/bin
READY := .venv/.ready
export PATH := $(CURDIR)/$(BIN):$(PATH)
export LC_ALL := C.UTF-8
unexport PYTHONSAFEPATH

.DEFAULT_GOAL := help
.PHONY: help run test test-all test-long test-gpu test-team faults kills check up down status flow serve install-services uninstall-services upgrade audit install-team profile base base-single experiment bench-train bench-gpu bench-data bench-score bench-caption install check-system

help:           ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

run: install    ## run the whole pipeline on the embedded benchmark, then print the scores and where the results are
	@python -m infra.run

test: install   ## run the quick tests
	@OMP_NUM_THREADS=1 python -m pytest -n 3 --dist worksteal

test-all: install ## run every test as CI does; tests of 45 seconds or more take turns, ten minutes of them in each run
	@OMP_NUM_THREADS=1 python -m pytest -n 4 --dist worksteal --all -m 'not gpu and not team'

test-gpu: install ## run the tests that need an NVIDIA GPU
	@python -c 'import sys, torch; torch.cuda.is_available() or sys.exit(f"make test-gpu: torch {torch.__version__} sees no GPU; install a CUDA build of torch and check nvidia-smi")'
	@python -m pytest tests/gpu -m gpu

test-team: install-team ## run the tests that start PostgreSQL, an SSH server and an S3-compatible server on this machine
	@OMP_NUM_THREADS=1 python -m pytest -m team

test-long: install ## run the longest tests and the slow tests of faults, of which `make test-all` runs a sample
	@OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal --long -m 'slow and not gpu and not team'

faults: install ## inject every fault of tests/faults/table.py, in at most an hour; SEED=N repeats the points of an earlier run
	@OMP_NUM_THREADS=1 timeout 3600 python -m pytest -n 2 --dist worksteal -m 'fault and not gpu and not team' $(if $(SEED),--faults-seed $(SEED))

kills: install  ## kill services and flows N times at random -> runs/kills/kills.jsonl; a second call continues
	@python -m tests.faults.kills $(or $(N),200) $(if $(SEED),--seed $(SEED))

check: install  ## check lint, formatting, types and the design rules
	@ruff check .
	@ruff format --check .
	@lint-imports --no-cache --no-logo
	@mypy
	@python -m pytest tests/test_entry_points.py tests/test_dependencies.py tests/test_readme.py tests/test_style.py -m 'not slow'

up: install     ## start Prefect, MLflow and a worker on this machine, and a keeper that restarts them
	@python -m infra.services up

down:           ## stop what `up` started
	@python -m infra.services down

status:         ## show for each service whether it is up, its address, start and log; and the last training
	@python -m infra.services status

flow:           ## run all stages of the last commit as a flow on the services of `up`, and wait for its end; REF=BRANCH for another commit
	@python -m infra.services flow $(if $(REF),"$(REF)")

serve: install  ## serve captions of the champion over HTTP, with a web page, at http://127.0.0.1:8000; MODEL=FOLDER or MODEL=VERSION for another model
	@m3diff serve $(if $(MODEL),--model $(MODEL))

UNITS = $(or $(XDG_CONFIG_HOME),$(HOME)/.config)/systemd/user
UNIT = $(shell systemd-escape --path --template=m3diff@.service "$(CURDIR)")

install-services: install ## let the user's systemd run the services of `up`, on a machine that stays on
	@install -D -m 644 -t "$(UNITS)" infra/m3diff@.service
	@systemctl --user daemon-reload && systemctl --user enable --now "$(UNIT)"
	@echo "$(UNIT) is started; the services end when you log out, unless: loginctl enable-linger"

uninstall-services: ## stop and disable what `install-services` started
	@systemctl --user disable --now "$(UNIT)"

profile: install ## make PROFILE (paper, one-gpu, small, ...) the parameters of the next run, if its plan fits the machine
	@m3diff --params profiles/$(PROFILE).yaml plan
	@m3diff profile $(PROFILE)

base: install   ## pre-train the tiny base from scratch (about two hours on one core); FAMILY=blip2idc or blip2idc-stacked makes the base of BLIP2IDC from it
	@$(if $(FAMILY),m3diff --params infra/base-$(FAMILY).yaml pretrain,m3diff pretrain && dvc repro --single-item pretrain)

base-single: install ## pre-train a base on single images only, a control of `make experiment NAME=ablation` (about two hours) -> data/00_base_single
	@m3diff --params infra/base-single.yaml pretrain

bench-train: install ## measure training speed -> benchmarks/results/train.json, one line per row in train.jsonl; ROWS='"packed" "unpacked"' for some rows
	@python benchmarks/train.py $(if $(ROWS),--rows $(ROWS))

bench-gpu: install ## run the benchmarks for a GPU (about an hour) in slices of BUDGET seconds; a call continues the last one -> benchmarks/results/gpu.jsonl
	@python benchmarks/gpu.py --budget $(or $(BUDGET),480)

bench-data: install  ## compare the speed of ingest, validate and convert with datasets.map -> benchmarks/results/data.json; AGAINST=FOLDER compares with another checkout
	@python benchmarks/data.py $(if $(AGAINST),--against $(AGAINST))

bench-caption: install ## compare the speed of `m3diff caption` with a stock script -> benchmarks/results/caption.json; AGAINST=FOLDER also with another checkout
	@python benchmarks/caption.py $(if $(AGAINST),--against $(AGAINST))

bench-score: install ## compare the speed of scoring with pycocoevalcap -> benchmarks/results/score.json; AGAINST=FOLDER also with another checkout
	@python benchmarks/score.py $(if $(AGAINST),--against $(AGAINST))

experiment: install ## train variants x seeds and write a table to benchmarks/results: NAME=ablation, compare, seeds, targets, rehearse or another file in benchmarks/experiments; N=3 sets the number of seeds
	@python -m benchmarks.experiments $(NAME) $(if $(N),--seeds $(N))

RESOLVE := uv pip compile --quiet --system-certs --no-annotate --custom-compile-command 'make upgrade' --python-version 3.11 pyproject.toml

# constraints.txt has every extra for every system, without the packages that only torch's CUDA build needs.
# lock.txt has the versions and hashes of the image.
upgrade: install $(BIN)/uv ## update to the newest versions that pyproject.toml allows -> constraints.txt, infra/lock.txt
	@$(RESOLVE) --universal --fork-strategy fewest --no-header --extra dev --extra team --extra cluster --extra team-test | sed -E '/^(nvidia-|cuda-|triton=)/d; s/ ;.*//' > .venv/constraints.txt
	@$(RESOLVE) --generate-hashes --python-platform x86_64-manylinux_2_28 --extra team --extra cluster -c .venv/constraints.txt -o .venv/lock.txt
	@mv .venv/constraints.txt constraints.txt; mv .venv/lock.txt infra/lock.txt; git diff --stat constraints.txt infra/lock.txt

audit: install $(BIN)/uv ## look up known vulnerabilities of the versions in infra/lock.txt; needs pypi.org
	@uvx --system-certs pip-audit==2.10.1 --strict --disable-pip --require-hashes -r infra/lock.txt

$(BIN)/uv:
	@python -m pip install -q uv==0.13.9

install: check-system
	@$(MAKE) --silent $(READY)

install-team: install ## install what PostgreSQL, S3, SSH and logins need, and their tests
	@python -m pip install -q -c constraints.txt -e '.[team,team-test]'

check-system:
	@"$$PYTHON" infra/check_system.py

# The first attempt uses no index; that is enough if only a file's time or the folder changed. Otherwise torch is installed
# alone first, so that a CPU build is taken if the index offers one, and nothing later replaces it.
$(READY): pyproject.toml constraints.txt
	@echo "install 1/3: virtual environment in .venv"
	@"$$PYTHON" -m venv .venv
	@if ! python -m pip install -q --no-index --no-build-isolation -c constraints.txt -e '.[dev]' 2>/dev/null; then \
	  echo "install 2/3: torch"; \
	  python -m pip install -q -c constraints.txt "$$(grep '^torch==' constraints.txt)"; \
	  echo "install 3/3: the other $$(grep -c '==' constraints.txt) packages, as tested (constraints.txt)"; \
	  python -m pip install -c constraints.txt -e '.[dev]' | awk '/^ *(Collecting|Building|Installing)/ {n++; if (n % 25 == 0) {printf "  %d collected\n", n; fflush()}}'; \
	fi
	@touch $@
