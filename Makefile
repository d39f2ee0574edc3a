# Two commands matter: `make demo` and `make test`. Each does all its own set-up.
.PHONY: demo demo-stop test test-all lint setup clean

PY := .venv/bin/python

demo: setup
	$(PY) tools/demo.py run

demo-stop:
	@if [ -x $(PY) ]; then $(PY) tools/demo.py stop; else echo "nothing to stop: there is no .venv"; fi

test: setup lint
	$(PY) -m pytest -m "not slow"

test-all: setup lint
	$(PY) -m pytest

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/vermin --quiet --no-tips --violations --target=3.9- remote_payload/host remote_payload/hook remote_payload/survey

setup:
	@tools/setup.sh

# ctl-runs stays: it is the only copy of what was seen of a run whose host is gone.
clean: demo-stop
	rm -rf .demo .venv
