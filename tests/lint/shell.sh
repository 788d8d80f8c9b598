#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Shell scripts, with or without .sh in their name, pass shellcheck.

set -uo pipefail
# shellcheck source=tests/lint/common.sh
. "$(dirname "$0")/common.sh"

{
	sources '*.sh'
	sources '*' | xargs -r -d '\n' awk 'FNR == 1 { if (/^#!.*[\/ ](ba|da|)sh( |$)/) print FILENAME; nextfile }'
} | sort -u | xargs -r -d '\n' shellcheck -x
