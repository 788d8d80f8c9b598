/* SPDX-License-Identifier: Apache-2.0 */
/* shm.h - objects whose content other programs have in memory, too: a memfd that they read and map. */
#pragma once

#include "tiering/base/base.h"

struct ht_store;
struct ht_obj;

/*
 * An object's content as a file of memory, for others to read and map: *out_fd, the store's, always as large as the
 * object. Until it is closed the file shows the object's content, whatever changes it: writes, updates, truncation,
 * abort. WAITS: for reading the whole content. A scratch object gets its memory at the first touch: the file shows
 * which pages were touched. -EINVAL: an object of small chunks, or an empty one; -ENOSPC: the share of memory is used
 * up; -EIO: a part cannot be read; -EBUSY: it changed during the call. Not while it is open.
 *
 * A user other than root (0) gets at most HT_SHM_USER_QUARTERS of the share, and of the number. So something is left
 * for others, no matter how much one user opens. -EDQUOT. While the object is open, it cannot grow beyond that either
 * (-ENOSPC).
 */
int ht_obj_shm_open_for(struct ht_obj *obj, uint32_t user, int *out_fd) HT_MUST_CHECK;
/* From now on programs may change it without a call. Reserves its whole rewrite: -ENOSPC. WAITS. */
int ht_obj_shm_expect_stores(struct ht_obj *obj) HT_MUST_CHECK;
/* No program changes it without a call any more, though it stays open: the next scan is the last one. */
void ht_obj_shm_expect_no_stores(struct ht_obj *obj);
/* No program has it any more: the memory stays until another object wants it. */
void ht_obj_shm_close(struct ht_obj *obj);
/*
 * Finds changes that were made without a call, and marks them dirty. ht_obj_writeback, ht_obj_sync and
 * ht_scope_writeback begin with it. WAITS.
 */
int ht_obj_shm_scan(struct ht_obj *obj) HT_MUST_CHECK;
/* After ht_scope_abort, and its transaction: the files show the old content again. WAITS. */
int ht_scope_shm_restore(struct ht_store *s, uint64_t scope) HT_MUST_CHECK;
