# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# For the lint scripts: which files there are. To be sourced; changes to the root of the tree.

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

# sources GLOB...: files of the project whose name matches, one on a line, sorted.
sources() {
	local expr=() g
	for g in "$@"; do
		expr+=(-o -name "$g")
	done
	find fs tiering optim include mount-helpers tests bench .ci \
		-type f \( "${expr[@]:1}" \) -print 2>/dev/null | sort
}
