/* SPDX-License-Identifier: Apache-2.0 */
/*
 * follow.h - logged steps of a model as a stream, for a copy of the model. docs/stream-format.md describes it.
 *
 *   header, { step, { parameter, its blocks }, [settings], { file, its parts }, done }, end
 *
 * A block is bytes of a gradient, as they are or as entries of those that are not zero. A part is bytes of a file that
 * is no parameter.
 *
 * The sum of a step is that of its parameters and blocks. Steps with one sum have the same gradients, and a logged step
 * has one sum in all streams. Two logs may cut and code the same gradients in different ways: then their sums differ,
 * and a copy of the one refuses the other, as if it were another step.
 */
#ifndef HITRAIN_MOUNT_HELPERS_STREAM_FOLLOW_H
#define HITRAIN_MOUNT_HELPERS_STREAM_FOLLOW_H

#include "mount-helpers/stream/stream.h"
#include <hitrain/format.h>

enum {
    HT_FOLLOW_VERSION = 3,
    HT_FOLLOW_HEADER_BYTES = 64,
    HT_FOLLOW_BLOCK_BYTES_MAX = 1 << 20,
    HT_FOLLOW_NUMBERS_BYTES = sizeof(struct ht_disk_redo_param),
    HT_FOLLOW_PAYLOAD_BYTES_MAX = HT_FOLLOW_BLOCK_BYTES_MAX,
    HT_FOLLOW_SPARSE_BYTES_MAX = 2 << 20, /* of a gradient, in a block of entries */
    HT_FOLLOW_WORDS_BYTES_MAX = 4096,
};
#define HT_FOLLOW_MAGIC "HTfoll\r\n"

enum ht_follow_type {
    HT_FOLLOW_STEP = 1,
    HT_FOLLOW_PARAM = 2,
    HT_FOLLOW_BLOCK = 3,
    HT_FOLLOW_FILE = 4,
    HT_FOLLOW_PART = 5,
    HT_FOLLOW_DONE = 6,
    HT_FOLLOW_END = 7,
    HT_FOLLOW_WORDS = 8,
    HT_FOLLOW_SPARSE = 9, /* a block as entries (tiering/base/sparse.h) */
};
/* The header proves the step that the stream continues: not at all; by the digest of all content; by its sum. */
enum ht_follow_proof { HT_FOLLOW_NO_PROOF = 0, HT_FOLLOW_DIGEST = 1, HT_FOLLOW_SUM = 2 };

struct ht_follow_head {
    uint64_t step; /* the first one of the stream is the next */
    uint64_t lineage;
    enum ht_follow_proof proof;
    struct ht_hash128 sum; /* of the proof */
};

struct ht_follow_step {
    uint64_t step, params;
    uint64_t bytes;  /* of its gradients, for a display */
    uint64_t newest; /* the newest step of the sender, when it wrote this */
};

struct ht_follow_param {
    const uint8_t *numbers; /* HT_FOLLOW_NUMBERS_BYTES, as in the summary of a logged step; object: 0 */
    const char *path;       /* below the root */
    bool section;           /* numbers are those of a section of the parameter before, which has the same path */
};

/* A file that is no parameter, as it is at the end of the step. Its content is all zeros but for its parts. */
struct ht_follow_file {
    uint16_t mode;
    int64_t mtime_ns;
    uint64_t size;
    const char *path;
};

/* The settings of the model, the value of user.hitrain.optimizer. */
struct ht_follow_words {
    const char *text;
};

struct ht_follow_block {
    uint64_t at;
    const uint8_t *data;
    size_t len;
};

/* Bytes [at, at + bytes) of a gradient, as entries. */
struct ht_follow_sparse {
    uint64_t at;
    uint32_t bytes;
    const uint8_t *entries;
    size_t len;
};

/* The end of a step: its sum, and whether the files of the stream belong to it. */
struct ht_follow_done {
    struct ht_hash128 sum;
    bool files;
};

struct ht_follow_record {
    enum ht_follow_type type;
    struct ht_follow_step step;
    struct ht_follow_param param;
    struct ht_follow_words words;
    struct ht_follow_file file;
    struct ht_follow_block block; /* BLOCK and PART; SPARSE: all bytes, with the zeros */
    struct ht_follow_sparse sparse;
    struct ht_follow_done done;
};

/* NULL, or why no line of .hitrain/ctl can have this path. */
const char *ht_follow_path_refused(const char *path);

/* --------------------------------------------------------------------- sum */

struct ht_follow_sum {
    struct ht_hash128_sum *sum; /* owned */
};
int ht_follow_sum_begin(struct ht_follow_sum *s, uint64_t step) HT_MUST_CHECK;
void ht_follow_sum_param(struct ht_follow_sum *s, const struct ht_follow_param *p);
/* type: BLOCK or SPARSE; payload: its checksum. */
void ht_follow_sum_block(struct ht_follow_sum *s, enum ht_follow_type type, uint64_t at,
                         const struct ht_hash128 *payload);
/* Ends it. */
struct ht_hash128 ht_follow_sum_end(struct ht_follow_sum *s);

/* ------------------------------------------------------------------ writer */

/* With put NULL it computes sums alone. One thread. */
struct ht_follow_writer {
    struct ht_records_out out;
    uint64_t step;
    struct ht_follow_sum sum;
};
int ht_follow_writer_begin(struct ht_follow_writer *w, const struct ht_follow_head *head,
                           int (*put)(void *ctx, const void *data, size_t len), void *ctx) HT_MUST_CHECK;
int ht_follow_put_step(struct ht_follow_writer *w, const struct ht_follow_step *s) HT_MUST_CHECK;
int ht_follow_put_param(struct ht_follow_writer *w, const struct ht_follow_param *p) HT_MUST_CHECK;
/* Of the last parameter, with rising places. */
int ht_follow_put_block(struct ht_follow_writer *w, uint64_t at, const uint8_t *data, size_t len) HT_MUST_CHECK;
int ht_follow_put_sparse(struct ht_follow_writer *w, const struct ht_follow_sparse *s) HT_MUST_CHECK;
int ht_follow_put_words(struct ht_follow_writer *w, const char *text) HT_MUST_CHECK;
int ht_follow_put_file(struct ht_follow_writer *w, const struct ht_follow_file *f) HT_MUST_CHECK;
int ht_follow_put_part(struct ht_follow_writer *w, uint64_t at, const uint8_t *data, size_t len) HT_MUST_CHECK;
int ht_follow_put_done(struct ht_follow_writer *w, bool files, struct ht_hash128 *out_sum) HT_MUST_CHECK;
int ht_follow_put_end(struct ht_follow_writer *w) HT_MUST_CHECK;
void ht_follow_writer_free(struct ht_follow_writer *w);

/* ------------------------------------------------------------------ reader */

/*
 * Reads a stream of any origin. All records have been verified: checksums, bounds, order, and that a path stays
 * below the root. One thread.
 */
struct ht_follow_reader {
    struct ht_records_in in; /* in.why says where it failed */
    struct ht_follow_head head;
    uint64_t step, params_left, next_at, size;
    unsigned element_bytes; /* of the parameter's gradient; 0: of no known type */
    uint8_t *elements;      /* owned: of a block of entries; NULL: there was none yet */
    enum ht_follow_type last;
    struct ht_follow_sum sum;
    char path[HT_STREAM_PATH_BYTES_MAX + 1];
    char words[HT_FOLLOW_WORDS_BYTES_MAX + 1];
};
/* After a failure, too, the caller ends with ht_follow_reader_free. -EPROTO: this is no such stream. */
int ht_follow_reader_begin(struct ht_follow_reader *r, ssize_t (*get)(void *ctx, void *data, size_t len),
                           void *ctx) HT_MUST_CHECK;
/*
 * 0, and the next record, which lives until the next call; END is the last one. -EPROTO: the stream is damaged;
 * -EPIPE: it is cut; -errno: get failed. r->in.why says more.
 */
int ht_follow_next(struct ht_follow_reader *r, struct ht_follow_record *out) HT_MUST_CHECK;
void ht_follow_reader_free(struct ht_follow_reader *r);

#endif
