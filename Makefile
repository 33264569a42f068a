# What people type. `make run` runs the whole pipeline, `make test` proves it; `make help` lists the rest.

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
.PHONY: help run test test-all test-long test-gpu test-team faults kills check up down status serve install-services uninstall-services upgrade audit install-team profile base base-single experiment bench-train bench-gpu bench-data install check-system

help:           ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

run: install    ## the whole pipeline on the embedded benchmark, then the scores and where everything is
	@python -m infra.run

test: install   ## the quick tests
	@OMP_NUM_THREADS=1 python -m pytest -n 3 --dist worksteal

test-all: install ## every test, as CI runs it; of those that take 45 seconds or more five minutes a day
	@OMP_NUM_THREADS=1 python -m pytest -n 4 --dist worksteal --all -m 'not gpu and not team'

test-gpu: install ## the tests that need an NVIDIA GPU
	@python -c 'import sys, torch; torch.cuda.is_available() or sys.exit(f"make test-gpu: torch {torch.__version__} sees no GPU; install a CUDA build of torch and check nvidia-smi")'
	@python -m pytest tests/gpu -m gpu

test-team: install-team ## the tests that start PostgreSQL, an SSH server and an S3-compatible one on this machine
	@OMP_NUM_THREADS=1 python -m pytest -m team

test-long: install ## the tests of which `make test-all` takes a sample: the longest, and the slow ones of faults
	@OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal --long -m 'slow and not gpu and not team'

faults: install ## every fault of tests/faults/table.py, an hour at most; SEED=N for the points of an earlier run
	@OMP_NUM_THREADS=1 timeout 3600 python -m pytest -n 2 --dist worksteal -m 'fault and not gpu and not team' $(if $(SEED),--faults-seed $(SEED))

kills: install  ## N random kills of services and flows -> runs/kills/kills.jsonl; a second call goes on
	@python -m tests.faults.kills $(or $(N),200) $(if $(SEED),--seed $(SEED))

check: install  ## lint, formatting, types and the design rules
	@ruff check .
	@ruff format --check .
	@lint-imports --no-cache --no-logo
	@mypy
	@python -m pytest tests/test_entry_points.py tests/test_dependencies.py tests/test_readme.py -m 'not slow'

up: install     ## Prefect server, MLflow server and a worker on this machine, and a keeper that starts them again
	@python -m infra.services up

down:           ## end what `up` started
	@python -m infra.services down

status:         ## each service: up or not, where, since when, its log; the last training
	@python -m infra.services status

serve: install  ## captions over HTTP with the champion, and a page, at http://127.0.0.1:8000; MODEL=FOLDER or a version for another
	@m3diff serve $(if $(MODEL),--model $(MODEL))

UNITS = $(or $(XDG_CONFIG_HOME),$(HOME)/.config)/systemd/user
UNIT = $(shell systemd-escape --path --template=m3diff@.service "$(CURDIR)")

install-services: install ## have the systemd of the user run the services of `up`, on a machine that stays on
	@install -D -m 644 -t "$(UNITS)" infra/m3diff@.service
	@systemctl --user daemon-reload && systemctl --user enable --now "$(UNIT)"
	@echo "$(UNIT) is started; the services end when you log out, unless: loginctl enable-linger"

uninstall-services: ## end what `install-services` started, for good
	@systemctl --user disable --now "$(UNIT)"

profile: install ## make PROFILE (paper, one-gpu, small, ...) the parameters of the next run, once it is seen to fit
	@m3diff --params profiles/$(PROFILE).yaml plan
	@m3diff profile $(PROFILE)

base: install   ## pre-train the tiny base from scratch (about two hours of one core); FAMILY=blip2idc, blip2idc-stacked: that of BLIP2IDC, from the first
	@$(if $(FAMILY),m3diff --params infra/base-$(FAMILY).yaml pretrain,m3diff pretrain && dvc repro --single-item pretrain)

base-single: install ## the control of `make experiment NAME=ablation` that was taught on single images alone (about two hours) -> data/00_base_single
	@m3diff --params infra/base-single.yaml pretrain

bench-train: install ## training speed -> benchmarks/results/train.json, a line a row in train.jsonl; ROWS='"packed" "unpacked"' for some
	@python benchmarks/train.py $(if $(ROWS),--rows $(ROWS))

bench-gpu: install ## the first hour on a GPU, in slices of BUDGET seconds that go on where the last one ended -> benchmarks/results/gpu.jsonl
	@python benchmarks/gpu.py --budget $(or $(BUDGET),480)

bench-data: install  ## speed of ingest, validate and convert -> benchmarks/results/data.json; AGAINST=FOLDER: and of another checkout, by turns
	@python benchmarks/data.py $(if $(AGAINST),--against $(AGAINST))

experiment: install ## variants x seeds -> a table in benchmarks/results: NAME=ablation, compare, seeds, targets, rehearse or another file of benchmarks/experiments; N=3 for the number of seeds
	@python -m benchmarks.experiments $(NAME) $(if $(N),--seeds $(N))

RESOLVE := uv pip compile --quiet --system-certs --no-annotate --custom-compile-command 'make upgrade' --python-version 3.11 pyproject.toml

# constraints.txt: every extra, any system, without what only torch's build for CUDA brings. lock.txt: that of an image.
upgrade: install $(BIN)/uv ## the newest versions that pyproject.toml allows -> constraints.txt, infra/lock.txt
	@$(RESOLVE) --universal --fork-strategy fewest --no-header --extra dev --extra team --extra cluster --extra team-test | sed -E '/^(nvidia-|cuda-|triton=)/d; s/ ;.*//' > .venv/constraints.txt
	@$(RESOLVE) --generate-hashes --python-platform x86_64-manylinux_2_28 --extra team --extra cluster -c .venv/constraints.txt -o .venv/lock.txt
	@mv .venv/constraints.txt constraints.txt; mv .venv/lock.txt infra/lock.txt; git diff --stat constraints.txt infra/lock.txt

audit: install $(BIN)/uv ## known vulnerabilities of what infra/lock.txt names; needs pypi.org
	@uvx --system-certs pip-audit==2.10.1 --strict --disable-pip --require-hashes -r infra/lock.txt

$(BIN)/uv:
	@python -m pip install -q uv==0.13.9

install: check-system
	@$(MAKE) --silent $(READY)

install-team: install ## what PostgreSQL, S3, SSH and logins need, and the tests of them
	@python -m pip install -q -c constraints.txt -e '.[team,team-test]'

check-system:
	@"$$PYTHON" infra/check_system.py

# First without an index, which is enough where only a time changed or the folder. Then torch by itself: where a CPU build
# is offered it is taken, and nothing later replaces it.
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
