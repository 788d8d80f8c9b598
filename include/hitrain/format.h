/* SPDX-License-Identifier: Apache-2.0 */
/*
 * format.h - the content of the media. Little-endian throughout.
 *
 * A device:
 *
 *   block 0        superblock copy 0
 *   block 16       superblock copy 1
 *   ...            log regions and data, as the superblock says
 *   last block     superblock copy 2 (the last whole 4 KiB block of the device)
 *
 * All copies carry the same content except the device index; the valid copy with the highest generation counts. The log
 * is described in tiering/journal/journal.h, records below. Everything that the log does not name is free.
 *
 * Only codec files (super_codec.c, frame.c, records.c, master.c) touch these structs.
 */
#pragma once

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <hitrain/limits.h>
#include <hitrain/participants.h>

typedef struct {
    uint8_t b[4];
} ht_le32;
typedef struct {
    uint8_t b[8];
} ht_le64;

#define HT_SUPER_MAGIC "hitrain\n"
#define HT_FORMAT_VERSION \
    3u /* 2: chunks with several owners, state of other rules; 3: epochs of members in the superblock */
#define HT_SUPER_COPIES 3u
#define HT_SUPER_BLOCK_1 16u /* copy 1 is at this block, copy 0 at block 0 */

/* Feature words: an unknown bit in the first refuses the mount, in the second allows
 * read-only, in the third is ignored. */
#define HT_FEAT_REFUSE_LOST 1ull        /* there are, or were, chunks of HT_CODEC_LOST */
#define HT_FEAT_REFUSE_PLANES 2ull      /* chunks may be of HT_CODEC_PLANES */
#define HT_FEAT_REFUSE_KEPT 4ull        /* there are, or were, kept steps */
#define HT_FEAT_REFUSE_REDO 8ull        /* there are, or were, logged steps */
#define HT_FEAT_REFUSE_SPARSE 16ull     /* pieces of logged gradients are, or were, of HT_REDO_SPARSE */
#define HT_FEAT_REFUSE_SECTIONS 32ull   /* parameters of logged steps have, or had, numbers for ranges of elements */
#define HT_FEAT_REFUSE_NEAR_G 64ull     /* logged steps have, or had, kernels for beta1 up to 0.5 */
#define HT_FEAT_REFUSE_FORMS 128ull     /* state of the optimizer is, or was, kept in fewer bits than f32 */
#define HT_FEAT_REFUSE_TWO_PHASE 256ull /* parameters, or logged steps, are or were of rules in two phases */
#define HT_FEAT_REFUSE_COLD 512ull      /* the log names, or named, a vault: content may lie there */
#define HT_FEAT_REFUSE_KNOWN                                                                                           \
    (HT_FEAT_REFUSE_LOST | HT_FEAT_REFUSE_PLANES | HT_FEAT_REFUSE_KEPT | HT_FEAT_REFUSE_REDO | HT_FEAT_REFUSE_SPARSE | \
     HT_FEAT_REFUSE_SECTIONS | HT_FEAT_REFUSE_NEAR_G | HT_FEAT_REFUSE_FORMS | HT_FEAT_REFUSE_TWO_PHASE |               \
     HT_FEAT_REFUSE_COLD)
#define HT_FEAT_RO_KNOWN 0ull
#define HT_FEAT_IGNORE_CLASSES 1ull /* device_class counts; a program that does not know it writes zeros there */

struct ht_disk_log_copy {
    ht_le32 device; /*  0 index of the device */
    ht_le32 writer; /*  4 of copy 0: HT_WRITER_*; of copy 1: zero */
    ht_le64 offset; /*  8 bytes, multiple of 4096 */
};

#define HT_FEATURE_NAMES_BYTES 1024u

struct ht_disk_super {
    uint8_t magic[8];                           /*    0 HT_SUPER_MAGIC */
    ht_le64 checksum;                           /*    8 XXH3 of bytes [16, 4096) */
    ht_le32 version;                            /*   16 */
    ht_le32 flags;                              /*   20 HT_SUPER_* */
    ht_le64 feat_refuse;                        /*   24 */
    ht_le64 feat_ro;                            /*   32 */
    ht_le64 feat_ignore;                        /*   40 */
    uint8_t uuid[16];                           /*   48 of the store */
    uint8_t label[HT_LABEL_BYTES];              /*   64 NUL-padded */
    ht_le64 salt;                               /*   96 random at mkfs, in every frame */
    ht_le64 generation;                         /*  104 of this superblock */
    ht_le32 device_index;                       /*  112 of the device it lies on */
    ht_le32 device_count;                       /*  116 */
    ht_le32 block_bytes;                        /*  120 always 4096 */
    ht_le32 chunk_bytes;                        /*  124 of tensors */
    ht_le64 log_bytes;                          /*  128 of each copy, multiple of 4096 */
    struct ht_disk_log_copy log[HT_LOG_COPIES]; /*  136 */
    ht_le64 start_pos;                          /*  168 where replay starts */
    ht_le64 start_seq;                          /*  176 sequence number of the frame there */
    ht_le64 start_chain;                        /*  184 checksum that frame names as its predecessor's */
    ht_le64 epoch;                              /*  192 highest epoch ever used */
    ht_le64 durable_seq;                        /*  200 last frame, when HT_SUPER_CLEAN */
    ht_le64 writer;                             /*  208 nonce of the mount that writes, or 0 */
    ht_le64 writer_place;                       /*  216 hash of its boot and of the bytes that it holds */
    uint8_t boot_id[16];                        /*  224 of the last writer */
    ht_le64 created_ns;                         /*  240 */
    ht_le64 device_bytes[HT_DEVICES_MAX];       /*  248 */
    ht_le64 member_epoch[HT_DEVICES_MAX]; /* 376 last epoch that each device took part in, as far as this one knows */
    uint8_t device_uuid[HT_DEVICES_MAX][16]; /*  504 */
    /*
     * Lines "effect bit name since" of the program that wrote this copy (features.h), NUL-padded. They differ from
     * those of the copy before only when another version of the program writes.
     */
    char feature_names[HT_FEATURE_NAMES_BYTES];                        /*  760 */
    uint8_t device_class[HT_DEVICES_MAX];                              /* 1784 enum ht_device_class */
    uint8_t pad[4096 - 760 - HT_FEATURE_NAMES_BYTES - HT_DEVICES_MAX]; /* 1800 zero */
};
enum ht_device_class { HT_DEVICE_FAST, HT_DEVICE_CAPACITY };
static_assert(sizeof(struct ht_disk_super) == 4096, "superblock is one block");
static_assert(offsetof(struct ht_disk_super, device_uuid) == 504, "superblock layout");
/*
 * Fields that change from one mount to the next lie in the first 512 bytes, which no power cut tears: each copy is the
 * old one or the new. Another copy is valid where a new version of the program writes its names.
 */
static_assert(offsetof(struct ht_disk_super, member_epoch) + 8 * HT_DEVICES_MAX <= 512, "superblock layout");

/* Of older programs the 16 bytes from `writer` on are the host's id, and nothing is known of the mount. */
#define HT_WRITER_KNOWN 1u
#define HT_WRITER_LOCAL 2u /* locks of its machine excluded all others */

#define HT_SUPER_CLEAN 1u  /* unmounted cleanly: durable_seq is the last frame */
#define HT_SUPER_IN_USE 2u /* a writer has it mounted, or died */

/* A log frame starts at a multiple of 4096 of the log position and is followed by its payload; zero padding to 4096. */
#define HT_FRAME_MAGIC 0x66746968u /* "hitf" */

struct ht_disk_frame {
    ht_le32 magic;       /*  0 */
    ht_le32 flags;       /*  4 zero */
    ht_le64 checksum;    /*  8 XXH3 of header bytes [16, 80) and payload */
    ht_le64 salt;        /* 16 of the store */
    ht_le64 epoch;       /* 24 of the mount that wrote it */
    ht_le64 seq;         /* 32 grows by one from frame to frame, across epochs */
    ht_le64 pos;         /* 40 log position of this frame, bytes; place in the region: pos modulo log_bytes */
    ht_le64 prev;        /* 48 checksum of the frame before */
    ht_le64 durable_seq; /* 56 last frame known durable when this one was written */
    ht_le64 payload_len; /* 64 bytes */
    ht_le64 pad;         /* 72 zero */
};
static_assert(sizeof(struct ht_disk_frame) == 80, "frame header");

/*
 * Payload: records, each { u16 type, u16 zero, u32 length, payload[length] }, unaligned.
 * A frame's records replay all or not at all. Numbers are never reused.
 * Replaying any record twice, or over a state that already holds it, gives the same state.
 * A program that does not know a type may read the store. It writes nothing, because its checkpoint would drop the
 * record. A type that programs must know also for reading needs a bit of feat_refuse.
 */
enum ht_record_type {
    /* the journal's */
    HT_REC_EPOCH = 1,            /* u64 epoch, u64 wall ns, u8 host[16], u8 boot[16] */
    HT_REC_CHECKPOINT_BEGIN = 2, /* u64 checkpoint id: the records up to the end mark are complete by themselves */
    HT_REC_CHECKPOINT_END = 3,   /* u64 checkpoint id */
    /* the store's */
    HT_REC_IDS = 16,        /* u64 next id */
    HT_REC_OBJECT = 17,     /* u64 oid, u32 chunk bytes, u32 class, u64 size, u64 scope: create or update */
    HT_REC_OBJECT_DEL = 18, /* u64 oid */
    /*
     * u64 oid, u64 index, u32 generation, u8 codec, u8 reserved, u16 frag count, u32 stored bytes, u32 visible bytes,
     * u64 checksum, count x { u8 device, u8 zero, u16 blocks, u64 first block }
     * Device HT_DEVICE_VAULT: one piece, in a segment of the vault (HT_VAULT_*_BITS); the checksum has no salt.
     */
    HT_REC_CHUNK = 19,
    HT_REC_CHUNK_DEL = 20, /* u64 oid, u64 first index, u64 count (~0: to the end) */
    HT_REC_VAULT = 21,     /* u8 uuid[16], URL: the vault where content lies; the last one counts */
/* those of participants */
#define HT_RECORD_TYPES(ID, name, first, last) HT_REC_##ID##_FIRST = first, HT_REC_##ID##_LAST = last,
    HT_PARTICIPANTS(HT_RECORD_TYPES)
#undef HT_RECORD_TYPES
};

/*
 * Beside the missing bits of masters (state of kind 6): the facts on each block of HT_MASTER_BLOCK elements. Zeros mean
 * that nothing is known.
 */
#define HT_MASTER_BLOCK 2048u
struct ht_disk_master {
    ht_le64 hash;  /*  0 XXH3 of the parameter's bytes that the bits belong to */
    ht_le32 upper; /*  8 zero, or 1 << 16 | the code that stands for an upper tie */
    ht_le32 pad;   /* 12 zero */
};
static_assert(sizeof(struct ht_disk_master) == 16, "block of masters");

/*
 * A logged step has an object: bytes of gradients, then a summary. The summary is this header, the parameters that the
 * step changed, and the pieces of their gradients, all in this order without gaps. A summary of HT_REDO_VERSION_CODED
 * says of each piece how its bytes are stored. So does one of HT_REDO_VERSION_SECTIONS, where sections may follow a
 * parameter; they count as parameters. In one of HT_REDO_VERSION_ORTHO pieces may also be of orthogonalised updates.
 */
#define HT_REDO_VERSION 1u
#define HT_REDO_VERSION_CODED 2u
#define HT_REDO_VERSION_SECTIONS 3u
#define HT_REDO_VERSION_ORTHO 4u
struct ht_disk_redo {
    ht_le32 version; /*  0 HT_REDO_VERSION* */
    ht_le32 pad;     /*  4 zero */
    ht_le64 step;    /*  8 its number */
    ht_le64 params;  /* 16 */
    ht_le64 pieces;  /* 24 */
};
static_assert(sizeof(struct ht_disk_redo) == 32, "summary of a logged step");
#define HT_REDO_SCALARS 9u
struct ht_disk_redo_param {
    ht_le64 object;                  /*  0 */
    ht_le64 steps;                   /*  8 of this parameter, with this one */
    ht_le64 elements;                /* 16 */
    ht_le32 chunk_bytes;             /* 24 */
    uint8_t dtype, grad_dtype;       /* 28 */
    uint8_t kernel, maximize;        /* 30 enum ht_kernel; 0 or 1 */
    ht_le32 scalar[HT_REDO_SCALARS]; /* 32 bits of f32: struct ht_scalars in its order */
    ht_le32 forms;                   /* 68 a hash of forms and salt of its state; 0: all is f32 */
};
static_assert(sizeof(struct ht_disk_redo_param) == 72, "parameter of a logged step");
/* Elements [begin, end) of the parameter before it, which its update took with other numbers. They ascend. */
struct ht_disk_redo_section {
    ht_le64 object;                  /*  0 that of the parameter */
    ht_le64 begin, end;              /*  8 */
    ht_le32 pad;                     /* 24 zero */
    uint8_t no_dtype;                /* 28 zero: a parameter has a dtype here */
    uint8_t frozen;                  /* 29 1: the update left them as they were */
    uint8_t kernel, maximize;        /* 30 */
    ht_le32 scalar[HT_REDO_SCALARS]; /* 32 */
    ht_le32 pad2;                    /* 68 zero */
};
static_assert(sizeof(struct ht_disk_redo_section) == sizeof(struct ht_disk_redo_param), "they count as parameters");
static_assert(offsetof(struct ht_disk_redo_section, no_dtype) == offsetof(struct ht_disk_redo_param, dtype),
              "no dtype");
struct ht_disk_redo_piece {
    ht_le64 at;         /*  0 of its bytes in the object */
    ht_le32 param;      /*  8 place among the parameters of the summary */
    ht_le32 range;      /* 12 */
    ht_le32 begin, end; /* 16 bytes of the gradient, from the start of the range */
};
static_assert(sizeof(struct ht_disk_redo_piece) == 24, "piece of a logged gradient");
#define HT_REDO_PLAIN 0u
#define HT_REDO_SPARSE 1u /* entries: tiering/base/sparse.h */
#define HT_REDO_ORTHO \
    256u /* beside one of these: bytes of the orthogonalised update, in bf16, in place of the gradient */
#define HT_REDO_SPARSE_BYTES_MAX ((1u << 20) - 64)
struct ht_disk_redo_coded {
    struct ht_disk_redo_piece piece; /*  0 */
    ht_le32 bytes;                   /* 24 that are stored; of entries at most HT_REDO_SPARSE_BYTES_MAX */
    ht_le32 coding;                  /* 28 HT_REDO_PLAIN: end - begin bytes; HT_REDO_SPARSE; | HT_REDO_ORTHO */
};
static_assert(sizeof(struct ht_disk_redo_coded) == 32, "piece of a logged gradient, with its coding");

/* Bytes of a record's header. */
#define HT_RECORD_HEADER_BYTES 8u

/*
 * A chunk's bytes of HT_CODEC_PLANES (tiering/codec/frame.h): this header, the planes, and the bytes after the last
 * whole element. Plane i holds byte i of each element. The frame's length is that of the stored bytes.
 */
#define HT_DISK_PLANES_MAX 4u
enum { HT_PLANE_NONE = 0, HT_PLANE_STORED = 1, HT_PLANE_ZSTD = 2 };
struct ht_disk_planes {
    uint8_t element_bytes;                   /*  0 1, 2 or 4: as many planes */
    uint8_t kind[HT_DISK_PLANES_MAX];        /*  1 HT_PLANE_* */
    uint8_t pad[3];                          /*  5 zero */
    ht_le32 raw_bytes;                       /*  8 of the content */
    ht_le32 pad2;                            /* 12 zero */
    ht_le32 plane_bytes[HT_DISK_PLANES_MAX]; /* 16 in the frame; 0 of planes that are not there */
};
static_assert(sizeof(struct ht_disk_planes) == 32, "header of planes");

/* codec of a stored chunk */
enum {
    HT_CODEC_RAW = 0,
    HT_CODEC_LOST = 1, /* no extents, nothing stored: fsck gave the content up; reading the visible bytes is an error */
    HT_CODEC_PLANES = 2, /* a compressed frame: struct ht_disk_planes; needs HT_FEAT_REFUSE_PLANES */
};

/*
 * The first block of content in the vault is LEASE << 28 | N << 13 | UNIT: the segment seg/LEASE/N, from its unit of 4
 * KiB on. Unit 0 is the header of a segment.
 */
enum { HT_VAULT_LEASE_BITS = 20, HT_VAULT_SEGMENT_BITS = 15, HT_VAULT_UNIT_BITS = 13 };
#define HT_VAULT_UNITS (1u << HT_VAULT_UNIT_BITS)
enum { HT_VAULT_URL_BYTES = 1024 }; /* with a NUL, which a record has not */

/* class of an object */
enum { HT_CLASS_DURABLE = 0, HT_CLASS_SCRATCH = 1 };
