/* SPDX-License-Identifier: Apache-2.0 */
/* words.h - the fixed words of the interface: attribute names, hidden files, sockets, dtypes. */
#pragma once

#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>

#define HT_XATTR_PREFIX "user.hitrain."
#define HT_CTL_DIR ".hitrain"

/*
 * On .hitrain/ctl opened for reading: one line as if written there, with a NUL after it. On a read-only mount no caller
 * can open it for writing.
 */
struct ht_ioctl_line {
    char text[256];
};
#define HT_IOCTL_COMMAND _IOW('h', 1, struct ht_ioctl_line)

/*
 * On a file or a state of a kept step: has another one, of a kept step of the same model, the same bytes from offset
 * on? other is the number of its inode. The answer is is_same, for all bytes up to end, which is above offset. It goes
 * by the places of the bytes and reads none: equal bytes in two places are not the same. Bytes after the end of either
 * count as zeros.
 */
struct ht_ioctl_same {
    uint64_t other, offset;
    uint64_t end;
    uint64_t is_same;
};
#define HT_IOCTL_SAME _IOWR('h', 2, struct ht_ioctl_same)

/*
 * On a descriptor of a file or of a gradient: 1 if its shared mapping is the memory that updates work on, and that
 * `apply` takes; 0 if the kernel has other pages for the file. The answer holds as long as the descriptor or a mapping.
 */
#define HT_IOCTL_PASSED _IOR('h', 3, uint32_t)

/*
 * A flag of open(2): the opener wants such a mapping, and orders its reads by itself (passthrough=auto). O_ASYNC has no
 * other meaning for files.
 */
#define HT_OPEN_PASSED O_ASYNC

/*
 * On .hitrain/gather of a model root: these parameters follow the members that the open file has. A line for each: its
 * bytes, a space, its path below the root, a newline; and a NUL after all. If one cannot be a member, none becomes one,
 * and the root's error says why. -ESTALE: a file has other bytes.
 */
struct ht_ioctl_gather {
    char lines[8192];
};
#define HT_IOCTL_GATHER _IOW('h', 4, struct ht_ioctl_gather)

/*
 * On a descriptor of a file or of a state of a kept step: its reads with O_DIRECT, and all of a state, are work in the
 * background from now on. They go to the devices in the pauses of all others, and leave the DRAM tier as it is. Where
 * there are no pauses they get a small share of each device, and each waits for half a second at most. They bring whole
 * chunks and keep none: read MiB by MiB. Of more than 128 in flight the others do not
 * wait. -EINVAL: it is no such file.
 */
#define HT_IOCTL_BACKGROUND _IO('h', 7)

/*
 * Where a block of 1 MiB lies in the store's vault: the 40 bytes of a manifest's record of places
 * (docs/vault-format.md), little-endian. The store keeps no sum of the content: it tells zeros for it.
 */
struct ht_ioctl_place {
    uint32_t index; /* of the block in its file or state */
    uint32_t lease; /* of its segment; below 2^20 */
    uint16_t segment, unit;
    uint8_t stored[3]; /* bytes, at most 1 MiB */
    uint8_t codec;
    uint64_t checksum; /* XXH3-64 of the stored bytes */
    uint8_t sum[16];   /* XXH3-128 of the block */
};
_Static_assert(sizeof(struct ht_ioctl_place) == 40, "a place of a manifest");
enum { HT_IOCTL_PLACES_MAX = 200 };
struct ht_ioctl_places {
    uint32_t count;
    uint32_t reserved; /* 0 */
    struct ht_ioctl_place place[HT_IOCTL_PLACES_MAX];
};
/*
 * On a file or a state below a model root that is cold: these blocks, which are holes, get the content of these places.
 * The next commit of the root makes them durable. For root, and the owner of the mount's root. All get their places, or
 * those before an error. -EINVAL: a place that no segment can have, or one outside the file, which has its size before;
 * -EEXIST: a block has content; -ENXIO: the store has no vault; -EPERM.
 */
#define HT_IOCTL_PLACES _IOW('h', 5, struct ht_ioctl_places)
/*
 * For the same callers: the places of the first cold blocks from block place[0].index on, in rising order, and how
 * many these are. Fewer than HT_IOCTL_PLACES_MAX: there are no more.
 */
#define HT_IOCTL_PLACES_TELL _IOWR('h', 6, struct ht_ioctl_places)

/* The abstract socket of a mount's daemon for `hitrainctl dump`, by the device number of the mount. */
#define HT_DUMP_SOCKET "hitrain-dump-%u:%u"
/* The last line of its answer. */
#define HT_DUMP_END "end of dump"

/* Numbers are on disk: never reuse one. */
enum ht_dtype {
    HT_DTYPE_NONE = 0,
    HT_DTYPE_F32 = 1,
    HT_DTYPE_BF16 = 2,
    HT_DTYPE_F16 = 3,
    HT_DTYPE_F64 = 4,
    HT_DTYPE_I8 = 5,
    HT_DTYPE_U8 = 6,
    HT_DTYPE_I16 = 7,
    HT_DTYPE_U16 = 8,
    HT_DTYPE_I32 = 9,
    HT_DTYPE_U32 = 10,
    HT_DTYPE_I64 = 11,
    HT_DTYPE_U64 = 12,
    HT_DTYPE_BOOL = 13,
};

struct ht_dtype_word {
    const char *word;
    uint8_t dtype; /* enum ht_dtype */
    uint8_t bytes; /* per element */
    uint8_t is_float;
};

static const struct ht_dtype_word ht_dtype_words[] = {
    {"f32", HT_DTYPE_F32, 4, 1},   {"bf16", HT_DTYPE_BF16, 2, 1}, {"f16", HT_DTYPE_F16, 2, 1},
    {"f64", HT_DTYPE_F64, 8, 1},   {"i8", HT_DTYPE_I8, 1, 0},     {"u8", HT_DTYPE_U8, 1, 0},
    {"i16", HT_DTYPE_I16, 2, 0},   {"u16", HT_DTYPE_U16, 2, 0},   {"i32", HT_DTYPE_I32, 4, 0},
    {"u32", HT_DTYPE_U32, 4, 0},   {"i64", HT_DTYPE_I64, 8, 0},   {"u64", HT_DTYPE_U64, 8, 0},
    {"bool", HT_DTYPE_BOOL, 1, 0},
};
enum { HT_DTYPE_WORDS = sizeof(ht_dtype_words) / sizeof(ht_dtype_words[0]) };

/* NULL: there is no such dtype. */
static inline const struct ht_dtype_word *ht_dtype_row(uint8_t dtype)
{
    for (int i = 0; i < HT_DTYPE_WORDS; i++)
        if (ht_dtype_words[i].dtype == dtype)
            return &ht_dtype_words[i];
    return NULL;
}

/* Bytes of an element of a parameter or gradient; 0: these have no such dtype. */
static inline uint8_t ht_dtype_trained_bytes(uint8_t dtype)
{
    return dtype == HT_DTYPE_F32 ? 4 : dtype == HT_DTYPE_BF16 || dtype == HT_DTYPE_F16 ? 2 : 0;
}
