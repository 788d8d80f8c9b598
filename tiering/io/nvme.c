/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/io/nvme.h"
#include "tiering/base/buf.h"

#define PAGE_BYTES_MIN 4096u /* the unit of MDTS is the smallest page of the controller: this or more */

enum opcode {
    FLUSH = 0x00,
    WRITE = 0x01,
    READ = 0x02,
    DATASET_MANAGEMENT = 0x09,
    ADMIN_IDENTIFY = 0x06,
};

/* Bytes of Identify Controller. */
enum { MDTS = 77, ONCS = 520, VWC = 525 };
/* Bytes of Identify Namespace. */
enum { NSZE = 0, NLBAF = 25, FLBAS = 26, DPS = 29, NSATTR = 99, LBAF = 128, LBAF_BYTES = 4, LBAF_COUNT_MAX = 64 };

enum {
    ONCS_DATASET_MANAGEMENT = 1 << 2,
    VWC_PRESENT = 1,
    DPS_TYPE = 7,
    NSATTR_WRITE_PROTECTED = 1,
    ATTRIBUTE_DEALLOCATE = 1 << 2, /* of Dataset Management */
};

/* Status code type and code, as in a completion. */
enum {
    STATUS = 0x7ff,
    INVALID_OPCODE = 0x001,
    INVALID_FIELD = 0x002,
    INVALID_NAMESPACE = 0x00b,
    WRITE_PROTECTED = 0x020,
    CAPACITY_EXCEEDED = 0x081,
    RESERVATION_CONFLICT = 0x083,
    FEATURE_NOT_SUPPORTED = 0x10b,
    ATTRIBUTES_CONFLICT = 0x180,
    PROTECTION_INVALID = 0x181,
    READ_ONLY_RANGE = 0x182,
    WRITE_FAULT = 0x280,
    READ_ERROR = 0x281,
    GUARD_WRONG = 0x282,
    TAG_WRONG = 0x283,
    REFERENCE_WRONG = 0x284,
    ACCESS_DENIED = 0x286,
    UNWRITTEN = 0x287,
    DO_NOT_RETRY = 0x4000, /* a flag beside these codes */
};

void ht_nvme_decode_controller(const uint8_t data[HT_NVME_IDENTIFY_BYTES], struct ht_nvme_controller *out)
{
    unsigned pages_log2 = data[MDTS];

    *out = (struct ht_nvme_controller){
        .transfer_bytes_max = pages_log2 == 0 || pages_log2 > 40 ? UINT64_MAX : (uint64_t)PAGE_BYTES_MIN << pages_log2,
        .volatile_cache = data[VWC] & VWC_PRESENT,
        .deallocates = data[ONCS] & ONCS_DATASET_MANAGEMENT,
    };
}

int ht_nvme_decode_namespace(const uint8_t data[HT_NVME_IDENTIFY_BYTES], struct ht_nvme_namespace *out)
{
    /* With more than 16 formats the number has two more bits, elsewhere. */
    unsigned format = (data[FLBAS] & 0xf) | (data[NLBAF] > 15 ? (data[FLBAS] & 0x60) >> 1 : 0);
    const uint8_t *f = data + LBAF + (size_t)format * LBAF_BYTES;

    if (format > data[NLBAF] || format >= LBAF_COUNT_MAX)
        return -EINVAL;
    *out = (struct ht_nvme_namespace){
        .blocks = ht_le64_load(data + NSZE),
        .block_shift = f[2],
        .metadata_bytes = f[0] | (unsigned)f[1] << 8,
        .protected = data[DPS] & DPS_TYPE,
        .write_protected = data[NSATTR] & NSATTR_WRITE_PROTECTED,
    };
    return 0;
}

void ht_nvme_identify(struct nvme_passthru_cmd *out, unsigned cns, uint32_t nsid, void *data)
{
    *out = (struct nvme_passthru_cmd){
        .opcode = ADMIN_IDENTIFY,
        .nsid = cns == 0 ? nsid : 0,
        .addr = (uintptr_t)data,
        .data_len = HT_NVME_IDENTIFY_BYTES,
        .cdw10 = cns,
    };
}

void ht_nvme_transfer(struct nvme_uring_cmd *out, enum ht_nvme_direction direction, uint32_t nsid, unsigned block_shift,
                      uint64_t offset, void *buf, uint32_t len)
{
    uint64_t first = offset >> block_shift;
    uint32_t blocks = len >> block_shift;

    assert(blocks > 0 && blocks <= HT_NVME_BLOCKS_MAX);
    *out = (struct nvme_uring_cmd){
        .opcode = direction == HT_NVME_WRITE ? WRITE : READ,
        .nsid = nsid,
        .addr = (uintptr_t)buf,
        .data_len = len,
        .cdw10 = (uint32_t)first,
        .cdw11 = (uint32_t)(first >> 32),
        .cdw12 = blocks - 1,
    };
}

void ht_nvme_flush(struct nvme_uring_cmd *out, uint32_t nsid)
{
    *out = (struct nvme_uring_cmd){.opcode = FLUSH, .nsid = nsid};
}

void ht_nvme_deallocate(struct nvme_uring_cmd *out, uint32_t nsid, uint64_t first_block, uint32_t blocks,
                        uint8_t range[HT_NVME_RANGE_BYTES])
{
    ht_le32_store(range, 0);
    ht_le32_store(range + 4, blocks);
    ht_le64_store(range + 8, first_block);
    *out = (struct nvme_uring_cmd){
        .opcode = DATASET_MANAGEMENT,
        .nsid = nsid,
        .addr = (uintptr_t)range,
        .data_len = HT_NVME_RANGE_BYTES,
        .cdw10 = 0, /* ranges, less one */
        .cdw11 = ATTRIBUTE_DEALLOCATE,
    };
}

int ht_nvme_errno(unsigned status)
{
    switch (status & STATUS) {
    case CAPACITY_EXCEEDED:
        return -ENOSPC;
    case INVALID_OPCODE:
    case INVALID_FIELD:
    case INVALID_NAMESPACE:
    case FEATURE_NOT_SUPPORTED:
    case ATTRIBUTES_CONFLICT:
        return -EOPNOTSUPP;
    case WRITE_PROTECTED:
        return -EROFS;
    case RESERVATION_CONFLICT:
        return -EBADE;
    case PROTECTION_INVALID:
    case GUARD_WRONG:
    case TAG_WRONG:
    case REFERENCE_WRONG:
        return -EILSEQ;
    case READ_ONLY_RANGE:
    case WRITE_FAULT:
    case READ_ERROR:
    case ACCESS_DENIED:
    case UNWRITTEN:
        return -ENODATA;
    default:
        return -EIO;
    }
}

bool ht_nvme_may_retry(unsigned status)
{
    return !(status & DO_NOT_RETRY);
}
