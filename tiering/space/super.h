/* SPDX-License-Identifier: Apache-2.0 */
/*
 * super.h - superblocks: encode, decode, find the newest, write all copies; and which members may act together.
 *
 * Each device carries three copies of the same content (format.h). Writing: copy 1 of every device, flush;
 * then copies 0 and 2, flush: at any moment at least one valid copy of the old or the new generation is on the media.
 */
#pragma once

#include "tiering/io/dev.h"
#include <hitrain/features.h>
#include <hitrain/format.h>

struct ht_super {
    uint32_t flags;
    uint64_t feat_refuse, feat_ro, feat_ignore;
    uint8_t uuid[16];
    char label[HT_LABEL_BYTES + 1];
    uint64_t salt, generation;
    uint32_t device_index, device_count, chunk_bytes;
    uint64_t log_bytes;
    uint32_t log_device[HT_LOG_COPIES];
    uint64_t log_offset[HT_LOG_COPIES];
    uint64_t start_pos, start_seq, start_chain;
    uint64_t epoch, durable_seq;
    uint64_t writer, writer_place; /* claim.h; 0: nobody, or not known */
    uint32_t writer_flags;
    uint8_t boot_id[16];
    uint64_t created_ns;
    uint64_t device_bytes[HT_DEVICES_MAX];
    uint8_t device_uuid[HT_DEVICES_MAX][16];
    uint64_t member_epoch[HT_DEVICES_MAX]; /* ht_members_validate */
    uint8_t device_class[HT_DEVICES_MAX];  /* enum ht_device_class; HT_DEVICE_FAST without the feature */
    /* In memory only: */
    uint8_t unsure[HT_DEVICES_MAX]; /* copies (bits) whose flush failed */
    uint64_t mine;                  /* our nonce, or 0 */
    uint32_t claimed, local;        /* devices (bits) that took our claim; whose bytes locks exclude others from */
    uint64_t places[HT_DEVICES_MAX];
    bool taken; /* another took the store over: nothing may be written any more */
};

/* What of a superblock never changes: readable without a lock. */
struct ht_super_layout {
    uint64_t salt;
    uint32_t chunk_bytes;
    uint64_t log_bytes;
    uint32_t log_device[HT_LOG_COPIES];
    uint64_t log_offset[HT_LOG_COPIES];
    uint64_t device_bytes[HT_DEVICES_MAX];
    uint8_t device_class[HT_DEVICES_MAX];
};
void ht_super_get_layout(const struct ht_super *sb, struct ht_super_layout *out);

/* Problems of a superblock copy; also fsck's words. */
enum ht_super_problem {
    HT_SUPER_OK,
    HT_SUPER_UNREADABLE, /* read error, or the device is too small */
    HT_SUPER_NO_MAGIC,   /* not a hitrain superblock */
    HT_SUPER_BAD_CHECKSUM,
    HT_SUPER_BAD_VERSION, /* a version or refuse-feature this program does not know */
    HT_SUPER_BAD_FIELD,   /* a field outside its bounds */
};
const char *ht_super_problem_text(enum ht_super_problem p);

void ht_super_encode(const struct ht_super *sb, uint8_t out_block[4096]);
enum ht_super_problem ht_super_decode(const uint8_t block[4096], struct ht_super *out_sb);
/* "fast" or "capacity", of a class that was decoded. */
const char *ht_device_class_word(unsigned device_class);

/* What of a superblock keeps its place in all versions: also of stores that this program refuses. */
struct ht_super_words {
    uint32_t version;
    uint64_t feat_refuse, feat_ro, feat_ignore, generation;
    uint8_t uuid[16];
    char label[HT_LABEL_BYTES + 1];
    char feature_names[HT_FEATURE_NAMES_BYTES + 1]; /* as they are on the device: any bytes */
};
/* HT_SUPER_OK, HT_SUPER_NO_MAGIC or HT_SUPER_BAD_CHECKSUM. */
enum ht_super_problem ht_super_peek(const uint8_t block[4096], struct ht_super_words *out);

/*
 * Name and first version of a feature, by the program that wrote the superblock. False: it says nothing,
 * or no name. Both are printable.
 */
struct ht_super_feature {
    char name[HT_FEATURE_NAME_MAX], since[HT_FEATURE_SINCE_MAX];
};
bool ht_super_feature_name(const char *feature_names, enum ht_feature_effect effect, unsigned bit,
                           struct ht_super_feature *out);
/*
 * For a store that this program refuses, or only reads: "format 4" or "kept-steps (hitrain 0.1.0), bit-7". Reads the
 * device.
 */
void ht_super_unknown_text(struct ht_dev *dev, char *buf, size_t cap);

/* Byte offset of copy 0, 1 or 2 on a device of so many bytes. */
uint64_t ht_super_offset(uint64_t device_bytes, unsigned copy);

struct ht_super_report {
    enum ht_super_problem copy[HT_SUPER_COPIES];
    uint64_t generation[HT_SUPER_COPIES]; /* of the valid ones */
};
/*
 * Reads the three copies of a device; chooses the valid one with the highest generation. Checks also that its device
 * size fits (a truncated device: -ENODATA with *out_sb filled). -EMEDIUMTYPE: no copy is hitrain's at all. -EUCLEAN:
 * copies are there but none is valid. -EPROTONOSUPPORT: HT_SUPER_BAD_VERSION. out_report is always filled.
 */
int ht_super_read(struct ht_dev *dev, struct ht_super *out_sb, struct ht_super_report *out_report) HT_MUST_CHECK;
/*
 * Raises sb->generation by one and writes it to all copies of all devices (device_index set for each). devs[i] NULL:
 * missing, skipped. Returns the devices (bits) that hold it in no copy; *out_partial (or NULL): how many lack it in
 * some copy. If another mount took the store over, nothing is written, sb->taken is set, and
 * no device counts as holding it.
 */
uint32_t ht_super_write(struct ht_super *sb, struct ht_dev *const devs[], unsigned dev_count,
                        unsigned *out_partial) HT_MUST_CHECK;

/*
 * Reads the copies that a device should hold of sb again; with repair, writes each bad one anew, flushes and reads it,
 * one after the other. The caller keeps others from writing them. Returns how many were bad.
 */
struct ht_super_scrub {
    enum ht_super_problem problem[HT_SUPER_COPIES]; /* HT_SUPER_OK also for a valid but old copy: stale */
    bool stale[HT_SUPER_COPIES], repaired[HT_SUPER_COPIES];
    uint64_t offset[HT_SUPER_COPIES];
};
unsigned ht_super_scrub(const struct ht_super *sb, struct ht_dev *dev, unsigned index, bool repair,
                        struct ht_super_scrub *out);
/* One copy, whatever the others say. */
enum ht_super_problem ht_super_read_copy(struct ht_dev *dev, uint64_t offset, struct ht_super *out_sb);
/* A copy that was found on a device of sb's store: is it another mount's, or another store's? */
bool ht_super_is_foreign(const struct ht_super *sb, const struct ht_super *have);
/* One copy of one device anew, and flush. sb: as another copy of that device has it. */
int ht_super_rewrite(const struct ht_super *sb, struct ht_dev *dev, unsigned copy) HT_MUST_CHECK;

/* Inside space/: bounds of fields. */
#define HT_SUPER_DEVICE_BYTES_MIN (8 * HT_MIB)
#define HT_SUPER_COUNTER_MAX (1ull << 62) /* generations, epochs, positions: never reached by counting */
bool ht_super_log_bytes_valid(uint64_t bytes);
bool ht_super_label_valid(const char *label);

struct ht_format_opts {
    const char *label;    /* or NULL */
    uint32_t chunk_bytes; /* 0: 1 MiB */
    uint64_t log_bytes;   /* 0: by the devices' size */
    uint32_t capacity;    /* devices (bits) of the class capacity: at least one is not */
};
/*
 * Lays out a new store over devices: chooses uuid, salt, log places (two fast devices if there are two, else two places
 * far apart on one), and writes the superblocks. The log region needs no initialisation: old frames have another salt.
 * -ENOSPC: too small (less than 8 MiB).
 */
int ht_super_format(struct ht_dev *const devs[], unsigned dev_count, const struct ht_format_opts *opts,
                    struct ht_super *out_sb) HT_MUST_CHECK;

/*
 * Adds a device to a store that nobody has mounted (super_format.c). devs: its members, by index, none missing; sb: the
 * newest superblock, with a claim on them (claim.h). Then sb has the device, and names no writer. What dev holds is
 * lost. -E2BIG: too many; -ENOSPC: too small; -EUCLEAN: it is a member, but a device lacks a copy of the superblock.
 * Another error: the store is as it was.
 */
int ht_super_add(struct ht_super *sb, struct ht_dev *const devs[], struct ht_dev *dev,
                 enum ht_device_class device_class) HT_MUST_CHECK;

/*
 * Members: each one's part in the history of its store.
 *
 * Every mount has an epoch, and so has every time at which a member drops out while the others go on. A superblock
 * names its epoch. For each device it names the last epoch in which the device took part, as far as was known at its
 * writing. The superblock is written to all members that take part before anything of that epoch is. So of two members
 * with one history one knows all that the other did:
 *
 *   A knows B:  A.member_epoch[B] >= B.member_epoch[B]
 *
 *   both mounted at 5, then A alone at 6:  A {epoch 6, A 6, B 5}   B {epoch 5, A 5, B 5}   A knows B: B catches up
 *   and then B alone, too:                 A {epoch 6, A 6, B 5}   B {epoch 6, A 5, B 6}   neither: they have diverged
 *
 * A device that was being added (ht_super_add) names a store whose other members may not name it: they went on without
 * it, and perhaps another one has its number. It is a stranger then.
 *
 * A member that dropped out while it could still be written, or whose log is not up to date yet, knows that itself: it
 * must not stand for the store alone.
 */
struct ht_members {
    unsigned newest;      /* index of the device whose superblock counts */
    unsigned apart[2];    /* -EXDEV: these two */
    unsigned left_behind; /* -ESTALE: this one */
    unsigned stranger;    /* -ENXIO: this one */
};

/*
 * sb[i]: superblock of the device with index i; NULL: not there. At least one is there. 0, -EXDEV: two members have
 * changed apart from each other; -ESTALE: none of the present ones with a copy of the log has the newest one; -ENXIO:
 * the newest superblock does not name this device.
 */
int ht_members_validate(const struct ht_super *const sb[HT_DEVICES_MAX], struct ht_members *out) HT_MUST_CHECK;
/* Is have, of a device with the store's uuid, not of the member that the store has under its number? */
bool ht_members_is_stranger(const struct ht_super *newest, const struct ht_super *have);
/* Did device i have the whole content when this superblock was written? */
bool ht_members_takes_part(const struct ht_super *sb, unsigned i);
/* Those that take part (bits) do so in sb->epoch from now on. */
void ht_members_take_part(struct ht_super *sb, uint32_t devices);

/* Ids of this host and this boot, 16 bytes each (zeros when unknown), as they were when first asked for. */
void ht_host_ids(uint8_t out_host[16], uint8_t out_boot[16]);
