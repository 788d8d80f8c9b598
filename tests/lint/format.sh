#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# C files are laid out as .clang-format says; with --fix they are made so.
#
# Versions of clang-format differ in a few corners (brace lists in macros, casts before an operator), so one of them
# judges: the one of Debian 12. With another one nothing is judged, and that is said.

set -uo pipefail
# shellcheck source=tests/lint/common.sh
. "$(dirname "$0")/common.sh"

judge=14
version=$(clang-format --version | sed -n 's/.*version \([0-9]*\).*/\1/p')
if [ "$version" != "$judge" ]; then
	echo "not judged: layout is what clang-format $judge makes of it, and this is $version"
	exit 0
fi

if [ "${1-}" = --fix ]; then
	sources '*.[ch]' | xargs -r -d '\n' clang-format --style=file -i
	exit
fi

formatted() {
	local change
	change=$(clang-format --style=file "$1" | diff -u --label "$1" --label "$1, formatted" "$1" -) && return
	head -n 30 <<<"$change"
	return 1
}
export -f formatted

# shellcheck disable=SC2016 # for the inner shell
if ! sources '*.[ch]' | xargs -r -d '\n' -P "$(nproc)" -n 1 bash -c 'formatted "$1"' _; then
	echo "'make format' would change these"
	exit 1
fi
