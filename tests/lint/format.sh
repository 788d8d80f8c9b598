#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# C files are laid out as .clang-format says; --fix rewrites them.
#
# Versions of clang-format differ in a few corners (brace lists in macros, casts before an operator). So only that of
# Debian 12 checks the files. With another version the lint checks nothing, and reports that.

set -uo pipefail
# shellcheck source=tests/lint/common.sh
. "$(dirname "$0")/common.sh"

judge=14
version=$(clang-format --version | sed -n 's/.*version \([0-9]*\).*/\1/p')
if [ "$version" != "$judge" ]; then
	echo "not judged: layout is what clang-format $judge makes of it, and this is $version"
	exit 0
fi

lay_out() {
	sources '*.[ch]' | xargs -r -d '\n' clang-format --style=file -i
}

if [ "${1-}" = --fix ]; then
	lay_out
	tests/lint/layout.py --fix
	bad=$?
	lay_out
	exit $bad
fi

formatted() {
	local file change
	clang-format --style=file --dry-run -Werror "$@" 2>/dev/null && return
	for file in "$@"; do
		change=$(clang-format --style=file "$file" | diff -u --label "$file" --label "$file, formatted" "$file" -) && continue
		head -n 30 <<<"$change"
	done
	return 1
}
export -f formatted

# clang-format takes longer to start than for a file: each gets many.
# shellcheck disable=SC2016 # for the inner shell
if ! sources '*.[ch]' | xargs -r -d '\n' -P "$(nproc)" -n 32 bash -c 'formatted "$@"' _; then
	echo "'make format' would change these"
	exit 1
fi
