#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# C files are laid out as .clang-format says; with --fix they are made so.
#
# Versions 14 and 19 agree on what .clang-format asks for, macros that hold a brace list or a cast before a minus apart:
# those stand between "clang-format off" and "on".

set -uo pipefail
# shellcheck source=tests/lint/common.sh
. "$(dirname "$0")/common.sh"

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
