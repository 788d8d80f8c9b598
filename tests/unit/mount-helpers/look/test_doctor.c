/* SPDX-License-Identifier: Apache-2.0 */
/* The checks of `hitrainctl doctor` on machines, figures and events that a test makes up. */
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>

#include "mount-helpers/look/doctor.h"
#include "tests/support/suite.h"

static struct ht_doctor d;
static char root[] = "/tmp/hitrain-doctor-XXXXXX";

static void begin(void)
{
    strcpy(root + strlen(root) - 6, "XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(root));
    memset(&d, 0, sizeof(d));
    d.root = root;
}

/* Every problem has a remedy. */
static void end(void)
{
    char command[128];

    for (unsigned i = 0; i < d.count; i++)
        ck_assert_msg(d.finding[i].level < HT_DOCTOR_WARN || d.finding[i].remedy[0], "%s", d.finding[i].text);
    snprintf(command, sizeof(command), "rm -r %s", root);
    ck_assert_int_eq(system(command), 0);
}

/* A file of the machine, with its folders. */
static void put(const char *name, const char *text)
{
    char path[512];

    snprintf(path, sizeof(path), "%s/%s", root, name);
    for (char *p = path + strlen(root) + 1; (p = strchr(p, '/')); p++) {
        *p = '\0';
        (void)mkdir(path, 0755);
        *p = '/';
    }
    FILE *f = fopen(path, "we");
    ck_assert_ptr_nonnull(f);
    fputs(text, f);
    ck_assert_int_eq(fclose(f), 0);
}

/* The worst finding of a check; -1: it found nothing, not even that all is well. */
static int level_of(const char *check)
{
    int worst = -1;

    for (unsigned i = 0; i < d.count; i++)
        if (strcmp(d.finding[i].check, check) == 0 && (int)d.finding[i].level > worst)
            worst = (int)d.finding[i].level;
    return worst;
}

static const struct {
    const char *file, *text, *check;
    int level;
} machines[] = {
    {"proc/sys/kernel/osrelease", "5.4.0\n", "kernel", HT_DOCTOR_ERROR},
    {"proc/sys/kernel/osrelease", "5.19.1-x\n", "kernel", HT_DOCTOR_WARN},
    {"proc/sys/kernel/osrelease", "6.1.0-18-amd64\n", "kernel", HT_DOCTOR_NOTE},
    {"proc/sys/kernel/osrelease", "6.9.0\n", "kernel", HT_DOCTOR_OK},
    {"proc/sys/kernel/osrelease", "7.0\n", "kernel", HT_DOCTOR_OK},
    {"proc/sys/kernel/osrelease", "unknown", "kernel", -1},
    {"dev/fuse", "", "fuse", HT_DOCTOR_OK},
    {"proc/none", "", "fuse", HT_DOCTOR_ERROR},
    {"proc/none", "", "huge-pages", HT_DOCTOR_WARN},
    {"sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n", "huge-pages", HT_DOCTOR_WARN},
    {"sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n", "huge-pages", HT_DOCTOR_OK},
    {"sys/kernel/mm/transparent_hugepage/enabled", "nonsense", "huge-pages", HT_DOCTOR_WARN},
    {"proc/sys/kernel/io_uring_disabled", "2\n", "io_uring", HT_DOCTOR_ERROR},
};

TEST_LOOP(machine, HT_ARRAY_SIZE(machines))
{
    put(machines[_i].file, machines[_i].text);
    ht_doctor_machine(&d);
    ck_assert_int_eq(level_of(machines[_i].check), machines[_i].level);
}

/* A kernel whose configuration is not known counts as one that has them. */
TEST_LOOP(passthrough, 4)
{
    static const struct {
        const char *release, *config;
        int level;
    } cases[] = {
        {"6.8.0", "CONFIG_FUSE_FS=y\nCONFIG_FUSE_PASSTHROUGH=y\n", -1},
        {"6.18.4-x", "CONFIG_FUSE_FS=y\n# CONFIG_FUSE_PASSTHROUGH is not set\n", HT_DOCTOR_NOTE},
        {"6.18.4-x", "CONFIG_FUSE_FS=y\nCONFIG_FUSE_PASSTHROUGH=y\n", HT_DOCTOR_OK},
        {"6.18.4-x", NULL, HT_DOCTOR_OK},
    };
    char path[128];

    put("proc/sys/kernel/osrelease", cases[_i].release);
    snprintf(path, sizeof(path), "boot/config-%s", cases[_i].release);
    if (cases[_i].config)
        put(path, cases[_i].config);
    ht_doctor_machine(&d);
    ck_assert_int_eq(level_of("passthrough"),
                     cases[_i].level == HT_DOCTOR_OK && geteuid() ? HT_DOCTOR_NOTE : cases[_i].level);
}

TEST(smaller_limits_of_the_machine_are_notes)
{
    put("dev/fuse", "");
    put("proc/sys/fs/fuse/max_pages_limit", "256\n");
    put("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n");
    put("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [never] deny\n");
    ht_doctor_machine(&d);
    ck_assert_int_eq(level_of("fuse-pages"), HT_DOCTOR_NOTE);
    ck_assert_int_eq(level_of("shared-huge-pages"), HT_DOCTOR_NOTE);
}

TEST_LOOP(control_groups, 7)
{
    static const struct {
        const char *groups, *file, *limit;
        int level;
    } cases[] = {
        {"0::/a/b\n", "sys/fs/cgroup/a/b/memory.max", "1000000000\n", HT_DOCTOR_ERROR},
        {"0::/a/b\n", "sys/fs/cgroup/a/memory.max", "1000000000\n", HT_DOCTOR_ERROR}, /* of a group above */
        {"0::/a/b\n", "sys/fs/cgroup/a/memory.max", "max\n", HT_DOCTOR_OK},
        {"0::/a/b\n", "sys/fs/cgroup/a/memory.max", "9000000000\n", HT_DOCTOR_OK},
        {"5:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes", "1000000\n", HT_DOCTOR_ERROR},
        {"5:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712\n", HT_DOCTOR_OK},
        {"4:cpu:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes", "1000000\n", HT_DOCTOR_OK},
    };

    put("proc/42/cgroup", cases[_i].groups);
    put(cases[_i].file, cases[_i].limit);
    ht_doctor_cgroup(&d, 42, 2000000000);
    ck_assert_int_eq(level_of("cgroup"), cases[_i].level);
}

static const char well[] = "total_bytes=1000000000\navailable_bytes=500000000\nlog_reserved_bytes=1\n"
                           "log_reserve_limit_bytes=1000\ndram_bytes=67108864\nstaging_bytes=33554432\n"
                           "locked_bytes=100663296\nhuge_bytes=67108864\noptimizer=adamw lr=1\n";

/* A later line of the same word counts for nothing: words are unique. So the change stands first. */
static void figures_with(const char *change)
{
    char text[1024];

    snprintf(text, sizeof(text), "%s\n%s", change, well);
    ht_doctor_figures(&d, text);
}

TEST_LOOP(figures, 16)
{
    static const struct {
        const char *change, *check;
        int level;
    } cases[] = {
        {"", "space", HT_DOCTOR_OK},
        {"available_bytes=40000000", "space", HT_DOCTOR_WARN},
        {"available_bytes=0", "space", HT_DOCTOR_ERROR},
        {"log_reserved_bytes=800", "log", HT_DOCTOR_WARN},
        {"log_reserved_bytes=990", "log", HT_DOCTOR_ERROR},
        {"log_reserve_limit_bytes=0", "log", -1},
        {"locked_bytes=0", "locked", HT_DOCTOR_WARN},
        {"huge_bytes=0", "huge", HT_DOCTOR_WARN},
        {"lost_chunks=1", "lost_chunks", HT_DOCTOR_ERROR},
        {"checksum_errors=3", "checksum_errors", HT_DOCTOR_ERROR},
        {"scrub_run_found=2\nscrub_run_repaired=1", "scrub", HT_DOCTOR_ERROR},
        {"scrub_run_found=2\nscrub_run_repaired=2", "scrub", -1},
        {"endurance_bytes=5\nday_written_bytes=6", "endurance", HT_DOCTOR_WARN},
        {"endurance_bytes=0\nday_written_bytes=6", "endurance", -1},
        {"passthrough_fallbacks=1", "passthrough_fallbacks", HT_DOCTOR_NOTE},
        {"available_bytes=x\nlog_reserved_bytes=-1\n=\n\n====", "space", HT_DOCTOR_OK},
    };

    figures_with(cases[_i].change);
    ck_assert_int_eq(level_of(cases[_i].check), cases[_i].level);
    if (!cases[_i].change[0])
        ck_assert_int_eq(ht_doctor_worst(&d, 0), HT_DOCTOR_OK);
}

TEST(too_much_memory_for_the_machine)
{
    put("proc/meminfo", "MemTotal:         100000 kB\n");
    figures_with("");
    ck_assert_int_eq(level_of("memory"), HT_DOCTOR_WARN);
}

TEST(members)
{
    char text[3][128] = {
        "{\"index\": 0, \"health\": \"failing\", \"log\": \"lost\", \"read_bytes_per_s\": 1000, \"path\": \"d0\"}",
        "{\"index\": 1, \"health\": \"ok\", \"log\": \"written\", \"read_bytes_per_s\": 3000, \"path\": \"d1\"}",
        "{\"index\": 2, \"health\": \"missing\", \"log\": \"none\", \"path\": \"\"}"};
    struct ht_cmd_line lines[3];

    for (unsigned i = 0; i < 3; i++)
        ck_assert_int_eq(ht_cmd_parse_json(text[i], &lines[i]), 0);
    ht_doctor_members(&d, "/none", &lines[1], 2);
    ck_assert_int_eq(level_of("unequal"), -1); /* one rate is known */
    ck_assert_int_eq(level_of("health"), HT_DOCTOR_ERROR);
    ck_assert_int_eq(level_of("device"), -1); /* relative paths of several are not looked at */
    d = (struct ht_doctor){.root = root};
    ht_doctor_members(&d, "/none", lines, 2);
    ck_assert_int_eq(level_of("health"), HT_DOCTOR_ERROR);
    ck_assert_int_eq(level_of("log-copy"), HT_DOCTOR_WARN);
    ck_assert_int_eq(level_of("unequal"), HT_DOCTOR_NOTE);
    d = (struct ht_doctor){.root = root};
    ht_doctor_members(&d, "/none", &lines[1], 1);
    ck_assert_int_eq(level_of("device"), HT_DOCTOR_ERROR); /* /none is not there */
}

#define DAY_NS 86400000000000ull

TEST(events_of_the_last_day)
{
    char text[1024];
    unsigned long long now = 100 * DAY_NS, before = now - DAY_NS - 1;

    snprintf(text, sizeof(text),
             "{\"seq\": 1, \"time_ns\": %llu, \"level\": \"error\", \"code\": \"checksum\"}\n"
             "{\"seq\": 2, \"time_ns\": %llu, \"level\": \"info\", \"code\": \"mounted\"}\n"
             "not JSON\n",
             before, now);
    ht_doctor_events(&d, text, now);
    ck_assert_int_eq(level_of("events"), HT_DOCTOR_OK);
    d = (struct ht_doctor){.root = root};
    snprintf(text, sizeof(text),
             "{\"time_ns\": %llu, \"level\": \"warn\", \"code\": \"refused\", \"count\": 5}\n"
             "{\"time_ns\": %llu, \"level\": \"warn\", \"code\": \"refused\"}\n"
             "{\"time_ns\": %llu, \"level\": \"error\", \"code\": \"checksum\"}\n",
             now, now, now);
    ht_doctor_events(&d, text, now);
    ck_assert_uint_eq(d.count, 2);
    ck_assert_ptr_nonnull(strstr(d.finding[0].text, "checksum (1)"));
    ck_assert_ptr_nonnull(strstr(d.finding[1].text, "refused (6)"));
    ck_assert_int_eq(d.finding[1].level, HT_DOCTOR_WARN);
}

/* A block device of this machine has another machine's attributes. Only its number is looked at. */
TEST_LOOP(block_devices, 9)
{
    static const struct {
        const char *file, *text, *check;
        int level;
    } cases[] = {
        {"queue/scheduler", "none mq-deadline [bfq]\n", "scheduler", HT_DOCTOR_WARN},
        {"queue/scheduler", "[none] mq-deadline\n", "device", HT_DOCTOR_OK},
        {"loop/dio", "0\n", "loop", HT_DOCTOR_WARN},
        {"loop/dio", "1\n", "device", HT_DOCTOR_OK},
        {"loop/backing_file", "/x (deleted)\n", "device", HT_DOCTOR_OK}, /* is no loop device: it has no dio */
        {"queue/nr_requests", "4\n", "queue-depth", HT_DOCTOR_WARN},
        {"queue/rotational", "1\n", "rotational", HT_DOCTOR_NOTE},
        {"queue/logical_block_size", "16384\n", "block-size", HT_DOCTOR_ERROR},
        {"ro", "1\n", "read-only", HT_DOCTOR_WARN},
    };
    char name[256], path[512];

    if (geteuid() != 0)
        return;
    snprintf(path, sizeof(path), "%s/disk", root);
    if (mknod(path, S_IFBLK | 0600, makedev(7, 250)) != 0)
        return; /* a container without the right to make devices */
    snprintf(name, sizeof(name), "sys/dev/block/7:250/%s", cases[_i].file);
    put(name, cases[_i].text);
    ht_doctor_device(&d, path);
    ck_assert_int_eq(level_of(cases[_i].check), cases[_i].level);
}

TEST(files)
{
    char path[512];
    struct statvfs fs;
    uint64_t huge = UINT64_C(1) << 42;

    snprintf(path, sizeof(path), "%s/image", root);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ck_assert_int_ge(fd, 0);
    ht_doctor_device(&d, path);
    ck_assert_int_lt(level_of("sparse-file"), 0);
    ck_assert_int_lt(level_of("permissions"), 0);
    d = (struct ht_doctor){.root = root};
    ck_assert_int_eq(fchmod(fd, 0666), 0);
    ck_assert_int_eq(statvfs(root, &fs), 0);
    if (ftruncate(fd, (off_t)huge) == 0) {
        ht_doctor_device(&d, path);
        if (fs.f_bavail * fs.f_frsize < huge)
            ck_assert_int_eq(level_of("sparse-file"), HT_DOCTOR_ERROR);
        ck_assert_int_eq(level_of("permissions"), HT_DOCTOR_WARN);
    }
    close(fd);
    d = (struct ht_doctor){.root = root};
    ht_doctor_device(&d, "/dev/null");
    ck_assert_int_eq(level_of("device"), HT_DOCTOR_ERROR);
}

TEST(a_full_list_keeps_the_worst)
{
    for (unsigned i = 0; i < 2 * HT_DOCTOR_FINDINGS_MAX; i++) {
        ht_doctor_add(&d, i == HT_DOCTOR_FINDINGS_MAX + 7 ? HT_DOCTOR_ERROR : HT_DOCTOR_NOTE, "x", "%u", i);
        ht_doctor_remedy(&d, "remedy of %u", i);
    }
    ck_assert_uint_eq(d.count, HT_DOCTOR_FINDINGS_MAX);
    ck_assert(d.cut);
    ck_assert_int_eq(ht_doctor_worst(&d, 0), HT_DOCTOR_ERROR);
    ck_assert_str_eq(d.finding[HT_DOCTOR_FINDINGS_MAX - 1].remedy, "remedy of 263");
}

RUN_TESTS("doctor", .setup = begin, .teardown = end)
