#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# On a bare machine `make deps all` compiles nothing before deps has ended, and then compiles with the installed packages.

set -uo pipefail
# shellcheck source=tests/lint/common.sh
. "$(dirname "$0")/common.sh"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/tests/tools" "$folder/fs/daemon"
cp Makefile "$folder/"

# In place of packages: a header, and the folder whose presence Makefile checks, both late.
cat >"$folder/tests/tools/deps.sh" <<'END'
#!/bin/bash
sleep 0.3
mkdir -p include build/deps/usr/lib
echo 'int main(void);' >include/installed.h
echo '!<arch>' >build/deps/usr/lib/libfuse3.a
END
chmod +x "$folder/tests/tools/deps.sh"
printf '#include "installed.h"\nint main(void) { return 0; }\n' >"$folder/fs/daemon/main.c"

cd "$folder" || exit 1
for goals in 'deps all' 'all deps'; do
	rm -rf include build
	# shellcheck disable=SC2086
	if ! env -u MAKEFLAGS -u MAKELEVEL make -j2 V=1 LIBS= $goals >log 2>&1; then
		echo "make $goals fails where nothing is installed:"
		cat log
		exit 1
	fi
	if ! grep -q 'build/deps/usr/lib/libfuse3.a' log; then
		echo "make $goals links as if deps had installed nothing:"
		cat log
		exit 1
	fi
done
