#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Clang checks the held locks wherever an annotation of tiering/base/guarded.h names one.

set -uo pipefail
# shellcheck source=tests/lint/common.sh
. "$(dirname "$0")/common.sh"

fuse=$(pkg-config --cflags fuse3 2>/dev/null)
if [ -e build/deps/usr/lib/libfuse3.a ]; then
	fuse='-isystem build/deps/usr/include/fuse3'
fi

analyse() {
	# shellcheck disable=SC2086 # several words
	clang -std=gnu11 -fsyntax-only -Wno-everything -Wthread-safety -Werror=thread-safety -DHT_THREAD_SAFETY -D_GNU_SOURCE \
		-D_FILE_OFFSET_BITS=64 -DHT_BINDIR='""' -Iinclude -I. $fuse "$@"
}
export -f analyse
export fuse

# Each of these has one error. Without it clang finds nothing, and the lint proves nothing.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
example() {
	cat >"$folder/example.c" <<-END
		#include "tiering/base/lock.h"
		struct t { struct ht_mutex lock; struct ht_rwlock names; int a HT_GUARDED_BY(HT_LOCK_STORE); };
		HT_MUTEX_OF(t_lock, struct t, lock, HT_LOCK_STORE)
		HT_MUTEX_OF(other_lock, struct t, lock, HT_LOCK_JOURNAL)
		HT_RWLOCK_OF(t_names, struct t, names, HT_LOCK_STORE)
		int needs(struct t *t) HT_REQUIRES(HT_LOCK_STORE);
		void takes(struct t *t) HT_EXCLUDES(HT_LOCK_STORE);
		void f(struct t *t) { ht_mutex_lock(t_lock(t)); t->a = needs(t); ht_mutex_unlock(t_lock(t)); takes(t); }
		void g(struct t *t) { $1 }
	END
	analyse "$folder/example.c" 2>/dev/null
}
bad=0
example 't->a = 0;' && bad=1
example 'ht_mutex_lock(other_lock(t)); t->a = 0; ht_mutex_unlock(other_lock(t));' && bad=1
example 'ht_rwlock_rdlock(t_names(t)); t->a = 0; ht_rwlock_unlock(t_names(t));' && bad=1
example 'ht_mutex_lock(t_lock(t));' && bad=1
example 'needs(t);' && bad=1
example 'ht_mutex_lock(t_lock(t)); takes(t); ht_mutex_unlock(t_lock(t));' && bad=1
if [ $bad = 1 ] || ! example ''; then
	echo 'clang does not find the errors of the examples, or finds one where there is none'
	exit 1
fi

# shellcheck disable=SC2016 # for the inner shell
sources '*.c' | grep -E '^(tiering|optim|fs|mount-helpers)/|^tests/unit/.*/verify' | xargs -r -d '\n' -P "$(nproc)" -n 8 bash -c 'analyse "$@"' _
