#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes two wheels: wheel.sh PROGRAMS OUT MODULE... PROGRAMS is a build folder made with BUNDLE=1. One wheel has the modules alone, for any
# machine. The other one has the programs in hitrain/bin, which find libraries in hitrain/lib.

set -euo pipefail
programs=$1 out=$2
shift 2
top=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

build() {
	"$PYTHON" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$1" "$work"
}

mkdir "$work/hitrain"
cp "$top/LICENSE" "$top/optim/torch/pyproject.toml" "$work"
cp "$@" "$work/hitrain"
build "$out"

# ---- with programs ----

mkdir "$work/hitrain/lib"
cp -r "$programs/bin" "$programs/share" "$work/hitrain"
find "$work/hitrain/share" \( -name __pycache__ -o -name compiled \) -prune -exec rm -rf {} +    # pip compiles
mapfile -t binaries < <(grep -l "^.ELF" -a "$work"/hitrain/bin/*)
strip --strip-unneeded "${binaries[@]}"
for library in $(LD_LIBRARY_PATH=$top/build/deps/usr/lib ldd "${binaries[@]}" | awk '$1 ~ /^lib(fuse3|numa|blkid|xxhash)[.]/ { print $3 }' | sort -u); do
	cp -L "$library" "$work/hitrain/lib"
done
cat >>"$work/pyproject.toml" <<'END'

[project.scripts]
hitrainctl = "hitrain._daemon:start"
hitrain-fsck = "hitrain._daemon:start"
"mkfs.hitrain" = "hitrain._daemon:start"
END
sed -i 's|^hitrain = \["py.typed"\]|hitrain = ["py.typed", "bin/*", "lib/*", "share/**"]|' "$work/pyproject.toml"

# The newest symbols of glibc that are used say on which systems it runs (PEP 600).
glibc=$(objdump -T "${binaries[@]}" "$work"/hitrain/lib/* | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
printf '[bdist_wheel]\nplat_name = manylinux_%s_%s\n' "$(echo "${glibc#GLIBC_}" | tr . _)" "$(uname -m)" >"$work/setup.cfg"
build "$out"
