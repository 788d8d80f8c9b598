/* SPDX-License-Identifier: Apache-2.0 */
#include "mount-helpers/common/features.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tiering/sys/nvme_namespace.h"

#define ROW(effect, bit, name, since, text) {HT_FEATURE_##effect, UINT64_C(1) << (bit), name, since, text},
static const struct ht_feature features[] = {HT_FEATURES(ROW)};
#undef ROW

const struct ht_feature *ht_feature_of(enum ht_feature_effect effect, uint64_t bit)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(features); i++)
        if (features[i].effect == effect && features[i].bit == bit)
            return &features[i];
    return NULL;
}

uint64_t ht_features_bits(const struct ht_super_words *w, enum ht_feature_effect effect)
{
    const uint64_t bits[HT_FEATURE_EFFECTS] = {w->feat_refuse, w->feat_ro, w->feat_ignore};

    return bits[effect];
}

uint64_t ht_features_unknown(const struct ht_super_words *w, enum ht_feature_effect effect)
{
    static const uint64_t known[HT_FEATURE_EFFECTS] = {HT_FEAT_REFUSE_KNOWN, HT_FEAT_RO_KNOWN, 0};

    return ht_features_bits(w, effect) & ~known[effect];
}

bool ht_features_name(const struct ht_super_words *w, enum ht_feature_effect effect, uint64_t bit,
                      char out_name[HT_FEATURE_NAME_MAX], char out_since[HT_FEATURE_SINCE_MAX])
{
    const struct ht_feature *own = ht_feature_of(effect, bit);
    struct ht_super_feature said;

    if (!own && !ht_super_feature_name(w->feature_names, effect, (unsigned)__builtin_ctzll(bit), &said))
        return false;
    snprintf(out_name, HT_FEATURE_NAME_MAX, "%s", own ? own->name : said.name);
    snprintf(out_since, HT_FEATURE_SINCE_MAX, "%s", own ? own->since : said.since);
    return true;
}

/* The block device of a namespace; the device without the page cache, which may be older than the daemon's writes. */
static int open_uncached(const char *path, uint64_t *out_bytes)
{
    char block[PATH_MAX];
    struct stat st;

    if (stat(path, &st) != 0)
        return -errno;
    if (ht_nvme_namespace_is(&st)) {
        int rc = ht_nvme_namespace_block(&st, block);
        if (rc < 0 || stat(path = block, &st) != 0)
            return rc < 0 ? rc : -errno;
    }
    if (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode))
        return -EINVAL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd < 0 && errno == EINVAL) /* its file system has no direct I/O */
        fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    *out_bytes = (uint64_t)st.st_size;
    if (S_ISBLK(st.st_mode) && ioctl(fd, BLKGETSIZE64, out_bytes) != 0) {
        int rc = -errno;
        close(fd);
        return rc;
    }
    return fd;
}

static int read_copies(int fd, uint64_t bytes, struct ht_super_words *out)
{
    static _Alignas(HT_BLOCK_BYTES) uint8_t block[HT_BLOCK_BYTES]; /* as direct I/O needs it */
    bool damaged = false, found = false;

    for (unsigned i = 0; i < HT_SUPER_COPIES; i++) {
        struct ht_super_words w;
        if (pread(fd, block, HT_BLOCK_BYTES, (off_t)ht_super_offset(bytes, i)) != (ssize_t)HT_BLOCK_BYTES)
            continue;
        enum ht_super_problem problem = ht_super_peek(block, &w);
        damaged |= problem == HT_SUPER_BAD_CHECKSUM;
        if (problem != HT_SUPER_OK || (found && w.generation <= out->generation))
            continue;
        found = true;
        *out = w;
    }
    return found ? 0 : damaged ? -EUCLEAN : -EMEDIUMTYPE;
}

int ht_features_read(const char *path, struct ht_super_words *out)
{
    uint64_t bytes = 0;
    int fd = open_uncached(path, &bytes);

    if (fd < 0)
        return fd;
    int rc = bytes < HT_BLOCK_BYTES ? -EMEDIUMTYPE : read_copies(fd, bytes, out);
    close(fd);
    return rc;
}
