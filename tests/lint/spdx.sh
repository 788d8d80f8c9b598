#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Every source file names its licence in its first line, or in the second below "#!".

set -uo pipefail
# shellcheck source=tests/lint/common.sh
. "$(dirname "$0")/common.sh"

bad=0
while read -r f; do
	if [ -z "$(sed -n '1,2{/SPDX-License-Identifier: Apache-2.0/p}' "$f")" ]; then
		echo "$f:1: no line 'SPDX-License-Identifier: Apache-2.0'"
		bad=1
	fi
done < <(echo Makefile; sources '*.[ch]' '*.py' '*.sh' run)
exit $bad
