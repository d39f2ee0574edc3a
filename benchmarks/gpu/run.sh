#!/usr/bin/env bash
# Run the GPU benchmarks on a bare machine with NVIDIA GPUs, Python 3.12, torch 2.11 (CUDA 13) and transformers.
# Usage: run.sh [--bundle FILE] [PART ...]
#   PART: models right canary product fast dissect account memory writing sweep, or "NAME:ARGUMENTS", as in
#         "fast:--tp 2"; without any: all that this machine's GPUs allow, an hour and more
#   --bundle  the concatenated part0..part4 of pack.sh; unpacked once. tools.tgz must be unpacked beside this checkout.
# CTL_CARRIED: where tools.tgz was unpacked, if not beside this checkout.
# Results: $OUT/*.json, $OUT/logs.tgz (logs, run folders, nvidia-smi); default $OUT: /tmp/ctl-gpu/out.
# It changes the machine: a .pth file for the vLLM bundle, a user `sshd`, /run/sshd. Use a machine of your own.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)
carried=${CTL_CARRIED:-$(dirname "$repo")} # ssh/ and ctlsite/ of tools.tgz
export BENCH_ROOT=${BENCH_ROOT:-/tmp/ctl-gpu} OUT=${OUT:-/tmp/ctl-gpu/out} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export BENCH_MEMORY=${BENCH_MEMORY:-/dev/shm/ctl-gpu} # of this call alone, where several run side by side
part_limit_s=${PART_LIMIT_S:-590}
mkdir -p "$OUT" "$BENCH_ROOT"
cd "$repo" # `python -m` looks in the current folder first: another checkout there would be measured instead

if [ "${1:-}" = --bundle ]; then
  site=$BENCH_ROOT/site
  if [ ! -d "$site/vllm" ]; then
    mkdir -p "$site" && tar -xzf "$2" -C "$site"
    # The job's Python must find the bundle without an environment variable, as an installed vLLM is found.
    packages=$(python3 -c 'import site; print(site.getsitepackages()[0])')
    echo "import sys; sys.path.insert(1, '$site')" >"$packages/ctl-gpu-bundle.pth"
  fi
  shift 2
fi
if [ -d "$carried/ssh" ]; then
  export PATH="$carried/ssh/bin:$PATH"
  getent passwd sshd >/dev/null || echo 'sshd:x:74:74::/run/sshd:/usr/sbin/nologin' >>/etc/passwd
  sed -i 's/^root:!/root:*/' /etc/shadow # without PAM, sshd takes a locked password for a locked account
  mkdir -p /run/sshd
fi
export CTL_SPECULATORS_CLIENT="$carried/peer/vllm_client.py"
if [ -x "$carried/peer/fio" ]; then export FIO="$carried/peer/fio"; fi
export CTL_PYTHONPATH="$carried/ctlsite:$repo" PYTHONPATH="$here:$repo:$repo/tests"

if [ $# = 0 ]; then
  set -- "models:qwen3-8b deepseek-wide qwen3-truth deepseek-truth kimi-truth prompts.jsonl long.jsonl short.jsonl truth.jsonl"
  set -- "$@" product canary dissect sweep account memory writing
  for model in qwen3 deepseek kimi; do set -- "$@" "right:--only $model-truth"; done
  for mode in compiled eager; do set -- "$@" "fast:--prompts long.jsonl --modes $mode --tag=-$mode"; done
  for gpus in 2 4 8; do
    if [ "$(nvidia-smi -L | wc -l)" -ge $gpus ]; then
      set -- "$@" "product:--gpus $gpus" "right:--tp $gpus"
      set -- "$@" "dissect:--model deepseek-wide --tp $gpus --compiled --prompts long.jsonl --rounds ,rank0,, --no-profile"
      set -- "$@" "sweep:--model deepseek-wide --tp $gpus --only base,eager,expert-parallel --at-once 3"
    fi
  done
fi

status=0
for part in "$@"; do
  name=${part%%:*}
  arguments=()
  case $part in *:*) read -ra arguments <<<"${part#*:}" ;; esac
  echo "== $part ($(date +%T))"
  started=$SECONDS
  timeout -k 60 "$part_limit_s" python3 "$here/$name.py" "${arguments[@]}" || { status=1; echo "== $part FAILED"; }
  echo "== $part took $((SECONDS - started)) s"
  rm -rf "$BENCH_MEMORY"
done
tar -C "$OUT" -czf "$OUT/logs.tgz" $(cd "$OUT" && ls -d logs runs smi 2>/dev/null)
rm -rf "$OUT/logs" "$OUT/runs" "$OUT/smi"
exit $status
