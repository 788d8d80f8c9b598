#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Every source file names its licence in its first line, or in the second below "#!".

set -uo pipefail
# shellcheck source=tests/lint/common.sh
. "$(dirname "$0")/common.sh"

# shellcheck disable=SC2016 # for awk
(echo Makefile; sources '*.[ch]' '*.py' '*.sh' run) | xargs -r -d '\n' awk '
	function judge() { if (file && !licensed) { print file ":1: no line '"'SPDX-License-Identifier: Apache-2.0'"'"; bad = 1 } }
	FNR == 1 { judge(); file = FILENAME; licensed = 0 }
	/SPDX-License-Identifier: Apache-2.0/ { licensed = 1 }
	FNR == 2 { nextfile }
	END { judge(); exit bad }'
