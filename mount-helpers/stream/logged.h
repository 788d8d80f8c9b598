/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logged.h - a logged step as a file, .hitrain/redo/STEP: its header and its summary. docs/stream-format.md describes
 * them. The gradients follow; they are the caller's business.
 */
#ifndef HITRAIN_MOUNT_HELPERS_STREAM_LOGGED_H
#define HITRAIN_MOUNT_HELPERS_STREAM_LOGGED_H

#include "tiering/base/base.h"
#include <hitrain/redo.h>

enum { HT_LOGGED_SUMMARY_BYTES_MAX = 1 << 30 };

/* at, bytes: in the gradients of the file; offset, len: in the gradient of its parameter. */
struct ht_logged_piece {
    uint64_t at, bytes, offset, len;
    uint32_t param;
    bool sparse; /* entries; else bytes == len */
};

struct ht_logged {
    uint64_t step, lineage, gradients_at, bytes, params, pieces;
    bool sections;                 /* some of params may be sections of the one before */
    uint8_t *summary;              /* owned */
    struct ht_logged_piece *piece; /* owned; by parameter and place */
    const char *part;              /* of a later version */
    uint32_t version, version_most;
};

/*
 * Of this step. *out_bytes: those of the summary, which follow. -EPROTO: it makes no sense. -EPROTONOSUPPORT: it is of
 * a later version.
 */
int ht_logged_take_header(struct ht_logged *l, const struct ht_redo_file *h, uint64_t step,
                          uint64_t *out_bytes) HT_MUST_CHECK;
/* Takes the summary in any case. Pieces lie in the gradients of the file. Errors as above. */
int ht_logged_take_summary(struct ht_logged *l, uint8_t *summary, size_t len) HT_MUST_CHECK;
/* What such an error of this step means, and what helps. */
void ht_logged_explain(const struct ht_logged *l, int err, char *buf, size_t cap);
/* The bytes of a struct ht_disk_redo_param, or struct ht_disk_redo_section. */
const uint8_t *ht_logged_param(const struct ht_logged *l, uint64_t i);
bool ht_logged_is_section(const struct ht_logged *l, uint64_t i);
/* Also after a failure. */
void ht_logged_free(struct ht_logged *l);

#endif
