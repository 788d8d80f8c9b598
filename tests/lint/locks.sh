#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Every lock has a rank: pthread's own are used in tiering/base/lock.h only, and in tests and measurements.

set -uo pipefail
# shellcheck source=tests/lint/common.sh
. "$(dirname "$0")/common.sh"

bad=0
while read -r f; do
	case $f in
	tests/* | bench/* | tiering/base/lock.h) continue ;;
	esac
	if grep -nE 'pthread_(mutex|rwlock|spin)_|pthread_cond_(timed)?wait' "$f" /dev/null; then
		echo "$f: use the types of tiering/base/lock.h, with a rank of include/hitrain/locks.h"
		bad=1
	fi
done < <(sources '*.[ch]')
exit $bad
