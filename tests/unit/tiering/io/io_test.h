/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_test.h - the devices that tests of this folder run on.
 *
 * Each kind is made in a scratch file of its own (under $HITRAIN_BUILD, else /tmp) that is unlinked at once. Loop
 * devices are detached as soon as they are open, so that closing them (or dying) removes them. If a kind is impossible
 * the test prints the reason and passes. HITRAIN_TEST_DEVICE names one more, whose content is lost.
 */
#pragma once

#include <fcntl.h>
#include <limits.h>
#include "tests/support/dev.h"
#include "tests/support/suite.h"
#include "tiering/io/io_priv.h"

enum kind { RAM_512, RAM_4096, A_FILE, LOOP_512, LOOP_4096, GIVEN, KINDS };

static const char *const kind_names[] = {"RAM, 512", "RAM, 4096", "file", "loop, 512", "loop, 4096", "given"};

__attribute__((unused)) static char *scratch_path(char path[PATH_MAX], uint64_t bytes)
{
    const char *dir = getenv("HITRAIN_BUILD");

    snprintf(path, PATH_MAX, "%s/io-test-XXXXXX", dir && access(dir, W_OK) == 0 ? dir : "/tmp");
    int fd = mkstemp(path);
    ck_assert_msg(fd >= 0, "%s: %s", path, strerror(errno));
    ck_assert_int_eq(ftruncate(fd, (off_t)bytes), 0);
    close(fd);
    return path;
}

/* Attaches a file to a loop device; its name, or false if that is impossible. */
__attribute__((unused)) static bool attach_loop(const char *file, unsigned lba, bool rdonly, char name[64])
{
    char command[PATH_MAX + 128];

    if (geteuid() != 0)
        return false;
    snprintf(command, sizeof(command), "losetup %s --direct-io=on -b %u -f --show '%s' 2>/dev/null", rdonly ? "-r" : "",
             lba, file);
    FILE *f = popen(command, "r");
    if (!f)
        return false;
    bool ok = fscanf(f, "%63s", name) == 1;
    return pclose(f) == 0 && ok;
}

__attribute__((unused)) static void detach_loop(const char *name)
{
    char command[PATH_MAX + 128];

    snprintf(command, sizeof(command), "losetup -d %s", name);
    ck_assert_int_eq(system(command), 0);
}

/* False when this file system has no O_DIRECT. */
__attribute__((unused)) static bool direct_io_works(const char *path)
{
    int fd = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);

    if (fd < 0)
        return false;
    close(fd);
    return true;
}

__attribute__((unused)) static struct ht_dev *skipped(enum kind kind, const char *why)
{
    printf("skipped on %s: %s\n", kind_names[kind], why);
    return NULL;
}

/* Uses only the first bytes of the device, so that its end is where tests expect it. */
__attribute__((unused)) static struct ht_dev *open_given(uint64_t bytes)
{
    const char *path = getenv("HITRAIN_TEST_DEVICE");
    struct ht_dev *dev;

    if (!path)
        return skipped(GIVEN, "HITRAIN_TEST_DEVICE names none");
    ck_assert_int_eq(ht_dev_open(path, HT_DEV_QUIET, &dev), 0);
    ck_assert_uint_ge(dev->size, bytes);
    dev->size = bytes;
    return dev;
}

/* NULL: cannot be had here, which was said. */
__attribute__((unused)) static struct ht_dev *open_kind(enum kind kind, uint64_t bytes)
{
    char path[PATH_MAX], loop[64];
    struct ht_dev *dev = NULL;

    if (kind == RAM_512 || kind == RAM_4096) {
        ck_assert_int_eq(dev_open_ram(bytes, kind == RAM_512 ? 512 : 4096, &dev), 0);
        return dev;
    }
    if (kind == GIVEN)
        return open_given(bytes);
    scratch_path(path, bytes);
    if (!direct_io_works(path)) {
        unlink(path);
        return skipped(kind, "no O_DIRECT on the file system of the build folder");
    }
    if (kind == A_FILE) {
        ck_assert_int_eq(ht_dev_open(path, HT_DEV_NOWAIT, &dev), 0);
        unlink(path);
        return dev;
    }
    if (!attach_loop(path, kind == LOOP_512 ? 512 : 4096, false, loop)) {
        unlink(path);
        return skipped(kind, "needs root and a free loop device");
    }
    unlink(path);
    /* Waits: something like udev may look at a new device for a moment. */
    ck_assert_int_eq(ht_dev_open(loop, HT_DEV_QUIET, &dev), 0);
    detach_loop(loop);
    ck_assert_uint_eq(ht_dev_facts(dev)->lba, kind == LOOP_512 ? 512 : 4096);
    return dev;
}

/* Nobody need free it, as that of test_alloc(). */
__attribute__((unused)) static uint8_t *aligned(size_t bytes)
{
    void *p = NULL;

    ck_assert_int_eq(posix_memalign(&p, 4096, bytes), 0);
    return test_keep(memset(p, 0, bytes));
}

/* Every 8 bytes encode their offset and their version. */
__attribute__((unused)) static void fill(uint8_t *buf, uint64_t offset, size_t len, uint64_t version)
{
    for (size_t i = 0; i < len; i += 8) {
        uint64_t word = (offset + i) * 0x9e3779b97f4a7c15u ^ version;
        memcpy(buf + i, &word, 8);
    }
}

__attribute__((unused)) static bool is_filled(const uint8_t *buf, uint64_t offset, size_t len, uint64_t version)
{
    for (size_t i = 0; i < len; i += 8) {
        uint64_t word = (offset + i) * 0x9e3779b97f4a7c15u ^ version, found;
        memcpy(&found, buf + i, 8);
        if (found != word)
            return false;
    }
    return true;
}

__attribute__((unused)) static struct ht_io io_of(struct ht_dev *dev, enum ht_io_op op, uint64_t offset, void *buf,
                                                  uint32_t len)
{
    return (struct ht_io){.op = op, .dev = dev, .offset = offset, .buf = buf, .len = len};
}
