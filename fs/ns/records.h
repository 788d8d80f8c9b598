/* SPDX-License-Identifier: Apache-2.0 */
/*
 * records.h - the log records of names: layout, encode, decode. Numbers are on disk and never reused.
 *
 *   INODE      u64 ino, u32 mode, u32 uid, u32 gid, u32 rdev, i64 atime, i64 mtime, i64 ctime (ns since 1970),
 *              u8 dtype, u8 grad dtype, u8 class, u8 flags: create or update, whole
 *   INODE_DEL  u64 ino: with its attributes and target; its names have their own records
 *   ENTRY      u64 parent, u64 ino, i64 time, u8 type (mode >> 12), name: create or retarget
 *   ENTRY_DEL  u64 parent, i64 time, name
 *   XATTR      u64 ino, i64 time, u8 name length, name, value: create or replace
 *   XATTR_DEL  u64 ino, i64 time, name
 *   TARGET     u64 ino, target of a symbolic link
 *   KEPT       u64 ino, u64 root, u64 step, i64 time, name: a directory without a name in any other is a kept step of
 *              that model root
 *   KEPT_DEL   u64 ino
 *
 * A time that is not 0 is that of the change: replay sets mtime and ctime of the parent and ctime of the inode to it.
 * So a change of names needs no INODE records beside it. Records may come in any order within a log: one may name an
 * inode whose INODE comes later. The model root of an inode is not stored: it follows from its directories.
 */
#pragma once

#include "tiering/base/buf.h"
#include <hitrain/format.h>

enum ht_ns_record_type {
    HT_REC_NS_INODE = HT_REC_NS_FIRST,
    HT_REC_NS_INODE_DEL = HT_REC_NS_FIRST + 1,
    HT_REC_NS_ENTRY = HT_REC_NS_FIRST + 2,
    HT_REC_NS_ENTRY_DEL = HT_REC_NS_FIRST + 3,
    HT_REC_NS_XATTR = HT_REC_NS_FIRST + 4,
    HT_REC_NS_XATTR_DEL = HT_REC_NS_FIRST + 5,
    HT_REC_NS_TARGET = HT_REC_NS_FIRST + 6,
    HT_REC_NS_KEPT = HT_REC_NS_FIRST + 7,
    HT_REC_NS_KEPT_DEL = HT_REC_NS_FIRST + 8,
};

/* Flags of INODE. */
enum { HT_NS_RECORD_MODEL_ROOT = 1, HT_NS_RECORD_FROZEN = 2 };

/* Bytes in the log, header included, without names, values and targets. */
enum {
    HT_NS_INODE_RECORD_BYTES = HT_RECORD_HEADER_BYTES + 52,
    HT_NS_ENTRY_RECORD_BYTES = HT_RECORD_HEADER_BYTES + 25,
    HT_NS_XATTR_RECORD_BYTES = HT_RECORD_HEADER_BYTES + 17,
    HT_NS_TARGET_RECORD_BYTES = HT_RECORD_HEADER_BYTES + 8,
    HT_NS_KEPT_RECORD_BYTES = HT_RECORD_HEADER_BYTES + 32,
};

/* The attributes of an inode that have a current and a published value. */
struct ht_ns_attr {
    int64_t atime_ns, mtime_ns, ctime_ns; /* since 1970 */
    uint32_t uid, gid;
    uint16_t mode;             /* with type */
    uint8_t dtype, grad_dtype; /* enum ht_dtype */
    uint8_t obj_class;
};

/* One record, decoded; which fields are set follows from the type. Pointers lead into the payload. */
struct ht_ns_record {
    uint16_t type;
    uint64_t ino, parent;
    int64_t time_ns;
    struct ht_ns_attr attr;
    uint32_t rdev;
    bool model_root, frozen;
    uint64_t root, step; /* of a kept step */
    uint16_t entry_type; /* S_IFMT bits */
    const char *name;    /* not terminated */
    uint32_t name_len;
    const void *value; /* of an attribute, or the target */
    uint32_t value_len;
};

/* -EUCLEAN: not a well-formed record of names. */
int ht_ns_record_decode(uint16_t type, const uint8_t *payload, uint32_t len, struct ht_ns_record *out) HT_MUST_CHECK;
void ht_ns_record_encode(struct ht_buf *group, const struct ht_ns_record *r);

/* 1 to 255 bytes, no '/' and no NUL, not "." or "..". */
bool ht_ns_name_valid(const char *name, size_t len);
bool ht_ns_type_valid(uint32_t type);
/* A name for a kept step: 1 to HT_KEPT_NAME_MAX letters, digits and . _ : -, and no name of a directory. */
bool ht_ns_kept_name_valid(const char *name, size_t len);
