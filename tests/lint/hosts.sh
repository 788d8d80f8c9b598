#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# No file names a host of packages: programs ask the machine's own package manager for its sources.

set -uo pipefail
# shellcheck source=tests/lint/common.sh
. "$(dirname "$0")/common.sh"

hosts='(deb|ftp[.a-z]*|security|snapshot|archive)\.(debian|ubuntu)\.(org|com)|pypi\.org|pythonhosted\.org|registry\.npmjs|crates\.io'
hosts+='|proxy\.golang\.org|rubygems\.org|repo\.maven|conda\.anaconda|download\.pytorch\.org'

{
	sources '*.[ch]' '*.py' '*.sh' run
	find Makefile README.md CONTRIBUTING.md docs -type f -print
} | grep -vx tests/lint/hosts.sh | xargs -d '\n' grep -nE "$hosts" && exit 1
exit 0
