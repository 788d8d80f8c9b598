#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes a Debian package of an installed tree: deb.sh ROOT VERSION OUT. ROOT is what `make install DESTDIR=ROOT PREFIX=/usr
# PYTHONDIR=/usr/lib/python3/dist-packages` left; OUT is a folder. The dependencies on libraries are those of the
# programs as they are linked.

set -euo pipefail
root=$1 version=$2 out=$3
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
architecture=$(dpkg --print-architecture)
doc=$root/usr/share/doc/hitrain

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# ---- files that only a package has ----

"$here/completions.py" "$HITRAIN_BIN" "$work"
install -d "$root/usr/share/bash-completion/completions" "$root/usr/share/zsh/vendor-completions" "$root/DEBIAN" \
	"$root/usr/lib/systemd/system" "$root/usr/lib/udev/rules.d" "$doc/examples"
install -m 644 "$work"/bash/* "$root/usr/share/bash-completion/completions/"
ln -sf hitrain-fsck "$root/usr/share/bash-completion/completions/fsck.hitrain"
install -m 644 "$work/zsh/_hitrain" "$root/usr/share/zsh/vendor-completions/"
install -m 644 "$top"/mount-helpers/udev/*.rules "$root/usr/lib/udev/rules.d/"
install -m 644 "$top"/mount-helpers/systemd/*.{service,timer} "$root/usr/lib/systemd/system/"
install -m 644 "$top"/mount-helpers/systemd/*.mount "$doc/examples/"
install -m 644 "$top/README.md" "$top"/docs/*.md "$doc/"
gzip -9n <"$top/CHANGELOG.md" >"$doc/CHANGELOG.md.gz"
{
	printf 'Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: hitrain\n\n'
	printf 'Files: *\nCopyright: the authors of hitrain\nLicense: Apache-2.0\n'
	printf ' On Debian systems the text of the licence is in /usr/share/common-licenses/Apache-2.0.\n'
} >"$doc/copyright"
chmod 644 "$doc/CHANGELOG.md.gz" "$doc/copyright"

# ---- as Debian wants them ----

find "$root/usr/share/man" -name '*.[78]' -exec gzip -9nf {} +
# Programs of vaults are scripts.
find "$root/usr/bin" "$root/usr/sbin" -type f ! -name "hitrain-vault-*" -exec strip --strip-unneeded {} +

mkdir -p "$work/debian"
printf 'Source: hitrain\n\nPackage: hitrain\nArchitecture: any\n' >"$work/debian/control"
mapfile -t programs < <(find "$root/usr/bin" "$root/usr/sbin" -type f ! -name "hitrain-vault-*")
libraries=$(cd "$work" && dpkg-shlibdeps -O --ignore-missing-info "${programs[@]}" 2>/dev/null | sed -n 's/^shlibs:Depends=//p')
[ -n "$libraries" ] || { echo "deb: dpkg-shlibdeps found no libraries" >&2; exit 1; }

cat >"$root/DEBIAN/control" <<END
Package: hitrain
Version: $version
Architecture: $architecture
Maintainer: hitrain maintainers <hitrain@localhost>
Installed-Size: $(du -sk --exclude=DEBIAN "$root" | cut -f1)
Depends: $libraries, fuse3
Recommends: attr, procps, python3
Suggests: python3-torch, python3-numpy
Section: admin
Priority: optional
Description: file system whose files are tensors, and which runs the optimizer
 hitrain keeps parameters, master weights and moments of a model on NVMe. A
 training program writes gradients into files and reads new parameters from
 files; the store updates them in place, and each step is one atomic commit.
 .
 This package has the daemon, tools for mounting, checking and monitoring, and
 the client for PyTorch.
END
install -m 755 "$here/postinst" "$root/DEBIAN/postinst"
install -m 755 "$here/prerm" "$root/DEBIAN/prerm"
(cd "$root" && find usr -type f -printf '%P\n' | sed 's|^|usr/|' | LC_ALL=C sort | xargs -d '\n' md5sum) >"$root/DEBIAN/md5sums"

mkdir -p "$out"
dpkg-deb --root-owner-group --build "$root" "$out/hitrain_${version}_$architecture.deb" >/dev/null
echo "$out/hitrain_${version}_$architecture.deb"
