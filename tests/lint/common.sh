# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# For the lint scripts, which source it: lists files. Changes to the root of the tree.

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

# sources GLOB...: prints the files of the project with matching names, sorted, one on a line.
sources() {
	local expr=() folders=() g
	for g in fs tiering optim include mount-helpers tests bench .ci; do
		[ ! -d "$g" ] || folders+=("$g")
	done
	for g in "$@"; do
		expr+=(-o -name "$g")
	done
	find "${folders[@]}" -type f \( "${expr[@]:1}" \) ! -path '*/__pycache__/*' ! -path 'optim/torch/build/*' -print | sort
}
