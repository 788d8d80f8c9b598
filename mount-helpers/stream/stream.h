/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stream.h - a step of a model as a stream of bytes, and its digest. docs/stream-format.md describes both.
 *
 *   header, entry of the root, { entry, its blocks, { state, its blocks } }, end
 *
 * An entry is a directory, file, symlink or hard link, by its path below the root. A directory stands before what is in
 * it, and the entries of a directory in the order of their names' bytes. So a stream of given content is one sequence
 * of bytes, and a reader knows with the path of the last entry alone that each parent is a directory of the stream, and
 * that no path comes twice.
 *
 * An incremental stream builds on a step that the receiver has, its base: runs of blocks that a file of the base has,
 * too, are named and not carried. A stream for a rank has of parameters and state the blocks alone that the rank gets
 * when the table of shards changes.
 */
#ifndef HITRAIN_MOUNT_HELPERS_STREAM_STREAM_H
#define HITRAIN_MOUNT_HELPERS_STREAM_STREAM_H

#include "mount-helpers/stream/records.h"
#include "mount-helpers/stream/shard.h"
#include "tiering/base/step_digest.h"

enum {
    HT_STREAM_VERSION = 1,
    HT_STREAM_HEADER_BYTES = 64,
    HT_STREAM_BLOCK_BYTES = 1 << 20,
    HT_STREAM_PAYLOAD_BYTES_MAX = 2 << 20, /* an entry with all attributes */
    HT_STREAM_PATH_BYTES_MAX = 4095,
    HT_STREAM_DEPTH_MAX = 256, /* directories below the root */
    HT_STREAM_STATE_NAME_BYTES_MAX = 64,
};
#define HT_STREAM_MAGIC "HTstep\r\n"

/* Features of the header. */
enum { HT_STREAM_INCREMENTAL = 1, HT_STREAM_FOR_RANK = 2 };

enum ht_stream_type {
    HT_STREAM_ENTRY = 1,
    HT_STREAM_STATE = 2,
    HT_STREAM_BLOCK = 3,
    HT_STREAM_END = 4,
    HT_STREAM_BASE = 5,
    HT_STREAM_SAME = 6,
    HT_STREAM_SHARD = 7,
};
enum ht_stream_kind { HT_STREAM_DIRECTORY = 1, HT_STREAM_FILE = 2, HT_STREAM_SYMLINK = 3, HT_STREAM_LINK = 4 };

struct ht_stream_base {
    uint64_t step;
    struct ht_hash128 digest;
};

struct ht_stream_head {
    uint64_t step;  /* finished steps of the model */
    uint64_t bytes; /* of content that may follow: for a display of progress */
    bool incremental;
    struct ht_stream_base base; /* of an incremental stream */
    bool for_rank;
    struct ht_stream_shard shard; /* of a stream for a rank */
};

/* Extended attributes back to back: u16 length of the name, u32 length of the value, name, value. Sorted by name. */
struct ht_stream_attributes {
    const uint8_t *data;
    size_t len;
};
struct ht_stream_attribute {
    const char *name; /* no NUL after it */
    const uint8_t *value;
    size_t name_len, value_len;
};

struct ht_stream_entry {
    enum ht_stream_kind kind;
    uint16_t mode; /* permission bits: 07777. Of a symlink 0 */
    uint32_t uid, gid;
    int64_t mtime_ns;
    uint64_t size;      /* of a file */
    const char *path;   /* below the root; "" is the root */
    const char *target; /* of a symlink: its text; of a hard link: the path of an earlier file; else "" */
    struct ht_stream_attributes attributes;
};

struct ht_stream_state {
    const char *name; /* exp_avg, step, ... */
    uint64_t size;
};

/* Blocks that the base has at the same place in a file, or in a state of this name. */
struct ht_stream_same {
    uint64_t index, count;
    const char *path; /* of the file in the base; "": that of the entry */
};

/* Takes the next attribute off the front; false: there is none, or a is damaged. */
bool ht_stream_attribute_next(struct ht_stream_attributes *a, struct ht_stream_attribute *out);
void ht_stream_attribute_put(struct ht_buf *b, const char *name, const void *value, size_t len);
/* May a stream carry it? user.* and access lists, without those that are part of no step. */
bool ht_stream_attribute_known(const char *name, size_t len);

/* NULL, or why this is no entry, as the rest of a sentence. */
const char *ht_stream_path_refused(const char *path);
const char *ht_stream_entry_refused(const struct ht_stream_entry *e);
const char *ht_stream_state_refused(const struct ht_stream_state *s);
const char *ht_stream_same_refused(const struct ht_stream_same *s);
/* The same for an entry that comes after the one with the path last, which is of kind last_kind. */
const char *ht_stream_order_refused(const char *last, enum ht_stream_kind last_kind, const char *path);
/* The dtype of a file that can be trained, or NULL. */
const char *ht_stream_parameter(const struct ht_stream_entry *e);
const char *ht_stream_float(const char *dtype, size_t len);
/*
 * One number of all parameters and states of a model: the sum of these of each. Models of other parameters, dtypes or
 * sizes have another one.
 */
uint64_t ht_stream_shape(const char *path, const char *dtype, uint64_t size);
uint64_t ht_stream_state_shape(const char *path, const char *state, uint64_t size);

/* ------------------------------------------------------------------ digest */

/* Records of a stream in the digest of their step. */
void ht_digest_entry(struct ht_digest *d, const struct ht_stream_entry *e);
void ht_digest_state(struct ht_digest *d, const struct ht_stream_state *s);
/* These make the digest that of an incremental stream. */
void ht_digest_base(struct ht_digest *d, const struct ht_stream_base *base);
void ht_digest_same(struct ht_digest *d, const struct ht_stream_same *s);
void ht_digest_shard(struct ht_digest *d, const struct ht_stream_shard *s);

/* ------------------------------------------------------------------ writer */

/*
 * Writes a stream, or computes a digest alone (put NULL). The caller sends entries in the right order: a wrong one is
 * -EINVAL. One thread.
 */
struct ht_stream_writer {
    struct ht_records_out out;
    uint64_t entries, bytes; /* so far: entries; bytes of blocks */
    struct ht_digest digest;
    char last[HT_STREAM_PATH_BYTES_MAX + 1];
    enum ht_stream_kind last_kind;
    bool incremental, for_rank;
    struct ht_stream_shard shard; /* of a stream for a rank, as the next */
    struct ht_moves moves;
};
/* After a failure, too, the caller ends with ht_stream_writer_free. */
int ht_stream_writer_begin(struct ht_stream_writer *w, const struct ht_stream_head *head,
                           int (*put)(void *ctx, const void *data, size_t len), void *ctx) HT_MUST_CHECK;
int ht_stream_put_entry(struct ht_stream_writer *w, const struct ht_stream_entry *e) HT_MUST_CHECK;
int ht_stream_put_state(struct ht_stream_writer *w, const struct ht_stream_state *s) HT_MUST_CHECK;
/* Of the last entry or state, with rising indices. len: HT_STREAM_BLOCK_BYTES but at the end. Leaves out zeros. */
int ht_stream_put_block(struct ht_stream_writer *w, uint64_t index, const uint8_t *data, size_t len) HT_MUST_CHECK;
/* The same for a run of blocks of the base, in an incremental stream. */
int ht_stream_put_same(struct ht_stream_writer *w, const struct ht_stream_same *s) HT_MUST_CHECK;
int ht_stream_put_end(struct ht_stream_writer *w, struct ht_hash128 *out_digest) HT_MUST_CHECK;
void ht_stream_writer_free(struct ht_stream_writer *w);

/* ------------------------------------------------------------------ reader */

struct ht_stream_block {
    uint64_t index;
    const uint8_t *data;
    size_t len;
};

struct ht_stream_record {
    enum ht_stream_type type;
    struct ht_stream_entry entry;
    struct ht_stream_state state;
    struct ht_stream_block block;
    struct ht_stream_same same;
    struct ht_hash128 digest; /* of END */
};

/*
 * Reads a stream of any origin. What it returns has been verified: checksums, bounds, order, and that a path stays
 * below the root. What it cannot know is whether the target of a hard link is a file. One thread.
 */
struct ht_stream_reader {
    struct ht_records_in in; /* in.why says where it failed */
    struct ht_stream_head head;
    uint64_t entries, bytes; /* so far: entries; bytes of blocks */
    struct ht_digest digest;
    char path[HT_STREAM_PATH_BYTES_MAX + 1];   /* of the last entry */
    char target[HT_STREAM_PATH_BYTES_MAX + 1]; /* of the last record */
    enum ht_stream_kind kind;
    char state[HT_STREAM_STATE_NAME_BYTES_MAX + 1]; /* "": the blocks are the entry's own */
    uint64_t size, next_block;
    struct ht_moves moves; /* of a stream for a rank, as the next */
    uint64_t shape;        /* of its parameters and states so far */
};
/* After a failure, too, the caller ends with ht_stream_reader_free. -EPROTO: this is no such stream. */
int ht_stream_reader_begin(struct ht_stream_reader *r, ssize_t (*get)(void *ctx, void *data, size_t len),
                           void *ctx) HT_MUST_CHECK;
/*
 * 0, and the next record; texts and content in it live until the next call. END is the last one: its digest is that of
 * what came, and nothing follows; after a stream for a rank, which nothing reads on, another one may follow. -EPROTO:
 * the stream is cut or damaged; -errno: get failed. r->in.why says which.
 */
int ht_stream_next(struct ht_stream_reader *r, struct ht_stream_record *out) HT_MUST_CHECK;
void ht_stream_reader_free(struct ht_stream_reader *r);

#endif
