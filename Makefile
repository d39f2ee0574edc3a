# Two commands matter: `make demo` and `make test`. Each does all its own set-up.
.PHONY: demo demo-stop test test-all test-older lint setup older clean

PY := .venv/bin/python
# The oldest vLLM that shares torch with the pinned one, see requirements/.
OLDER := 0.28
OLDER_PY := .venv-vllm-$(OLDER)/bin/python
# Tests in two processes, for the two cores of CI; tests/conftest.py says who gets which. 0: one after another.
WORKERS := 2

demo: setup
	$(PY) tools/demo.py run

demo-stop:
	@if [ -x $(PY) ]; then $(PY) tools/demo.py stop; else echo "nothing to stop: there is no .venv"; fi

# The linters want a core, the older vLLM mostly the network.
test: setup
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint older
	$(PY) -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	$(OLDER_PY) -m pytest tests/extract/test_older_vllm.py tests/extract/test_versions.py -m "not slow"

test-all: setup lint
	$(PY) -m pytest
	$(MAKE) test-older

# Every test of the capture on the older vLLM; what it cannot is skipped with the reason.
test-older: older
	$(OLDER_PY) -m pytest tests/extract

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/vermin --quiet --no-tips --violations --target=3.9- remote_payload/host remote_payload/hook remote_payload/survey

setup:
	@tools/setup.sh

older: setup
	@tools/setup_vllm.sh $(OLDER)

# ctl-runs stays: it is the only copy of what was seen of a run whose host is gone.
clean: demo-stop
	rm -rf .demo .venv .venv-vllm-*
