/* SPDX-License-Identifier: Apache-2.0 */
/*
 * raw.c - raw NVMe namespaces: their properties, and requests to them as commands (nvme.h) that io_uring passes on.
 *
 * Identify describes a namespace. The queue of the block device beside it gives further limits of the driver. The
 * kernel neither cuts a command that is too large nor repeats one that the controller could not work off: this file
 * does both.
 */
#include "tiering/io/io_priv.h"
#include "tiering/base/fault.h"
#include "tiering/base/log.h"

#include <hitrain/limits.h>
#include <liburing.h>
#include <linux/fs.h>
#include <sys/ioctl.h>

#define SEGMENTS_FEW 33u
#define LENGTH_MAX (1u << 31) /* of one request, in bytes: as far as 32 bits and a whole number of blocks go */

static uint64_t power_of_two_below(uint64_t n)
{
    return n == 0 ? 0 : 1ull << (63 - (unsigned)__builtin_clzll(n));
}

/*
 * Each page of memory may be a segment of its own, and the first may be a part of one. That is also so for huge pages:
 * to Linux 6.1 registered memory consists of small ones. The driver refuses a command with too many segments; for block
 * I/O the kernel would have cut it.
 */
static uint64_t transfer_max(const struct ht_nvme_controller *c, const struct ht_nvme_namespace *n, dev_t block)
{
    uint64_t kib = ht_queue_limit(block, "max_hw_sectors_kb"), segments = ht_queue_limit(block, "max_segments");
    uint64_t max = ht_min_u64(c->transfer_bytes_max, kib > 0 ? kib * HT_KIB : LENGTH_MAX);

    max = ht_min_u64(max, ((segments > 1 ? segments : SEGMENTS_FEW) - 1) * HT_BLOCK_BYTES);
    max = ht_min_u64(max, (uint64_t)HT_NVME_BLOCKS_MAX << n->block_shift);
    return power_of_two_below(ht_max_u64(ht_min_u64(max, LENGTH_MAX), 1ull << n->block_shift));
}

/* 0: it cannot discard. */
static uint64_t discard_max(const struct ht_nvme_controller *c, const struct ht_nvme_namespace *n, dev_t block)
{
    uint64_t max = c->deallocates ? ht_queue_limit(block, "discard_max_hw_bytes") : 0;

    return ht_min_u64(max, LENGTH_MAX) >> n->block_shift << n->block_shift;
}

static int identify(const struct ht_dev *dev, unsigned cns, uint8_t *data)
{
    struct nvme_passthru_cmd command;

    ht_nvme_identify(&command, cns, dev->nsid, data);
    int status = ioctl(dev->fd, NVME_IOCTL_ADMIN_CMD, &command);
    if (status == 0)
        return 0;
    return status < 0 ? -errno : ht_nvme_errno((unsigned)status);
}

static int check_namespace(const struct ht_dev *dev, const struct ht_nvme_namespace *n)
{
    if (n->metadata_bytes != 0 || n->protected) {
        ht_error(
            "%s is formatted with %u bytes of metadata beside each block%s: only a format without them is possible "
            "(nvme format --lbaf=, which erases it)",
            dev->name, n->metadata_bytes, n->protected ? " and protection information" : "");
        return -EINVAL;
    }
    if (n->block_shift < 9 || n->block_shift > 12 || n->blocks > (uint64_t)INT64_MAX >> n->block_shift) {
        ht_error("%s reports %llu blocks of 2^%u bytes: blocks of 512 to %u bytes are possible", dev->name,
                 (unsigned long long)n->blocks, n->block_shift, HT_BLOCK_BYTES);
        return -EINVAL;
    }
    if (n->write_protected && !dev->facts.rdonly) {
        ht_error("%s is write-protected: only reading is possible", dev->name);
        return -EROFS;
    }
    return 0;
}

static int ask(struct ht_dev *dev, uint8_t *data, struct ht_nvme_controller *c, struct ht_nvme_namespace *n)
{
    int nsid = ioctl(dev->fd, NVME_IOCTL_ID), read_only = 0, rc;

    if (nsid < 0 || ioctl(dev->hold_fd, BLKROGET, &read_only) != 0)
        return -errno;
    dev->nsid = (uint32_t)nsid;
    rc = identify(dev, 1, data);
    if (rc != 0)
        return rc;
    ht_nvme_decode_controller(data, c);
    rc = identify(dev, 0, data);
    if (rc == 0)
        rc = ht_nvme_decode_namespace(data, n);
    if (rc == 0)
        n->write_protected |= read_only != 0;
    return rc;
}

int ht_raw_geometry(struct ht_dev *dev, dev_t block)
{
    struct ht_nvme_controller c;
    struct ht_nvme_namespace n;
    void *data;

    /* Lies in a page of its own, because the controller writes to it. */
    if (posix_memalign(&data, HT_BLOCK_BYTES, HT_NVME_IDENTIFY_BYTES) != 0)
        return -ENOMEM;
    int rc = ask(dev, data, &c, &n);
    if (rc != 0)
        ht_error("%s does not identify itself: %s%s", dev->name, strerror(-rc),
                 rc == -EACCES || rc == -EPERM ? " (commands to it need root)" : "");
    else
        rc = check_namespace(dev, &n);
    if (rc == 0) {
        dev->size = n.blocks << n.block_shift;
        dev->facts.lba = 1u << n.block_shift;
        dev->block_shift = n.block_shift;
        dev->volatile_cache = c.volatile_cache;
        dev->facts.transfer_max = dev->facts.scattered_max = (uint32_t)transfer_max(&c, &n, block);
        dev->discard_max = (uint32_t)discard_max(&c, &n, block);
    }
    free(data);
    return rc;
}

/* ---------------------------------------------------------------- requests */

bool ht_raw_ends_at_once(const struct ht_io *io)
{
    return io->dev->raw && io->op == HT_IO_FLUSH && !io->dev->volatile_cache;
}

void ht_raw_prepare(struct io_uring_sqe *sqe, const struct ht_io *io, uint32_t at, uint32_t len, int registered,
                    struct ht_raw_segment *r)
{
    struct nvme_uring_cmd *command = (struct nvme_uring_cmd *)sqe->cmd;
    const struct ht_dev *dev = io->dev;
    uint64_t offset = io->offset + at;

    memset(sqe, 0, sizeof(*sqe)); /* the command lies after it, and is written whole */
    sqe->opcode = IORING_OP_URING_CMD;
    sqe->fd = dev->fd;
    sqe->cmd_op = NVME_URING_CMD_IO;
    if (registered >= 0 && !r->unregistered && !dev->unregistered) {
        sqe->uring_cmd_flags = IORING_URING_CMD_FIXED;
        sqe->buf_index = (uint16_t)registered;
    }
    if (io->op == HT_IO_FLUSH)
        ht_nvme_flush(command, dev->nsid);
    else if (io->op == HT_IO_DISCARD)
        ht_nvme_deallocate(command, dev->nsid, offset >> dev->block_shift, len >> dev->block_shift, r->range);
    else
        ht_nvme_transfer(command, io->op == HT_IO_WRITE ? HT_NVME_WRITE : HT_NVME_READ, dev->nsid, dev->block_shift,
                         offset, (char *)io->buf + at, len);
}

int ht_raw_result(const struct ht_io *io, int res, uint32_t len, struct ht_raw_segment *r)
{
    bool refused = ht_fault(HT_FAULT_IO_COMMAND_MEMORY) != 0;

    if (!io->dev->raw)
        return res;
    /*
     * Not every kernel takes every registered memory for a command: Linux 6.1 takes none that
     * it knows to be of large pages.
     */
    if ((res == -EINVAL || refused) && !r->unregistered) {
        r->unregistered = true;
        io->dev->unregistered = true;
        return -EINTR;
    }
    if (res <= 0)
        return res == 0 ? (int)len : res;
    if (ht_nvme_may_retry((unsigned)res) && ++r->tries < HT_NVME_TRIES)
        return -EAGAIN;
    return ht_nvme_errno((unsigned)res);
}
