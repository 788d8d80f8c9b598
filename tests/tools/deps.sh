#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the packages for building and testing hitrain on Debian 12 or 13: `make deps`. With one more word it adds:
#
#   bench-meta  libfuse's example file system passthrough_hp, in build/deps/bench, which `make bench-meta` measures, too
#   bench-step  the programs that make the XFS which `make bench-step` measures, too
#   bench-path  all of these, and strace
#   bench-fit   the programs that make an XFS
#   bench-space the programs of XFS and btrfs, and duperemove: `make bench-space` leaves out those that it does not get
#   ecosystem   the compiler and headers with which `make check-ecosystem` builds a part of DeepSpeed
#   vm          QEMU, and a kernel in build/deps/vm, unpacked and never installed, which `make check-vm` boots
#   system      Prometheus, Chromium and debootstrap: tests that need them run only where they are installed
#
# A second run only checks, and returns at once. Packages come from the machine's own package sources. If these have a
# libfuse older than 3.17, the script builds libfuse from the source package of a newer suite into build/deps, and
# programs link it from there. For that it uses a sources list and state folders of its own. So the machine's package
# configuration does not change.

set -euo pipefail

top=$(cd "$(dirname "$0")/../.." && pwd)
deps=$top/build/deps
fuse_min=3.17
fuse_suite=trixie
export DEBIAN_FRONTEND=noninteractive LC_ALL=C

packages=(
	gcc libc6-dev make pkgconf ccache clang libclang-rt-dev
	liburing-dev libnuma-dev libzstd-dev libxxhash-dev libblkid-dev systemtap-sdt-dev check
	fuse3 attr acl e2fsprogs fio procps util-linux xxd
	gdb git rsync sqlite3 tar xz-utils stress-ng zsh nbdkit libnbd-bin
	clang-format shellcheck
	python3 python3-numpy python3-torch python3-pytest libopenblas0-openmp
	python3-pip python3-setuptools python3-wheel python3-venv
)
# Needed only if libfuse is built here.
fuse_build_packages=(dpkg-dev meson ninja-build)
# Needed only to build passthrough_hp.
example_packages=(dpkg-dev g++)
# Needed only for bench-step and bench-fit.
step_packages=(xfsprogs)
# Needed only for bench-path, which counts system calls.
path_packages=(xfsprogs strace)

# What bench-space measures beside hitrain.
space_packages=(xfsprogs btrfs-progs duperemove)

# Needed only for check-ecosystem: DeepSpeed compiles the code by which it reaches NVMe.
ecosystem_packages=(g++ python3-dev libaio-dev)

# Needed only for a machine in QEMU: QEMU, the tool for its first file system, and the tools that unpack modules.
vm_packages=(qemu-system-x86 qemu-utils busybox-static cpio kmod zstd xz-utils)

# Needed only by tests of whole systems, which are skipped without them.
system_packages=(prometheus chromium-headless-shell debootstrap)

say() { echo "deps: $*"; }
die() { echo "deps: $*" >&2; exit 1; }

sudo=()
if [ "$(id -u)" != 0 ]; then
	sudo=(sudo)
fi

as_root() {
	if [ ${#sudo[@]} -gt 0 ] && ! command -v sudo >/dev/null; then
		die "must be root (or have sudo) to run: $*"
	fi
	${sudo[@]+"${sudo[@]}"} "$@"
}

installed() {
	[ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

lists_fresh=no
update_lists() {
	if [ $lists_fresh = no ]; then
		say "apt-get update"
		# Another source of this machine being unreachable is no reason to stop.
		as_root apt-get -q -o DPkg::Lock::Timeout=300 update >"$log" 2>&1 ||
			{ say "apt-get update failed in part:"; tail -n 5 "$log"; }
		lists_fresh=yes
	fi
}

install_missing() {
	local missing=() p
	for p in "$@"; do
		installed "$p" || missing+=("$p")
	done
	[ ${#missing[@]} -gt 0 ] || return 0
	update_lists
	say "installing ${missing[*]}"
	as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 \
		--no-install-recommends install "${missing[@]}" </dev/null >"$log" 2>&1 ||
		{ cat "$log" >&2; die "could not install: ${missing[*]}"; }
}

# The newest libfuse3-dev that apt would install (or has installed) here.
fuse_packaged_version() {
	apt-cache policy libfuse3-dev 2>/dev/null |
		awk '$1 == "Candidate:" { sub(/^[0-9]+:/, "", $2); print $2 }'
}

# The Debian archives that apt uses on this machine, one per line.
configured_archives() {
	# shellcheck disable=SC2016 # apt replaces these
	apt-get indextargets --format '$(REPO_URI)' \
		'Created-By: Packages' 'Origin: Debian' 'Label: Debian' 2>/dev/null | sort -u
}

# The same, after an update if apt has no lists yet. DEBIAN_MIRROR= in the environment takes precedence.
archives() {
	if [ -n "${DEBIAN_MIRROR:-}" ]; then
		echo "$DEBIAN_MIRROR"
		return
	fi
	[ -n "$(configured_archives)" ] || update_lists >&2
	configured_archives
}

# fetch_source_from MIRROR: the fuse3 source package of $fuse_suite, unpacked into $work/src.
fetch_source_from() {
	local keyring=/usr/share/keyrings/debian-archive-keyring.gpg opt=() signed=
	[ ! -r "$keyring" ] || signed="[signed-by=$keyring] "
	rm -rf "$work"
	mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/parts"
	echo "deb-src $signed$1 $fuse_suite main" >"$work/sources.list"
	opt=(-q
		-o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts="$work/parts"
		-o Dir::Etc::PreferencesParts="$work/parts" -o Dir::Etc::Preferences=/dev/null
		-o Dir::State="$work/state" -o Dir::State::status=/var/lib/dpkg/status
		-o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -o APT::Default-Release=)
	(
		cd "$work"
		apt-get "${opt[@]}" update
		apt-get "${opt[@]}" --only-source --download-only source fuse3
		dpkg-source -x ./*.dsc src
	) >"$log" 2>&1
}

fetch_source() {
	local archive found=no
	mkdir -p "$deps"
	while read -r archive; do
		found=yes
		say "fetching the source of libfuse from $archive $fuse_suite"
		if fetch_source_from "$archive" </dev/null; then
			return 0
		fi
		tail -n 5 "$log"
	done < <(archives)
	[ $found = yes ] ||
		die "apt has no source of Debian packages: add one, or name an archive in DEBIAN_MIRROR="
	die "no archive has the source of libfuse >= $fuse_min ($fuse_suite): name another in DEBIAN_MIRROR=," \
		"or install libfuse3-dev >= $fuse_min"
}

build_fuse() {
	fetch_source
	say "building libfuse into build/deps"
	# The prefix is where fusermount3 is looked for at run time, not where this is put.
	(
		cd "$work"
		PATH=/usr/sbin:/usr/bin:/sbin:/bin
		CC=gcc CFLAGS='-O2 -g' meson setup obj src --prefix=/usr --libdir=lib --buildtype=plain \
			-Ddefault_library=both -Dexamples=false -Dtests=false -Dutils=false
		ninja -C obj
		rm -rf "${deps:?}/usr"
		DESTDIR=$deps meson install -C obj
	) >"$log" 2>&1 || { cat "$log" >&2; die "building libfuse failed"; }
	PKG_CONFIG_LIBDIR=$deps/usr/lib/pkgconfig pkg-config --modversion fuse3 >"$stamp.new"
	mv "$stamp.new" "$stamp"
	rm -rf "$work"
}

have_fuse() {
	if [ -s "$stamp" ] && [ -e "$deps/usr/lib/libfuse3.a" ] && [ -e "$deps/usr/lib/libfuse3.so" ]; then
		return 0
	fi
	pkg-config --atleast-version=$fuse_min fuse3 2>/dev/null
}

# Linked with the same libfuse as hitrain, so that only the file systems differ.
build_example() {
	local flags
	install_missing "${example_packages[@]}"
	fetch_source
	say "building passthrough_hp into build/deps/bench"
	if [ -e "$deps/usr/lib/libfuse3.a" ] && [ -e "$deps/usr/lib/libfuse3.so" ]; then
		flags="-isystem $deps/usr/include/fuse3 $deps/usr/lib/libfuse3.a -ldl"
	else
		flags=$(pkg-config --cflags --libs fuse3)
	fi
	mkdir -p "$deps/bench"
	# shellcheck disable=SC2086 # several words
	g++ -std=c++17 -O2 -D_FILE_OFFSET_BITS=64 -pthread -o "$example.new" "$work/src/example/passthrough_hp.cc" \
		$flags >"$log" 2>&1 || { cat "$log" >&2; die "building passthrough_hp failed"; }
	mv "$example.new" "$example"
	rm -rf "$work"
}

# The kernel package that Debian's meta package names, beside this machine's own.
fetch_kernel() {
	local package
	update_lists
	package=$(apt-cache depends linux-image-amd64 | awk '$1 == "Depends:" { print $2 }')
	[ -n "$package" ] || die "no package linux-image-amd64"
	say "fetching $package"
	rm -rf "$kernel.new" "$kernel"
	mkdir -p "$kernel.new/package"
	(
		cd "$kernel.new/package"
		apt-get -q -o APT::Sandbox::User=root download "$package"
		dpkg-deb -x ./*.deb ..
	) >"$log" 2>&1 || { cat "$log" >&2; die "could not fetch $package"; }
	rm -rf "$kernel.new/package"
	# Where all of / is below /usr the modules are, too.
	[ -d "$kernel.new/lib/modules" ] || ln -s usr/lib "$kernel.new/lib"
	mv "$kernel.new" "$kernel"
}

# selected NAME: prints the target of an alternative, or nothing. Each reader of a pipe here reads to its end:
# one that stops early kills the writer with SIGPIPE, now and then, and pipefail makes that an error.
selected() {
	update-alternatives --query "$1" 2>/dev/null | awk '$1 == "Value:" { print $2 }' || true
}

# PyTorch calls BLAS through an alternative; any but the OpenMP build of OpenBLAS is slow.
select_blas() {
	local arch lib name want now
	arch=$(gcc -print-multiarch)
	for lib in libblas.so.3 liblapack.so.3 libopenblas.so.0; do
		name=$lib-$arch
		now=$(selected "$name")
		want=/usr/lib/$arch/openblas-openmp/$lib
		if [ -n "$now" ] && [ "$now" != "$want" ] && [ -e "$want" ]; then
			say "selecting $want instead of $now"
			as_root update-alternatives --set "$name" "$want" >/dev/null
		fi
	done
	name=libblas.so.3-$arch
	now=$(selected "$name")
	case $now in
	*/openblas-openmp/*) ;;
	*) say "warning: $name is ${now:-not set}, not OpenBLAS with OpenMP; PyTorch will be slow" ;;
	esac
}

command -v apt-get >/dev/null || die "this is not a Debian machine; the list of packages is in $0"

log=$(mktemp)
work=$deps/work
stamp=$deps/fuse3.version
example=$deps/bench/passthrough_hp
kernel=$deps/vm/kernel
trap 'rm -f "$log"' EXIT

install_missing "${packages[@]}"
if ! have_fuse; then
	[ -n "$(fuse_packaged_version)" ] || update_lists
	packaged=$(fuse_packaged_version)
	if [ -n "$packaged" ] && [ "$packaged" != '(none)' ] && dpkg --compare-versions "$packaged" ge $fuse_min; then
		install_missing libfuse3-dev
	else
		install_missing "${fuse_build_packages[@]}"
		build_fuse
	fi
fi
have_fuse || die "no libfuse >= $fuse_min"
case ${1-} in
bench-meta) [ -x "$example" ] || build_example ;;
bench-step | bench-fit) install_missing "${step_packages[@]}" ;;
bench-path)
	install_missing "${path_packages[@]}"
	[ -x "$example" ] || build_example
	;;
bench-space) (install_missing "${space_packages[@]}") || say "bench-space goes without some of: ${space_packages[*]}" ;;
ecosystem) install_missing "${ecosystem_packages[@]}" ;;
system) install_missing "${system_packages[@]}" ;;
vm)
	install_missing "${vm_packages[@]}"
	[ -d "$kernel" ] || fetch_kernel
	;;
esac
select_blas

if [ -s "$stamp" ]; then
	say "everything is present (libfuse $(cat "$stamp") in build/deps)"
else
	say "everything is present (libfuse $(pkg-config --modversion fuse3))"
fi
