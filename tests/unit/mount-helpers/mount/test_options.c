/* SPDX-License-Identifier: Apache-2.0 */
/* Mount options: options of fstab are removed, options of the daemon stay, in order and unchanged. */
#include "mount-helpers/mount/options.h"
#include "tests/support/suite.h"

static const struct {
    const char *given, *passed;
} cases[] = {
    {"", ""},
    {"rw", "rw"},
    {"ro", "ro"},
    {"defaults", ""},
    {"noauto,nofail,user,_netdev,defaults,nolazytime", ""},
    {"user=alice,owner,group,users", ""},
    {"x-systemd.automount,x-systemd.device-timeout=30s,X-anything", ""},
    {"comment=the big one,dram=8G", "dram=8G"},
    {"dram=8G,auto,staging=64M", "dram=8G,staging=64M"},
    {"noexec,nosuid,nodev,exec,suid,dev", "noexec,nosuid,nodev,exec,suid,dev"},
    {"noatime,relatime,sync", "noatime,relatime,sync"},
    {",,dram=1G,,", "dram=1G"},
    {"device=/dev/nvme1n1,device=/dev/nvme2n1", "device=/dev/nvme1n1,device=/dev/nvme2n1"},
    {"context=\"a,rw,b\",ro", "context=\"a,rw,b\",ro"},
    {"fsname=a\\,rw,allow_other", "fsname=a\\,rw,allow_other"},
    {"ro,remount,user,commit=5", "ro,remount,commit=5"},
    {"unknown_word=1", "unknown_word=1"},
    {"rwx,defaults2,autos", "rwx,defaults2,autos"},
    {"dram=1G\\", "dram=1G\\"},
    {"context=\"open", "context=\"open"},
};

TEST_LOOP(options_are_translated, HT_ARRAY_SIZE(cases))
{
    struct ht_buf out = HT_BUF_INIT;

    ck_assert_int_eq(ht_mount_options(cases[_i].given, &out), 0);
    ck_assert_str_eq(out.len > 0 ? (const char *)out.data : "", cases[_i].passed);
    ht_buf_free(&out);
}

TEST(several_texts_add_up)
{
    struct ht_buf out = HT_BUF_INIT;

    ck_assert_int_eq(ht_mount_options("rw,noauto", &out), 0);
    ck_assert_int_eq(ht_mount_options("ro,noauto", &out), 0);
    ck_assert_int_eq(ht_mount_options("dram=1G", &out), 0);
    ck_assert_str_eq((const char *)out.data, "rw,ro,dram=1G");
    ht_buf_free(&out);
}

TEST(what_cannot_be_done_is_refused)
{
    struct ht_buf out = HT_BUF_INIT;

    ck_assert_int_eq(ht_mount_options("ro,loop,dram=1G", &out), -ENOTSUP);
    ht_buf_free(&out);
}

RUN_TESTS("mount options")
