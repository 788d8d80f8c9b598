/* SPDX-License-Identifier: Apache-2.0 */
/* The command line: every option has the effect that help describes, and a wrong one is refused. */
#include <sys/mount.h>
#include "fs/daemon/options.h"
#include "tests/support/suite.h"

enum { ARGS_MAX = 24 };

/* args: separated by one space. Modifies nothing the options point to until the next call. */
static int parse(const char *args, struct ht_options *out)
{
    static char name[] = "hitrain", text[512];
    char *argv[ARGS_MAX + 1] = {name};
    int argc = 1;

    ck_assert_uint_lt(strlen(args), sizeof(text));
    strcpy(text, args);
    for (char *word = strtok(text, " "); word && argc < ARGS_MAX; word = strtok(NULL, " "))
        argv[argc++] = word;
    argv[argc] = NULL;
    return ht_options_parse(argc, argv, false, out);
}

TEST(defaults)
{
    struct ht_options o;

    ck_assert_int_eq(parse("/dev/x /mnt", &o), 0);
    ck_assert_uint_eq(o.device_count, 1);
    ck_assert_str_eq(o.device[0], "/dev/x");
    ck_assert_str_eq(o.mountpoint, "/mnt");
    ck_assert_uint_eq(o.store.commit_ms, 5000);
    ck_assert_int_eq(o.store.numa_node, HT_NUMA_AUTO);
    ck_assert(!o.foreground && !o.store.read_only && !o.tune && !o.allow_other);
    ck_assert(o.store.dedup && o.store.compact && !o.store.no_background && o.compress == false);
    ck_assert_int_eq(o.store.discard, HT_DISCARD_AUTO);
    ck_assert_uint_eq(o.store.shm_bytes, HT_PASSTHROUGH_AUTO);
    ht_options_free(&o);
}

TEST(all_options)
{
    struct ht_options o;

    ck_assert_int_eq(
        parse("-f -s a -o dram=1G,staging=64M,commit=0 b -o optim_threads=3,numa=1,tune,device=c,ro,noatime "
              "/mnt",
              &o),
        0);
    ck_assert_uint_eq(o.device_count, 3);
    ck_assert_str_eq(o.device[0], "a");
    ck_assert_str_eq(o.device[1], "b");
    ck_assert_str_eq(o.device[2], "c");
    ck_assert(o.foreground && o.single_thread && o.tune && o.store.read_only);
    ck_assert_uint_eq(o.store.dram_bytes, HT_GIB);
    ck_assert_uint_eq(o.store.staging_bytes, 64 * HT_MIB);
    ck_assert_uint_eq(o.store.commit_ms, 0);
    ck_assert_uint_eq(o.optim_threads, 3);
    ck_assert_int_eq(o.store.numa_node, 1);
    ck_assert_str_eq((const char *)o.passed.data, "ro,noatime");
    ht_options_free(&o);
}

TEST(passthrough_is_turned_off)
{
    struct ht_options o;
    static const char *const off[] = {"a /mnt -o passthrough=off", "a /mnt -o passthrough=0",
                                      "a /mnt -o passthrough=64M,passthrough=0"};

    for (size_t i = 0; i < HT_ARRAY_SIZE(off); i++) {
        ck_assert_int_eq(parse(off[i], &o), 0);
        ck_assert_uint_eq(o.store.shm_bytes, 0);
        ht_options_free(&o);
    }
    ck_assert_int_eq(parse("a /mnt -o passthrough=1M", &o), -EINVAL);
    ck_assert_int_eq(parse("a /mnt -o passthrough=on", &o), -EINVAL);
    ck_assert_int_eq(parse("a /mnt -o passthrough=64M,passthrough=auto", &o), 0);
    ck_assert_uint_eq(o.store.shm_bytes, HT_PASSTHROUGH_AUTO);
    ht_options_free(&o);
}

TEST(engines_are_turned_off)
{
    struct ht_options o;

    ck_assert_int_eq(parse("a /mnt -o dedup=off,compact=off,discard=off", &o), 0);
    ck_assert(!o.store.dedup && !o.store.compact && !o.store.no_background);
    ck_assert_int_eq(o.store.discard, HT_DISCARD_OFF);
    ht_options_free(&o);
    ck_assert_int_eq(parse("a /mnt -o background=off,discard=on", &o), 0);
    ck_assert(o.store.no_background);
    ck_assert_int_eq(o.store.discard, HT_DISCARD_ON);
    ht_options_free(&o);
    ck_assert_int_eq(parse("a /mnt -o background=off,background=on", &o), 0);
    ck_assert(!o.store.no_background);
    ht_options_free(&o);
}

TEST(commas_in_values)
{
    struct ht_options o;

    ck_assert_int_eq(parse("a /mnt -o device=b\\,c,context=\"x:y,z\"", &o), 0);
    ck_assert_str_eq(o.device[1], "b,c");
    ck_assert_str_eq((const char *)o.passed.data, "context=x:y\\,z");
    ht_options_free(&o);
}

TEST(wrong_ones_are_refused)
{
    static const char *const bad[] = {
        "",
        "a",
        "a m -o bogus",
        "a m -o dram",
        "a m -o dram=",
        "a m -o dram=lots",
        "a m -o dram=1M",
        "a m -o staging=1M",
        "a m -o commit=-1",
        "a m -o commit=1.5",
        "a m -o commit=99999",
        "a m -o optim_threads=0",
        "a m -o numa=here",
        "a m -o tune=yes",
        "a m -o device=",
        "a m -o rox",
        "a m -x",
        "a m -o dram=1G,bogus=2",
        "a m -o max_threads=0",
        "a m -o background_rate=1k",
        "a m -o background_cpu=0",
        "a m -o background_cpu=half",
        "a m -o dedup",
        "a m -o dedup=yes",
        "a m -o compact=1",
        "a m -o discard=yes",
        "a m -o background",
        "a m -o background=auto",
        "a m -o dedup_index=1k",
        "a m -o user_id=0",
        "a m -o remount=1",
        "a b c d e f g h i j k l m n o p q r m",
    };

    for (size_t i = 0; i < HT_ARRAY_SIZE(bad); i++) {
        struct ht_options o;
        ck_assert_msg(parse(bad[i], &o) == -EINVAL, "'%s'", bad[i]);
        ht_options_free(&o);
    }
}

static const char *fixed(const struct ht_options *o)
{
    return o->fixed.len ? (const char *)o->fixed.data : "";
}

/* As a remount learns it: from the text that the daemon has of its options. */
static const char *changed(const char *running, const char *asked)
{
    static struct ht_options daemon, now, next;

    ck_assert_int_eq(parse(running, &daemon), 0);
    ck_assert_int_eq(ht_options_parse_fixed(fixed(&daemon), &now), 0);
    ck_assert_int_eq(parse(asked, &next), 0);
    ck_assert(next.remount);
    const char *word = ht_options_changed(&now, &next);
    ht_options_free(&daemon);
    ht_options_free(&now);
    ht_options_free(&next);
    return word;
}

TEST(a_remount_names_what_cannot_change)
{
    static const char running[] = "a m -o dram=1G,commit=3,noatime";

    ck_assert_ptr_null(changed(running, "a m -o remount"));
    ck_assert_ptr_null(changed(running, "a m -o remount,ro,strictatime,user_id=0,group_id=0,default_permissions"));
    ck_assert_ptr_null(changed(running, "a m -o remount,dram=1024M,commit=3"));
    ck_assert_ptr_null(changed(running, "a m -o remount,commit=5,commit=3")); /* the last one counts */
    ck_assert_str_eq(changed(running, "a m -o remount,commit=5"), "commit");
    ck_assert_str_eq(changed(running, "a m -o remount,ro,dram=2G"), "dram");
    ck_assert_str_eq(changed(running, "a m -o staging=64M,remount"), "staging");
    ck_assert_str_eq(changed(running, "a m -o remount,tune"), "tune");
    ck_assert_str_eq(changed(running, "a m -o remount,device=b"), "device");
    ck_assert_ptr_null(changed("a b m", "a m -o remount,device=b"));
    ck_assert_str_eq(changed("a b m", "a m -o remount,device=b,device=c"), "device");
    ck_assert_ptr_null(changed("a m -o numa=off,passthrough=8M", "a m -o remount,passthrough=8M,numa=off"));
    ck_assert_ptr_null(changed("a m", "a m -o remount,passthrough=auto"));
    ck_assert_str_eq(changed("a m", "a m -o remount,passthrough=off"), "passthrough");
}

TEST(what_cannot_change_is_a_list_that_means_the_same)
{
    struct ht_options o, again;

    ck_assert_int_eq(parse("-f a b,\"c m -o noatime,dram=1G -o ro,device=d\\,e,commit=3,tune,allow_other", &o), 0);
    ck_assert_str_eq(fixed(&o), "dram=1G,device=d\\,e,commit=3,tune,allow_other,ro,device=b\\,\\\"c");
    ck_assert_int_eq(ht_options_parse_fixed(fixed(&o), &again), 0);
    ck_assert_uint_eq(again.store.dram_bytes, HT_GIB);
    ck_assert_uint_eq(again.store.commit_ms, 3000);
    ck_assert(again.store.read_only && again.tune && again.allow_other && !again.store.degraded);
    ck_assert_uint_eq(again.device_count, 3);
    ck_assert_str_eq(again.device[1], "d,e");
    ck_assert_str_eq(again.device[2], "b,\"c");
    ht_options_free(&again);
    ht_options_free(&o);
    ck_assert_int_eq(ht_options_parse_fixed("dram=1G,of_a_later_version=1", &again), -EINVAL);
    ht_options_free(&again);
}

TEST(flags_are_collected_and_later_words_win)
{
    struct ht_options o;

    ck_assert_int_eq(parse("a m -o ro,rw,noatime,relatime,nodev,dev,nosuid", &o), 0);
    ck_assert(!o.store.read_only);
    ck_assert_uint_eq(o.flags.set, MS_RELATIME | MS_NOSUID);
    ck_assert_uint_eq(o.flags.clear & (MS_RDONLY | MS_NOATIME | MS_NODEV | MS_NOSUID),
                      MS_RDONLY | MS_NOATIME | MS_NODEV);
    ht_options_free(&o);
    ck_assert_uint_eq(ht_mount_flags_of("rw,nosuid,relatime,user_id=0"), MS_NOSUID | MS_RELATIME);
    ck_assert_uint_eq(ht_mount_flags_of(""), 0);
    ck_assert_int_eq(parse("a m -o strictatime", &o), 0);
    ck_assert_uint_eq(ht_mount_flags_later(&o.flags), MS_STRICTATIME);
    ck_assert_uint_eq(o.passed.len, 0); /* libfuse does not know it */
    ht_options_free(&o);
}

TEST(help_needs_nothing_else)
{
    struct ht_options o;

    ck_assert_int_eq(parse("--help", &o), 0);
    ck_assert(o.help);
    ck_assert_int_eq(parse("--version", &o), 0);
    ck_assert(o.version);
}

RUN_TESTS("options")
