#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Each header compiles alone: a file that includes it needs no other header before it.

set -uo pipefail
# shellcheck source=tests/lint/common.sh
. "$(dirname "$0")/common.sh"

fuse=$(pkg-config --cflags fuse3 2>/dev/null)
if [ -e build/deps/usr/lib/libfuse3.a ]; then
	fuse='-isystem build/deps/usr/include/fuse3'
fi

compile() {
	# shellcheck disable=SC2086 # several words
	echo "#include \"$1\"" |
		gcc -std=gnu11 -fsyntax-only -Wall -Wextra -Werror -Wno-unused-parameter -D_GNU_SOURCE \
			-D_FILE_OFFSET_BITS=64 -Iinclude -I. $2 -x c - || { echo "$1: does not compile alone"; return 1; }
}
export -f compile

# shellcheck disable=SC2016 # for the inner shell
sources '*.h' | xargs -r -d '\n' -P "$(nproc)" -I '{}' bash -c 'compile "$@"' _ '{}' "$fuse"
