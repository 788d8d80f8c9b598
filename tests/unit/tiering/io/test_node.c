/* SPDX-License-Identifier: Apache-2.0 */
/* Which NUMA node a device hangs on, in trees as sysfs has them. */
#include <sys/stat.h>

#include "tests/support/suite.h"
#include "tiering/io/io_priv.h"

static char top[64];

static const char *under(const char *path)
{
    static char full[2][256];
    static unsigned turn;
    char *out = full[turn ^= 1];

    snprintf(out, sizeof(full[0]), "%s/devices/%s", top, path);
    return out;
}

/* With all folders above it. */
static void folder(const char *path)
{
    char all[256];

    snprintf(all, sizeof(all), "%s", under(path));
    for (char *p = all + strlen(top) + 1; (p = strchr(p, '/')); *p++ = '/') {
        *p = 0;
        ck_assert(mkdir(all, 0700) == 0 || errno == EEXIST);
    }
    ck_assert(mkdir(all, 0700) == 0 || errno == EEXIST);
}

static void on_node(const char *path, int node)
{
    char name[300];

    folder(path);
    snprintf(name, sizeof(name), "%s/numa_node", under(path));
    FILE *f = fopen(name, "we");
    ck_assert_ptr_nonnull(f);
    fprintf(f, "%d\n", node);
    fclose(f);
}

static void linked(const char *to, const char *at)
{
    ck_assert_int_eq(symlink(under(to), under(at)), 0);
}

static int node_of(const char *path)
{
    return ht_node_of_folder(under(path), 0);
}

static void begin(void)
{
    snprintf(top, sizeof(top), "/tmp/node-test-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(top));
    folder("pci0/slot/nvme/nvme0/nvme0n1/nvme0n1p1");
    on_node("pci0/slot", 1);
    folder("pci1/slot/nvme/nvme1/nvme1n1");
    on_node("pci1/slot", 0);
    on_node("pci1", 3);
}

static void end(void)
{
    char line[128];

    snprintf(line, sizeof(line), "rm -r %s", top);
    ck_assert_int_eq(system(line), 0);
}

TEST(the_nearest_attribute_above_a_device_counts)
{
    ck_assert_int_eq(node_of("pci0/slot/nvme/nvme0/nvme0n1/nvme0n1p1"), 1);
    ck_assert_int_eq(node_of("pci1/slot/nvme/nvme1/nvme1n1"), 0);
    on_node("pci1/slot/nvme/nvme1", -1); /* not known there */
    ck_assert_int_eq(node_of("pci1/slot/nvme/nvme1/nvme1n1"), 0);
}

TEST(without_any_there_is_no_node)
{
    folder("virtual/block/loop0");
    ck_assert_int_eq(node_of("virtual/block/loop0"), HT_NUMA_OFF);
    ck_assert_int_eq(node_of("not/there"), HT_NUMA_OFF);
}

TEST(what_stands_for_others_is_where_they_all_are)
{
    folder("virtual/block/dm-0/slaves");
    ck_assert_int_eq(node_of("virtual/block/dm-0"), HT_NUMA_OFF);
    linked("pci0/slot/nvme/nvme0/nvme0n1", "virtual/block/dm-0/slaves/nvme0n1");
    ck_assert_int_eq(node_of("virtual/block/dm-0"), 1);
    folder("virtual/block/dm-1/slaves");
    linked("virtual/block/dm-0", "virtual/block/dm-1/slaves/dm-0");
    ck_assert_int_eq(node_of("virtual/block/dm-1"), 1);
    linked("pci1/slot/nvme/nvme1/nvme1n1", "virtual/block/dm-1/slaves/nvme1n1");
    ck_assert_int_eq(node_of("virtual/block/dm-1"), HT_NUMA_OFF);
}

TEST(a_namespace_with_several_controllers_is_where_they_all_are)
{
    folder("virtual/nvme-subsystem/nvme-subsys0/nvme0n1");
    linked("pci0/slot/nvme/nvme0", "virtual/nvme-subsystem/nvme-subsys0/nvme0");
    ck_assert_int_eq(node_of("virtual/nvme-subsystem/nvme-subsys0/nvme0n1"), 1);
    linked("pci1/slot/nvme/nvme1", "virtual/nvme-subsystem/nvme-subsys0/nvme1");
    ck_assert_int_eq(node_of("virtual/nvme-subsystem/nvme-subsys0/nvme0n1"), HT_NUMA_OFF);
}

TEST(devices_that_stand_for_each_other_end)
{
    folder("virtual/block/dm-2/slaves");
    linked("virtual/block/dm-2", "virtual/block/dm-2/slaves/dm-2");
    ck_assert_int_eq(node_of("virtual/block/dm-2"), HT_NUMA_OFF);
}

RUN_TESTS("node", .setup = begin, .teardown = end)
