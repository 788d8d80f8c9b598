/* SPDX-License-Identifier: Apache-2.0 */
/*
 * records.c - encode and decode the log records of names (layouts in records.h).
 *
 * Decode trusts nothing: it checks lengths, names, modes and words, so that memory built from a record has the form
 * that code relies on. link.c checks relations between records (that a parent exists). No state, any thread.
 */
#include "fs/ns/records.h"

#include <sys/stat.h>
#include "tiering/api/tx.h"
#include <hitrain/words.h>

#define MODE_TYPE_SHIFT 12

bool ht_ns_name_valid(const char *name, size_t len)
{
    if (len == 0 || len > HT_NAME_BYTES_MAX)
        return false;
    if (memchr(name, '/', len) || memchr(name, '\0', len))
        return false;
    return !(name[0] == '.' && (len == 1 || (len == 2 && name[1] == '.')));
}

bool ht_ns_type_valid(uint32_t type)
{
    return type == S_IFREG || type == S_IFDIR || type == S_IFLNK || type == S_IFIFO || type == S_IFSOCK ||
        type == S_IFCHR || type == S_IFBLK;
}

bool ht_ns_kept_name_valid(const char *name, size_t len)
{
    if (len > HT_KEPT_NAME_MAX || !ht_ns_name_valid(name, len))
        return false;
    for (size_t n = 0; n < len; n++) {
        char c = name[n];
        bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!letter && !(c >= '0' && c <= '9') && c != '.' && c != '_' && c != ':' && c != '-')
            return false;
    }
    return true;
}

static bool xattr_name_valid(const char *name, size_t len)
{
    return len > 0 && len <= HT_XATTR_NAME_BYTES_MAX && !memchr(name, '\0', len);
}

static bool inode_valid(const struct ht_ns_record *r, uint32_t mode, uint8_t flags)
{
    uint32_t type = mode & S_IFMT;

    if (mode > UINT16_MAX || !ht_ns_type_valid(type) || (flags & ~(HT_NS_RECORD_MODEL_ROOT | HT_NS_RECORD_FROZEN)) != 0)
        return false;
    if (r->model_root && type != S_IFDIR)
        return false;
    if (r->frozen && !r->model_root)
        return false;
    if (r->rdev != 0 && type != S_IFCHR && type != S_IFBLK)
        return false;
    return r->attr.dtype <= HT_DTYPE_BOOL && r->attr.grad_dtype <= HT_DTYPE_BOOL &&
        r->attr.obj_class <= HT_CLASS_SCRATCH;
}

static bool decode_inode(struct ht_reader *in, struct ht_ns_record *r)
{
    r->ino = ht_get_u64(in);
    uint32_t mode = ht_get_u32(in);
    r->attr.mode = (uint16_t)mode;
    r->attr.uid = ht_get_u32(in);
    r->attr.gid = ht_get_u32(in);
    r->rdev = ht_get_u32(in);
    r->attr.atime_ns = (int64_t)ht_get_u64(in);
    r->attr.mtime_ns = (int64_t)ht_get_u64(in);
    r->attr.ctime_ns = (int64_t)ht_get_u64(in);
    r->attr.dtype = ht_get_u8(in);
    r->attr.grad_dtype = ht_get_u8(in);
    r->attr.obj_class = ht_get_u8(in);
    uint8_t flags = ht_get_u8(in);
    r->model_root = (flags & HT_NS_RECORD_MODEL_ROOT) != 0;
    r->frozen = (flags & HT_NS_RECORD_FROZEN) != 0;
    return ht_reader_done(in) && inode_valid(r, mode, flags);
}

static size_t left(const struct ht_reader *in)
{
    return (size_t)(in->end - in->p);
}

/* The rest of the payload is a name; NULL after an error. */
static void get_name(struct ht_reader *in, struct ht_ns_record *r)
{
    r->name_len = (uint32_t)left(in);
    r->name = (const char *)ht_get_bytes(in, r->name_len);
}

static bool decode_entry(struct ht_reader *in, struct ht_ns_record *r)
{
    r->parent = ht_get_u64(in);
    r->ino = ht_get_u64(in);
    r->time_ns = (int64_t)ht_get_u64(in);
    uint32_t type = (uint32_t)ht_get_u8(in) << MODE_TYPE_SHIFT;
    r->entry_type = (uint16_t)type;
    get_name(in, r);
    return !in->bad && r->parent != 0 && ht_ns_type_valid(type) && ht_ns_name_valid(r->name, r->name_len);
}

static bool decode_entry_del(struct ht_reader *in, struct ht_ns_record *r)
{
    r->parent = ht_get_u64(in);
    r->time_ns = (int64_t)ht_get_u64(in);
    r->ino = r->parent; /* it has no number of its own */
    get_name(in, r);
    return !in->bad && ht_ns_name_valid(r->name, r->name_len);
}

static bool decode_xattr(struct ht_reader *in, struct ht_ns_record *r)
{
    r->ino = ht_get_u64(in);
    r->time_ns = (int64_t)ht_get_u64(in);
    r->name_len = ht_get_u8(in);
    r->name = (const char *)ht_get_bytes(in, r->name_len);
    r->value_len = (uint32_t)left(in);
    r->value = ht_get_bytes(in, r->value_len);
    return !in->bad && r->value_len <= HT_XATTR_VALUE_BYTES_MAX && xattr_name_valid(r->name, r->name_len);
}

static bool decode_xattr_del(struct ht_reader *in, struct ht_ns_record *r)
{
    r->ino = ht_get_u64(in);
    r->time_ns = (int64_t)ht_get_u64(in);
    get_name(in, r);
    return !in->bad && xattr_name_valid(r->name, r->name_len);
}

static bool decode_target(struct ht_reader *in, struct ht_ns_record *r)
{
    r->ino = ht_get_u64(in);
    r->value_len = (uint32_t)left(in);
    r->value = ht_get_bytes(in, r->value_len);
    return !in->bad && r->value_len > 0 && r->value_len <= HT_SYMLINK_BYTES_MAX &&
        !memchr(r->value, '\0', r->value_len);
}

static bool decode_inode_del(struct ht_reader *in, struct ht_ns_record *r)
{
    r->ino = ht_get_u64(in);
    return ht_reader_done(in);
}

static bool decode_kept(struct ht_reader *in, struct ht_ns_record *r)
{
    r->ino = ht_get_u64(in);
    r->root = ht_get_u64(in);
    r->step = ht_get_u64(in);
    r->time_ns = (int64_t)ht_get_u64(in);
    get_name(in, r);
    return !in->bad && r->root != 0 && r->root <= HT_ID_MAX && r->root != r->ino &&
        ht_ns_kept_name_valid(r->name, r->name_len);
}

int ht_ns_record_decode(uint16_t type, const uint8_t *payload, uint32_t len, struct ht_ns_record *out)
{
    static bool (*const decode[])(struct ht_reader *, struct ht_ns_record *) = {
        decode_inode,     decode_inode_del, decode_entry, decode_entry_del, decode_xattr,
        decode_xattr_del, decode_target,    decode_kept,  decode_inode_del,
    };
    struct ht_reader in = ht_reader_of(payload, len);
    struct ht_ns_record r = {.type = type};

    if (type < HT_REC_NS_FIRST || type - HT_REC_NS_FIRST >= (int)HT_ARRAY_SIZE(decode) || len > HT_RECORD_BYTES_MAX)
        return -EUCLEAN;
    if (!decode[type - HT_REC_NS_FIRST](&in, &r) || r.ino == 0 || r.ino > HT_ID_MAX || r.parent > HT_ID_MAX)
        return -EUCLEAN;
    *out = r;
    return 0;
}

static void encode_inode(struct ht_buf *b, const struct ht_ns_record *r)
{
    ht_buf_put_u64(b, r->ino);
    ht_buf_put_u32(b, r->attr.mode);
    ht_buf_put_u32(b, r->attr.uid);
    ht_buf_put_u32(b, r->attr.gid);
    ht_buf_put_u32(b, r->rdev);
    ht_buf_put_u64(b, (uint64_t)r->attr.atime_ns);
    ht_buf_put_u64(b, (uint64_t)r->attr.mtime_ns);
    ht_buf_put_u64(b, (uint64_t)r->attr.ctime_ns);
    ht_buf_put_u8(b, r->attr.dtype);
    ht_buf_put_u8(b, r->attr.grad_dtype);
    ht_buf_put_u8(b, r->attr.obj_class);
    ht_buf_put_u8(b, (r->model_root ? HT_NS_RECORD_MODEL_ROOT : 0) | (r->frozen ? HT_NS_RECORD_FROZEN : 0));
}

static void encode_entry(struct ht_buf *b, const struct ht_ns_record *r)
{
    assert(ht_ns_name_valid(r->name, r->name_len) && ht_ns_type_valid(r->entry_type));
    ht_buf_put_u64(b, r->parent);
    ht_buf_put_u64(b, r->ino);
    ht_buf_put_u64(b, (uint64_t)r->time_ns);
    ht_buf_put_u8(b, (uint8_t)(r->entry_type >> MODE_TYPE_SHIFT));
    ht_buf_put(b, r->name, r->name_len);
}

static void encode_xattr(struct ht_buf *b, const struct ht_ns_record *r)
{
    assert(xattr_name_valid(r->name, r->name_len) && r->value_len <= HT_XATTR_VALUE_BYTES_MAX);
    ht_buf_put_u64(b, r->ino);
    ht_buf_put_u64(b, (uint64_t)r->time_ns);
    ht_buf_put_u8(b, (uint8_t)r->name_len);
    ht_buf_put(b, r->name, r->name_len);
    ht_buf_put(b, r->value, r->value_len);
}

/* Both deletions that name something: of an entry in its parent, of an attribute in its inode. */
static void encode_named_del(struct ht_buf *b, uint64_t owner, const struct ht_ns_record *r)
{
    ht_buf_put_u64(b, owner);
    ht_buf_put_u64(b, (uint64_t)r->time_ns);
    ht_buf_put(b, r->name, r->name_len);
}

void ht_ns_record_encode(struct ht_buf *group, const struct ht_ns_record *r)
{
    size_t mark = ht_record_begin(group, r->type);

    switch ((enum ht_ns_record_type)r->type) {
    case HT_REC_NS_INODE:
        encode_inode(group, r);
        break;
    case HT_REC_NS_INODE_DEL:
    case HT_REC_NS_KEPT_DEL:
        ht_buf_put_u64(group, r->ino);
        break;
    case HT_REC_NS_KEPT:
        ht_buf_put_u64(group, r->ino);
        ht_buf_put_u64(group, r->root);
        ht_buf_put_u64(group, r->step);
        ht_buf_put_u64(group, (uint64_t)r->time_ns);
        ht_buf_put(group, r->name, r->name_len);
        break;
    case HT_REC_NS_ENTRY:
        encode_entry(group, r);
        break;
    case HT_REC_NS_ENTRY_DEL:
        encode_named_del(group, r->parent, r);
        break;
    case HT_REC_NS_XATTR:
        encode_xattr(group, r);
        break;
    case HT_REC_NS_XATTR_DEL:
        encode_named_del(group, r->ino, r);
        break;
    case HT_REC_NS_TARGET:
        ht_buf_put_u64(group, r->ino);
        ht_buf_put(group, r->value, r->value_len);
        break;
    }
    ht_record_end(group, mark);
}
