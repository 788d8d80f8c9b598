/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvme.h - the language of NVMe, as far as namespaces need it: a controller's description, commands, and the meaning of
 * their status. Nothing here touches a device.
 *
 * Field names and numbers are those of the NVM Express Base and NVM Command Set specifications.
 */
#pragma once

#include <linux/nvme_ioctl.h>
#include "tiering/base/base.h"

enum {
    HT_NVME_IDENTIFY_BYTES = 4096,
    HT_NVME_RANGE_BYTES = 16,   /* of a Dataset Management command */
    HT_NVME_BLOCKS_MAX = 65536, /* of a Read or Write */
    HT_NVME_TRIES = 5,          /* tries of a command whose status suggests a retry; as many as Linux gives block I/O */
};

/* The needed fields of Identify, Controller data structure (CNS 01h). */
struct ht_nvme_controller {
    uint64_t transfer_bytes_max; /* UINT64_MAX: no limit */
    bool volatile_cache, deallocates;
};

/* Fields of Identify, Namespace data structure (CNS 00h). */
struct ht_nvme_namespace {
    uint64_t blocks;
    unsigned block_shift;    /* log2 of the bytes of a block; not checked */
    unsigned metadata_bytes; /* beside each block */
    bool protected;          /* with protection information */
    bool write_protected;
};

void ht_nvme_decode_controller(const uint8_t data[HT_NVME_IDENTIFY_BYTES], struct ht_nvme_controller *out);
/* -EINVAL: it names a format that it does not have. */
int ht_nvme_decode_namespace(const uint8_t data[HT_NVME_IDENTIFY_BYTES], struct ht_nvme_namespace *out) HT_MUST_CHECK;

/* Identify: cns 0 of a namespace, 1 of its controller. */
void ht_nvme_identify(struct nvme_passthru_cmd *out, unsigned cns, uint32_t nsid, void *data);

enum ht_nvme_direction { HT_NVME_READ, HT_NVME_WRITE };
/* blocks: at least 1, at most HT_NVME_BLOCKS_MAX. */
void ht_nvme_transfer(struct nvme_uring_cmd *out, enum ht_nvme_direction direction, uint32_t nsid, unsigned block_shift,
                      uint64_t offset, void *buf, uint32_t len);
void ht_nvme_flush(struct nvme_uring_cmd *out, uint32_t nsid);
/* Deallocates. range: memory that stays until the command has ended. */
void ht_nvme_deallocate(struct nvme_uring_cmd *out, uint32_t nsid, uint64_t first_block, uint32_t blocks,
                        uint8_t range[HT_NVME_RANGE_BYTES]);

/* status: as Linux completes a command, not 0. The errno that block I/O gives for it, negative. */
int ht_nvme_errno(unsigned status);
/* The controller says that the same command may succeed later. */
bool ht_nvme_may_retry(unsigned status);
