/* SPDX-License-Identifier: Apache-2.0 */
/* limits.h - every bound in one place. */
#pragma once

#define HT_BLOCK_BYTES 4096u            /* unit of allocation */
#define HT_CHUNK_BYTES (1u << 20)       /* of tensors */
#define HT_SMALL_CHUNK_BYTES (1u << 16) /* of files without a dtype */
/* Of any object: a power of two between these. n is a variable. */
#define HT_CHUNK_BYTES_VALID(n) ((n) >= HT_SMALL_CHUNK_BYTES && (n) <= HT_CHUNK_BYTES && ((n) & ((n)-1)) == 0)
#define HT_CHUNK_BLOCKS_MAX (HT_CHUNK_BYTES / HT_BLOCK_BYTES)
#define HT_DEVICES_MAX 16u
#define HT_DEVICE_VAULT HT_DEVICES_MAX /* the vault, in references: no device of the store has this number */
#define HT_LOG_COPIES 2u
#define HT_FRAGS_MAX 256u              /* extents of one stored chunk */
#define HT_FILE_BYTES_MAX (1ull << 44) /* 16 TiB */
#define HT_ID_MAX (1ull << 47) /* of inodes and objects: new ones count up from the highest in the log, to below this */
#define HT_NAME_BYTES_MAX 255u
#define HT_SYMLINK_BYTES_MAX 4095u
#define HT_XATTR_NAME_BYTES_MAX 255u
#define HT_XATTR_VALUE_BYTES_MAX 65536u
#define HT_XATTR_INODE_BYTES_MAX (1u << 20) /* all names and values of one inode */
#define HT_LINKS_MAX 65000u
#define HT_RECORD_BYTES_MAX (1u << 17) /* payload of one log record */
#define HT_LOG_BYTES_MIN (512u << 10)
#define HT_LOG_BYTES_MAX (16ull << 30) /* 88 million chunks */
#define HT_LABEL_BYTES 32u
#define HT_SHAPE_DIMS_MAX 16u
#define HT_KEPT_NAME_MAX 64u             /* characters of the name of a kept step */
#define HT_RETAIN_MAX 1000000u           /* kept steps of a model root that expire */
#define HT_SHM_IMAGES_MAX 4096u          /* images in shared memory: descriptors and mappings have limits */
#define HT_SHM_USER_QUARTERS 3u          /* of that number, and of the share of memory, for one user other than root */
#define HT_SHM_PERCENT_MAX 75u           /* of the DRAM tier */
#define HT_GATHER_MEMBERS_MAX (1u << 17) /* of one open .hitrain/gather */
/* tiering/base/quota.h says which part of the next two a user may have. */
#define HT_GATHER_MEMBERS_OF_ALL_MAX (1u << 19) /* of all: some 80 MiB of memory if they are open for writing */
#define HT_ACCOUNTS_BYTES_MAX (64ull << 20)     /* memory of places that such files have written, and not applied */
#define HT_DEVICE_WAIT_S 30
#define HT_CLAIM_LOOK_MS 2000u  /* how often the owner of a store looks for claims of others */
#define HT_CLAIM_WAIT_MS 10000u /* how long a claim waits for an owner whose end locks cannot prove */
#define HT_CAPACITY_ANSWER_S 10 /* the same for one of the class capacity */
#define HT_DEVICE_ANSWER_S 30   /* default: a device whose oldest request is older does not answer */
