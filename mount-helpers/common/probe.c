/* SPDX-License-Identifier: Apache-2.0 */
#include "mount-helpers/common/probe.h"
#include "tiering/sys/nvme_namespace.h"

#include <blkid/blkid.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { SIGNATURES_MAX = 64 }; /* more on one device is no accident, and nothing to loop over */

/*
 * For an NVMe namespace libblkid can read the block device. Its page cache may be older than the commands' writes, and
 * must neither be believed nor written back.
 */
static int open_readable(const char *path, int flags)
{
    char block[PATH_MAX];
    struct stat st;
    int fd, rc;

    if (stat(path, &st) != 0)
        return -errno;
    if (!ht_nvme_namespace_is(&st)) {
        fd = open(path, flags | O_CLOEXEC);
        return fd < 0 ? -errno : fd;
    }
    rc = ht_nvme_namespace_block(&st, block);
    if (rc < 0)
        return rc;
    fd = open(block, flags | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (ioctl(fd, BLKFLSBUF, 0) == 0)
        return fd;
    rc = -errno;
    close(fd);
    return rc;
}

static int probe_new(const char *path, int flags, int *out_fd, blkid_probe *out_probe)
{
    int fd = open_readable(path, flags);

    if (fd < 0)
        return fd;
    blkid_probe pr = blkid_new_probe();
    if (!pr) {
        close(fd);
        return -ENOMEM;
    }
    if (blkid_probe_set_device(pr, fd, 0, 0) != 0) {
        blkid_free_probe(pr);
        close(fd);
        return -EIO;
    }
    blkid_probe_enable_superblocks(pr, 1);
    blkid_probe_set_superblocks_flags(
        pr, BLKID_SUBLKS_TYPE | BLKID_SUBLKS_LABEL | BLKID_SUBLKS_USAGE | BLKID_SUBLKS_MAGIC | BLKID_SUBLKS_BADCSUM);
    blkid_probe_enable_partitions(pr, 1);
    blkid_probe_set_partitions_flags(pr, BLKID_PARTS_MAGIC | BLKID_PARTS_FORCE_GPT);
    *out_fd = fd;
    *out_probe = pr;
    return 0;
}

static void probe_free(int fd, blkid_probe pr)
{
    blkid_free_probe(pr);
    close(fd);
}

static const char *value(blkid_probe pr, const char *name)
{
    const char *text;

    return blkid_probe_lookup_value(pr, name, &text, NULL) == 0 && text[0] != '\0' ? text : NULL;
}

static const char *usage_text(const char *usage)
{
    if (!usage || strcmp(usage, "filesystem") == 0)
        return "file system";
    if (strcmp(usage, "raid") == 0)
        return "RAID or volume manager member";
    if (strcmp(usage, "crypto") == 0)
        return "encrypted volume";
    return "signature";
}

static void describe_content(blkid_probe pr, char text[HT_PROBE_TEXT_MAX])
{
    const char *type = value(pr, "TYPE"), *label = value(pr, "LABEL"), *table = value(pr, "PTTYPE");
    const char *name = type ? type : table ? table : "unknown";
    const char *article = strchr("aeiox", name[0]) ? "an" : "a";

    snprintf(text, HT_PROBE_TEXT_MAX, "%s %s %s%s%.64s%s", article, name,
             type ? usage_text(value(pr, "USAGE")) : "partition table", label ? " labelled \"" : "", label ? label : "",
             label ? "\"" : "");
}

int ht_probe(const char *path, char text[HT_PROBE_TEXT_MAX])
{
    blkid_probe pr;
    int fd, found, rc = probe_new(path, O_RDONLY, &fd, &pr);

    if (rc < 0)
        return rc;
    found = blkid_do_safeprobe(pr);
    if (found == 0) {
        describe_content(pr, text);
        rc = 1;
    } else if (found == -2) {
        snprintf(text, HT_PROBE_TEXT_MAX, "signatures of more than one file system");
        rc = 1;
    } else {
        rc = found == 1 ? 0 : -EIO;
    }
    probe_free(fd, pr);
    return rc;
}

int ht_probe_wipe(const char *path)
{
    blkid_probe pr;
    int fd, rc = probe_new(path, O_RDWR, &fd, &pr);

    if (rc < 0)
        return rc;
    for (unsigned i = 0; rc == 0 && i < SIGNATURES_MAX && blkid_do_probe(pr) == 0; i++)
        if (blkid_do_wipe(pr, 0) != 0)
            rc = -EIO;
    if (rc == 0 && fsync(fd) != 0)
        rc = -errno;
    probe_free(fd, pr);
    return rc;
}
