# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# For the lint scripts: which files there are. To be sourced; changes to the root of the tree.

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

# sources GLOB...: files of the project whose name matches, one on a line, sorted.
sources() {
	local expr=() folders=() g
	for g in fs tiering optim include mount-helpers tests bench .ci; do
		[ ! -d "$g" ] || folders+=("$g")
	done
	for g in "$@"; do
		expr+=(-o -name "$g")
	done
	find "${folders[@]}" -type f \( "${expr[@]:1}" \) ! -path '*/__pycache__/*' -print | sort
}
