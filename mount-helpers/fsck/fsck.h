/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fsck.h - what the passes of hitrain-fsck share.
 *
 *   1 superblocks  pass_super.c    every copy on every device, by itself
 *   2 log          pass_log.c      both copies; then the store is opened by the daemon's own replay, read-only
 *   3 references   pass_refs.c     where stored chunks lie: inside the devices, apart from each other, with an owner
 *   4 tensors      pass_tensors.c  every stored chunk is read and its checksum verified
 *   5 names        pass_names.c    directories, links, attributes
 *
 * A pass tells problems through ht_fsck_problem and goes on; it returns a negative errno only where going on is
 * impossible. One thread; nothing is ever written to a device.
 */
#ifndef HITRAIN_MOUNT_HELPERS_FSCK_FSCK_H
#define HITRAIN_MOUNT_HELPERS_FSCK_FSCK_H

#include <stdio.h>
#include "tiering/base/base.h"
#include "tiering/io/dev.h"
#include "tiering/space/alloc.h"
#include "tiering/space/super.h"
#include "tiering/store/store.h"
#include "optim/optim.h"
#include "fs/ns/ns.h"
#include "mount-helpers/common/json.h"

/* Exit codes, as e2fsck's; 4 and 8 may come together. */
enum { HT_FSCK_CLEAN = 0, HT_FSCK_CORRECTED = 1, HT_FSCK_LEFT = 4, HT_FSCK_FAILED = 8, HT_FSCK_USAGE = 16 };

enum { HT_FSCK_PATH_MAX = 4200 };

/* ---------------------------------------------------------------- problems */

/* One row each in problem.c. */
enum ht_fsck_code {
    HT_FSCK_SB_READ,
    HT_FSCK_SB_MAGIC,
    HT_FSCK_SB_CSUM,
    HT_FSCK_SB_VERSION,
    HT_FSCK_SB_FIELD,
    HT_FSCK_SB_OTHER,
    HT_FSCK_SB_NONE,
    HT_FSCK_SB_SHORT,
    HT_FSCK_LOG_FRAME,
    HT_FSCK_LOG_READ,
    HT_FSCK_LOG_DIFFER,
    HT_FSCK_LOG_ALL,
    HT_FSCK_LOG_RECORD,
    HT_FSCK_REF_RANGE,
    HT_FSCK_REF_META,
    HT_FSCK_REF_OVERLAP,
    HT_FSCK_REF_ORPHAN,
    HT_FSCK_DATA_READ,
    HT_FSCK_DATA_CSUM,
    HT_FSCK_NAME, /* the name layer's own codes */
    HT_FSCK_CODES,
};

#define HT_FSCK_NONE UINT64_MAX

/* Where a problem is, for programs that read --json; what does not apply is NULL or HT_FSCK_NONE. */
struct ht_fsck_where {
    const char *device, *path, *state;
    uint64_t copy, offset, bytes, position, frame, object, chunk, first_byte;
};
#define HT_FSCK_NOWHERE                                                                            \
    .copy = HT_FSCK_NONE, .offset = HT_FSCK_NONE, .bytes = HT_FSCK_NONE, .position = HT_FSCK_NONE, \
    .frame = HT_FSCK_NONE, .object = HT_FSCK_NONE, .chunk = HT_FSCK_NONE, .first_byte = HT_FSCK_NONE

/* ------------------------------------------------------------------- state */

enum ht_fsck_mode { HT_FSCK_CHECK, HT_FSCK_PREEN, HT_FSCK_YES };

struct ht_fsck_options {
    enum ht_fsck_mode mode;
    bool json, progress, extents, no_wait;
};

/* One stored chunk. Where it lies in several pieces, they are frags[frag_first...] and block is that of the first. */
struct ht_fsck_item {
    uint64_t oid, checksum, block;
    uint32_t index, stored, visible, frag_first;
    uint16_t frag_count;
    uint8_t device, chunk_shift;
    bool unreadable; /* its place makes no sense: told by pass 3, not read by pass 4 */
};

struct ht_fsck {
    struct ht_fsck_options opt;
    struct ht_dev *devs[HT_DEVICES_MAX]; /* as given; after ht_fsck_open_store by index */
    unsigned dev_count;
    struct ht_super super; /* newest of the first device */

    struct ht_store *store;
    struct ht_ns *ns;
    struct ht_optim *optim;
    struct ht_journal_report log;

    struct ht_fsck_item *items;
    size_t item_count, item_cap;
    struct ht_extent *frags;
    size_t frag_count, frag_cap;

    uint64_t problems, objects, stored_bytes, verified_bytes;
    uint64_t lost_chunks; /* marked so by an earlier repair: no problem any more */
    struct ht_json json;
    bool failed; /* an operational error was told */
};

/* --------------------------------------------------------------- problem.c */

void ht_fsck_problem(struct ht_fsck *f, enum ht_fsck_code code, const struct ht_fsck_where *where, const char *fmt, ...)
    HT_PRINTF(4, 5);
/* For HT_FSCK_NAME: under the name layer's code. */
void ht_fsck_name_problem(struct ht_fsck *f, const char *code, const char *text);

/* ----------------------------------------------------------------- passes */

/* Fills f->super. -EUCLEAN: no store can be made of it, told as problems; other errors are told as such. */
int ht_fsck_pass_super(struct ht_fsck *f) HT_CHECK;
/* Opens the store. -EUCLEAN: told, and nothing behind the log can be checked. */
int ht_fsck_pass_log(struct ht_fsck *f) HT_CHECK;
int ht_fsck_pass_refs(struct ht_fsck *f) HT_CHECK;
int ht_fsck_pass_tensors(struct ht_fsck *f) HT_CHECK;
int ht_fsck_pass_names(struct ht_fsck *f) HT_CHECK;

/* ---------------------------------------------------------------- session.c */

/* Open and hold the devices for reading. Errors are told. */
int ht_fsck_open_devices(struct ht_fsck *f, char *const paths[], unsigned count) HT_CHECK;
/* Attach, replay the log. force: though all copies are damaged. */
int ht_fsck_open_store(struct ht_fsck *f, bool force) HT_CHECK;
void ht_fsck_close_store(struct ht_fsck *f);
void ht_fsck_close(struct ht_fsck *f);

/* ------------------------------------------------------------------ items.c */

/* All published references, in (object, chunk) order. */
int ht_fsck_items_load(struct ht_fsck *f) HT_CHECK;
/* By device and offset, as a disk likes to be read. */
void ht_fsck_items_sort(struct ht_fsck *f);
struct ht_extent ht_fsck_item_extent(const struct ht_fsck *f, const struct ht_fsck_item *it, unsigned i);

/* Whose bytes an object holds. */
struct ht_fsck_owner {
    bool known;
    char path[HT_FSCK_PATH_MAX]; /* of the file, or of the parameter */
    const char *state;           /* name of the optimizer state, or NULL */
};
void ht_fsck_owner(struct ht_fsck *f, uint64_t oid, struct ht_fsck_owner *out);
/* "/a/b, chunk 3 (bytes 3145728 to 4194303)" */
void ht_fsck_item_text(struct ht_fsck *f, const struct ht_fsck_item *it, char *buf, size_t cap,
                       struct ht_fsck_owner *out_owner);

/* ------------------------------------------------------------------ report.c */

/* --extents: where every stored chunk lies. */
void ht_fsck_list_extents(struct ht_fsck *f);
/* The last line or, with --json, everything after the problems. */
void ht_fsck_summary(struct ht_fsck *f, const char *name, int status);

/* ----------------------------------------------------------------- progress.c */

struct ht_progress {
    bool on, terminal;
    uint64_t total_bytes, done_bytes, began_ns, shown_ns;
};
void ht_progress_begin(struct ht_progress *p, bool wanted, uint64_t total_bytes);
void ht_progress_add(struct ht_progress *p, uint64_t bytes);
/* Take the bar away, for a message or for good. */
void ht_progress_clear(struct ht_progress *p);
void ht_progress_end(struct ht_progress *p);

#endif
